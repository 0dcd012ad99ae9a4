"""Precision and statistics: single precision, bf16 autocast as captured, and batch norm as DDP has it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, named_tensors, trained_by_ranks, trained_plainly
from torch import Tensor, nn

from soapstone.frontends.capture import Captured, capture
from soapstone.machine import preset
from soapstone.search.baselines import data_parallel
from soapstone.strategy.space import random_strategy

SGD = Recipe("SGD", {"lr": 0.05, "momentum": 0.9})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


class Net(nn.Module):
    """Convolution, batch norm, a linear layer; the matrix products in bf16 if asked for."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 6 * 6, 6)
        self.half_products = half

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half_products):
            y = self.out(F.relu(self.norm(self.conv(x))).flatten(1))
        return F.cross_entropy(y.float() if self.half_products else y, labels)


@cache
def net(dtype: torch.dtype, half: bool = False) -> tuple[nn.Module, list[Any], Captured]:
    torch.manual_seed(5)
    module = Net(half).to(dtype)
    batches = [(torch.randn(6, 2, 6, 6, dtype=dtype), torch.randint(6, (6,))) for _ in range(5)]
    return module, batches, capture(module, batches[0], "net")


@pytest.mark.parametrize("seed", [1, 2])
def test_single_precision_differs_by_rounding_only(seed: int, ranks: Ranks, tmp_path: Path) -> None:
    """24 bits: sums taken in another order differ by some 1e-7, and five steps let it grow tenfold."""
    module, batches, captured = net(torch.float32)
    strategy = random_strategy(captured.graph, 3, Random(seed), most_copies=2)
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, SGD, tmp_path)
    assert_same(ours, trained_plainly(module, batches, SGD), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_autocast_regions_run_in_half_precision_as_captured(seed: int, ranks: Ranks, tmp_path: Path) -> None:
    """8 bits: a shard's partial sum is rounded before it is added, so a value is off by some 2**-8; the
    same training in single precision is further away."""
    module, batches, captured = net(torch.float32, half=True)
    assert any(value.dtype == "bf16" for value in captured.graph.values.values())
    strategy = random_strategy(captured.graph, 3, Random(seed), most_copies=2)
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, SGD, tmp_path)
    assert_same(ours, trained_plainly(module, batches, SGD), rtol=2**-5, atol=2**-6)


def test_local_statistics_are_those_of_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank normalises by its own samples; gradients are averaged; rank 0's buffers are kept."""
    module, batches, _ = net(torch.float64)
    captured = capture(module, batches[0], "net", batch_norm="local")
    strategy = data_parallel(captured.graph, preset("cpu:1x3"))
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, SGD, tmp_path)
    model = deepcopy(module).train()
    optimizer = SGD.optimizer_of(model.parameters())
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        total = 0.0
        for rank in range(3):
            before = {name: buffer.clone() for name, buffer in model.norm.named_buffers()}
            loss = model(images[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2]) / 3
            loss.backward()
            total += loss.item()
            if rank:
                for name, buffer in model.norm.named_buffers():
                    buffer.copy_(before[name])
        optimizer.step()
        losses.append(total)
    assert_same(ours, (losses, named_tensors(model)))
    together = trained_plainly(module, batches, SGD)
    assert abs(together[0][-1] - losses[-1]) > 1e-4
