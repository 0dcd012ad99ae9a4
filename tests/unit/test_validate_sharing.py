"""What messages and sums take from each other on one bus."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.search.baselines import baseline, data_parallel
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import TaskKind
from soapstone.validation.sharing import Going, Kinds, going, on_one_bus
from soapstone.validation.traffic import Traffic

Floats = NDArray[np.float64]

WIDE = (1.0,) * 8
"""Nobody is in another's way by their number."""


def waits_s(ready_s: list[float], queued_s: list[float], amid: tuple[tuple[float, float], ...]) -> Floats:
    """How long two messages of device 0 and one of device 1 wait for others' sums, which are short, could go
    at some moments and begin so much later. Device 1 adds up for the first 100 seconds."""

    def simulated(durations: Floats) -> tuple[Floats, Floats]:
        start_s = np.concatenate([[0.0], np.add(ready_s, queued_s), ready_s])
        return start_s, start_s + durations

    wire_s, none = np.array([100.0, 1e-3, 1e-3, 1e-3, 0.0, 0.0, 0.0]), np.zeros(7)
    number = np.arange(7)
    is_message = (number > 0) & (number < 4)
    kinds = Kinds(is_message, number == 0, number.astype(np.int32), [[], [4], [5], [6], [], [], []])
    where = Going(np.ones(7), np.array([1, 0, 0, 1, -1, -1, -1]))
    bytes_s, latency_s = on_one_bus(wire_s, none, none, kinds, where, Traffic(WIDE, amid=amid), simulated)
    assert bytes_s[0] == pytest.approx(wire_s[0], rel=0.2)
    return latency_s[is_message]


def test_a_message_waits_for_sums_of_others_and_not_for_its_own_devices() -> None:
    at_once = [0.0, 0.0, 0.0]
    amid = ((1.0, 0.5), (3.0, 2.0))
    assert waits_s([1.0, 2.0, 3.0], at_once, amid) == pytest.approx([0.5, 0.5, 0.0], abs=0.01)
    assert waits_s([1.0, 2.0, 3.0], at_once, ()) == pytest.approx([0.0] * 3)
    assert waits_s([101.0, 102.0, 103.0], at_once, amid) == pytest.approx([0.0] * 3)  # the sum is done


def test_who_has_waited_for_its_turn_anyway_waits_for_no_sum_as_well() -> None:
    found = waits_s([1.0, 2.0, 3.0], [0.2, 0.7, 0.0], ((1.0, 0.5),))
    assert found == pytest.approx([0.3, 0.0, 0.0], abs=0.01)


def test_more_ranks_that_add_up_are_waited_for_longer() -> None:
    traffic = Traffic(amid=((1.5, 3.0), (3.0, 5.0)))
    assert traffic.held_up_s(np.array([0.0, 0.5, 1.5, 2.25, 3.0, 4.0])) == pytest.approx([0, 1, 3, 4, 5, 5])
    assert Traffic().held_up_s(np.array([0.0, 3.0])) == pytest.approx([0, 0])


def test_what_goes_from_where_is_told_by_the_task_graph() -> None:
    machine = preset("cpu:1x2")
    graph = load("lenet", tiny=True, devices=2).captured().graph
    tasks = task_graph(data_parallel(graph, machine), machine, AnalyticCosts())
    found = going(tasks)
    sums = [n for n, task in enumerate(tasks.tasks) if task.kind is TaskKind.ALL_REDUCE]
    assert {int(found.senders[n]) for n in sums} == {0, 1}
    assert {float(found.flows[n]) for n in sums} == {2.0}
    others = [n for n in range(len(tasks.tasks)) if n not in sums]
    assert {(int(found.senders[n]), float(found.flows[n])) for n in others} == {(-1, 1.0)}
    stages = baseline("pipeline", graph, machine, AnalyticCosts(), 0)
    tasks = task_graph(stages, machine, AnalyticCosts())
    found = going(tasks)
    names = [device.name for device in machine.devices]
    messages = [n for n, task in enumerate(tasks.tasks) if task.kind is TaskKind.TRANSFER]
    assert len(messages) > 1
    for number in messages:  # a message comes from where what it comes after was computed
        (before,) = {tasks.tasks[i].resource for i in tasks.after[number]}
        assert names[found.senders[number]] == before
