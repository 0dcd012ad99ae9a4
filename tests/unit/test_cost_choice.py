"""Which costs a prediction uses."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from oracles.profiles import made_up_costs

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.cache import Cache
from soapstone.cost.candidates import keys_of
from soapstone.cost.choice import bases, costs_for, shipped, shipped_kinds
from soapstone.cost.measured import Basis, MeasuredCosts
from soapstone.cost.profile import Profile
from soapstone.errors import CostError, PlanError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.machine.cores import usable_cores
from soapstone.plans import Plan, planned, read_plan, simulation, write_plan
from soapstone.search.baselines import data_parallel

MACHINE = preset("cpu:1x2")


def small_graph() -> Graph:
    build = GraphBuilder("net")
    x = build.input("x", (8, 4))
    (y,) = build.add("linear", [x, build.weight("w", (4, 4)), None], name="fc")
    (y,) = build.add("relu", [y], name="act")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "costs.sqlite")


def measured_profile() -> Profile:
    costs = made_up_costs(data_parallel(small_graph(), MACHINE), MACHINE, Random(0), share=1.0)
    return costs.profiles["cpu"]


def test_without_a_profile_costs_are_analytic_or_refused(cache: Cache) -> None:
    assert costs_for(MACHINE, "auto", cache) == AnalyticCosts()
    assert costs_for(MACHINE, "analytic", cache) == AnalyticCosts()
    with pytest.raises(CostError, match="no costs of 'cpu' were measured"):
        costs_for(MACHINE, "measured", cache)
    with pytest.raises(CostError, match="did you mean 'measured'"):
        costs_for(MACHINE, "mesured", cache)


def test_a_profile_in_the_cache_is_used(cache: Cache) -> None:
    cache.add(measured_profile())
    for choice in ("auto", "measured"):
        found = costs_for(MACHINE, choice, cache)
        assert isinstance(found, MeasuredCosts)
        assert found.profiles["cpu"] == measured_profile()
    assert not isinstance(costs_for(MACHINE, "analytic", cache), MeasuredCosts)


def test_kinds_without_a_profile_stay_analytic(cache: Cache) -> None:
    cache.add(measured_profile())
    assert costs_for(preset("p100:1x2"), "auto", cache) == AnalyticCosts()


def test_a_profile_with_the_same_threads_and_ranks_comes_first(cache: Cache) -> None:

    threads = str(max(1, usable_cores() // 2))
    times = measured_profile().times
    for software in (
        {"threads": threads, "ranks": "2", "best": "yes"},
        {"threads": threads},
        {"threads": "99", "ranks": "2"},
    ):
        cache.add(Profile("cpu", software, times))
    found = costs_for(MACHINE, "auto", cache)
    assert isinstance(found, MeasuredCosts)
    assert found.profiles["cpu"].software.get("best") == "yes"


def test_shipped_profiles_can_be_read() -> None:
    for kind in shipped_kinds():
        profile = shipped(kind)
        assert profile is not None
        assert profile.kind == kind
        assert profile.count
    assert shipped("abacus") is None


def test_a_plan_holds_the_times_it_rests_on(tmp_path: Path, cache: Cache) -> None:
    """It can be simulated again where nothing was measured, with the same prediction."""
    graph = small_graph()
    cache.add(measured_profile())
    costs = costs_for(MACHINE, "measured", cache, graph)
    strategy = data_parallel(graph, MACHINE)
    plan = planned(strategy, MACHINE, simulation(strategy, MACHINE, costs), costs)
    assert plan.costs == "measured"
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.simulated().prediction == plan.prediction
    assert plan.prediction != simulation(strategy, MACHINE).prediction
    assert set(bases(strategy, MACHINE, again.cost_model)) == {Basis.MEASURED}
    assert {key.op_name for key in plan.profiles["cpu"].times} <= {key.op_name for key in keys_of(graph)}


def test_measured_costs_without_times_are_refused(tmp_path: Path) -> None:
    strategy = data_parallel(small_graph(), MACHINE)
    plan = Plan(strategy, MACHINE, simulation(strategy, MACHINE).prediction, costs="measured")
    with pytest.raises(PlanError, match="need the times"):
        plan.simulated()
    write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(PlanError, match="does not go with its profiles"):
        read_plan(tmp_path / "plan.json")
