"""Checkpoints: written under one plan, read under another or by plain PyTorch; complete or not there."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from oracles.ranks import Ranks
from oracles.training import Recipe, Tensors, assert_same, tiny, trained_by_ranks, trained_plainly
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from soapstone.errors import CheckpointError
from soapstone.machine import preset
from soapstone.ops.box import Interval
from soapstone.plans import Plan, simulation
from soapstone.runtime.checkpoint import latest
from soapstone.runtime.contents import contents
from soapstone.runtime.run import state_of
from soapstone.runtime.stored import stored_boxes
from soapstone.runtime.trainer import Trainer
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import data_parallel, single_device
from soapstone.strategy.space import random_strategy

STEPS = 4
ADAM = Recipe("Adam", {"lr": 0.01})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


def alone(name: str) -> Trainer:
    """A trainer of one rank."""
    module, _, captured = tiny(name, STEPS)
    machine = preset("cpu:1x1")
    strategy = single_device(captured.graph, machine)
    plan = Plan(strategy, machine, simulation(strategy, machine).prediction)
    model = deepcopy(module)
    named: Tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = state_of(captured.graph, named, captured.constants)
    return Trainer(plan, state, dict(model.named_parameters()), ADAM.optimizer_of, Wire())


@pytest.mark.parametrize("name", ["rnntc", "resnet101"])
def test_a_run_goes_on_under_another_plan(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two steps on 4 ranks, one on 2, one on 1: as four steps of plain PyTorch."""
    module, batches, captured = tiny(name, STEPS)
    saved = tmp_path / "saved"
    plans = tmp_path / "plans"
    plans.mkdir()
    first = random_strategy(captured.graph, 4, Random(5), most_copies=2)
    begun = trained_by_ranks(ranks, first, 4, captured, module, batches[:2], ADAM, plans, save=saved)
    second = data_parallel(captured.graph, preset("cpu:1x2"))
    other = deepcopy(module)
    for parameter in other.parameters():
        parameter.data.zero_()
    went_on = trained_by_ranks(
        ranks, second, 2, captured, other, batches[2:3], ADAM, plans, resume=saved, save=saved
    )
    last = alone(name)
    last.load(saved)
    assert last.steps_done == 3
    losses = [*begun[0], *went_on[0], last.step(batches[3])]
    assert_same((losses, last.state_dict()), trained_plainly(module, batches, ADAM), rtol=1e-8, atol=1e-9)


def test_a_checkpoint_fills_the_plain_module(ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny("rnntc", STEPS)
    (tmp_path / "plans").mkdir()
    strategy = random_strategy(captured.graph, 3, Random(2))
    saved = tmp_path / "saved"
    _, state = trained_by_ranks(
        ranks, strategy, 3, captured, module, batches[:1], ADAM, tmp_path / "plans", save=saved
    )
    plain = deepcopy(module)
    filled = {"model": plain.state_dict()}
    dcp.load(filled, checkpoint_id=latest(saved), no_dist=True)
    plain.load_state_dict(filled["model"])
    exported = load_file(saved / "model.safetensors")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state[name])
        assert torch.equal(tensor, exported[name])
    assert not torch.equal(plain.state_dict()["classifier.weight"], module.state_dict()["classifier.weight"])


def test_a_run_that_ends_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    trainer = alone("lenet")
    _, batches, _ = tiny("lenet", STEPS)
    trainer.step(batches[0])
    complete = trainer.save(tmp_path)
    (tmp_path / ".step-00000002.part").mkdir()
    (tmp_path / "step-00000003").mkdir()
    assert latest(tmp_path) == complete


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    alone("lenet").save(tmp_path)
    with pytest.raises(CheckpointError, match="another model: it has no"):
        alone("rnntc").load(tmp_path)


def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    trainer = alone("lenet")
    path = trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match="there is no complete checkpoint here"):
        trainer.load(tmp_path / "elsewhere")
    (path / ".metadata").write_bytes(b"no metadata")
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.load(tmp_path)
    (path / "training.json").write_text(json.dumps({"format": "soapstone-checkpoint"}))
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.load(tmp_path)


def test_half_of_the_hidden_units_is_four_boxes_of_the_stored_matrix() -> None:
    box = (Interval(0, 4), Interval(2, 4), Interval(0, 3))
    found = list(stored_boxes(box, (4, 4, 3), (16, 3)))
    assert [stored[0] for _, stored in found] == [Interval(4 * g + 2, 4 * g + 4) for g in range(4)]
    whole = (Interval(1, 3), Interval(0, 4), Interval(0, 3))
    assert [stored for _, stored in stored_boxes(whole, (4, 4, 3), (16, 3))] == [
        (Interval(4, 12), Interval(0, 3))
    ]
    assert [stored for _, stored in stored_boxes((), (), ())] == [()]


class Payload:
    """What a hostile file would have an unpickler do: make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("hidden", [False, True], ids=["alone", "within a list of tensors"])
def test_a_checkpoint_that_would_run_something_is_refused_and_runs_nothing(
    hidden: bool, tmp_path: Path
) -> None:
    trainer = alone("lenet")
    path = trainer.save(tmp_path / "saved")
    marker = tmp_path / "it ran"
    listed: object = Payload(marker)
    if hidden:
        own = FileSystemReader(path).read_metadata()
        own.planner_data = Payload(marker)
        listed = own
    (path / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(CheckpointError, match=r"holds '\w+\.mkdir', which does not belong there"):
        trainer.load(tmp_path / "saved")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))  # the payload does work
    assert marker.exists()


def test_pickled_objects_among_the_tensors_are_refused(tmp_path: Path) -> None:
    """DCP unpickles what is saved as bytes; a model has none."""
    trainer = alone("lenet")
    path = trainer.save(tmp_path)
    (name, *_) = trainer.state_dict()
    listed = FileSystemReader(path).read_metadata()
    listed.state_dict_metadata[f"model.{name}"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(CheckpointError, match=f"its '{name}' is no tensor"):
        trainer.load(tmp_path)


def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = alone("lenet")
    path = trainer.save(tmp_path)
    listed = FileSystemReader(path).read_metadata()
    for place in listed.storage_data.values():
        place.relative_path = "../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(CheckpointError, match=r"the file name '../elsewhere'"):
        trainer.load(tmp_path)


def test_the_list_of_tensors_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    trainer = alone("resnet101")
    trainer.step(tiny("resnet101", STEPS)[1][0])
    path = trainer.save(tmp_path)
    ours, theirs = contents(path), FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
