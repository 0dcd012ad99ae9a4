"""The search by Markov chains: what it finds, what it promises, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.plans import simulation
from soapstone.search.baselines import baseline
from soapstone.search.mcmc import RULES, Budget, mcmc, part_over
from soapstone.search.report import StopReason
from soapstone.strategy.space import Space, random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem, native_tasks

FOUR, TWO = preset("p100:1x4"), preset("p100:1x2")
COSTS = AnalyticCosts()


@cache
def tiny(name: str) -> Graph:
    return load(name, devices=4, tiny=True).captured().graph


def two_layers() -> Graph:
    """x (4, 8) -> fc (4, 16) -> relu -> out (4, 4) -> loss."""
    build = GraphBuilder("two")
    (y,) = build.add("linear", [build.input("x", (4, 8)), build.weight("w", (16, 8)), None], name="fc")
    (y,) = build.add("relu", [y], name="relu")
    (y,) = build.add("linear", [y, build.weight("v", (4, 16)), None], name="out")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def makespan_s(strategy: Strategy, machine: Machine) -> float:
    return native_tasks(strategy, machine, COSTS).simulated()[2]


@pytest.mark.parametrize("method", RULES)
def test_the_optimum_of_a_small_problem_is_found(method: str) -> None:
    """All strategies of two layers on two devices are tried one by one."""
    graph = two_layers()
    blocks = Strategy(graph, {}).blocks
    spaces = [list(Space(graph, block, 2)) for block in blocks]
    best_s = min(
        makespan_s(Strategy(graph, dict(zip([b.name for b in blocks], chosen, strict=True))), TWO)
        for chosen in product(*spaces)
    )
    assert mcmc(graph, TWO, method=method, budget=Budget(None, 3000)).makespan_s == best_s


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("name", ["nmt", "resnet101"])
def test_the_search_depends_on_the_seed_alone(method: str, name: str) -> None:
    """On any number of threads; and another seed takes another way."""
    found = [
        mcmc(tiny(name), FOUR, method=method, budget=Budget(None, 60), seed=seed, threads=threads)
        for seed, threads in ((3, 1), (3, 4), (4, 2))
    ]
    assert found[0].strategy.placements == found[1].strategy.placements
    assert found[0].starts == found[1].starts
    assert found[0].starts != found[2].starts


@pytest.mark.parametrize("name", ["alexnet", "nmt", "dlrm", "bert_large"])
def test_no_start_is_better_than_what_is_found(name: str) -> None:
    """And the makespan is that of the strategy, to the bit."""
    graph = tiny(name)
    report = mcmc(graph, FOUR, budget=Budget(None, 40))
    assert {start.name for start in report.starts} >= {"data_parallel", "optcnn", "random"}
    for start in report.starts:
        assert report.makespan_s <= start.best_s <= start.first_s
        if start.name in ("data_parallel", "optcnn"):
            assert start.first_s == makespan_s(baseline(start.name, graph, FOUR), FOUR)
    assert report.makespan_s == makespan_s(report.strategy.checked(FOUR), FOUR)
    assert [p.best_s for p in report.curve] == sorted((p.best_s for p in report.curve), reverse=True)
    assert report.curve[-1].best_s == report.makespan_s


def test_the_paper_s_search_gives_up_when_half_of_it_was_in_vain() -> None:
    report = mcmc(tiny("lenet"), FOUR, method="mcmc-paper", budget=Budget(None, 10**7))
    assert report.stop is StopReason.CONVERGED
    assert all(start.stop is StopReason.CONVERGED for start in report.starts)


def test_an_interrupted_search_keeps_its_best() -> None:
    def interrupt(part: float, note: str) -> None:
        assert 0 <= part <= 1
        assert note
        raise KeyboardInterrupt

    report = mcmc(tiny("nmt"), FOUR, budget=Budget(600.0), show=interrupt)
    assert report.stop is StopReason.INTERRUPTED
    assert report.makespan_s == makespan_s(report.strategy, FOUR)
    assert report.proposals > 0


def test_seconds_end_a_search() -> None:
    report = mcmc(tiny("nmt"), FOUR, budget=Budget(0.5))
    assert report.stop is StopReason.BUDGET
    assert report.proposals > 0


def test_slack_is_used_to_move_less() -> None:
    """Within the slack of what is found without it, and links are less busy."""
    graph = tiny("nmt")
    strict, loose = (mcmc(graph, FOUR, budget=Budget(None, 300), slack=slack) for slack in (0.0, 0.05))
    assert strict.makespan_s < loose.makespan_s <= strict.makespan_s * 1.05
    assert link_s(loose.strategy) < link_s(strict.strategy)


def link_s(strategy: Strategy) -> float:
    flat = native_tasks(strategy, FOUR, COSTS)
    return float(sum(flat.duration_s[flat.resource >= len(FOUR.devices)]))


def test_a_chain_may_start_from_more_shards_than_there_are_devices() -> None:
    """A strategy by hand may have several shards on a device; what is drawn then has no more than fit."""
    graph, machine = two_layers(), preset("cpu:1x3")
    problem = FlatProblem(graph, machine, COSTS)
    chain = native.Proposals(problem.native, 1, is_structured=True)
    for number, block in enumerate(problem.blocks):
        split = block.leader.op_name == "linear"
        dims = list(graph.signature(block.leader).sizes)
        degrees = [4 if split and dim == "b" else 1 for dim in dims]
        assert chain.place(number, degrees, 1, [0, 1, 2, 0] if split else [0])
    assert chain.step(2000, 1.0) > 0
    for number in range(len(problem.blocks)):
        assert set(chain.placed(number)[2]) <= {0, 1, 2}


# -- memory -----------------------------------------------------------------------------------------


def with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The machine with as much memory on each device."""
    devices = tuple(
        replace(device, kind=replace(device.kind, memory_bytes=memory_bytes)) for device in machine.devices
    )
    return replace(machine, devices=devices)


