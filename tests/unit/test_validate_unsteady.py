"""Ranks that are now faster and now slower than they were, and than each other, and steps that wait for the
slowest."""

from __future__ import annotations

from math import log
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.launching import launches
from oracles.ranks import Ranks
from oracles.wirecases import rounds_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.undisturbed import undisturbed
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, predicted
from soapstone.search.baselines import baseline
from soapstone.validation.calibrating import Calibration
from soapstone.validation.comparing import STATISTICS
from soapstone.validation.crowding import Crowding
from soapstone.validation.in_step import InStep
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.running import Ran
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, Traffic
from soapstone.validation.unsteady import (
    MOST_WAYS,
    Round,
    Unsteady,
    believed,
    does_alike,
    slowness,
)

COSTS = AnalyticCosts()
CPUS = preset("cpu:1x2")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load("mlp:features=256,hidden=256,layers=4", batch=512, devices=2).captured().graph


def plan_of(name: str, graph: Graph) -> Plan:
    strategy = baseline(name, graph, CPUS, COSTS, 0)
    return planned(strategy, CPUS, predicted(strategy, CPUS, COSTS), COSTS)


def parts(
    name: str, graph: Graph, *rounds: Round, faster: float = 0.5, traffic: Traffic = AS_THE_MACHINE_SAYS
) -> Parts:
    crowding = Crowding((1.0, 1.0), unsteady=Unsteady(rounds, faster))
    return parts_of(plan_of(name, graph), COSTS, crowding, backend="memory", traffic=traffic)


def test_only_plans_that_give_all_as_much_to_do_tell(graph: Graph) -> None:
    assert does_alike(plan_of("data_parallel", graph))
    assert not does_alike(plan_of("single_device", graph))


def test_a_step_of_all_waits_for_the_slowest(graph: Graph) -> None:
    """Whichever it is; and a step of one rank is as long as one takes by itself."""
    rounds = [Round((1.0, 1.0), each) for each in ((0.9, 1.1), (1.1, 0.9), (0.9, 1.1))]
    for name, least, most in (("data_parallel", 1.08, 1.1), ("single_device", 0.999, 1.001)):
        steady, unsteady = parts(name, graph), parts(name, graph, *rounds)
        times = unsteady.makespan_s(Calibration()) / steady.makespan_s(Calibration())
        assert least < times < most
        timeline = unsteady.timeline(Calibration(step_s=1.0))
        assert timeline.makespan_s == pytest.approx(unsteady.makespan_s(Calibration(step_s=1.0)))
        assert max(timeline.end_s) == pytest.approx(timeline.makespan_s - 1.0)


def test_waiting_for_the_slowest_counts_once(graph: Graph) -> None:
    """In meetings or by the rounds, whichever is more; and what is computed is as slow as all ranks are
    anyway, but no meeting is, which was not measured when that was."""
    differ = [Round((1.0, 1.0), each) for each in ((0.8, 1.2), (1.2, 0.8))]
    slow = [Round((1.5, 1.5), (1.5, 1.5))] * 2
    steady_s, taken_s, longer_s = [], [], []
    for meeting_s in (0.0, 1e-6, 1e-5, 1e-4, 1.0):
        traffic = Traffic(meeting_s=meeting_s)
        found = parts("zero", graph, *differ, traffic=traffic)
        taken_s.append(found.makespan_s(Calibration()))
        steady_s.append(parts("zero", graph, traffic=traffic).makespan_s(Calibration()))
        slow_s = parts("zero", graph, *slow, traffic=traffic).makespan_s(Calibration())
        longer_s.append(slow_s - steady_s[-1])
    assert taken_s[0] > 1.1 * steady_s[0]
    assert taken_s[-1] == pytest.approx(steady_s[-1])
    assert longer_s == pytest.approx([longer_s[0]] * len(longer_s), rel=0.02)
    assert 1.4 * steady_s[0] < longer_s[0] + steady_s[0] < 1.501 * steady_s[0]
    assert taken_s == sorted(taken_s)
    assert all(taken >= steady * (1 - 1e-9) for taken, steady in zip(taken_s, steady_s, strict=True))


def test_what_one_rank_does_is_as_slow_as_one_is_and_what_all_do_as_slow_as_all_are(graph: Graph) -> None:
    rounds = [Round((1.5, 1.5), (2.0, 2.0))] * 3
    assert parts("single_device", graph, *rounds).unsteady == pytest.approx(1.5, rel=1e-3)
    assert 1.9 < parts("data_parallel", graph, *rounds).unsteady < 2.0  # but for copying what is summed


def test_ranks_that_work_in_turn_are_each_as_slow_as_it_is(graph: Graph) -> None:
    """The faster quarter of what one takes alone is not that of a step of both: seldom are both fast."""
    ranks = [(1.0, 1.0), (1.0, 1.5), (1.5, 1.0), (1.5, 1.5)]
    rounds = [Round(each, each) for each in ranks]
    one, both = (parts(name, graph, *rounds, faster=0.25) for name in ("single_device", "model_parallel"))
    assert one.unsteady == pytest.approx(1.0, rel=1e-3)
    assert 1.1 < both.unsteady < 1.3


