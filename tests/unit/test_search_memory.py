"""Searching where memory is short: exact peaks decide, what fits is found, and seconds are for all of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.clocks import Ticking
from oracles.graphs import graphs

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.plans import predicted
from soapstone.search import sparing
from soapstone.search.baselines import data_parallel
from soapstone.search.find import OF_ALL, SPARING, Options, WhyInstead, find, settled
from soapstone.search.mcmc import Budget, mcmc
from soapstone.search.sparing import Judge, Judged, Placements, fastest_of_all, is_short, spaces_of, spared
from soapstone.strategy.space import random_strategy

COSTS = AnalyticCosts()
TWO = preset("p100:1x2")


@cache
def layers() -> Graph:
    """Three layers whose weights take more than their activations, in 3,072 strategies on two devices."""
    build = GraphBuilder("layers")
    x = build.input("x", (256, 1024), samples=0)
    for number, (before, after) in enumerate(((1024, 4096), (4096, 1024), (1024, 512))):
        (x,) = build.add("linear", [x, build.weight(f"w{number}", (after, before)), None], name=f"fc{number}")
        (x,) = build.add("relu", [x], name=f"relu{number}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def holding(*memory_bytes: int) -> Machine:
    """Two P100 with so much memory."""
    devices = [
        replace(device, kind=replace(device.kind, name=f"small{n}", memory_bytes=own))
        for n, (device, own) in enumerate(zip(TWO.devices, memory_bytes, strict=True))
    ]
    return replace(TWO, devices=tuple(devices))


@cache
def everything(machine: Machine) -> tuple[Judged, ...]:
    """All strategies on a machine, the fastest first."""
    judge = Judge(layers(), machine, COSTS, "momentum")
    spaces = spaces_of(layers(), machine, 10_000)
    assert spaces is not None
    return tuple(sorted(map(judge.judged, product(*spaces)), key=lambda each: each.makespan_s))


def tight(part: float) -> int:
    """The bytes of each of two devices that so large a part of all strategies fits in."""
    peaks = sorted(max(each.peak_bytes) for each in everything(TWO))
    return peaks[int(part * len(peaks))]


@given(graphs(), st.integers(0, 2**16), st.sampled_from(["sgd", "adam"]))
@settings(max_examples=40, deadline=None)
def test_a_judge_says_what_a_prediction_does(graph: Graph, seed: int, optimizer: str) -> None:
    """One judge of several strategies, to the bit."""
    judge = Judge(graph, TWO, COSTS, optimizer)
    for number in range(3):
        strategy = random_strategy(graph, 2, Random(seed + number), 2)
        told = predicted(strategy, TWO, COSTS, optimizer)
        own = judge.judged(judge.placements(strategy))
        assert (own.makespan_s, own.peak_bytes) == (told.makespan_s, told.memory_bytes)
        assert judge.strategy(judge.placements(strategy)) == strategy


@pytest.mark.parametrize("part", [0.02, 0.1, 0.3])
def test_the_fastest_that_fits_is_found_where_footprints_mislead(part: float) -> None:
    """Of 3,072 strategies few fit, and the fastest that chains take for fitting does not."""
    memory_bytes = tight(part)
    machine = holding(memory_bytes, memory_bytes)
    least_s = min(each.makespan_s for each in everything(machine) if each.fits)
    for search, seed in product(("mcmc", "exact"), range(2)):
        options = Options(search, Budget(None, 200), seed, threads=1)
        found = settled(find(layers(), machine, COSTS, options), machine, COSTS, "", options)
        assert found.plan.prediction.fits(machine)
        assert found.plan.prediction.makespan_s <= least_s
        assert found.instead in (None, OF_ALL, SPARING, "pipeline", "zero")
        assert found.why is (WhyInstead.MEMORY if found.instead else None)


@pytest.mark.parametrize("seed", range(4))
def test_walks_alone_find_what_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many strategies to try all of them; on devices of different memory, too."""
    monkeypatch.setattr(sparing, "MANY_STRATEGIES", 0)
    memory_bytes = tight(0.05)
    for machine in (holding(memory_bytes, memory_bytes), holding(tight(0.02), 2 * memory_bytes)):
        least_s = min(each.makespan_s for each in everything(machine) if each.fits)
        judge = Judge(layers(), machine, COSTS, "momentum")
        found = spared(judge, [data_parallel(layers(), machine)], Budget(None, 600), seed, 1)
        assert found is not None
        strategy, is_of_all = found
        assert not is_of_all
        told = predicted(strategy, machine, COSTS)
        assert told.fits(machine)
        assert told.makespan_s <= 1.2 * least_s


