"""Strategies to validate: drawn from a seed, and found by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import simulation
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.validation.drawing import BEFORE, FOUND, Drawn, drawn, found_anew

MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load("lenet", tiny=True, devices=2).captured().graph


def test_strategies_are_different_and_follow_from_the_seed(graph: Graph) -> None:
    found = drawn(graph, MACHINE, COSTS, 12, seed=3)
    assert len(found) == 12
    assert found[0].name == "data_parallel"
    for a, b in combinations(found, 2):
        assert a.strategy.placements != b.strategy.placements
    again = drawn(graph, MACHINE, COSTS, 12, seed=3)
    assert [each.strategy.placements for each in again] == [each.strategy.placements for each in found]
    other = drawn(graph, MACHINE, COSTS, 12, seed=4)
    assert [each.strategy.placements for each in other] != [each.strategy.placements for each in found]


def test_what_is_found_by_other_costs_stands_for_what_was_found_before(graph: Graph) -> None:
    """Found where computing takes a hundredth of the time, and again where it takes a hundred times."""
    slow, swift = AnalyticCosts(most_flops=0.006, most_bandwidth=0.0091), AnalyticCosts(60.0, 91.0)
    found = drawn(graph, MACHINE, swift, 12, seed=3)
    anew = found_anew(found, graph, MACHINE, [slow], seed=3)
    assert len(anew) == len(found)
    for a, b in combinations(anew, 2):
        assert a.strategy.placements != b.strategy.placements
    ((place, best),) = [(i, each) for i, each in enumerate(anew) if each.name == FOUND]
    assert place == 1
    times_s = [simulation(each.strategy, MACHINE, slow).timeline.makespan_s for each in (best, *found)]
    assert times_s[0] <= 1.1 * min(times_s)  # it was searched for with gradients in buckets
    assert times_s[0] < 0.7 * times_s[1 + place]
    rest = [each for each in found if each.name != FOUND]
    assert [each for each in anew if each.name != FOUND] == rest[: len(found) - 1]


def test_what_is_found_and_known_by_another_name_has_that_name(graph: Graph) -> None:
    found = drawn(graph, MACHINE, COSTS, 6, seed=3)
    best = next(each for each in found if each.name == FOUND)
    other = Drawn(FOUND, random_strategy(graph, 2, Random(1)))
    anew = found_anew([Drawn("data_parallel", best.strategy), other], graph, MACHINE, [COSTS], seed=3)
    if anew[1].name == FOUND:  # something better still
        times = [simulation(each.strategy, MACHINE, COSTS).timeline.makespan_s for each in (anew[1], best)]
        assert times[0] < times[1]
    else:
        assert anew[1] == Drawn(BEFORE, other.strategy)


def test_what_is_found_is_the_best_by_its_prediction(graph: Graph) -> None:
    """Of what searches find by several costs, and of the baselines, whatever searches think of it."""
    found = drawn(graph, MACHINE, COSTS, 6, seed=3)
    slow, swift = AnalyticCosts(most_flops=0.006, most_bandwidth=0.0091), AnalyticCosts(60.0, 91.0)
    tried: list[Strategy] = []

    def none_before_the_second(strategies: Sequence[Strategy]) -> list[float]:
        tried.extend(strategies)
        return [0.5 if i == 1 else 1.0 for i in range(len(strategies))]

    anew = found_anew(found, graph, MACHINE, [swift, slow], seed=3, predicted=none_before_the_second)
    by_slow = found_anew(found, graph, MACHINE, [slow], seed=3)
    assert [each.strategy.placements for each in anew] == [each.strategy.placements for each in by_slow]
    usual = next(each for each in found if each.name == "data_parallel")
    assert usual.strategy in tried

    def data_parallel_first(strategies: Sequence[Strategy]) -> list[float]:
        return [float(each.placements != usual.strategy.placements) for each in strategies]

    anew = found_anew(found, graph, MACHINE, [swift, slow], seed=3, predicted=data_parallel_first)
    assert [each.name for each in anew] == [BEFORE if each.name == FOUND else each.name for each in found]
