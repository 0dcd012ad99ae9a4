"""Exact search on LeNet and its like: proofs, budgets, interrupts and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.search.baselines import baseline
from soapstone.search.exact import exact_search, lower_bound
from soapstone.search.mcmc import Budget, mcmc
from soapstone.search.proofs import exact_report
from soapstone.search.report import StopReason
from soapstone.strategy.placement import Placement
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem, native_tasks

COSTS = AnalyticCosts()


def layers(count: int, width: int = 1024, batch: int = 512) -> Graph:
    """Linear layers wide enough to be worth splitting."""
    build = GraphBuilder("layers")
    x = build.input("x", (batch, width))
    for i in range(count):
        (x,) = build.add("linear", [x, build.weight(f"w{i}", (width, width)), None], name=f"fc{i}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def test_an_optimum_is_proved_and_is_no_worse_than_any_baseline() -> None:
    graph, machine = layers(2), preset("p100:1x2")
    result = exact_search(graph, machine, COSTS, proposals=20)
    assert result.is_optimal
    assert result.lower_bound_s == result.makespan_s
    assert result.gap == 0
    assert result.fits
    assert native_tasks(result.strategy, machine, COSTS).simulated()[2] == result.makespan_s
    for name in ("data_parallel", "model_parallel"):
        other = baseline(name, graph, machine, COSTS)
        assert native_tasks(other, machine, COSTS).simulated()[2] >= result.makespan_s


def test_the_result_does_not_depend_on_the_run() -> None:
    graph, machine = layers(1), preset("p100:1x3")
    first, second = (exact_search(graph, machine, COSTS, proposals=20) for _ in range(2))
    assert first.strategy.placements == second.strategy.placements
    assert (first.bounded, first.simulated) == (second.bounded, second.simulated)


def test_a_tolerance_is_kept_and_reported() -> None:
    graph, machine = load("lenet", devices=4, tiny=True).captured().graph, preset("p100:1x2")
    result = exact_search(graph, machine, COSTS, tolerance=0.1, proposals=50)
    assert result.is_optimal
    assert result.tolerance == 0.1
    assert result.lower_bound_s >= result.makespan_s * (1 - 0.1) * (1 - 1e-12)


def test_a_budget_ends_it_with_what_it_has() -> None:
    graph, machine = load("rnnlm:steps=2", devices=4, tiny=True).captured().graph, preset("p100:1x4")
    start = random_strategy(graph, 4, Random(0))
    result = exact_search(graph, machine, COSTS, budget_s=0.0, start=start, proposals=0)
    assert result.stop is StopReason.BUDGET
    assert not result.is_optimal
    assert 0 < result.lower_bound_s <= result.makespan_s
    assert result.makespan_s <= native_tasks(start, machine, COSTS).simulated()[2]


def test_an_interrupt_ends_it_with_what_it_has() -> None:
    graph, machine = load("lenet", devices=4, tiny=True).captured().graph, preset("p100:1x4")
    seen: list[tuple[float, float, int]] = []

    def interrupt(best_s: float, bound_s: float, count: int) -> None:
        seen.append((best_s, bound_s, count))
        if len(seen) == 2:
            raise KeyboardInterrupt

    result = exact_search(graph, machine, COSTS, progress=interrupt, proposals=20)
    assert result.stop is StopReason.INTERRUPTED
    assert not result.is_optimal
    assert [count for _, _, count in seen] == sorted(count for _, _, count in seen)
    assert seen[-1][1] <= result.lower_bound_s <= result.makespan_s == seen[-1][0]


def test_an_interrupt_of_the_first_chains_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was given; or, by name, what the chains before have found."""
    graph, machine = load("lenet", devices=2, tiny=True).captured().graph, preset("p100:1x2")
    start = random_strategy(graph, 2, Random(0))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("soapstone.search.exact._annealed", interrupted)
    result = exact_search(graph, machine, COSTS, start=start)
    assert result.stop is StopReason.INTERRUPTED
    assert result.strategy.placements == start.placements
    assert 0 < result.lower_bound_s <= result.makespan_s
    with pytest.raises(KeyboardInterrupt):
        exact_search(graph, machine, COSTS)
    report = exact_report(graph, machine, COSTS, None, 0, 1, "momentum", None)
    assert (report.method, report.stop) == ("exact", StopReason.INTERRUPTED)
    assert report.makespan_s <= native_tasks(start, machine, COSTS).simulated()[2]


def test_chains_that_were_interrupted_are_not_followed_by_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = load("lenet", devices=2, tiny=True).captured().graph, preset("p100:1x2")
    ended = replace(
        mcmc(graph, machine, COSTS, budget=Budget(None, 50), threads=1), stop=StopReason.INTERRUPTED
    )
    monkeypatch.setattr("soapstone.search.proofs.mcmc", lambda *_, **__: ended)
    monkeypatch.setattr("soapstone.search.proofs.exact_search", None)
    report = exact_report(graph, machine, COSTS, None, 0, 1, "momentum", None)
    assert report == replace(ended, method="exact")


