"""Gradients in buckets: the same sums, fewer of them, and the native core has them too."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from oracles.strategies import pipelined, planned

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import Machine, resolve
from soapstone.search.baselines import baseline
from soapstone.sim.outcome import bucketed_s, outcome
from soapstone.sim.reference import simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buckets import FIRST_BYTES, FULL_BYTES, shelves
from soapstone.tasks.build import task_graph
from soapstone.tasks.placed import UPDATE, WEIGHT
from soapstone.tasks.task import Task, TaskGraph, TaskKind

COSTS = AnalyticCosts()


def sums(tasks: TaskGraph) -> list[Task]:
    """The all-reduces of weights' gradients."""
    return [
        task
        for task in tasks.tasks
        if task.kind is TaskKind.ALL_REDUCE and task.key[0] != UPDATE and task.key[2] == WEIGHT
    ]


@given(planned(most_copies=3) | pipelined(most_copies=3))
@settings(max_examples=100, deadline=None)
def test_the_native_core_has_the_same_time_in_buckets(plan: tuple[Strategy, Machine]) -> None:
    strategy, machine = plan
    tasks = task_graph(strategy, machine, COSTS, in_buckets=True)
    assert bucketed_s(strategy, machine, COSTS) == simulate(tasks).makespan_s


@given(planned(most_copies=2) | pipelined(most_copies=2))
@settings(max_examples=60, deadline=None)
def test_buckets_change_nothing_but_sums_of_gradients(plan: tuple[Strategy, Machine]) -> None:
    """All other tasks are the same and wait for the same; a bucket is where one of its members was, and what
    an update waited for, it waits for still, by its bucket."""
    strategy, machine = plan
    apart = task_graph(strategy, machine, COSTS)
    together = task_graph(strategy, machine, COSTS, in_buckets=True)
    summed, bucketed = sums(apart), sums(together)
    assert {task.key for task in bucketed} <= {task.key for task in summed}
    assert len({task.key[:-1] for task in bucketed}) <= len({task.key[:-1] for task in summed})
    others = {task.key: task for task in apart.tasks if task not in summed}
    assert others.keys() == {task.key for task in together.tasks if task not in bucketed}
    merged = {task.key for task in summed}
    for task in together.tasks:
        if task.key in others:
            own = others[task.key]
            assert (task.duration_s, task.resource) == (own.duration_s, own.resource)
            assert set(task.after) - merged == set(own.after) - merged
            assert bool(set(task.after) & merged) == bool(set(own.after) & merged)
    # Every backward task that a sum waited for is waited for by some bucket among the same devices.
    before = {key for task in summed for key in task.after}
    assert before == {key for task in bucketed for key in task.after}
    # Rings divide what they sum into equal parts, rounded down: buckets lose less by it.
    moved, expected = (sum(task.size_bytes for task in found) for found in (bucketed, summed))
    assert expected <= moved <= expected + 2 * len(summed)


def test_a_network_of_many_small_weights_has_few_sums() -> None:
    graph = load("resnet101:tiny=True", devices=4).captured().graph
    machine = resolve("p100:1x4")
    strategy = baseline("data_parallel", graph, machine, COSTS)
    apart, together = (
        task_graph(strategy, machine, COSTS, in_buckets=in_buckets) for in_buckets in (False, True)
    )
    filled = Counter(shelves(graph).values())
    assert len({task.key[:-1] for task in sums(together)}) == len(filled) < len(sums(apart)) / 4 / 4
    assert simulate(together).makespan_s < simulate(apart).makespan_s
    assert outcome(strategy, machine, COSTS).makespan_s == simulate(apart).makespan_s


def test_shelves_are_filled_in_the_order_of_the_backward_pass() -> None:
    graph = load("resnet101", devices=1).captured().graph
    shelf = shelves(graph)
    first_read = {
        name: place for place, node in reversed(list(enumerate(graph.nodes))) for name in node.reads
    }
    backward = sorted(shelf, key=lambda name: -first_read[name])
    assert [shelf[name] for name in backward] == sorted(shelf.values())
    held = Counter[int]()
    for name in backward:
        size = 4
        for extent in graph.value(name).shape:
            size *= extent
        full = FIRST_BYTES if shelf[name] == 0 else FULL_BYTES
        assert held[shelf[name]] < full  # it was not yet full when the weight came to it
        held[shelf[name]] += size
    assert all(held[number] >= FULL_BYTES for number in range(1, max(held)))
