"""What accounts for the difference between a predicted step and a recorded one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from oracles.strategies import planned

from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.sim.reference import Timeline, simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import Task, TaskGraph, TaskKind
from soapstone.validation.accounts import BETWEEN, Account, accounts

FORWARD, SENT, UPDATE = TaskKind.FORWARD, TaskKind.TRANSFER, TaskKind.UPDATE


def tasks_of(*tasks: Task) -> TaskGraph:
    return TaskGraph(tasks, tuple(dict.fromkeys(task.resource for task in tasks)))


def handed_on() -> TaskGraph:
    """One device makes what another, which has something of its own to do first, waits for."""
    return tasks_of(
        Task((0,), FORWARD, "maker forward", "a", 1.0, ()),
        Task((1,), FORWARD, "other forward", "b", 0.5, ()),
        Task((2,), SENT, "handed", "wire", 1.0, ((0,),), 4),
        Task((3,), FORWARD, "reader forward", "b", 0.25, ((2,), (1,))),
    )


def told(found: tuple[Account, ...]) -> Mapping[tuple[str, str], tuple[float, float]]:
    return {(each.kind, each.name): (each.predicted_s, each.actual_s) for each in found}


def timeline(*spans: tuple[float, float]) -> Timeline:
    return Timeline([a for a, _ in spans], [b for _, b in spans], max(b for _, b in spans))


def test_a_device_that_waits_blames_the_one_that_is_late() -> None:
    """The maker takes a second longer: neither the message nor the reader's device is at fault."""
    graph = handed_on()
    late = timeline((0.0, 2.0), (0.0, 0.5), (2.0, 3.0), (3.0, 3.25))
    found = accounts(graph, simulate(graph), late)
    assert told(found.tasks) == {
        ("forward", "maker"): (1.0, 2.0),
        ("forward", "reader"): (0.25, 0.25),
        ("transfer", "handed"): (1.0, 1.0),
    }
    assert found.tasks[0].name == "maker"
    assert told(found.kinds) == {("forward", ""): (1.25, 2.25), ("transfer", ""): (1.0, 1.0)}


def test_a_message_has_the_time_in_which_its_reader_stood_still() -> None:
    """It is made early, and its reader's device is busy for most of its way; what is left is blamed on it."""
    graph = handed_on()
    slow = timeline((0.0, 1.0), (0.0, 3.5), (1.0, 4.0), (4.0, 4.25))
    found = told(accounts(graph, simulate(graph), slow).tasks)
    assert found["transfer", "handed"] == (1.0, 0.5)
    assert found["forward", "other"] == (0.0, 3.5)
    assert found["forward", "maker"] == (1.0, 0.0)


def test_time_in_which_nothing_was_waited_for_is_the_runtimes() -> None:
    """Before the first task, before the one that its message has been there for, and after the last."""
    graph = handed_on()
    gaps = Timeline([0.125, 0.0, 1.125, 2.5], [1.125, 0.5, 2.125, 2.75], 3.0)
    found = told(accounts(graph, simulate(graph), gaps, most=10).tasks)
    assert found[BETWEEN, "maker"] == (0.0, 0.125)
    assert found[BETWEEN, "reader"] == (0.0, 0.375)
    assert found[BETWEEN, "(end of the step)"] == (0.0, 0.25)


def test_messages_that_others_carry_are_not_blamed() -> None:
    """A gradient that is ready long before its bucket is full waits for that bucket; updates are one call."""
    graph = tasks_of(
        Task((0,), FORWARD, "early", "a", 1.0, ()),
        Task((1,), TaskKind.ALL_REDUCE, "member", "wire", 0.0, ((0,),)),
        Task((2,), FORWARD, "late", "a", 1.0, ()),
        Task((3,), TaskKind.ALL_REDUCE, "leader", "wire", 1.0, ((1,), (2,)), 4),
        Task((4,), UPDATE, "w update", "a", 0.5, ((1,), (3,))),
        Task((5,), UPDATE, "v update", "a", 0.5, ((3,),)),
    )
    seen = timeline((0.0, 1.0), (1.0, 5.0), (1.0, 2.0), (2.0, 5.0), (5.0, 6.0), (5.0, 6.0))
    found = told(accounts(graph, simulate(graph), seen).tasks)
    assert found == {
        ("all_reduce", "leader"): (1.0, 3.0),
        ("update", "(all weights)"): (1.0, 1.0),
        ("forward", "early"): (1.0, 1.0),
        ("forward", "late"): (1.0, 1.0),
    }


def test_an_order_that_a_recorded_step_does_not_keep_does_no_harm() -> None:
    """A graph as it is run has autograd's order within a call; a recorded step takes tasks one by one."""
    graph = tasks_of(
        Task((0,), FORWARD, "first", "a", 1.0, ()),
        Task((1,), TaskKind.BACKWARD, "one", "a", 1.0, ((0,),)),
        Task((2,), TaskKind.BACKWARD, "two", "a", 1.0, ((1,),)),
        Task((3,), SENT, "message", "wire", 1.0, ((1,), (2,)), 4),
        Task((4,), FORWARD, "reader", "b", 1.0, ((3,),)),
    )
    turned = timeline((0.0, 1.0), (2.0, 3.0), (1.0, 2.0), (3.0, 4.0), (4.0, 5.0))
    found = told(accounts(graph, simulate(graph), turned).tasks)
    assert set(found.values()) == {(1.0, 1.0)}
    assert len(found) == 5


@given(planned())
def test_every_moment_of_a_step_belongs_to_one_task(case: tuple[Strategy, Machine]) -> None:
    strategy, machine = case
    graph = task_graph(strategy, machine, AnalyticCosts())
    once = simulate(graph)
    twice = Timeline([2 * s for s in once.start_s], [2 * s for s in once.end_s], 2 * once.makespan_s)
    found = accounts(graph, once, twice, most=len(graph.tasks))
    for some in (found.kinds, found.tasks):
        assert sum(each.predicted_s for each in some) == pytest.approx(once.makespan_s)
        assert sum(each.actual_s for each in some) == pytest.approx(twice.makespan_s)
        assert [each.actual_s for each in some] == pytest.approx([2 * each.predicted_s for each in some])
    assert not any(each.kind == BETWEEN for each in found.kinds)
