"""What it takes to add gradients up, where that was measured."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from oracles.ranks import Ranks
from oracles.wirecases import adding_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import Plan, planned, simulation
from soapstone.search.baselines import data_parallel, single_device
from soapstone.search.baselines.zero import zero
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.task import BufferKind, TaskKind
from soapstone.validation.adding import SIZES, Adding, adding_s
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding
from soapstone.validation.in_step import InStep
from soapstone.validation.parts import parts_of

MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()


def plan_of(strategy: Strategy) -> Plan:
    return planned(strategy, MACHINE, simulation(strategy, MACHINE, COSTS), COSTS)


def test_what_lies_between_sizes_that_were_measured() -> None:
    adding = Adding((100, 200), (1.0, 3.0))
    assert [adding.of(size) for size in (1, 100, 150, 200, 400)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_ranks_agree_and_more_takes_longer() -> None:
    ranks = Ranks(2)
    first, second = ranks.run(adding_seen, 2)
    ranks.close()
    assert first == second
    assert first.size_bytes == SIZES
    assert 0 < first.seconds[0] < first.seconds[-1] < 1


def test_each_gradient_but_the_first_is_added() -> None:
    """Cells share their weights, and each of those has a gradient from every one; an MLP's have one."""
    each = Adding((1, 2**40), (1.0, 1.0))
    for model, is_shared in (("rnnlm", True), ("mlp", False)):
        graph = load(model, tiny=True, devices=1).captured().graph
        simulated = plan_of(single_device(graph, MACHINE)).executed()
        found = adding_s(simulated.tasks, simulated.timeline, MACHINE, COSTS, each)
        backward = np.array([task.kind is TaskKind.BACKWARD for task in simulated.tasks.tasks])
        assert not found[~backward].any()
        readers = [len(graph.consumers.get(name, ())) for name in graph.differentiable]
        assert found.sum() == sum(count - 1 for count in readers if count)
        assert found.any() == is_shared


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_in_messages_is_not_added(seed: int) -> None:
    """A gradient of a device may come in pieces from others; only passes on its own way back add."""
    graph = load("gpt2", tiny=True, devices=2).captured().graph
    strategy = random_strategy(graph, 2, Random(seed))
    simulated = plan_of(strategy).executed()
    found = adding_s(simulated.tasks, simulated.timeline, MACHINE, COSTS, Adding((1, 2**40), (1.0, 1.0)))
    kinds = {simulated.tasks.tasks[number].kind for number in np.flatnonzero(found).tolist()}
    assert kinds <= {TaskKind.BACKWARD}
    makers = [
        simulated.tasks.tasks[simulated.tasks.ids[key]].kind
        for buffer in simulated.tasks.buffers
        if buffer.kind is BufferKind.GRADIENT and len(buffer.made_by) > 1
        for key in buffer.made_by
    ]
    assert set(makers) - {TaskKind.BACKWARD}  # there are such


def test_gradients_of_a_weight_that_is_used_again_are_added_up() -> None:
    """An RNN's cells share their weights, and an MLP's layers do not: its step is what the plan says."""
    for model, is_longer in (("rnnlm", True), ("mlp", False)):
        own = load(model, tiny=True, devices=2).captured().graph
        plan = plan_of(single_device(own, MACHINE))
        taken_s = parts_of(plan, COSTS).makespan_s(Calibration())
        assert (taken_s > 1.001 * plan.prediction.makespan_s) == is_longer


def test_adding_up_takes_longer_in_a_step() -> None:
    """By as many times as was seen there."""
    own = load("rnnlm", tiny=True, devices=2).captured().graph
    plan = plan_of(data_parallel(own, MACHINE))

    def added_s(times: float) -> float:
        adding, in_step = Adding((1, 2**40), (1e-3, 1e-3)), InStep(adding=times)
        crowding = Crowding((1.0, 1.0), adding=adding, in_step=(in_step, in_step), stretch=(1.0, 1.0))
        return float(parts_of(plan, COSTS, crowding, backend="memory").seconds.sum())

    assert added_s(3.0) - added_s(1.0) == pytest.approx(2 * (added_s(2.0) - added_s(1.0)))
    assert added_s(2.0) > added_s(1.0) + 1e-3


def test_gradients_of_weights_that_came_are_added_up_too() -> None:
    """Under ZeRO cells read what was gathered; its gradients are those that data parallelism adds up."""
    own = load("rnnlm", tiny=True, devices=2).captured().graph
    found = []
    for strategy in (data_parallel(own, MACHINE), zero(own, MACHINE)):
        plan = plan_of(strategy)
        plain = plan.simulated().tasks
        usual = np.array([task.duration_s for task in plain.tasks])
        is_pass = [task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD) for task in plain.tasks]
        found.append((parts_of(plan, COSTS).seconds - usual)[is_pass].sum())
    assert found[0] > 0
    assert found[1] == pytest.approx(found[0], rel=0.01)
