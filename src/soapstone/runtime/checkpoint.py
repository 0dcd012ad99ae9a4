"""Checkpoints, with torch.distributed.checkpoint: each rank writes the boxes it answers for.

A checkpoint is a directory `step-N` of DCP's files and `training.json`. Its tensors are called

    model.NAME              a parameter or buffer of the module, in the module's shape
    optimizer.NAME.KEY      what the optimizer remembers of a parameter

so that `dcp.load({"model": module.state_dict()}, checkpoint_id=...)` fills the plain module, and a run
under another plan, with another number of ranks, reads the boxes it needs. It is written aside, and takes
its name when all of it is on the disk; the file `latest` beside it names the last complete one.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from soapstone.errors import CheckpointError
from soapstone.files import replace_text
from soapstone.graph import Role, Value
from soapstone.ops.box import Box, relative_to, shape_of, slices
from soapstone.runtime.boxed import Boxed, BoxLoader, BoxSaver
from soapstone.runtime.buffers import owners
from soapstone.runtime.contents import ContentsReader, contents
from soapstone.runtime.run import Run
from soapstone.runtime.stored import stored_boxes
from soapstone.runtime.weights import Holding
from soapstone.runtime.wire import Wire

FORMAT = "soapstone-checkpoint"
VERSION = 1
LATEST = "latest"
PARTICULARS = "training.json"


@dataclass(frozen=True)
class Particulars:
    """What a checkpoint says beside its tensors: steps done, and the optimizer's groups."""

    step: int
    model: str
    optimizer: str
    groups: list[dict[str, Any]]


# -- writing ----------------------------------------------------------------------------------------


def save(folder: Path, run: Run, optimizer: Optimizer, step: int, wire: Wire) -> Path:
    """Write a checkpoint of all ranks, complete or not at all; its path."""
    name = f"step-{step:08d}"
    draft, final = folder / f".{name}.part", folder / name
    try:
        if wire.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        wire.meet(f"beginning of checkpoint {name}")
        state = {**_weights(run, optimizer, only_owned=True), **_buffers(run, wire, only_owned=True)}
        with _quiet():
            save_tensors(
                state, storage_writer=FileSystemWriter(draft), planner=BoxSaver(), no_dist=wire.size == 1
            )
        if wire.rank == 0:
            particulars = Particulars(
                step, run.strategy.graph.name, type(optimizer).__name__, _groups(optimizer)
            )
            _write_particulars(draft / PARTICULARS, particulars)
            if final.exists():
                shutil.rmtree(final)
            draft.rename(final)
            _sync(folder)
            replace_text(folder / LATEST, name + "\n")
        wire.meet(f"end of checkpoint {name}")
    except OSError as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be written ({error.strerror}).") from error
    except (RuntimeError, CheckpointException) as error:
        _blame_disk(folder, error)
        # Every rank takes part in a checkpoint: one that is gone fails the others here too.
        raise wire.failure(f"the checkpoint '{name}'", error) from error
    return final


@contextmanager
def _quiet() -> Iterator[None]:
    """One process alone is what was meant: torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _blame_disk(folder: Path, error: BaseException) -> None:
    """Say so if it was a rank's disk that failed."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for rank, (cause, _) in sorted(failures.items()):
        if isinstance(cause, OSError):
            raise CheckpointError(
                f"{folder}: rank {rank} cannot write its part of the checkpoint ({cause.strerror})."
            ) from error


def _sync(folder: Path) -> None:
    """See to it that a renaming is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_particulars(path: Path, particulars: Particulars) -> None:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": particulars.step,
        "model": particulars.model,
        "optimizer": particulars.optimizer,
        "groups": particulars.groups,
    }
    replace_text(path, json.dumps(document, indent=1) + "\n")


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the optimizer's groups are set to, as far as it is numbers."""
    return [
        {k: v for k, v in group.items() if k != "params" and isinstance(v, int | float | bool | list | tuple)}
        for group in optimizer.param_groups
    ]


# -- reading ----------------------------------------------------------------------------------------


def latest(folder: Path) -> Path:
    """The last complete checkpoint in a folder; or the folder, if it is a checkpoint itself."""
    if (folder / PARTICULARS).is_file():
        return folder
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no complete checkpoint here; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: the file '{LATEST}' cannot be read ({error}).") from None
    if not (folder / name / PARTICULARS).is_file():
        raise CheckpointError(f"{folder}: '{LATEST}' names '{name}', which is no complete checkpoint.")
    return folder / name