def test_of_all_strategies_none_that_fits_is_faster() -> None:
    machine = holding(tight(0.1), tight(0.1))
    judge = Judge(layers(), machine, COSTS, "momentum")
    spaces = spaces_of(layers(), machine, 3072)
    assert spaces is not None
    assert spaces_of(layers(), machine, 3071) is None
    own = fastest_of_all(judge, spaces)
    assert own is not None
    least_s = min(each.makespan_s for each in everything(machine) if each.fits)
    assert judge.judged(own).makespan_s == least_s
    assert judge.judged_count < 3072  # only those that are faster
    assert fastest_of_all(judge, spaces, least_s) is None


def test_nothing_is_found_where_nothing_fits() -> None:
    machine = holding(1000, 1000)
    judge = Judge(layers(), machine, COSTS, "momentum")
    assert spared(judge, [data_parallel(layers(), machine)], Budget(None, 50), 0, 1) is None


def test_a_search_is_held_to_what_each_device_is_said_to_have() -> None:
    """Half of the weights on one device, with room for all of them on the other."""
    graph, (weights, _) = layers(), Judge(layers(), TWO, COSTS, "sgd").footprint_bytes(one_device())
    found = mcmc(
        graph, TWO, COSTS, budget=Budget(None, 300), threads=1, optimizer="sgd",
        capacity_bytes=[weights, weights // 4],
    )  # fmt: skip
    assert found.fits
    judge = Judge(graph, TWO, COSTS, "sgd")
    held = judge.footprint_bytes(judge.placements(found.strategy))
    assert held[1] <= weights // 4


def one_device() -> Placements:
    return tuple(next(iter(space)) for space in spaces_of(layers(), TWO, 10_000) or ())


def test_memory_is_short_where_data_parallelism_does_not_fit() -> None:
    peak_bytes = max(predicted(data_parallel(layers(), TWO), TWO, COSTS).memory_bytes)
    assert not is_short(layers(), holding(peak_bytes, peak_bytes), COSTS, "momentum")
    assert is_short(layers(), holding(peak_bytes, peak_bytes - 1), COSTS, "momentum")
    assert is_short(layers(), holding(1000, peak_bytes), COSTS, "momentum")


@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
def test_the_seconds_are_for_all_of_it(part: float) -> None:
    """What follows a search that found nothing that fits is over when the seconds are, but for a little."""
    clock = Ticking()
    memory_bytes = tight(part) - (part == 0.0)  # less than anything takes
    machine = holding(memory_bytes, memory_bytes)
    options = Options("mcmc", Budget(60.0, clock=clock), threads=1)
    settled(find(layers(), machine, COSTS, options), machine, COSTS, "", options)
    assert 30.0 < clock() < 66.0


def test_what_was_kept_for_memory_is_used_where_what_is_found_fits() -> None:
    clock, memory_bytes = Ticking(), tight(0.4)
    machine = holding(memory_bytes, memory_bytes)
    assert is_short(layers(), machine, COSTS, "momentum")
    options = Options("mcmc", Budget(30.0, clock=clock), threads=1)
    report = find(layers(), machine, COSTS, options)
    assert predicted(report.strategy, machine, COSTS).fits(machine)
    assert report.method == "mcmc"
    assert "found" in {start.name for start in report.starts}
    assert 25.0 < report.elapsed_s < 33.0
