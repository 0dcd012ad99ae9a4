"""Explanations and differences: every number is that of a whole simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from oracles.profiles import made_up_costs

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import PlanError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.plans import Plan, planned, simulation
from soapstone.report.difference import difference
from soapstone.report.dot import graph_dot, quoted, tasks_dot
from soapstone.report.explanation import block_named, explained, parts_tried, with_devices, with_links
from soapstone.search.baselines import data_parallel, single_device
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import native_tasks
from soapstone.tasks.task import TaskKind

MACHINE = preset("p100:1x4")


def network(batch: int = 64) -> Graph:
    build = GraphBuilder("net")
    x = build.input("x", (batch, 512))
    (x,) = build.add("linear", [x, build.weight("w1", (1024, 512)), None], name="first", scope="body.first")
    (x,) = build.add("relu", [x], name="bent")
    (x,) = build.add("linear", [x, build.weight("w2", (256, 1024)), None], name="last", scope="body.last")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def plan_of(strategy: Strategy, machine: Machine = MACHINE) -> Plan:
    return Plan(strategy, machine, simulation(strategy, machine).prediction)


def seconds(strategy: Strategy, machine: Machine = MACHINE) -> float:
    return native_tasks(strategy, machine, AnalyticCosts()).simulated()[2]


def changed(strategy: Strategy, name: str, placement: Placement) -> Strategy:
    return Strategy(strategy.graph, {**strategy.placements, name: placement})


def test_every_alternative_takes_what_its_simulation_takes() -> None:
    plan = plan_of(data_parallel(network(), MACHINE))
    found = explained(plan, block_named(plan.strategy, "first"), plan.simulated().tasks)
    assert found.makespan_s == plan.prediction.makespan_s
    assert len(found.alternatives) >= 8
    assert len({each.placement for each in found.alternatives}) == len(found.alternatives)
    assert found.placement not in [each.placement for each in found.alternatives]
    for each in found.alternatives:
        assert each.makespan_s == seconds(changed(plan.strategy, "first", each.placement))
    assert [each.makespan_s for each in found.alternatives] == sorted(
        each.makespan_s for each in found.alternatives
    )


def test_what_moves_is_what_the_tasks_move() -> None:
    graph = network()
    strategy = changed(data_parallel(graph, MACHINE), "last", placed({"o": 4}, range(4)))
    plan = plan_of(strategy)
    tasks = plan.simulated().tasks
    first, last = (explained(plan, block_named(strategy, name), tasks) for name in ("first", "last"))
    roles = {(each.role, each.what) for each in last.caused}
    value = graph.node("bent").outputs[0]
    assert {("read", value), ("read", f"{value}'s gradient")} <= roles
    assert ("weight", "w2's gradient") not in roles
    assert ("weight", "w1's gradient") in {(each.role, each.what) for each in first.caused}
    reduced = [each for each in first.caused if each.what == "w1's gradient"]
    assert sum(each.size_bytes for each in reduced) == sum(
        task.size_bytes for task in tasks.tasks if task.name.startswith("w1 gradient")
    )
    assert {each.kind for each in reduced} == {TaskKind.ALL_REDUCE}


def test_turning_points_are_real_and_the_smallest_tried() -> None:
    plan = plan_of(data_parallel(network(4096), MACHINE))
    found = explained(plan, block_named(plan.strategy, "first"), plan.simulated().tasks)
    assert not found.is_beaten
    assert found.turnings
    for turning in found.turnings:
        change = with_links if turning.part == "links" else with_devices
        machine = change(MACHINE, turning.factor)
        assert turning.decided_s == seconds(plan.strategy, machine)
        other = changed(plan.strategy, "first", turning.alternative.placement)
        assert turning.alternative.makespan_s == seconds(other, machine) < turning.decided_s


def test_a_choice_that_is_beaten_as_it_is_has_no_turning_points() -> None:
    plan = plan_of(single_device(network(4096), MACHINE))
    found = explained(plan, block_named(plan.strategy, "first"), plan.simulated().tasks)
    assert found.is_beaten
    assert found.alternatives[0].makespan_s < found.makespan_s
    assert not found.turnings


def test_a_plan_with_measured_costs_is_explained_with_them() -> None:
    strategy = data_parallel(network(), MACHINE)
    costs = made_up_costs(strategy, MACHINE, Random(0), share=1.0)
    plan = planned(strategy, MACHINE, simulation(strategy, MACHINE, costs), costs)
    found = explained(plan, block_named(strategy, "first"), plan.simulated().tasks)
    assert found.makespan_s == plan.prediction.makespan_s != seconds(strategy)
    for each in found.alternatives:
        other = changed(strategy, "first", each.placement)
        assert each.makespan_s == native_tasks(other, MACHINE, costs).simulated()[2]
    assert parts_tried(plan) == ("links",)
    assert {turning.part for turning in found.turnings} <= {"links"}
    assert parts_tried(plan_of(strategy)) == ("links", "devices")


def test_nodes_are_found_by_name_and_by_module() -> None:
    strategy = data_parallel(network(), MACHINE)
    assert block_named(strategy, "bent").name == block_named(strategy, "body.first").name == "first"
    with pytest.raises(PlanError, match=r"no node 'frist'; did you mean 'first'\?"):
        block_named(strategy, "frist")


def test_each_difference_is_simulated_alone_and_left_out() -> None:
    graph = network()
    one = data_parallel(graph, MACHINE)
    two = changed(changed(one, "first", placed({"o": 4}, range(4))), "last", placed({"i": 4}, range(4)))
    found = difference(plan_of(one), plan_of(two))
    assert (found.first_s, found.second_s) == (seconds(one), seconds(two))
    assert {change.layer for change in found.changes} == {"body.first", "body.last"}
    for change in found.changes:
        name = change.layer.removeprefix("body.")
        assert change.alone_s == seconds(changed(one, name, two.placements[name]))
        assert change.without_s == seconds(changed(two, name, one.placements[name]))
    assert found.same_blocks == 1
    assert not difference(plan_of(one), plan_of(one)).changes


def test_plans_that_cannot_be_compared_are_refused() -> None:
    one = plan_of(data_parallel(network(), MACHINE))
    with pytest.raises(PlanError, match="64 samples, 'net' with 4 nodes and 32 samples"):
        difference(one, plan_of(data_parallel(network(32), MACHINE)))
    other = replace(
        plan_of(data_parallel(replace(network(), name="again"), MACHINE)),
        search={"rewrites": ["fold", "fold"]},
    )
    with pytest.raises(PlanError, match=r"rewrote the graph of a plan \(the second by fold\)"):
        difference(one, other)
    smaller = preset("p100:1x2")
    with pytest.raises(PlanError, match="4 devices"):
        difference(one, plan_of(data_parallel(network(), smaller), smaller))


def test_graphs_for_graphviz_have_every_block_task_and_dependency() -> None:
    plan = plan_of(data_parallel(network(), MACHINE))
    text = graph_dot(plan)
    assert '"first" [label="first\\nlinear, relu\\nsample(b) 4\\nall 4 devices"];' in text
    assert '"first" -> "last" [label="64×1024"];' in text
    simulated = plan.simulated()
    tasks = tasks_dot(simulated, "a title")
    assert tasks.count("shape=") == len(simulated.tasks.tasks)
    assert tasks.count(" -> ") == sum(map(len, simulated.tasks.after))
    assert quoted('a "b"\\c') == '"a \\"b\\"\\\\c"'
