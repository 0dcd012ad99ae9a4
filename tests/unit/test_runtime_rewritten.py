"""Rewritten graphs train: the runtime runs them, and parameters keep their names, values and losses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, trained_by_ranks, trained_plainly
from torch import Tensor, nn

from soapstone.frontends.capture import Captured, capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.runtime.trainer import Options
from soapstone.search.baselines import data_parallel
from soapstone.search.baselines.zero import zero
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.subst import parse_rule, rewrite, shipped

RECIPE = Recipe("SGD", {"lr": 0.05, "momentum": 0.9})
STEPS = 3


class Heads(nn.Module):
    """Two heads that read one input, a sum of two layers, and a product of three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4, bias=False)
        self.second = nn.Linear(8, 6, bias=False)
        self.one = nn.Linear(10, 8, bias=False)
        self.two = nn.Linear(10, 8, bias=False)
        self.narrow = nn.Linear(8, 2, bias=False)
        self.wide = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        joined = torch.cat([torch.tanh(self.first(x)), torch.relu(self.second(x))], 1)
        summed = self.one(joined) + self.two(joined)
        return nn.functional.mse_loss(self.wide(self.narrow(torch.relu(summed))), wanted)


class Images(nn.Module):
    """Two convolutions of one image, with batch statistics after them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.right = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), torch.relu(self.right(x))], 1)
        return nn.functional.mse_loss(self.head(torch.relu(self.norm(joined)).flatten(1)), wanted)


class Summed(nn.Module):
    """A sum of two layers that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 6, bias=False)
        self.two = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.one(x) + self.two(x), wanted)


CASES = {
    "heads": (Heads, (8, 8), 8, ("concat-head-linear-tail.2", "add-linear", "linear-matmul")),
    "images": (Images, (8, 2, 4, 4), 3, ("concat-conv2d-head-tail.2",)),
    "summed": (Summed, (8, 8), 6, ("add-linear",)),
}

VIEWS, _ = parse_rule(
    "views | x:[1 1] y:[1 1] z:[1 1] | add(linear(x, y), linear(x, z)) | "
    "linear(x, reshape[shape=(6 8)](add(reshape[shape=(4 12)](y), reshape[shape=(4 12)](z))))"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@cache
def case(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]], Captured]:
    torch.manual_seed(0)
    build, shape, width, _ = CASES[name]
    module = build().double()
    batches = [
        (
            torch.randn(*shape, dtype=torch.float64),
            torch.randn(shape[0], width, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]
    return module, batches, capture(module, batches[0], name)


def rewritten(name: str) -> Graph:
    """The graph after all rules of a case, one after the other."""
    graph = case(name)[2].graph
    for rule in CASES[name][3]:
        done = rewrite(graph, shipped().entry(rule).rule)
        assert done.graph != graph
        assert done.parameters == {source: source for source in done.parameters}
        graph = done.graph
    return graph


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["data_parallel", "random", "zero"])
def test_a_rewritten_graph_trains_the_same(name: str, how: str, ranks: Ranks, tmp_path: Path) -> None:
    """Losses, weights and statistics under the module's own names, as plain PyTorch has them."""
    module, batches, captured = case(name)
    graph = rewritten(name)
    if how == "data_parallel":
        devices, strategy = 2, data_parallel(graph, preset("cpu:1x2"))
    elif how == "zero":
        devices, strategy = 2, zero(graph, preset("cpu:1x2"))
        assert any(block.endswith(".gathered") for block in strategy.placements)
    else:
        devices, strategy = 3, random_strategy(graph, 3, Random(5), most_copies=2)
    ours = trained_by_ranks(ranks, strategy, devices, captured, module, batches, RECIPE, tmp_path)
    theirs = trained_plainly(module, batches, RECIPE)
    assert_same(ours, theirs)
    assert set(ours[1]) == set(theirs[1])


@pytest.mark.parametrize("how", ["data_parallel", "random"])
def test_weights_that_are_added_as_views_have_gradients_of_their_own(
    how: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Autograd gives the two of them one piece of memory, and what is clipped twice is not what was asked
    for. Plain PyTorch would do the same to the rewritten module, so the original is what is compared."""
    module, batches, captured = case("summed")
    graph = rewrite(captured.graph, VIEWS).graph
    machine = preset("cpu:1x2")
    parallel = how == "data_parallel"
    strategy = data_parallel(graph, machine) if parallel else random_strategy(graph, 2, Random(0))
    recipe = Recipe("SGD", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}, Options(clip_norm=0.05))
    ours = trained_by_ranks(ranks, strategy, 2, captured, module, batches, recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches, recipe))


def test_a_checkpoint_of_a_rewritten_graph_loads_into_the_original(ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = case("heads")
    theirs = trained_plainly(module, batches, RECIPE)
    graph, saved = rewritten("heads"), tmp_path / "saved"
    (tmp_path / "plans").mkdir()
    given = (captured, module)
    machine = preset("cpu:1x2")
    begun = trained_by_ranks(
        ranks, data_parallel(graph, machine), 2, *given, batches[:2], RECIPE, tmp_path / "plans", save=saved
    )
    plain: Strategy = random_strategy(captured.graph, 2, Random(1))
    ended = trained_by_ranks(ranks, plain, 2, *given, batches[2:], RECIPE, tmp_path / "plans", resume=saved)
    assert_same((begun[0] + ended[0], ended[1]), theirs)
