"""The native core makes the same task graph, the same timeline and the same chain of proposals."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.strategies import planned

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.sim.reference import simulate
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.flat import KINDS, FlatProblem, native_tasks

COSTS = AnalyticCosts()


@given(planned(most_copies=3))
@settings(max_examples=80, deadline=None)
def test_native_tasks_are_the_plain_ones(plan: tuple[Strategy, Machine]) -> None:
    """Every task is there once, with the same kind, resource, duration, bytes and predecessors."""
    strategy, machine = plan
    plain, flat = task_graph(strategy, machine, COSTS), native_tasks(strategy, machine, COSTS)
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


@given(planned())
@settings(max_examples=60, deadline=None)
def test_native_timeline_is_the_reference(plan: tuple[Strategy, Machine]) -> None:
    """Start times and makespan agree to the bit."""
    strategy, machine = plan
    reference = simulate(task_graph(strategy, machine, COSTS))
    start_s, end_s, makespan_s = native_tasks(strategy, machine, COSTS).simulated()
    assert start_s.tolist() == list(reference.start_s)
    assert end_s.tolist() == list(reference.end_s)
    assert makespan_s == reference.makespan_s


def placed(problem: FlatProblem, strategy: Strategy) -> native.Proposals:
    proposals = native.Proposals(problem.native)
    for number, block in enumerate(problem.blocks):
        placement = strategy.placements[block.name]
        degrees = problem.degrees(block, placement)
        assert proposals.place(number, degrees, placement.copies, list(placement.devices))
    return proposals


@given(planned(), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_proposals_equal_full_simulations(plan: tuple[Strategy, Machine], seed: int) -> None:
    """After any sequence of accepted and rejected proposals, the incremental makespan is the full one."""
    strategy, machine = plan
    random = Random(seed)
    problem = FlatProblem(strategy.graph, machine, COSTS, strategy.apart)
    proposals = placed(problem, strategy)
    current_s = proposals.makespan()
    assert current_s == native_tasks(strategy, machine, COSTS).simulated()[2]
    for _ in range(8):
        number = random.randrange(len(problem.blocks))
        block = problem.blocks[number]
        drawn = Space(strategy.graph, block, len(machine.devices), most_copies=2).drawn(random)
        other = Strategy(strategy.graph, {**strategy.placements, block.name: drawn}, strategy.apart)
        expected_s = native_tasks(other, machine, COSTS).simulated()[2]
        threshold_s = random.choice([math.inf, current_s, 1.1 * current_s, expected_s])
        found_s = proposals.propose(
            number, problem.degrees(block, drawn), drawn.copies, list(drawn.devices), threshold_s
        )
        assert found_s == expected_s if expected_s <= threshold_s else found_s > threshold_s
        if expected_s <= threshold_s and random.random() < 0.7:
            proposals.accept()
            strategy, current_s = other, expected_s
        else:
            proposals.reject()
        assert proposals.makespan() == current_s


def test_misuse_is_refused() -> None:
    """Wrong arguments are a ValueError, not a crash."""
    problem = native.Problem(native.MachineData(), [], [], [])
    planned_tasks = native.PlannedTasks(problem)
    with pytest.raises(ValueError, match="no such block"):
        planned_tasks.place(0, [], 1, [0])
