"""Searches by name, and the plan that is taken of what they find."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from oracles.clocks import Ticking

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import SearchError
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.plans import simulation
from soapstone.search.baselines import applicable, baseline, data_parallel, single_device
from soapstone.search.exact import exact_search, lower_bound
from soapstone.search.find import (
    BUCKETED,
    OF_ALL,
    RESORTS,
    SEARCHES,
    SPARING,
    Options,
    WhyInstead,
    _searched_in_buckets,
    find,
    is_unrolled,
    settled,
)
from soapstone.search.mcmc import Budget
from soapstone.search.report import SearchReport, StopReason
from soapstone.sim.outcome import bucketed_s
from soapstone.strategy.blocks import blocks
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy

MACHINE = preset("p100:1x2")
QUICK = Options(budget=Budget(None, 100), threads=1)


def network() -> Graph:
    """Two dense layers of which neither is small beside its activations."""
    build = GraphBuilder("net")
    x = build.input("x", (64, 64))
    for number in range(2):
        (x,) = build.add("linear", [x, build.weight(f"w{number}", (64, 64)), None], name=f"fc{number}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def holding(memory_bytes: int, machine: Machine = MACHINE) -> Machine:
    kind = replace(machine.devices[0].kind, name="small", memory_bytes=memory_bytes)
    return replace(machine, devices=tuple(replace(device, kind=kind) for device in machine.devices))


def applicable_to(graph: Graph, machine: Machine) -> set[str]:
    return {each.name for each in applicable(graph, machine)}


def report_of(strategy: Strategy, machine: Machine = MACHINE) -> SearchReport:
    makespan_s = simulation(strategy, machine).timeline.makespan_s
    return SearchReport("mcmc", 7, strategy, makespan_s, True, (), (), 1.0, StopReason.BUDGET)


def peak(strategy: Strategy) -> int:
    return max(simulation(strategy, MACHINE).prediction.memory_bytes)


def test_what_fits_is_taken_as_it_was_found() -> None:
    report = report_of(single_device(network(), MACHINE))
    outcome = settled(report, MACHINE, AnalyticCosts(), "net", QUICK)
    assert outcome.instead is None
    assert outcome.plan.strategy == report.strategy
    assert outcome.plan.prediction == outcome.plan.simulated().prediction
    assert outcome.plan.search == {**report.document(), "instead": None, "why_instead": None}


def test_a_baseline_that_fits_takes_the_place_of_what_does_not() -> None:
    graph = network()
    alone, shared = single_device(graph, MACHINE), data_parallel(graph, MACHINE)
    assert peak(shared) < peak(alone)
    machine = holding(peak(alone) - 1)
    outcome = settled(report_of(alone), machine, AnalyticCosts(), "net", QUICK)
    assert outcome.instead is not None
    assert outcome.plan.prediction.fits(machine)
    assert outcome.plan.search is not None
    assert outcome.plan.search["fits"] is True
    assert outcome.plan.search["instead"] == outcome.instead
    assert outcome.plan.search["makespan_s"] == outcome.plan.prediction.makespan_s


def test_of_few_strategies_the_fastest_that_fits_is_taken() -> None:
    """Whatever the memory: what no other strategy of the space that fits is faster than. The proof of another
    strategy is not claimed for it."""
    graph = network()
    spaces = {block.name: Space(graph, block, 2) for block in blocks(graph)}
    everything = [
        simulation(Strategy(graph, dict(zip(spaces, chosen, strict=True))), MACHINE).prediction
        for chosen in product(*spaces.values())
    ]
    peaks = sorted({max(each.memory_bytes) for each in everything})
    report = find(graph, MACHINE, AnalyticCosts(), replace(QUICK, search="exact"))
    assert report.is_optimal
    taken = []
    for memory_bytes in peaks[:: max(1, len(peaks) // 6)]:
        machine = holding(memory_bytes)
        outcome = settled(report, machine, AnalyticCosts(), "net", replace(QUICK, search="exact"))
        fitting = [each for each in everything if each.fits(machine)]
        assert outcome.plan.prediction.fits(machine)
        assert outcome.plan.prediction.makespan_s <= min(each.makespan_s for each in fitting)
        assert outcome.report.is_optimal == (outcome.instead is None)
        assert outcome.plan.search is not None
        assert outcome.plan.search["is_optimal"] == (outcome.instead is None)
        taken.append(outcome.instead)
    assert OF_ALL in taken


@pytest.mark.parametrize("name", ["mcmc", "auto", "unity"])
def test_of_few_strategies_the_best_is_found_by_the_shortest_search(name: str) -> None:
    graph = network()
    spaces = {block.name: Space(graph, block, 2) for block in blocks(graph)}
    least_s = min(
        simulation(Strategy(graph, dict(zip(spaces, chosen, strict=True))), MACHINE).timeline.makespan_s
        for chosen in product(*spaces.values())
    )
    for seed in range(3):
        options = Options(search=name, budget=Budget(None, 1), threads=1, seed=seed)
        assert find(graph, MACHINE, AnalyticCosts(), options).makespan_s <= least_s


def test_weights_that_are_spread_are_a_resort() -> None:
    graph = load("mlp", devices=4, tiny=True).captured().graph
    four = preset("p100:1x4")
    assert "zero" in RESORTS
    assert baseline("zero", graph, four).checked(four)


def test_a_second_search_takes_less_memory_than_any_baseline() -> None:
    """Where no baseline fits, a search that is told to take less memory is tried before giving up."""
    graph = load("dlrm", devices=4, tiny=True).captured().graph
    four = preset("p100:1x4")
    baselines = [baseline(name, graph, four) for name in RESORTS if name in applicable_to(graph, four)]
    least = min(max(simulation(each, four).prediction.memory_bytes) for each in baselines)
    machine = holding(least - 1, four)
    wasteful = report_of(baseline("data_parallel", graph, four), four)
    options = Options(budget=Budget(None, 4000), threads=1)
    outcome = settled(wasteful, machine, AnalyticCosts(), "dlrm", options)
    assert outcome.instead == SPARING
    assert outcome.plan.prediction.fits(machine)
    assert outcome.plan.search is not None
    assert outcome.plan.search["makespan_s"] == outcome.plan.prediction.makespan_s


def test_an_interrupted_search_is_not_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(report_of(single_device(network(), MACHINE)), stop=StopReason.INTERRUPTED)
    monkeypatch.setattr("soapstone.search.find.mcmc", None)
    assert settled(report, holding(1), AnalyticCosts(), "net", QUICK).instead is None


def test_where_nothing_fits_what_was_found_stays_and_says_so() -> None:
    report = report_of(single_device(network(), MACHINE))
    outcome = settled(report, holding(1), AnalyticCosts(), "net", QUICK)
    assert outcome.instead is None
    assert outcome.plan.strategy == report.strategy
    assert outcome.plan.search is not None
    assert outcome.plan.search["fits"] is False


def test_the_optimizer_decides_what_fits() -> None:
    strategy = single_device(network(), MACHINE)
    machine = holding(peak(strategy))  # with momentum
    assert (
        settled(
            report_of(strategy), machine, AnalyticCosts(), "net", replace(QUICK, optimizer="momentum")
        ).instead
        is None
    )
    outcome = settled(report_of(strategy), machine, AnalyticCosts(), "net", replace(QUICK, optimizer="adam"))
    assert outcome.instead is not None
    assert outcome.plan.optimizer == "adam"


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "pipeline"])
def test_every_search_reports_under_its_name_and_beats_data_parallelism(name: str) -> None:
    graph = network()
    options = Options(name, Budget(None, 20), seed=3, threads=1)
    report = find(graph, MACHINE, AnalyticCosts(), options)
    assert (report.method, report.seed) == (name, 3)
    exact_s = simulation(report.strategy, MACHINE).timeline.makespan_s
    assert report.makespan_s == exact_s
    assert exact_s <= simulation(data_parallel(graph, MACHINE), MACHINE).timeline.makespan_s


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(SearchError, match=r"there is no search 'mcnc'.*mcmc"):
        find(network(), MACHINE, AnalyticCosts(), Options("mcnc"))


def test_a_model_without_weights_is_refused() -> None:
    build = GraphBuilder("still")
    (y,) = build.add("relu", [build.input("x", (4, 4))], name="y")
    with pytest.raises(SearchError, match="model 'still' has nothing to split"):
        find(build.graph(outputs=(y,)), MACHINE, AnalyticCosts(), Options())


def test_a_model_that_cannot_be_a_pipeline_is_planned_without() -> None:
    """Its samples divide, but lie within its rows, as those of an attention that flattens time by sample."""
    build = GraphBuilder("net")
    x = build.input("x", (8, 6, 4))
    (x,) = build.add("permute", [x], {"dims": (1, 0, 2)})
    (x,) = build.add("linear", [x, build.weight("w0", (4, 4)), None], name="fc0")
    (x,) = build.add("reshape", [x], {"shape": (48, 4)})
    (x,) = build.add("linear", [x, build.weight("w1", (4, 4)), None], name="fc1")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    assert "pipeline" not in applicable_to(graph, MACHINE)
    found = find(graph, MACHINE, AnalyticCosts(), Options(budget=Budget(0.3, None), threads=1))
    assert found.strategy.pipeline is None
    with pytest.raises(
        SearchError, match="no pipeline of any number of stages for 8 samples on 2 devices: block"
    ):
        find(graph, MACHINE, AnalyticCosts(), replace(QUICK, search="pipeline"))


def unrolled(steps: int) -> Graph:
    """A recurrent layer, step by step, and a dense one."""
    build = GraphBuilder("net")
    x, weight = build.input("x", (64, 64)), build.weight("w", (64, 64))
    for number in range(steps):
        (x,) = build.add("linear", [x, weight, None], name=f"step{number}")
    (x,) = build.add("linear", [x, build.weight("head", (64, 64)), None], name="head")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


@pytest.mark.parametrize("name", ["rnntc", "rnnlm", "nmt"])
def test_models_of_steps_are_told_from_others(name: str) -> None:
    assert is_unrolled(load(name, tiny=True, devices=2).captured().graph)


@pytest.mark.parametrize("name", ["lenet", "dlrm", "gpt2", "candle_uno"])
def test_models_of_layers_are_told_from_those_of_steps(name: str) -> None:
    assert not is_unrolled(load(name, tiny=True, devices=2).captured().graph)


@pytest.mark.parametrize(("steps", "has_mapping"), [(6, False), (1, True)])
def test_chains_have_the_time_of_the_joint_search_where_layers_are_unrolled(
    steps: int, has_mapping: bool
) -> None:
    """Then they start from all that `mcmc` starts from."""
    options = Options(budget=Budget(10.0, None, Ticking()), threads=1)
    starts = {start.name for start in find(unrolled(steps), MACHINE, AnalyticCosts(), options).starts}
    assert ("mappings" in starts) is has_mapping
    if not has_mapping:
        assert {"data_parallel", "optcnn", "model_parallel", "random"} <= starts


@pytest.mark.parametrize(
    ("worth", "machine", "are_bettered"),
    [(0.0, MACHINE, False), (1e9, MACHINE, True), (0.0, holding(9), True)],
)
def test_hopeless_pipelines_leave_their_time_to_chains(
    worth: float, machine: Machine, are_bettered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where nothing else fits, slow ones are not hopeless."""
    monkeypatch.setattr("soapstone.search.find.PIPELINE_WORTH", worth)
    options = Options(budget=Budget(20.0, None, Ticking()), threads=1)
    names = [start.name for start in find(unrolled(6), machine, AnalyticCosts(), options).starts]
    tried = [n for n, name in enumerate(names) if " stages, " in name]
    assert tried
    assert any(name.startswith("round of ") for name in names) is are_bettered
    if not are_bettered:
        assert names[max(tried) + 1] == "found"


