"""The native core makes the same task graph, the same timeline and the same chain of proposals."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.strategies import pipelined, planned

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.frontends.source import load
from soapstone.machine import Machine, resolve
from soapstone.machine.machine import SUMS
from soapstone.search.baselines import baseline
from soapstone.sim.reference import simulate
from soapstone.strategy.pipeline import repeated
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.flat import KINDS, FlatProblem, native_tasks

COSTS = AnalyticCosts()
METHODS: tuple[native.Method, ...] = get_args(native.Method)


@given(planned(most_copies=3) | pipelined(most_copies=3), st.booleans(), st.sampled_from(SUMS))
@settings(max_examples=200, deadline=None)
def test_native_tasks_are_the_plain_ones(plan: tuple[Strategy, Machine], in_buckets: bool, sums: str) -> None:
    """Every task is there once, with the same kind, resource, duration, bytes and predecessors."""
    strategy, machine = plan[0], replace(plan[1], sums=sums)
    plain = task_graph(strategy, machine, COSTS, in_buckets=in_buckets)
    flat = native_tasks(strategy, machine, COSTS, in_buckets=in_buckets)
    number = {name: i for i, name in enumerate(flat.resources)}
    assert plain.resources == flat.resources
    assert [t.kind for t in plain.tasks] == [KINDS[k] for k in flat.kind]
    assert [number[t.resource] for t in plain.tasks] == flat.resource.tolist()
    assert [t.duration_s for t in plain.tasks] == flat.duration_s.tolist()
    assert [t.size_bytes for t in plain.tasks] == flat.size_bytes.tolist()
    rows = [
        tuple(flat.after[flat.after_begin[i] : flat.after_begin[i + 1]].tolist())
        for i in range(len(plain.tasks))
    ]
    assert rows == list(plain.after)


@given(planned() | pipelined())
@settings(max_examples=80, deadline=None)
def test_native_timeline_is_the_reference(plan: tuple[Strategy, Machine]) -> None:
    """Start times and makespan agree to the bit."""
    strategy, machine = plan
    reference = simulate(task_graph(strategy, machine, COSTS))
    start_s, end_s, makespan_s = native_tasks(strategy, machine, COSTS).simulated()
    assert start_s.tolist() == list(reference.start_s)
    assert end_s.tolist() == list(reference.end_s)
    assert makespan_s == reference.makespan_s


@given(planned())
@settings(max_examples=60, deadline=None)
def test_a_task_without_duration_precedes_what_waits_for_it(plan: tuple[Strategy, Machine]) -> None:
    """In the task order: so tasks leave the queue sorted by (ready time, task order), which Algorithm 2
    takes for granted when it keeps every resource's tasks in that order."""
    strategy, machine = plan
    flat = native_tasks(strategy, machine, COSTS)
    for task in range(len(flat.kind)):
        for before in flat.after[flat.after_begin[task] : flat.after_begin[task + 1]]:
            assert flat.duration_s[before] > 0 or before < task


def placed(
    problem: FlatProblem,
    strategy: Strategy,
    method: native.Method = "engine",
    *,
    seed: int = 0,
    uses_threshold: bool = True,
    is_structured: bool = False,
) -> native.Proposals:
    proposals = native.Proposals(problem.native, seed, method, uses_threshold, is_structured)
    for number, block in enumerate(problem.blocks):
        placement, turns = strategy.placements[block.name], strategy.turns[block.name]
        degrees, devices = problem.degrees(block, placement), list(placement.devices)
        assert proposals.place(number, degrees, placement.copies, devices, turns.count, turns.in_flight)
    return proposals