def test_a_budget_holds_for_the_first_chains_too() -> None:
    """One short chain at most, of the eight that there would be."""
    graph, machine = load("lenet", devices=2, tiny=True).captured().graph, preset("p100:1x2")
    result = exact_search(graph, machine, COSTS, budget_s=0.0, proposals=10**9)
    assert result.stop is StopReason.BUDGET


def test_a_start_with_copies_is_refused() -> None:
    graph, machine = layers(1), preset("p100:1x2")
    copied = Strategy(graph, {"fc0": Placement((), (0, 1), 2), "loss": Placement((), (0,))})
    with pytest.raises(StrategyError, match="block 'fc0' has copies"):
        exact_search(graph, machine, COSTS, start=copied)


def test_a_start_whose_devices_do_not_follow_each_other_is_refused_among_ranges() -> None:
    graph, machine = layers(1), preset("p100:1x2")
    turned = Strategy(graph, {"fc0": Placement((("b", 2),), (1, 0)), "loss": Placement((), (0,))})
    assert exact_search(graph, machine, COSTS, start=turned, proposals=5).is_optimal
    with pytest.raises(StrategyError, match="or devices that do not follow each other"):
        exact_search(graph, machine, COSTS, has_ranges=True, start=turned)


@pytest.mark.parametrize(("model", "makespan_s"), [("lenet", 229.388e-6), ("rnnlm:steps=2", 23469.066e-6)])
def test_the_papers_small_problems_are_solved_among_ranges(model: str, makespan_s: float) -> None:
    """FlexFlow 8.3, in the space of its own code. The makespans are those of docs/results.md."""
    graph, machine = load(model, devices=4).captured().graph, preset("p100:1x4")
    result = exact_search(graph, machine, COSTS, has_ranges=True, proposals=300)
    assert result.is_optimal
    assert result.makespan_s == pytest.approx(makespan_s, rel=1e-5)


def test_too_many_placements_are_refused() -> None:
    with pytest.raises(StrategyError, match="more than 100,000 placements on 16 devices"):
        exact_search(layers(2), preset("p100:4x4"), COSTS)


def test_a_strategy_outside_the_space_is_not_taken() -> None:
    graph, machine = layers(1), preset("p100:1x2")
    problem = FlatProblem(graph, machine, COSTS)
    search = native.ExactSearch(problem.native, 0.0)
    whole: list[tuple[list[int], int, list[int]]] = [([1, 1, 1], 1, [0]), ([1, 1], 1, [0])]
    search.offer(whole)
    for wrong in ([2, 1, 1], 1, [0, 0]), ([1, 1, 1], 1, [2]), ([1, 1, 1], 2, [0, 1]), ([1, 1], 1, [0]):
        with pytest.raises(ValueError, match=r"must be one of the space|for each dim"):
            search.offer([wrong, whole[1]])
    with pytest.raises(ValueError, match="not every block"):
        search.offer(whole[:1])


def test_the_lower_bound_is_that_of_one_device() -> None:
    """On one device there is nothing to lose: all work in a row is the makespan itself."""
    graph, machine = layers(3), preset("p100:1x1")
    alone_s = native_tasks(baseline("data_parallel", graph, machine, COSTS), machine, COSTS).simulated()[2]
    bound = lower_bound(graph, machine, COSTS)
    assert bound.seconds == pytest.approx(alone_s, rel=1e-9)
    assert bound.reason == "compute"
    assert bound.gap(alone_s) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("model", ["lenet", "rnnlm:steps=2"])
def test_bounds_of_the_papers_small_problems_hold(model: str) -> None:
    graph, machine = load(model, devices=4).captured().graph, preset("p100:1x4")
    makespan_s = native_tasks(baseline("data_parallel", graph, machine, COSTS), machine, COSTS).simulated()[2]
    assert 0.3 * makespan_s < lower_bound(graph, machine, COSTS).seconds < makespan_s


def test_threads_share_the_tree_and_prove_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tree that is shared from the first bounds on, and chains that hardly help."""
    graph, machine = layers(3), preset("p100:1x2")
    alone = exact_search(graph, machine, COSTS, proposals=1)
    monkeypatch.setattr("soapstone.search.exact.SLICE", 5)
    monkeypatch.setattr("soapstone.search.exact.SHARED_SLICE", 20)
    made: list[native.ExactSearch] = []

    def settled(*given: Any) -> native.ExactSearch:
        made.append(never(*given))
        return made[-1]

    never = partial(native.ExactSearch, first_restart=10**9)
    monkeypatch.setattr("soapstone.search.exact.native.ExactSearch", settled)
    shared = exact_search(graph, machine, COSTS, proposals=1, threads=3)
    assert len(made) == 3
    assert shared.is_optimal
    assert shared.makespan_s == alone.makespan_s