def wide() -> Graph:
    """On three devices its loss is quickest in copies, which data parallelism has as 61 divides by none."""
    build = GraphBuilder("wide")
    x = build.input("x", (61, 512))
    (x,) = build.add("linear", [x, build.weight("w0", (4096, 512)), None], name="fc0")
    (x,) = build.add("linear", [x, build.weight("w1", (256, 4096)), None], name="fc1")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def test_a_proof_is_not_about_copies_and_does_not_hide_them() -> None:
    """Chains may find what is faster and outside the space of the exact search; then that is returned."""
    graph, machine, costs = wide(), preset("p100:1x3"), AnalyticCosts()
    options = replace(QUICK, search="exact", budget=Budget(None))
    report = find(graph, machine, costs, options)
    assert any(placement.copies > 1 for placement in report.strategy.placements.values())
    assert report.stop is StopReason.OPTIMAL_WITHOUT_COPIES
    assert not report.is_optimal
    alone = exact_search(graph, machine, costs, proposals=50)
    assert alone.is_optimal
    assert report.makespan_s < alone.makespan_s
    assert report.lower_bound_s is not None
    assert report.lower_bound_s < report.makespan_s


def test_the_optimum_among_ranges_is_told_apart() -> None:
    graph, costs = network(), AnalyticCosts()
    report = find(graph, MACHINE, costs, replace(QUICK, search="exact-ranges", budget=Budget(None)))
    assert report.method == "exact-ranges"
    assert report.stop is StopReason.OPTIMAL_OF_RANGES
    assert not report.is_optimal
    found = exact_search(graph, MACHINE, costs, has_ranges=True, proposals=50)
    assert report.makespan_s == found.makespan_s
    assert report.lower_bound_s == lower_bound(graph, MACHINE, costs).seconds