@pytest.mark.parametrize("method", METHODS)
@given(plan=planned(), seed=st.integers(0, 2**32), in_buckets=st.booleans())
@settings(max_examples=40, deadline=None)
def test_proposals_equal_full_simulations(
    method: native.Method, plan: tuple[Strategy, Machine], seed: int, in_buckets: bool
) -> None:
    """After any sequence of accepted and rejected proposals, the makespan is the full simulation's, and
    so is the timeline where one is kept."""
    strategy, machine = plan
    random = Random(seed)
    problem = FlatProblem(strategy.graph, machine, COSTS, strategy.apart, in_buckets=in_buckets)
    proposals = placed(problem, strategy, method)
    current_s = proposals.makespan()
    assert current_s == native_tasks(strategy, machine, COSTS, in_buckets=in_buckets).simulated()[2]
    for _ in range(8):
        number = random.randrange(len(problem.blocks))
        block = problem.blocks[number]
        drawn = Space(strategy.graph, block, len(machine.devices), most_copies=2).drawn(random)
        other = Strategy(strategy.graph, {**strategy.placements, block.name: drawn}, strategy.apart)
        flat = native_tasks(other, machine, COSTS, in_buckets=in_buckets)
        expected_s = flat.simulated()[2]
        threshold_s = random.choice([math.inf, current_s, 1.1 * current_s, expected_s])
        found_s = proposals.propose(
            number, problem.degrees(block, drawn), drawn.copies, list(drawn.devices), threshold_s
        )
        assert found_s == expected_s if expected_s <= threshold_s else found_s > threshold_s
        if expected_s <= threshold_s and random.random() < 0.7:
            proposals.accept()
            strategy, current_s = other, expected_s
            assert proposals.task_count == len(flat.kind)
        else:
            proposals.reject()
        assert proposals.makespan() == current_s
        if method in ("engine", "full"):
            _, end_s, _ = native_tasks(strategy, machine, COSTS, in_buckets=in_buckets).simulated()
            counts, ends_s = proposals.ends()
            batches = np.split(end_s, np.cumsum(counts)[:-1])
            assert [batch.max() for batch in batches] == ends_s.tolist()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "paper_delta"])
@given(plan=pipelined(), seed=st.integers(0, 2**32), in_buckets=st.booleans())
@settings(max_examples=40, deadline=None)
def test_proposals_of_pipelines_equal_full_simulations(
    method: native.Method, plan: tuple[Strategy, Machine], seed: int, in_buckets: bool
) -> None:
    """The same with micro-batches. (The paper's Algorithm 2 takes for granted what the order of micro-batches
    breaks: that a task without duration precedes what waits for it in the task order.)"""
    strategy, machine = plan
    random, pipeline = Random(seed), strategy.pipeline
    assert pipeline is not None
    problem = FlatProblem(strategy.graph, machine, COSTS, in_buckets=in_buckets)
    proposals = placed(problem, strategy, method)
    current_s = proposals.makespan()
    assert current_s == native_tasks(strategy, machine, COSTS, in_buckets=in_buckets).simulated()[2]
    for _ in range(8):
        number = random.randrange(len(problem.blocks))
        block, turns = problem.blocks[number], strategy.turns[problem.blocks[number].name]
        space = Space(strategy.graph, block, len(machine.devices), most_copies=2)
        try:
            drawn = repeated(strategy.graph, block, space.drawn(random), pipeline.micro_batches)
            other = replace(strategy, placements={**strategy.placements, block.name: drawn})
            assert other.layouts
        except StrategyError:
            continue
        # The stages are those of the strategy that stands: what may be in flight does not change.
        changed = replace(other)
        changed.__dict__["turns"] = {
            **strategy.turns,
            block.name: replace(other.turns[block.name], in_flight=turns.in_flight),
        }
        expected_s = native_tasks(changed, machine, COSTS, in_buckets=in_buckets).simulated()[2]
        threshold_s = random.choice([math.inf, current_s, 1.1 * current_s, expected_s])
        found_s = proposals.propose(
            number,
            problem.degrees(block, drawn),
            drawn.copies,
            list(drawn.devices),
            threshold_s,
            turns.count,
            turns.in_flight,
        )
        assert found_s == expected_s if expected_s <= threshold_s else found_s > threshold_s
        if expected_s <= threshold_s and random.random() < 0.7:
            proposals.accept()
            strategy, current_s = changed, expected_s
        else:
            proposals.reject()
        assert proposals.makespan() == current_s


