"""What the native core foretells of a strategy is what the plain task graph, simulated, says of it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.strategies import pipelined, planned

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import Machine, preset
from soapstone.search.baselines.zero import zero
from soapstone.sim.memory import peak_memory
from soapstone.sim.outcome import KINDS, outcome
from soapstone.sim.reference import simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.placed import placed_block
from soapstone.tasks.task import COMPUTE_KINDS, BufferKind, TaskKind

COSTS = AnalyticCosts()


@given(planned(most_copies=3) | pipelined(most_copies=3), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_an_outcome_is_that_of_the_task_graph(plan: tuple[Strategy, Machine], states: int) -> None:
    """Makespan, bytes, and every device's peak, when it is reached and what it is made of, to the bit."""
    strategy, machine = plan
    tasks = task_graph(strategy, machine, COSTS)
    timeline = simulate(tasks)
    found = outcome(strategy, machine, COSTS, states)
    assert found.makespan_s == timeline.makespan_s
    assert found.moved_bytes == tasks.moved_bytes
    assert found.memory == peak_memory(tasks, timeline, len(machine.devices), states)


@pytest.mark.parametrize("model", ["mlp", "vit_l", "rnntc"])
def test_an_outcome_with_gathered_weights_is_that_of_the_task_graph(model: str) -> None:
    """A part of a weight that is given away as it is is no memory of its own."""
    machine = preset("cpu:1x2")
    strategy = zero(load(model, tiny=True, devices=2).captured().graph, machine)
    tasks = task_graph(strategy, machine, COSTS)
    timeline = simulate(tasks)
    assert outcome(strategy, machine, COSTS, 1).memory == peak_memory(tasks, timeline, 2, 1)
    gathered = {
        block.number
        for block in map(partial(placed_block, strategy), range(len(strategy.blocks)))
        if block.block.leader.op_name == "combine"
    }
    own = [b for b in tasks.buffers if b.kind is BufferKind.ACTIVATION and b.made_by[0][1] in gathered]
    assert own
    assert all(buffer.size_bytes == 0 for buffer in own)


@given(planned(most_copies=3) | pipelined(most_copies=3))
@settings(max_examples=40, deadline=None)
def test_figures_are_those_of_the_tasks(plan: tuple[Strategy, Machine]) -> None:
    """How long devices compute, and what of the traffic goes right before updates."""
    strategy, machine = plan
    tasks = task_graph(strategy, machine, COSTS)
    found = outcome(strategy, machine, COSTS)
    for device, busy_s in zip(machine.devices, found.busy_s, strict=True):
        own = [t.duration_s for t in tasks.tasks if t.resource == device.name]
        assert abs(sum(own) - busy_s) <= 1e-12 + 1e-9 * busy_s
    sums = {key for t in tasks.tasks if t.kind is TaskKind.UPDATE for key in t.after}
    sums |= {key for t in tasks.tasks if t.kind is TaskKind.TAKE and t.key in sums for key in t.after}
    moved = [t for t in tasks.tasks if t.key in sums and t.kind not in COMPUTE_KINDS]
    assert found.gradient_bytes == sum(t.size_bytes for t in moved)
    assert found.memory == ()


def test_the_native_core_numbers_kinds_of_buffers_as_here() -> None:
    """The first six, in this order (cpp/buffers.h)."""
    assert KINDS[:6] == (
        BufferKind.INPUT,
        BufferKind.WEIGHT,
        BufferKind.WEIGHT_GRADIENT,
        BufferKind.ACTIVATION,
        BufferKind.RECEIVED,
        BufferKind.GRADIENT,
    )
