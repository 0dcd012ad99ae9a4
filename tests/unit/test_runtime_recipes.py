"""The same training with every optimizer and option, on graphs made to be awkward.

Dropout has no equal in plain PyTorch (the masks are Soapstone's own): the oracle there is the graph
interpreted whole, in one process, with the same seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, trained_by_ranks, trained_plainly
from torch import Tensor, nn

from soapstone.frontends.capture import Captured, capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.ops.op import Shard
from soapstone.runtime.executor import seed_of
from soapstone.runtime.trainer import Options
from soapstone.search.baselines import data_parallel
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.placement import Placement
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


class Net(nn.Module):
    """A table of which part is read, tied to the output layer; batch norm; dropout if asked for."""

    def __init__(self, dropout: float = 0.0, loss: str = "mean") -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.places = nn.Parameter(torch.randn(10, 8) * 0.1)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.table.weight
        self.dropout, self.loss = dropout, loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens) + self.places[: tokens.shape[1]]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = F.dropout(F.relu(self.hidden(x)), self.dropout)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten(), reduction=self.loss)


@cache
def net(dropout: float = 0.0, loss: str = "mean") -> tuple[nn.Module, list[Any], Captured]:
    torch.manual_seed(3)
    module = Net(dropout, loss).double()
    batches = [(torch.randint(12, (4, 6)), torch.randint(12, (4, 6))) for _ in range(10)]
    return module, batches, capture(module, batches[0], "net")


RECIPES = {
    "sgd": Recipe("SGD", {"lr": 0.1}),
    "momentum, decay": Recipe("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": Recipe("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": Recipe("Adam", {"lr": 0.01}),
    "adamw": Recipe("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": Recipe("RMSprop", {"lr": 0.01}),
    "clipping": Recipe("SGD", {"lr": 0.5}, Options(clip_norm=0.05)),
    "schedule": Recipe("Adam", {"lr": 0.02}, decay=0.5),
    "accumulation": Recipe("SGD", {"lr": 0.1, "momentum": 0.9}, Options(accumulate=2)),
    "apart": Recipe("SGD", {"lr": 0.1}, Options(fuse=False)),
}


@pytest.mark.parametrize("how", RECIPES)
def test_training_with_each_recipe_is_the_same(how: str, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = net()
    recipe = RECIPES[how]
    given = (
        batches[:5] if recipe.options.accumulate == 1 else list(zip(batches[::2], batches[1::2], strict=True))
    )
    plain = trained_plainly(module, given, recipe)
    for seed in (1, 2):
        strategy = random_strategy(captured.graph, 3, Random(seed), most_copies=3)
        ours = trained_by_ranks(ranks, strategy, 3, captured, module, given, recipe, tmp_path)
        assert_same(ours, plain)


def test_a_summed_loss_is_summed_over_shards(ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = net(loss="sum")
    recipe = Recipe("SGD", {"lr": 0.01})
    strategy = data_parallel(captured.graph, preset("cpu:1x4"))
    ours = trained_by_ranks(ranks, strategy, 4, captured, module, batches[:5], recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches[:5], recipe))


def test_devices_that_do_nothing_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = net()
    recipe = Recipe("SGD", {"lr": 0.1})
    blocks = Strategy(captured.graph, {}).blocks
    strategy = Strategy(captured.graph, {b.name: Placement((), (1 + i % 2,)) for i, b in enumerate(blocks)})
    ours = trained_by_ranks(ranks, strategy, 4, captured, module, batches[:3], recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches[:3], recipe))


class Remembering(nn.Module):
    """A buffer that one layer changes and another reads in the next step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        out = self.second(y - self.mean)
        self.mean.copy_(0.5 * self.mean + 0.5 * y.detach().mean(0))
        return F.mse_loss(out, target)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_buffer_changed_on_one_rank_is_read_on_another(seed: int, ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Remembering().double()
    batches = [(torch.randn(4, 8).double(), torch.randn(4, 4).double()) for _ in range(4)]
    captured = capture(module, batches[0], "remembering")
    assert captured.graph.updates
    recipe = Recipe("SGD", {"lr": 0.1})
    strategy = random_strategy(captured.graph, 3, Random(seed))
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches, recipe))


def interpreted_loss(graph: Graph, captured: Captured, seed: int) -> Any:
    """The loss of the graph run whole, with the random numbers that every strategy must draw."""

    def loss(module: nn.Module, batch: tuple[Tensor, ...], step: int) -> Tensor:
        named: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        values: dict[str, Any] = dict(captured.constants)
        inputs = iter(batch)
        for value in graph.values.values():
            if value.role == "input":
                values[value.name] = next(inputs)
            elif value.role in ("weight", "buffer"):
                values[value.name] = next(named[s] for s in value.sources if s in named)
            elif value.role == "constant" and value.fill is not None:
                values[value.name] = torch.full(value.shape, value.fill, dtype=torch.float64)
        for node in graph.nodes:
            signature = graph.signature(node)
            shard = Shard(signature, signature.points, seed_of(seed, step, node.name), "f64")
            operands = [values[o] if isinstance(o, str) else o for o in node.operands]
            made = node.op.run(node.op.slices(operands, shard), node.attrs, shard)
            values.update(zip(node.outputs, made, strict=True))
        with torch.no_grad():
            for buffer, made_name in graph.updates.items():
                named[buffer].copy_(values[made_name])
            for buffer, count in graph.counters.items():
                named[buffer].add_(count)
        assert graph.loss is not None
        return values[graph.loss]

    return loss


@pytest.mark.parametrize("seed", [1, 2])
def test_dropout_drops_the_same_elements_under_every_strategy(
    seed: int, ranks: Ranks, tmp_path: Path
) -> None:
    module, batches, captured = net(dropout=0.4)
    assert any(node.op.random for node in captured.graph.nodes)
    recipe = Recipe("SGD", {"lr": 0.1}, Options(seed=11))
    plain = trained_plainly(module, batches[:5], recipe, interpreted_loss(captured.graph, captured, seed=11))
    strategy = random_strategy(captured.graph, 4, Random(seed), most_copies=2)
    ours = trained_by_ranks(ranks, strategy, 4, captured, module, batches[:5], recipe, tmp_path)
    assert_same(ours, plain)
    assert len(set(plain[0])) == 5
    blocks = Strategy(captured.graph, {}).blocks
    halves = {b.name: Placement((), (2 * i // len(blocks),)) for i, b in enumerate(blocks)}
    pipeline = Strategy(captured.graph, halves).pipelined(Pipeline(2 * seed, Schedule.GPIPE))
    ours = trained_by_ranks(ranks, pipeline, 2, captured, module, batches[:5], recipe, tmp_path)
    assert_same(ours, plain)
