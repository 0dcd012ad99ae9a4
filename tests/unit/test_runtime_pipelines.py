"""Pipelines train as one process does: stages, micro-batches, and other splits inside a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from oracles.ranks import Ranks
from oracles.training import (
    Recipe,
    Tensors,
    assert_same,
    named_tensors,
    tiny,
    trained_by_ranks,
    trained_plainly,
)
from safetensors.torch import load_file
from torch import nn

from soapstone.graph import Graph
from soapstone.runtime.trainer import Options
from soapstone.strategy.layout import layouts
from soapstone.strategy.pipeline import Pipeline, Schedule, micro_dim
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

RECIPE = Recipe("SGD", {"lr": 0.01, "momentum": 0.9})
STEPS = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


def halves(graph: Graph) -> Strategy:
    """The first half of the blocks on one device, the second on the other."""
    blocks = Strategy(graph, {}).blocks
    return Strategy(graph, {b.name: placed({}, [2 * i // len(blocks)]) for i, b in enumerate(blocks)})


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("mlp", Schedule.ONE_F_ONE_B),
        ("bert_large", Schedule.ONE_F_ONE_B),
        ("rnnlm", Schedule.ONE_F_ONE_B),
        ("resnet101", Schedule.GPIPE),
    ],
)
def test_a_pipeline_trains_the_same(name: str, schedule: Schedule, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny(name, STEPS)
    strategy = halves(captured.graph).pipelined(Pipeline(2, schedule))
    assert len(strategy.stages) == 2
    ours = trained_by_ranks(ranks, strategy, 2, captured, module, batches, RECIPE, tmp_path)
    assert_same(ours, trained_plainly(module, batches, RECIPE))


def test_stages_that_are_split_train_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Two stages of two devices, each block of them split along any dim; saved under the module's names and
    loaded into plain PyTorch's."""
    module, batches, captured = tiny("gpt2", STEPS)
    graph, random = captured.graph, Random(5)
    placements = {}
    for name, placement in halves(graph).placements.items():
        block = next(block for block in Strategy(graph, {}).blocks if block.name == name)
        legal = [
            found
            for found in layouts(graph, block, 2)
            if found.degrees.get(micro_dim(graph, block, 2) or "", 1) == 1
        ]
        own = placed(dict(random.choice(legal).degrees), [0, 1]) if legal else Placement((), (0, 1), 2)
        placements[name] = replace(own, devices=tuple(2 * placement.devices[0] + d for d in own.devices))
    strategy = Strategy(graph, placements).pipelined(Pipeline(2))
    assert len(strategy.stages) == 2
    kinds = {
        kind
        for b in strategy.blocks
        for dim, kind in graph.kinds(b.leader).items()
        if dim in placements[b.name].degree_of
    }
    assert {"parameter", "reduction"} <= kinds
    save = tmp_path / "saved"
    plans = tmp_path / "plans"
    plans.mkdir()
    ours = trained_by_ranks(ranks, strategy, 4, captured, module, batches, RECIPE, plans, save=save)
    theirs = trained_plainly(module, batches, RECIPE)
    assert_same(ours, theirs)
    saved = load_file(save / "model.safetensors")
    assert saved.keys() == theirs[1].keys() & saved.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, theirs[1][name], rtol=1e-9, atol=1e-10)


def trained_with_older_gradients(
    module: nn.Module, batches: Sequence[Any], recipe: Recipe
) -> tuple[list[float], Tensors]:
    """w(t + 1) = w(t) - lr * gradient at w(t - 1), in one process of plain PyTorch."""
    model, older = deepcopy(module).train(), deepcopy(module).train()
    optimizer = recipe.optimizer_of(model.parameters())
    losses = []
    for batch in batches:
        older.zero_grad()
        loss = older(*batch)
        loss.backward()
        for parameter, source in zip(model.parameters(), older.parameters(), strict=True):
            parameter.grad = None if source.grad is None else source.grad.clone()
        older.load_state_dict(model.state_dict())
        optimizer.step()
        losses.append(loss.item())
    return losses, named_tensors(model)


@pytest.mark.parametrize("optimizer", [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.01})])
def test_2bw_takes_gradients_at_the_weights_before_the_last_update(
    optimizer: tuple[str, dict[str, float]], ranks: Ranks, tmp_path: Path
) -> None:
    """The older weights are in checkpoints: a run that goes on is the run that was not interrupted."""
    module, batches, captured = tiny("mlp", STEPS)
    recipe = Recipe(*optimizer, Options(weights="2bw"))
    strategy = halves(captured.graph).pipelined(Pipeline(2))
    theirs = trained_with_older_gradients(module, batches, recipe)
    assert theirs[0] != trained_plainly(module, batches, recipe)[0]
    plans, saved = tmp_path / "plans", tmp_path / "saved"
    plans.mkdir()
    case = (ranks, strategy, 2, captured, module)
    assert_same(trained_by_ranks(*case, batches, recipe, plans), theirs)
    if recipe.optimizer == "SGD":
        return  # one of them will do
    first = trained_by_ranks(*case, batches[:3], recipe, plans, save=saved)
    rest = trained_by_ranks(*case, batches[3:], recipe, plans, resume=saved)
    assert_same((first[0] + rest[0], rest[1]), theirs)


def test_weights_that_grew_old_under_flush_are_no_version(ranks: Ranks, tmp_path: Path) -> None:
    """2bw, then flush, then 2bw again, by checkpoints: what flush went on without is not one update old, and
    the third run begins as one without an older version does."""
    module, batches, captured = tiny("mlp", STEPS)
    older, newest = (Recipe("SGD", {"lr": 0.1}, Options(weights=weights)) for weights in ("2bw", "flush"))
    case = (ranks, halves(captured.graph).pipelined(Pipeline(2)), 2, captured, module)
    plans, first, second = (tmp_path / name for name in ("plans", "first", "second"))
    plans.mkdir()
    trained_by_ranks(*case, batches[:2], older, plans, save=first)
    middle = trained_by_ranks(*case, batches[2:4], newest, plans, resume=first, save=second)
    last = trained_by_ranks(*case, batches[4:], older, plans, resume=second)
    model = deepcopy(module)
    model.load_state_dict({name: middle[1][name] for name in model.state_dict()})
    assert_same(last, trained_plainly(model, batches[4:], older))
