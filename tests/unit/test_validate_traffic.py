"""What bytes take between ranks: messages at once, and sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from oracles.ranks import Ranks
from oracles.wirecases import traffic_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, simulation
from soapstone.search.baselines import data_parallel
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.task import TaskKind
from soapstone.validation.calibrating import Calibration
from soapstone.validation.drawing import drawn
from soapstone.validation.parts import parts_of
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, Traffic

MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load("lenet", tiny=True, devices=2).captured().graph


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def plan_of(strategy: Strategy) -> Plan:
    return planned(strategy, MACHINE, simulation(strategy, MACHINE, COSTS), COSTS)


def test_sums_of_other_sizes_lie_between_those_that_were_measured() -> None:
    traffic = Traffic((1.0,), {2: ((1024, 1.0), (1024 * 1024, 3.0)), 8: ((1024, 5.0),)}, {2: 1.5, 8: 4.0})
    assert [traffic.of_sum(2, size) for size in (0, 1024, 32 * 1024, 2**30)] == pytest.approx([1, 1, 2, 3])
    assert traffic.of_sum(7, 2**30) == 5.0
    assert [traffic.latency_of_sum(count) for count in (2, 3, 8)] == [1.5, 1.5, 4.0]


def test_what_was_not_measured_is_as_the_machine_says(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    assert AS_THE_MACHINE_SAYS.of_sum(4, 10**6) == AS_THE_MACHINE_SAYS.latency_of_sum(4) == 1.0
    alike = Traffic((1.0, 1.0), {2: ((1024, 1.0),)}, {2: 1.0})
    usual, measured = parts_of(plan, COSTS), parts_of(plan, COSTS, traffic=alike)
    assert measured.durations(Calibration()) == pytest.approx(usual.durations(Calibration()))


@pytest.mark.parametrize("backend", ["gloo", "memory"])
def test_sums_take_what_was_measured_and_messages_theirs(graph: Graph, backend: str) -> None:
    """All times of bytes, wherever they are counted, are those of messages three times and of sums twice."""
    traffic = Traffic((3.0,), {2: ((1024, 2.0),)}, {2: 5.0})
    for strategy in (data_parallel(graph, MACHINE), random_strategy(graph, 2, Random(0))):
        plan = plan_of(strategy)
        usual = parts_of(plan, COSTS, backend=backend)
        messages = parts_of(plan, COSTS, backend=backend, traffic=replace(traffic, sums={}, latencies={}))
        sums = parts_of(plan, COSTS, backend=backend, traffic=replace(traffic, messages=(1.0,)))
        more = (messages.wire_s - usual.wire_s) / 2 + (sums.wire_s - usual.wire_s)
        assert more == pytest.approx(usual.wire_s)
        is_sum = [task.kind is TaskKind.ALL_REDUCE for task in usual.tasks.tasks]
        assert sums.latency_s == pytest.approx(np.where(is_sum, 5.0, 1.0) * usual.latency_s)


def test_messages_under_way_together_slow_each_other_down(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    usual = parts_of(plan, COSTS)
    crowded = parts_of(plan, COSTS, traffic=Traffic((1.0, 4.0)))
    there = usual.wire_s > 0
    slower = crowded.wire_s[there] / usual.wire_s[there]
    assert slower.min() == pytest.approx(1.0)
    assert 1.0 < slower.max() <= 4.0


def test_all_ranks_see_the_same_traffic(ranks: Ranks) -> None:
    first, second = ranks.run(traffic_seen, 2)
    assert first == second
    messages, sums, latencies = first
    assert len(messages) == 2
    assert list(sums) == list(latencies) == [2]
    assert min(*messages, *latencies.values(), *(factor for _, factor in sums[2])) > 0


def test_every_second_strategy_is_half_of_each_kind(graph: Graph) -> None:
    for count in (13, 20):
        names = [each.name for each in drawn(graph, MACHINE, COSTS, count)]
        kinds = ["random" if "random" in n else "changed" if "changed" in n else "known" for n in names]
        fitted, reported = Counter(kinds[::2]), Counter(kinds[1::2])
        assert all(abs(fitted[kind] - reported[kind]) <= 1 for kind in set(kinds))