@pytest.mark.parametrize("is_structured", [False, True])
@given(
    plan=planned(),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.01, 0.2]),
    in_buckets=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_method_walks_the_same_chain(
    is_structured: bool, plan: tuple[Strategy, Machine], seed: int, temperature: float, in_buckets: bool
) -> None:
    """The same proposals are accepted, of one block or of several, however they are simulated, and whether
    or not hopeless ones are dropped early. The temperature is relative to the makespan."""
    strategy, machine = plan
    problem = FlatProblem(strategy.graph, machine, COSTS, strategy.apart, in_buckets=in_buckets)
    chains = [
        placed(problem, strategy, method, seed=seed, is_structured=is_structured) for method in METHODS
    ] + [
        placed(problem, strategy, method, seed=seed, uses_threshold=False, is_structured=is_structured)
        for method in ("engine", "full")
    ]
    temperature_s = temperature * chains[0].makespan()
    for _ in range(6):
        walked = {
            (
                chain.step(5, temperature_s),
                chain.makespan(),
                str([chain.placed(number) for number in range(len(problem.blocks))]),
            )
            for chain in chains
        }
        assert len(walked) == 1


@cache
def with_embeddings() -> FlatProblem:
    """A recurrent model whose first weights are large, on two nodes: all-reduces of them come last."""
    graph = (
        load("nmt:steps=6,hidden=512,layers=1,source_vocabulary=8000,target_vocabulary=500", devices=4)
        .captured()
        .graph
    )
    return FlatProblem(graph, resolve("p100:2x2"), COSTS)


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([1e-6, 1e-3, 1e-2]))
@settings(max_examples=8, deadline=None)
def test_chains_are_the_same_where_proposals_are_dropped_for_their_tail(
    seed: int, temperature: float
) -> None:
    """From data parallelism, where devices are idle only at the end, after their last compute tasks; hot
    chains come to weights that are read in pieces and blocks whose shards read different values."""
    _walked_with_tails(seed, temperature)


def test_proposals_are_dropped_for_their_tail() -> None:
    """At the temperature of a search; a hot chain may leave the tail behind at once."""
    *_, dropped = _walked_with_tails(0, 1e-3).counters
    assert dropped > 0


def _walked_with_tails(seed: int, temperature: float) -> native.Proposals:
    """The engine's chain, which the plain way and the engine without a threshold walk too."""
    problem = with_embeddings()
    strategy = baseline("data_parallel", problem.graph, problem.machine)
    chains = [
        placed(problem, strategy, "engine", seed=seed),
        placed(problem, strategy, "engine", seed=seed, uses_threshold=False),
        placed(problem, strategy, "plain", seed=seed),
    ]
    temperature_s = temperature * chains[0].makespan()
    for _ in range(8):
        assert len({(chain.step(25, temperature_s), chain.makespan()) for chain in chains}) == 1
    *_, without_threshold = chains[1].counters
    assert without_threshold == 0
    return chains[0]


@given(planned())
@settings(max_examples=40, deadline=None)
def test_native_space_is_the_plain_one(plan: tuple[Strategy, Machine]) -> None:
    """The degrees that may be drawn for a block are those of its space."""
    strategy, machine = plan
    problem = FlatProblem(strategy.graph, machine, COSTS, strategy.apart)
    proposals = native.Proposals(problem.native)
    for number, block in enumerate(problem.blocks):
        shapes = Space(strategy.graph, block, len(machine.devices)).shapes
        dims = list(strategy.graph.signature(block.leader).sizes)
        expected = [[layout.degrees.get(dim, 1) for dim in dims] for layout, _ in shapes]
        assert sorted(proposals.degrees(number)) == sorted(expected)


def test_misuse_is_refused() -> None:
    """Wrong arguments are a ValueError, not a crash."""
    problem = native.Problem(native.MachineData(), [], [], [])
    planned_tasks = native.PlannedTasks(problem)
    with pytest.raises(ValueError, match="no such block"):
        planned_tasks.place(0, [], 1, [0])
    with pytest.raises(ValueError, match="no such method"):
        native.Proposals(problem, method="guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such block"):
        native.Proposals(problem).degrees(0)
    with pytest.raises(ValueError, match="nothing to place"):
        native.Proposals(problem).step(1, 0.0)