def test_what_is_predicted_is_what_counts_of_steps(graph: Graph) -> None:
    """The faster quartile of steps by that of the ways in which they may go, and so on."""
    rounds = [Round((times, times), (times, times)) for times in (1.0, 1.1, 1.2, 1.3, 2.0)]
    steps_s = Ran([each.alone[0] for each in rounds])
    for statistic, faster in STATISTICS.items():
        found = parts("single_device", graph, *rounds, faster=faster)
        assert found.unsteady == pytest.approx(steps_s.step_s(statistic), rel=0.02)
    assert [steps_s.step_s(each) for each in ("fastest", "quartile", "median")] == [1.0, 1.1, 1.2]


@given(st.lists(st.tuples(*3 * [st.floats(0.5, 2)]), min_size=1, max_size=5), st.floats(0, 1))
def test_a_step_is_as_far_off_as_ranks_are(
    graph: Graph, rounds: list[tuple[float, float, float]], faster: float
) -> None:
    factors = [1.0, *(each for row in rounds for each in row)]
    found = parts("data_parallel", graph, *(Round((one, one), (a, b)) for one, a, b in rounds), faster=faster)
    assert min(factors) * (1 - 1e-9) <= found.unsteady <= max(factors) * (1 + 1e-9)


def test_ranks_that_do_not_differ_change_nothing(graph: Graph) -> None:
    assert parts("data_parallel", graph, *[Round((1.0, 1.0), (1.0, 1.0))] * 3).unsteady == 1.0


def test_some_ways_stand_for_all_and_every_rank_is_the_slow_one_in_some() -> None:
    rounds = [Round((1.0,) * 4, (1.0, 1.0, 1.0, 2.0))] * 50
    found = slowness(rounds, np.array([0, 1, 2, 3, -1]), np.full(5, 4.0))
    assert len(found) <= MOST_WAYS
    assert set(np.argmax(found, axis=1).tolist()) == {0, 1, 2, 3}
    assert (found[:, 4] == 1.0).all()


def test_of_gpus_threads_differ_and_not_kernels(graph: Graph) -> None:
    """A step whose kernels take longer than all of its thread does is as long as ever."""
    rounds = Round((1.0, 1.0), (0.5, 1.5)), Round((1.0, 1.0), (1.5, 0.5))
    crowding = Crowding((1.0, 1.0), launching=(1.0, 1.0), unsteady=Unsteady(rounds))
    for kernels_s, launching_s, least, most in ((1.0, 0.1, 1.0, 1.05), (0.0, 0.1, 1.4, 1.5)):
        found = parts_of(
            plan_of("data_parallel", graph),
            COSTS,
            crowding,
            launches=launches(kernels_s, launching_s),
            backend="memory",
        )
        assert least <= found.unsteady <= most


def test_ranks_that_share_cores_are_as_slow_as_all_of_them() -> None:
    slow = (1.1, 1.2, 1.3)
    assert Round(slow, (1.0, 2.0, 3.0)).evened == Round(slow, (2.0, 2.0, 2.0))
    assert Crowding((1.0, 1.9), stretch=(1.0, 1.9)).shares_cores
    assert not Crowding((1.0, 1.4), stretch=(1.0, 1.05)).shares_cores
    waited_once = InStep(), InStep(real=0.55)  # while that was measured, and not in steps
    assert not Crowding((1.0, 1.9), stretch=(1.0, 1.9), in_step=waited_once).shares_cores


def test_ranks_tell_each_other_what_they_took() -> None:
    ranks = Ranks(2)
    first, second = ranks.run(rounds_seen, 2)
    ranks.close()
    assert first == second == (Round((2.0, 3.0), (0.8, 1.2)),) * 2


@given(st.lists(st.floats(1, 2), min_size=1, max_size=30), st.lists(st.floats(3, 9), max_size=8))
def test_what_disturbs_some_is_not_seen(quiet: list[float], disturbed: list[float]) -> None:
    """As long as it disturbs fewer than three in four."""
    if len(disturbed) <= 3 * (len(quiet) - 1):
        assert undisturbed([*disturbed, *quiet]) <= 2
    assert min(quiet) <= undisturbed(quiet) <= median(quiet)


def test_steps_that_differ_much_tell_little() -> None:
    same, few, many = Ran([1.0] * 8), Ran([1.0, 1.1, 1.2, 1.3] * 2), Ran([1.0, 1.1, 1.2, 1.3] * 8)
    assert same.doubt == 0.0
    assert 0 < many.doubt < 0.6 * few.doubt


def test_what_one_takes_by_itself_is_believed_as_far_as_it_is_told() -> None:
    steady = [1.2] * 5
    assert believed(steady, 0.0) == pytest.approx(1.2)
    assert believed(steady, 0.5 * log(1.2)) == pytest.approx(1.2**0.75)
    assert believed(steady, log(1.2)) == believed(steady, 1.0) == 1.0
    assert believed([0.45] * 5, 0.1) == pytest.approx(0.45, rel=0.02)  # far more than what is uncertain
    assert believed([0.7, 1.2, 1.9], 0.0) < believed([1.15, 1.2, 1.3], 0.0) < 1.2
    assert believed([1.0] * 5, 0.1) == believed([1.2], 0.0) == believed([], 0.0) == 1.0