def load(folder: Path, run: Run, optimizer: Optimizer, wire: Wire) -> int:
    """Read the last complete checkpoint into the weights, buffers and optimizer of this rank; the
    number of steps that were done."""
    path = latest(folder)
    particulars = _particulars(path / PARTICULARS)
    known = contents(path)
    stored = known.state_dict_metadata
    _check_model(path, run, stored)
    if particulars.optimizer == type(optimizer).__name__:
        _expect_state(run, optimizer, stored)
        for group, saved in zip(optimizer.param_groups, particulars.groups, strict=False):
            group.update(saved)
    state = {**_weights(run, optimizer, only_owned=False), **_buffers(run, wire, only_owned=False)}
    try:
        with _quiet():
            # Every rank reads the boxes it needs by itself: there is nothing to wait for.
            load_tensors(state, storage_reader=ContentsReader(path, known), planner=BoxLoader(), no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001, damaged files may raise anything
        cause = _cause(error)
        told = next(iter(str(cause).splitlines()), type(cause).__name__).rstrip(".")
        raise CheckpointError(f"{path}: the checkpoint cannot be read ({told}).") from None
    wire.meet(f"end of reading {path.name}")
    return particulars.step


def _cause(error: BaseException) -> BaseException:
    """What a rank met, out of what DCP wraps it in."""
    if isinstance(error, CheckpointException):
        return next((cause for cause, _ in error.failures.values()), error)
    return error


def _particulars(path: Path) -> Particulars:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise CheckpointError(f"{path}: this is not a checkpoint that this Soapstone reads.")
        return Particulars(
            int(document["step"]),
            str(document["model"]),
            str(document["optimizer"]),
            list(document["groups"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged ({error}).") from None


def _check_model(path: Path, run: Run, stored: Mapping[str, Any]) -> None:
    for value in run.strategy.graph.values.values():
        if value.role not in (Role.WEIGHT, Role.BUFFER):
            continue
        found = stored.get(f"model.{value.sources[0]}")
        if found is None:
            raise CheckpointError(f"{path}: this is of another model: it has no '{value.sources[0]}'.")
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{path}: its '{value.sources[0]}' is no tensor.")
        wanted = value.stored_shape or value.shape
        if tuple(found.size) != wanted:
            raise CheckpointError(
                f"{path}: this is of another model: its '{value.sources[0]}' has shape {list(found.size)} and"
                f" not {list(wanted)}."
            )


def _expect_state(run: Run, optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Give the optimizer something to read its state into."""
    for holding in run.held:
        if not holding.parameter.requires_grad:
            continue
        value = run.strategy.graph.value(holding.weight)
        prefix = f"optimizer.{value.sources[0]}."
        for key, found in stored.items():
            if key.startswith(prefix) and isinstance(found, TensorStorageMetadata):
                whole = tuple(found.size) == (value.stored_shape or value.shape)
                made = (
                    torch.zeros_like(holding.parameter)
                    if whole
                    else torch.zeros(found.size, dtype=found.properties.dtype)
                )
                optimizer.state[holding.parameter][key.removeprefix(prefix)] = made


# -- what is written and read -----------------------------------------------------------------------


def _weights(run: Run, optimizer: Optimizer, *, only_owned: bool) -> dict[str, Any]:
    """Weights, and what the optimizer remembers of them, as boxes in the stored shape."""
    parts: dict[str, dict[Box, Tensor]] = {}
    plain: dict[str, Any] = {}
    held = run.held.owned() if only_owned else ((holding, holding.box) for holding in run.held)
    for holding, box in held:
        value = run.strategy.graph.value(holding.weight)
        for key, tensor in _tensors(holding, optimizer):
            names = (
                [f"model.{s}" for s in value.sources]
                if key is None
                else [f"optimizer.{value.sources[0]}.{key}"]
            )
            for name in names:
                if tensor.shape == holding.parameter.shape and (tensor.ndim or not key):
                    parts.setdefault(name, {}).update(_cut(value, holding.box, box, tensor))
                else:
                    plain[name] = tensor
    shapes = {f"model.{s}": v for v in run.strategy.graph.with_role(Role.WEIGHT) for s in v.sources}
    boxed = {
        name: Boxed(_shape_of(name, shapes), next(iter(own.values())).dtype, own)
        for name, own in parts.items()
    }
    return {**plain, **boxed}


def _shape_of(name: str, weights: Mapping[str, Value]) -> Sequence[int]:
    if not name.startswith("model."):
        name = "model." + name.removeprefix("optimizer.").rpartition(".")[0]
    return weights[name].stored_shape or weights[name].shape


def _tensors(holding: Holding, optimizer: Optimizer) -> Iterator[tuple[str | None, Tensor]]:
    yield None, holding.parameter.data
    for key, tensor in optimizer.state.get(holding.parameter, {}).items():
        if isinstance(tensor, Tensor):
            yield key, tensor


def _cut(value: Value, held: Box, box: Box, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The parts of a tensor that fills `held`, by the boxes that they are in the stored shape."""
    for own, stored in stored_boxes(box, value.shape, value.stored_shape or value.shape):
        yield stored, tensor[slices(relative_to(own, held))].view(shape_of(stored))


def _buffers(run: Run, wire: Wire, *, only_owned: bool) -> dict[str, Any]:
    """Buffers: all of them where they are read; where they are written, those that a step changes as
    the boxes that this rank answers for, and the rest by rank 0."""
    found: dict[str, Any] = {}
    for value in run.strategy.graph.with_role(Role.BUFFER):
        tensor = run.free.buffers[value.name]
        owned = owners(run.executor.program.links, value.name) if only_owned else []
        mine = {box: tensor[slices(box)] for box, owner in owned if owner == wire.rank}
        for source in value.sources:
            if not owned and (wire.rank == 0 or not only_owned):
                found[f"model.{source}"] = tensor
            elif mine:
                found[f"model.{source}"] = Boxed(value.shape, tensor.dtype, mine)
    return found
