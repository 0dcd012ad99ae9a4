"""What bytes take between ranks: messages at once, and sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from oracles.ranks import Ranks
from oracles.wirecases import traffic_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, simulation
from soapstone.runtime.mailbox import WATCH_S
from soapstone.search.baselines import data_parallel
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.task import COMPUTE_KINDS, TaskKind
from soapstone.validation import meeting
from soapstone.validation.calibrating import Calibration
from soapstone.validation.drawing import drawn
from soapstone.validation.handing import Handing
from soapstone.validation.meeting import LONGEST_S, SLEPT_S, waking_s
from soapstone.validation.parts import parts_of
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, Traffic, between

MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()
WAKING_S = 3.0, 4.0


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
    traffic = Traffic(
        (1.0,), {2: ((1024, 1.0, 0.5), (1024 * 1024, 3.0, 2.5)), 8: ((1024, 5.0, 4.0),)}, {2: 1.5, 8: 4.0}
    )
    found = np.array([traffic.of_sum(2, size) for size in (0, 1024, 32 * 1024, 2**30)])
    assert found == pytest.approx(np.array([(1, 0.5), (1, 0.5), (2, 1.5), (3, 2.5)]))
    assert traffic.of_sum(5, 2**30) == pytest.approx((4.0, 3.25))  # half way between 2 and 8 ranks
    assert traffic.of_sum(9, 2**30) == (5.0, 4.0)
    assert [traffic.latency_of_sum(count) for count in (1, 2, 5, 8)] == [1.5, 1.5, 2.75, 4.0]


def test_what_was_not_measured_is_as_the_machine_says(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    assert AS_THE_MACHINE_SAYS.of_sum(4, 10**6) == (1.0, 1.0)
    assert AS_THE_MACHINE_SAYS.latency_of_sum(4) == 1.0
    alike = Traffic((1.0, 1.0), {2: ((1024, 1.0, 1.0),)}, {2: 1.0})
    usual, measured = parts_of(plan, COSTS), parts_of(plan, COSTS, traffic=alike)
    assert measured.durations(Calibration()) == pytest.approx(usual.durations(Calibration()))


@pytest.mark.parametrize("backend", ["gloo", "memory"])
def test_sums_take_what_was_measured_and_messages_theirs(graph: Graph, backend: str) -> None:
    """All times of bytes, wherever they are counted, are those of messages three times and of sums twice."""
    traffic = Traffic((3.0,), {2: ((1024, 2.0, 2.0),)}, {2: 5.0})
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


def test_all_that_is_on_a_bus_shares_it(graph: Graph) -> None:
    """By belts each takes longer by what is under way meanwhile; no more goes over the bus in a step than it
    can carry."""
    for strategy in (data_parallel(graph, MACHINE), random_strategy(graph, 2, Random(0))):
        plan = plan_of(strategy)
        wide = Traffic((1.0,) * 64)  # nobody is in another's way
        alone, shared = (
            parts_of(plan, COSTS, backend="belts", traffic=traffic) for traffic in (wide, Traffic((1.0,)))
        )
        there = alone.wire_s > 0
        assert (shared.wire_s[there] >= alone.wire_s[there] * (1 - 1e-9)).all()
        messages = [task.kind is TaskKind.TRANSFER for task in alone.tasks.tasks]
        assert shared.makespan_s(Calibration()) > 0.9 * alone.wire_s[messages].sum()
        slowest = (shared.wire_s[there] / alone.wire_s[there]).max()
        assert (slowest > 1.0) == any(messages)


def test_the_first_piece_of_a_message_is_copied_twice() -> None:
    mib = 2**20
    assert Traffic().of_message(3 * mib) == 1.0
    in_pieces = Traffic(piece_bytes=4 * mib)
    for size_bytes, first_bytes in ((1000, 1000), (mib, mib // 2), (8 * mib, 2 * mib), (32 * mib, 4 * mib)):
        taken = (size_bytes + first_bytes) / size_bytes
        assert in_pieces.of_message(size_bytes) == pytest.approx(taken)


def test_sums_go_beside_messages_where_they_are_apart(graph: Graph) -> None:
    """On one link one follows the other; apart, with no delay, both take what they take."""
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    usual = parts_of(plan, COSTS).makespan_s(Calibration())
    steps = [
        parts_of(plan, COSTS, traffic=Traffic((1.0, 1.0), delay=delay)).makespan_s(Calibration())
        for delay in (0.0, 0.5, 1.0)
    ]
    assert steps[0] < usual
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


def test_sums_that_are_asked_for_together_take_what_was_measured_so(graph: Graph) -> None:
    plan = plan_of(data_parallel(graph, MACHINE))
    alone, among = (
        parts_of(plan, COSTS, traffic=Traffic((1.0,), {2: ((1024, 4.0, b),)})) for b in (4.0, 1.0)
    )
    there = alone.wire_s > 0
    share = among.wire_s[there] / alone.wire_s[there]
    assert share.max() <= 1.0
    assert share.min() >= 0.25 - 1e-9


def test_the_latency_of_a_sum_passes_while_it_waits() -> None:
    """Only where sums are apart, and never more of it than there is."""
    wide = load("mlp:features=2048,hidden=2048,layers=6", devices=2).captured().graph  # of several buckets
    plan = plan_of(data_parallel(wide, MACHINE))
    slow = {2: ((1024, 1000.0, 1000.0),)}  # so that one is asked for before the last is over
    together, apart = (parts_of(plan, COSTS, traffic=Traffic((1.0,), slow, delay=d)) for d in (None, 0.0))
    there = together.latency_s > 0
    share = apart.latency_s[there] / together.latency_s[there]
    assert share.max() == pytest.approx(1.0)
    assert share.min() == 0.0


def test_messages_have_the_latency_that_was_measured(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    usual, late = (parts_of(plan, COSTS, traffic=Traffic(latency=factor)) for factor in (1.0, 3.0))
    is_sum = [task.kind is TaskKind.ALL_REDUCE for task in usual.tasks.tasks]
    assert late.latency_s == pytest.approx(np.where(is_sum, 1.0, 3.0) * usual.latency_s)


def test_a_message_takes_time_of_both_its_ends(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    usual, busy = (parts_of(plan, COSTS, traffic=Traffic(handing=Handing(message_s=s))) for s in (0.0, 1.0))
    longer_s = busy.durations(Calibration()) - usual.durations(Calibration())
    assert longer_s == pytest.approx(usual.handed.messages)


def test_a_sum_is_as_much_work_as_was_measured_for_so_many_ranks_and_bytes(graph: Graph) -> None:
    handing = Handing(1.0, sums={2: (3.0, 5.0), 4: (7.0, 9.0)})
    assert [handing.of_sum(count, 4096) for count in (2, 3, 4, 8)] == [3.0, 5.0, 7.0, 7.0]
    assert [handing.of_sum(count, 2**20) for count in (2, 4)] == [5.0, 9.0]
    assert Handing().of_sum(4, 2**20) == 2.0  # once handed over, and once taken
    plan = plan_of(data_parallel(graph, MACHINE))
    usual, known = (
        parts_of(plan, COSTS, traffic=Traffic(handing=each)).handed.messages
        for each in (Handing(1.0), handing)
    )
    assert usual.any()
    assert known == pytest.approx(usual * (3.0 / 2.0))  # LeNet's gradients are few bytes


def test_what_was_measured_before_and_after_lies_between() -> None:
    few, many = Handing(1e-4, sums={2: (1.0, 4.0)}), Handing(4e-4, sums={2: (9.0, 4.0)})
    before = Traffic((1.0, 2.0), {2: ((1024, 1.0, 1.0),)}, {2: 1.0}, 0.1, 1.0, 1.0, 0, few)
    after = Traffic((4.0, 8.0), {2: ((1024, 9.0, 4.0),)}, {2: 4.0}, 0.4, 4.0, 9.0, 0, many)
    found = between(before, after)
    assert found.messages == (2.0, 4.0)
    assert found.sums == {2: ((1024, 3.0, 2.0),)}
    assert (found.latencies, found.delay) == ({2: 2.0}, 0.2)
    assert found.handing.message_s == pytest.approx(2e-4)
    assert found.handing.sums == {2: (3.0, 4.0)}
    assert (found.beyond, found.latency) == (2.0, 3.0)
    assert between(AS_THE_MACHINE_SAYS, AS_THE_MACHINE_SAYS) == AS_THE_MACHINE_SAYS
    some, others = Traffic(meeting_s=2.0, waking=(1.0, 3.0)), Traffic(meeting_s=8.0, waking=(2.0, 5.0))
    met = between(some, others)  # also where nothing else was measured
    assert (met.meeting_s, met.waking) == (5.0, (1.5, 4.0))
    amid = between(replace(before, amid=((1.5, 1e-3),)), replace(after, amid=((1.5, 3e-3),)))
    assert amid.amid == ((1.5, pytest.approx(2e-3)),)


def test_a_task_that_meets_another_rank_takes_longer(graph: Graph) -> None:
    plan = plan_of(random_strategy(graph, 2, Random(0)))
    usual, met = (parts_of(plan, COSTS, traffic=Traffic(meeting_s=each)) for each in (0.0, 3.0))
    longer = met.durations(Calibration()) - usual.durations(Calibration())
    assert 0 < np.count_nonzero(usual.meets) < len(usual.meets)
    assert longer == pytest.approx(3.0 * usual.meets)


def test_who_has_slept_for_longer_takes_longer_to_wake() -> None:
    short_s, long_s = SLEPT_S
    at = np.array([0.0, WATCH_S, short_s, long_s, long_s**2 / short_s, LONGEST_S, 9.0])
    found = waking_s((2.0, 5.0), at)
    assert found[:5] == pytest.approx([0.0, 0.0, 2.0, 5.0, 8.0])
    assert found[5] == found[6] > 8.0
    assert waking_s((3.0, 3.0), at)[2:] == pytest.approx([3.0] * 5)


def test_what_seeing_to_messages_takes_after_computing_is_none_of_a_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes that with nobody at the other end, too; and waking is what a relay takes beyond all of it."""
    wire = cast(Any, SimpleNamespace(rank=0, size=2, device=None, backend="memory", neighbours=None))
    found: dict[str, float] = {"some": 200e-6, "none": 80e-6, "nobody some": 120e-6, "nobody none": 30e-6}

    def swap(_: object, ends: object, compute: object) -> float:
        whose = "" if ends is wire else "nobody "
        return found[f"{whose}{'none' if compute is meeting._nothing else 'some'}"]

    def of_a_hop(compute: object) -> float:
        return 0.0 if compute is meeting._nothing else 300e-6

    monkeypatch.setattr(meeting, "_swap", swap)
    monkeypatch.setattr(meeting, "_over_ranks", lambda _wire, own_s, _how: own_s)
    monkeypatch.setattr(meeting, "_at_once", lambda *_: 50e-6)
    monkeypatch.setattr(meeting, "_alone", lambda _, compute: of_a_hop(compute))
    after_s, handed_s, waking = 70e-6, 75e-6, 90e-6
    monkeypatch.setattr(
        meeting,
        "_relay",
        lambda _, compute: handed_s + (of_a_hop(compute) and of_a_hop(compute) + after_s + waking),
    )
    assert meeting.measured_meeting(wire) == (pytest.approx(30e-6), (pytest.approx(waking),) * 2)
    found["nobody some"] = 1.0
    assert meeting.measured_meeting(wire) == (0.0, (pytest.approx(waking),) * 2)


