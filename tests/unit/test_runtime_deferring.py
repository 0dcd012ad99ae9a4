"""Sums of a loss that nobody waits for: which are left out, and which must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from soapstone.frontends.capture import capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import simulation
from soapstone.runtime.deferring import deferred
from soapstone.search.baselines import data_parallel
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.placed import SEAM, placed_blocks

MACHINE = preset("cpu:1x2")


class Regression(nn.Module):
    """A layer, a squared error for each sample, and a loss made of them, times a number that the batch says:
    as that is not known beforehand, the end of the graph is not taken away as the loss's tail."""

    def __init__(self, loss: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x).square(), self) * x.abs().sum()


def graph_of(loss: Callable[[Tensor, nn.Module], Tensor]) -> Graph:
    return capture(Regression(loss), (torch.randn(8, 4),), "regression").graph


def sums_of(strategy: Strategy) -> int:
    tasks = simulation(strategy, MACHINE).tasks
    return len(deferred(strategy.graph, placed_blocks(strategy), tasks.exchanges))


@pytest.mark.parametrize("loss", [lambda error, _: error.mean(), lambda error, _: 3 * error.mean()])
def test_a_multiple_of_a_partial_sum_has_nothing_to_wait_for(
    loss: Callable[[Tensor, nn.Module], Tensor],
) -> None:
    """The task graph itself has no such sum: each device multiplies its part."""
    strategy = data_parallel(graph_of(loss), MACHINE)
    assert sums_of(strategy) == 0
    assert not [key for key in simulation(strategy, MACHINE).tasks.exchanges if key[2] == SEAM]


def test_all_parts_of_a_loss_are_left_to_the_end() -> None:
    def loss(error: Tensor, _: nn.Module) -> Tensor:
        return torch.stack([error[:, 0].mean(), 3 * error[:, 1].sum()]).mean()

    assert sums_of(data_parallel(graph_of(loss), MACHINE)) == 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda error, _: error.mean().sqrt(),  # not linear
        lambda error, _: error.mean() + 1.0,  # every device would add one
        lambda error, model: error.mean() + model.layer.weight.square().sum(),  # likewise
        lambda error, _: error.mean() * error.sum(),  # each part times all of the other
    ],
    ids=["root", "offset", "decay", "product"],
)
def test_sums_that_something_needs_are_made(loss: Callable[[Tensor, nn.Module], Tensor]) -> None:
    assert sums_of(data_parallel(graph_of(loss), MACHINE)) == 0


def test_parts_that_would_meet_on_one_device_are_summed() -> None:
    """The loss is split over samples, and what follows is on one of the devices."""
    graph = graph_of(lambda error, _: torch.stack([error[:, 0].mean(), error[:, 1].mean()]).mean())
    strategy = data_parallel(graph, MACHINE)
    last = strategy.blocks[-1].name
    moved = Strategy(graph, {**strategy.placements, last: Placement((), (0,))})
    assert sums_of(strategy) == 2
    assert sums_of(moved) == 0
