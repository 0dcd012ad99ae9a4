"""Batch norms with each shard's own statistics, from what a user asks for to what ranks compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import ddpcases
from oracles.ranks import Ranks
from oracles.shell import Soapstone
from oracles.training import Recipe, Tensors, assert_same, trained_plainly
from torch import nn

from soapstone.errors import CaptureError
from soapstone.frontends.capture import capture
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.plans import read_plan

NET = f"{ddpcases.__file__}:net"
SGD = Recipe("SGD", {"lr": 0.05, "momentum": 0.9})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def first(answers: list[Any]) -> tuple[list[float], Tensors]:
    """What rank 0 found; all report the same losses."""
    assert answers[0][0] == answers[1][0]
    return answers[0][0], {name: torch.from_numpy(array) for name, array in answers[0][1].items()}


def syncs(graph: Graph) -> list[bool]:
    """Of each batch norm whether it takes statistics of the whole batch."""
    return [node.op.joins_statistics(node.attrs) for node in graph.nodes if node.op_name == "batch_norm"]


@pytest.fixture(scope="module")
def ddp(ranks: Ranks) -> tuple[list[float], Tensors]:
    """What DDP trains, which is not what one process does."""
    theirs = first(ranks.run(ddpcases.under_ddp, 2))
    whole = trained_plainly(ddpcases.net()[0], ddpcases.batches(), SGD)
    assert abs(whole[0][-1] - theirs[0][-1]) > 1e-3
    return theirs


@pytest.mark.parametrize(
    "asked",
    [
        ("simulate", "--model", NET),
        ("plan", NET, "--stages=2", "--micro-batches=2", "--proposals=1"),
    ],
    ids=["data-parallel", "pipeline"],
)
def test_a_plan_file_with_local_statistics_trains_as_ddp_does(
    asked: tuple[str, ...],
    ranks: Ranks,
    ddp: tuple[list[float], Tensors],
    soapstone: Soapstone,
    tmp_path: Path,
) -> None:
    """Losses, weights and rank 0's buffers; two micro-batches have the statistics of two ranks."""
    path = tmp_path / "plan.json"
    written = soapstone(*asked, "--machine=cpu:1x2", "--batch-norm=local", "-o", path)
    assert (written.code, written.err) == (0, "")
    assert_same(first(ranks.run(ddpcases.under_saved_plan, 2, str(path))), ddp)


def test_ranks_that_plan_for_local_statistics_train_as_ddp_does(
    ranks: Ranks, ddp: tuple[list[float], Tensors]
) -> None:
    assert_same(first(ranks.run(ddpcases.under_own_plan, 2, "net", "local")), ddp)


def test_sync_batch_norm_keeps_the_whole_batch_in_a_rank(ranks: Ranks) -> None:
    """torch's own refuses a rank's CPU tensors, and on GPUs would send messages while it is traced."""
    whole = trained_plainly(ddpcases.net()[0], ddpcases.batches(), SGD)
    assert_same(first(ranks.run(ddpcases.under_own_plan, 2, "synchronised", "local")), whole)


def test_sync_batch_norm_is_told_apart_by_its_module() -> None:
    class Own(nn.SyncBatchNorm):
        """A class of one's own."""

    class Mixed(nn.Module):
        """The same module twice, another of one's own, and a function."""

        def __init__(self) -> None:
            super().__init__()
            self.plain, self.own = nn.BatchNorm1d(3), Own(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.own(self.plain(self.own(self.plain(x))))
            return nn.functional.batch_norm(x, None, None, training=True).square().sum()

    captured = capture(Mixed(), [torch.randn(4, 3)], "mixed", batch_norm="local")
    assert syncs(captured.graph) == [False, True, False, True, False]
    (note,) = captured.notes
    assert note.startswith("2 of 5 batch norms are nn.SyncBatchNorm")
    assert all(syncs(capture(Mixed(), [torch.randn(4, 3)], "mixed").graph))


def test_a_plan_with_local_statistics_exchanges_none(soapstone: Soapstone, tmp_path: Path) -> None:
    plan, tasks = tmp_path / "plan.json", tmp_path / "tasks.json"
    machine = ["--machine", "cpu:1x2"]
    planned = soapstone("plan", NET, *machine, "--proposals=1", "--batch-norm=local", "-o", plan)
    assert (planned.code, planned.err) == (0, "")
    found = read_plan(plan)
    assert found.model == f"{NET}:batch_norm=local"
    assert syncs(found.graph) == [False, False]
    assert load(found.model).captured().graph == found.graph
    assert syncs(load(NET).captured().graph) == [True, True]

    def moved(*options: object) -> Counter[int]:
        told = soapstone("simulate", *options, "--tasks", tasks)
        assert (told.code, told.err) == (0, "")
        return Counter(task["bytes"] for task in json.loads(tasks.read_text())["tasks"] if task["bytes"])

    asked = ["--model", NET, *machine]
    whole, local = moved(*asked), moved(*asked, "--batch-norm=local", "-o", plan)
    # Count, mean and M2 of 4 channels, for two norms, forward and backward, in rings of two.
    assert whole - local == {3 * 4 * 4: 2 * 2 * 2}
    assert local - whole == {}
    assert moved(plan) == local
    refused = soapstone("simulate", plan, "--batch-norm=whole")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("given", ["resnet101", "hf"])
def test_every_sort_of_model_takes_it(given: str, tmp_path: Path) -> None:
    if given == "hf":
        config = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
        sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
        (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
        source = load(f"hf:{tmp_path}", batch=2, batch_norm="local")
    else:
        source = load(given, tiny=True, batch_norm="local")
    found = syncs(source.captured().graph)
    assert found
    assert not any(found)


def test_a_model_without_batch_norm_is_told_so(soapstone: Soapstone) -> None:
    outcome = soapstone("graph", "lenet", "--tiny", "--batch-norm=local", "--summary")
    assert outcome.code == 0
    assert outcome.err == (
        "soapstone: note: the model has no batch norm that trains, so --batch-norm local has nothing to"
        " apply to\n"
    )
    assert soapstone("graph", "lenet", "--tiny", "--batch-norm=whole", "--summary").err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("lenet", "--batch-norm=ddp"),
        ("lenet:batch_norm=3",),
        (f"{NET}:batch_norm=ddp",),
        ("lenet:batch_norm=local", "--batch-norm=whole"),
    ],
)
def test_another_choice_is_refused_in_a_sentence(soapstone: Soapstone, arguments: tuple[str, ...]) -> None:
    outcome = soapstone("graph", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "batch_norm" in outcome.err


def test_another_choice_is_refused_in_python() -> None:
    import soapstone

    module, batch = ddpcases.net()
    with pytest.raises(CaptureError, match=r"batch_norm is whole .* or local .*, not 'ddp'"):
        soapstone.plan(module, batch, machine="cpu:1x2", batch_norm="ddp")