def test_who_has_waited_for_long_has_to_wake(graph: Graph) -> None:
    """A task that meets another rank takes longer by that where its device had nothing to do before for more
    than it watches, and not where it had."""
    asleep = 0
    for seed in range(4):
        plan = plan_of(random_strategy(graph, 2, Random(seed)))
        usual, met = (parts_of(plan, COSTS, traffic=Traffic(waking=each)) for each in ((0.0, 0.0), WAKING_S))
        woken_s = met.durations(Calibration()) - usual.durations(Calibration())
        assert woken_s == pytest.approx(met.woken_s)
        assert (woken_s[usual.meets == 0] == 0).all()
        timeline = usual.timeline(Calibration())
        until_s = dict.fromkeys((task.resource for task in usual.tasks.tasks), 0.0)
        for number in np.lexsort((timeline.end_s, timeline.start_s)).tolist():
            task = usual.tasks.tasks[number]
            if task.kind in COMPUTE_KINDS and usual.meets[number]:
                waited_s = timeline.start_s[number] - until_s[task.resource]
                said_s = usual.meets[number] * waking_s(WAKING_S, np.array([waited_s]))[0]
                assert woken_s[number] == pytest.approx(said_s, abs=1e-6)
                assert waited_s > 0.99 * WATCH_S or not woken_s[number]
                asleep += woken_s[number] > 0
            if task.kind in COMPUTE_KINDS:
                until_s[task.resource] = timeline.end_s[number]
    assert asleep > 0


def test_all_ranks_see_the_same_traffic(ranks: Ranks) -> None:
    first, second = ranks.run(traffic_seen, 2)
    assert first == second
    assert len(first.messages) == 2
    assert list(first.sums) == list(first.latencies) == [2]
    factors = [factor for _, *both in first.sums[2] for factor in both]
    assert min(*first.messages, *first.latencies.values(), *factors, first.delay) > 0
    assert 0 <= first.handing.message_s < 1
    assert 0 <= first.meeting_s < 1
    assert 0 <= first.waking[0] <= first.waking[1] < 1
    assert min(first.beyond, first.latency) > 0


def test_every_second_strategy_is_half_of_each_kind(graph: Graph) -> None:
    for count in (13, 20):
        names = [each.name for each in drawn(graph, MACHINE, COSTS, count)]
        kinds = ["random" if "random" in n else "changed" if "changed" in n else "known" for n in names]
        fitted, reported = Counter(kinds[::2]), Counter(kinds[1::2])
        assert all(abs(fitted[kind] - reported[kind]) <= 1 for kind in set(kinds))