def many_small_weights() -> Graph:
    """Layers of one device's time, each with a weight so small that its sum is latency alone."""
    build = GraphBuilder("net")
    x = build.input("x", (4096, 512))
    for number in range(24):
        (x,) = build.add("mul", [x, build.weight(f"w{number}", (512,))], name=f"scaled{number}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def test_chains_in_buckets_go_on_from_what_was_found() -> None:
    machine, costs = preset("p100:4x4"), AnalyticCosts()
    found = single_device(many_small_weights(), machine)
    report = report_of(found, machine)
    again = _searched_in_buckets(report, {}, machine, costs, replace(QUICK, budget=Budget(None, 4000)))
    assert again is not None
    assert again.makespan_s == bucketed_s(again.strategy, machine, costs) < bucketed_s(found, machine, costs)
    stopped = replace(report, stop=StopReason.INTERRUPTED)
    assert _searched_in_buckets(stopped, {}, machine, costs, QUICK) is None


def test_a_baseline_that_is_faster_in_buckets_takes_the_place_of_what_was_found() -> None:
    machine, costs = preset("p100:4x4"), AnalyticCosts()
    graph = many_small_weights()
    alone, shared = single_device(graph, machine), data_parallel(graph, machine)
    alone_s, shared_s = (simulation(strategy, machine).timeline.makespan_s for strategy in (alone, shared))
    assert bucketed_s(shared, machine, costs) < alone_s < shared_s
    report = report_of(alone, machine)
    outcome = settled(report, machine, costs, "net", QUICK)
    assert outcome.instead in {"data_parallel", BUCKETED}
    assert outcome.why is WhyInstead.BUCKETS
    assert bucketed_s(outcome.plan.strategy, machine, costs) <= bucketed_s(shared, machine, costs)
    allowed = replace(QUICK, slack=alone_s / bucketed_s(shared, machine, costs) - 1)
    assert settled(report, machine, costs, "net", allowed).instead is None
    by_name = replace(QUICK, search="mcmc")
    assert settled(report, machine, costs, "net", by_name).plan.strategy == alone


def test_where_a_pipeline_was_found_chains_in_buckets_start_from_baselines() -> None:
    """They leave a pipeline as it is, but what they make of data parallelism may train faster than it."""
    machine, costs = preset("p100:1x4"), AnalyticCosts()
    graph = many_small_weights()
    report = report_of(baseline("pipeline", graph, machine, costs), machine)
    assert report.strategy.pipeline is not None
    others = {"data_parallel": data_parallel(graph, machine)}
    again = _searched_in_buckets(report, others, machine, costs, QUICK)
    assert again is not None
    assert again.makespan_s <= bucketed_s(others["data_parallel"], machine, costs)
    assert {start.name for start in again.starts} >= set(others)
    assert "found" not in {start.name for start in again.starts}


def many_small_layers() -> Graph:
    """Dense layers whose weights are so small that sums of their gradients are latency."""
    build = GraphBuilder("net")
    x = build.input("x", (4096, 128))
    for number in range(14):
        (x,) = build.add("linear", [x, build.weight(f"w{number}", (128, 128)), None], name=f"fc{number}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def test_of_what_fits_instead_auto_takes_what_trains_fastest() -> None:
    """With each gradient summed by itself something else is faster than data parallelism, which trains
    faster; who asks for another search has its way of counting."""
    machine, costs = preset("p100:2x2"), AnalyticCosts()
    graph = many_small_layers()
    found, shared = baseline("optcnn", graph, machine, costs), data_parallel(graph, machine)
    small = holding(max(simulation(found, machine).prediction.memory_bytes) - 1, machine)
    report = report_of(found, machine)
    taken = {
        search: settled(report, small, costs, "net", replace(QUICK, search=search))
        for search in ("auto", "mcmc")
    }
    assert {each.why for each in taken.values()} == {WhyInstead.MEMORY}
    assert all(each.plan.prediction.fits(small) for each in taken.values())
    auto, mcmc = (each.plan for each in taken.values())
    assert bucketed_s(auto.strategy, small, costs) <= bucketed_s(shared, small, costs)
    assert bucketed_s(auto.strategy, small, costs) < bucketed_s(mcmc.strategy, small, costs)
    assert mcmc.prediction.makespan_s < auto.prediction.makespan_s


@pytest.mark.parametrize("search", SEARCHES)
def test_no_budget_is_too_small_to_find_something(search: str) -> None:
    """Where capturing and settling leave no time at all, something is found, and progress is told."""
    told: list[float] = []
    options = Options(search, Budget(1e-9), threads=1)
    report = find(network(), MACHINE, AnalyticCosts(), options, lambda part, _: told.append(part))
    assert report.makespan_s > 0
    assert all(0 <= part <= 1 for part in told)