@pytest.mark.parametrize("method", RULES)
def test_a_strategy_that_fits_is_found_where_the_fastest_does_not(method: str) -> None:
    """DLRM's tables do not fit when every device holds them all."""
    graph = tiny("dlrm")
    peaks = simulation(baseline("data_parallel", graph, FOUR), FOUR).prediction.memory_bytes
    machine = with_memory(FOUR, max(peaks) * 3 // 4)
    report = mcmc(graph, machine, method=method, budget=Budget(None, 400))
    assert report.fits
    assert simulation(report.strategy, machine).prediction.fits(machine)


def test_a_model_that_cannot_fit_is_reported() -> None:
    machine = with_memory(FOUR, 1000)
    assert not mcmc(tiny("lenet"), machine, budget=Budget(None, 50)).fits


@given(graphs(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_a_footprint_on_one_device_is_no_more_than_its_peak(graph: Graph, seed: int) -> None:
    """All that it counts is there when the forward pass ends."""
    machine = preset("p100:1x1")
    strategy = random_strategy(graph, 1, Random(seed))
    problem = FlatProblem(graph, machine, COSTS)
    chain = native.Proposals(problem.native)
    for number, block in enumerate(problem.blocks):
        placement = strategy.placements[block.name]
        assert chain.place(number, problem.degrees(block, placement), 1, list(placement.devices))
    (memory,) = simulation(strategy, machine, optimizer="momentum").memory
    (footprint_bytes,) = chain.footprint_bytes(2)
    held_bytes = memory.parts["weights"] + memory.parts["optimizer state"]
    assert held_bytes <= footprint_bytes <= memory.peak_bytes


def test_ranges_of_devices_are_kept() -> None:
    """FlexFlow's own code draws devices that follow each other, at the start and in every proposal."""
    problem = FlatProblem(tiny("lenet"), FOUR, COSTS)
    chain = native.Proposals(problem.native, 5, has_ranges=True)
    chain.place_at_random()
    firsts = set()
    for _ in range(20):
        chain.step(50, 1.0)  # so hot that everything is accepted
        for number in range(len(problem.blocks)):
            devices = chain.placed(number)[2]
            assert devices == list(range(devices[0], devices[0] + len(devices)))
            firsts.add(devices[0])
    assert firsts == {0, 1, 2, 3}


@pytest.mark.parametrize("blocks", [8, 23, 24, 500])
def test_chains_cool_down_to_the_same(blocks: int) -> None:
    """Without a jump, from warmer where there are few blocks."""
    temperature = RULES["mcmc"].temperature
    course = [temperature(step / 1000, blocks) for step in range(1001)]
    assert course == sorted(course, reverse=True)
    assert all(after > before * 0.8 for before, after in pairwise(course))
    assert course[0] == pytest.approx(0.05 / blocks if blocks < 24 else 1e-3)
    assert course[-1] == pytest.approx(1e-6)


def test_of_no_time_all_is_over() -> None:
    """However late a clock is looked at, a chain's progress is a part of it."""
    assert [part_over(1.0, 4.0), part_over(5.0, 4.0), part_over(-1.0, 4.0)] == [0.25, 1.0, 0.0]
    assert [part_over(1.0, 0.0), part_over(1.0, -1e-9), part_over(1.0, float("inf"))] == [1.0, 1.0, 0.0]
