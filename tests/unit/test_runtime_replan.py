"""The machine that a run goes on with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.training import tiny

from soapstone.cli.replan import machine_now, replanned
from soapstone.errors import SoapstoneError, TrainingError
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.search.baselines import data_parallel


def plan_on(name: str) -> Plan:
    _, _, captured = tiny("lenet", 1)
    machine = preset(name)
    strategy = data_parallel(captured.graph, machine)
    return Plan(strategy, machine, simulation(strategy, machine).prediction, "lenet:tiny")


@pytest.mark.parametrize(
    ("before", "ranks", "now"),
    [
        ("cpu:1x4", 2, "cpu:1x2"),
        ("cpu:1x2", 4, "cpu:1x4"),
        ("p100:4x4", 8, "p100:2x4"),
        ("p100:2x4", 3, "p100:1x3"),
        ("p100:2x4", 8, "p100:2x4"),
    ],
)
def test_a_preset_has_as_many_devices_as_there_are_ranks(before: str, ranks: int, now: str) -> None:
    assert machine_now(plan_on(before), None, ranks) == preset(now)


def test_of_a_machine_of_ones_own_the_first_devices_are_left() -> None:
    plan = plan_on("p100:2x4")
    own = replace(plan, machine=replace(plan.machine, name="mine"))
    left = machine_now(own, None, 6)
    assert left.devices == plan.machine.devices[:6]
    assert left.bandwidth(0, 5) == plan.machine.bandwidth(0, 5)
    with pytest.raises(TrainingError, match="name the machine to plan for with --machine"):
        machine_now(own, None, 9)


def test_a_machine_with_another_number_of_devices_than_ranks_is_refused() -> None:
    with pytest.raises(TrainingError, match="has 2 devices and there are 3 ranks"):
        machine_now(plan_on("cpu:1x4"), "cpu:1x2", 3)


def test_the_new_plan_is_of_the_same_model_and_at_least_as_fast_as_data_parallelism() -> None:
    plan, machine = plan_on("p100:1x4"), preset("p100:1x2")
    found = replanned(plan, machine)
    assert (found.model, found.optimizer, found.graph) == (plan.model, plan.optimizer, plan.graph)
    alike = simulation(data_parallel(plan.graph, machine), machine).prediction.makespan_s
    assert found.prediction.makespan_s <= alike
    named = replanned(plan, machine, "data_parallel")
    assert named.prediction.makespan_s == alike
    with pytest.raises(SoapstoneError, match="there is no strategy 'best'"):
        replanned(plan, machine, "best")
