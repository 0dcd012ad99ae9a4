"""What it takes to add gradients up, where that was measured."""

from __future__ import annotations

import numpy as np
from oracles.ranks import Ranks
from oracles.wirecases import adding_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import planned, simulation
from soapstone.search.baselines import single_device
from soapstone.tasks.task import TaskKind
from soapstone.validation.adding import SIZES, Adding, adding_s

MACHINE, COSTS = preset("cpu:1x1"), AnalyticCosts()


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
        strategy = single_device(graph, MACHINE)
        simulated = planned(strategy, MACHINE, simulation(strategy, MACHINE, COSTS), COSTS).executed()
        found = adding_s(simulated.tasks, simulated.timeline, MACHINE, COSTS, each)
        backward = np.array([task.kind is TaskKind.BACKWARD for task in simulated.tasks.tasks])
        assert not found[~backward].any()
        readers = [len(graph.consumers.get(name, ())) for name in graph.differentiable]
        assert found.sum() == sum(count - 1 for count in readers if count)
        assert found.any() == is_shared
