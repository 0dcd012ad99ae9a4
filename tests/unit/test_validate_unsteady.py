"""Ranks that are now faster and now slower than each other, and steps that wait for the slowest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.launching import launches
from oracles.ranks import Ranks
from oracles.wirecases import rounds_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, predicted
from soapstone.search.baselines import baseline
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.unsteady import ROUNDS, Rounds, does_alike

COSTS = AnalyticCosts()
CPUS = preset("cpu:1x2")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load("mlp:features=256,hidden=256,layers=4", batch=512, devices=2).captured().graph


def plan_of(name: str, graph: Graph) -> Plan:
    strategy = baseline(name, graph, CPUS, COSTS, 0)
    return planned(strategy, CPUS, predicted(strategy, CPUS, COSTS), COSTS)


def parts(name: str, graph: Graph, rounds: Rounds) -> Parts:
    crowding = Crowding((1.0, 1.0), rounds=rounds)
    return parts_of(plan_of(name, graph), COSTS, crowding, backend="memory")


def test_only_plans_that_give_all_as_much_to_do_tell(graph: Graph) -> None:
    assert does_alike(plan_of("data_parallel", graph))
    assert not does_alike(plan_of("single_device", graph))


def test_a_step_of_all_waits_for_the_slowest(graph: Graph) -> None:
    """Whichever it is; and a step of one rank is as long as it is in the middle."""
    rounds = ((0.9, 1.1), (1.1, 0.9), (0.9, 1.1))
    for name, least, most in (("data_parallel", 1.08, 1.1), ("single_device", 0.999, 1.001)):
        steady, unsteady = parts(name, graph, ()), parts(name, graph, rounds)
        times = unsteady.makespan_s(Calibration()) / steady.makespan_s(Calibration())
        assert least < times < most
        timeline = unsteady.timeline(Calibration(step_s=1.0))
        assert timeline.makespan_s == pytest.approx(unsteady.makespan_s(Calibration(step_s=1.0)))
        assert max(timeline.end_s) == pytest.approx(timeline.makespan_s - 1.0)


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=1, max_size=5))
def test_a_step_is_as_far_off_as_ranks_are(graph: Graph, rounds: list[tuple[float, float]]) -> None:
    factors = [1.0, *(each for row in rounds for each in row)]
    found = parts("data_parallel", graph, tuple(rounds)).unsteady
    assert min(factors) * (1 - 1e-9) <= found <= max(factors) * (1 + 1e-9)


def test_ranks_that_do_not_differ_change_nothing(graph: Graph) -> None:
    assert parts("data_parallel", graph, ((1.0, 1.0),) * 3).unsteady == 1.0


def test_of_gpus_threads_differ_and_not_kernels(graph: Graph) -> None:
    """A step whose kernels take longer than all of its thread does is as long as ever."""
    crowding = Crowding((1.0, 1.0), launching=(1.0, 1.0), rounds=((0.5, 1.5), (1.5, 0.5)))
    for kernels_s, launching_s, least, most in ((1.0, 0.1, 1.0, 1.05), (0.0, 0.1, 1.4, 1.5)):
        found = parts_of(
            plan_of("data_parallel", graph),
            COSTS,
            crowding,
            launches=launches(kernels_s, launching_s),
            backend="memory",
        )
        assert least <= found.unsteady <= most


def test_ranks_tell_each_other_what_they_took() -> None:
    ranks = Ranks(2)
    first, second = ranks.run(rounds_seen, 2)
    ranks.close()
    assert first == second == ((0.8, 1.2),) * ROUNDS
