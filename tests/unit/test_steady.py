"""A pipeline that is not drained between steps: what a step takes then."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from oracles.graphs import layers
from oracles.strategies import pipelined

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine, preset
from soapstone.sim.reference import simulate
from soapstone.sim.steady import steady_step_s
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph

COSTS = AnalyticCosts()


def stages(graph: Graph, count: int, pipeline: Pipeline) -> Strategy:
    names = [block.name for block in Strategy(graph, {}).blocks]
    where = {name: min(count - 1, count * i // (len(names) - 1)) for i, name in enumerate(names)}
    return Strategy(graph, {name: placed({}, [where[name]]) for name in names}).pipelined(pipeline)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_an_undrained_pipeline_has_no_bubbles(micro_batches: int) -> None:
    """Four equal stages drain for about three micro-batches of each step; undrained, a step takes what its
    busiest stage computes, and little more (what is in flight is also under way between stages)."""
    strategy = stages(layers(4), 4, Pipeline(micro_batches))
    tasks = task_graph(strategy, preset("p100:1x4"), COSTS)
    drained_s, undrained_s = simulate(tasks).makespan_s, steady_step_s(strategy, tasks)
    busy_s = max(sum(t.duration_s for t in tasks.tasks if t.resource == r) for r in tasks.resources)
    assert undrained_s is not None
    assert busy_s <= undrained_s <= 1.15 * busy_s
    assert drained_s >= (1 + 2 / micro_batches) * undrained_s


def test_what_runs_nothing_ahead_has_nothing_to_drain() -> None:
    graph = layers(2)
    machine = preset("p100:1x2")
    for strategy in (
        stages(graph, 2, Pipeline(4, Schedule.GPIPE)),
        Strategy(graph, {block.name: placed({}, [0]) for block in Strategy(graph, {}).blocks}),
    ):
        assert steady_step_s(strategy, task_graph(strategy, machine, COSTS)) is None


@given(pipelined())
@settings(max_examples=30, deadline=None)
def test_no_resource_does_more_than_one_thing_at_a_time(plan: tuple[Strategy, Machine]) -> None:
    """A step takes at least what the busiest resource does in it, and about as long as a drained one at
    most (first come, first served may lose a little by starting early)."""
    strategy, machine = plan
    tasks = task_graph(strategy, machine, COSTS)
    undrained_s = steady_step_s(strategy, tasks)
    if undrained_s is None:
        return
    busy_s = max(sum(t.duration_s for t in tasks.tasks if t.resource == r) for r in tasks.resources)
    assert busy_s * (1 - 1e-9) <= undrained_s <= 1.5 * simulate(tasks).makespan_s
