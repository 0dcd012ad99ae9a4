"""Whole weights and buffers, gathered from the ranks that hold their parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from soapstone.errors import CheckpointError
from soapstone.graph import Role
from soapstone.ops.box import shape_of, slices
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.runtime.run import Run
from soapstone.runtime.wire import Wire


def gathered(run: Run, wire: Wire) -> dict[str, Tensor]:
    """Every weight and buffer under all of the module's names for it, in the module's shapes."""
    graph = run.strategy.graph
    found: dict[str, Tensor] = {}
    for value in graph.values.values():
        if value.role is Role.WEIGHT:
            tensor = torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=wire.device)
            for box, owner in run.weights.owned[value.name]:
                own = run.held.holding(value.name, box).contents(box) if owner == wire.rank else None
                tensor[slices(box)] = wire.shared(own, shape_of(box), tensor.dtype, owner, value.name)
        elif value.role is Role.BUFFER:
            run.executor.buffers.share([value.name], wire)
            tensor = run.free.buffers[value.name].clone()
        else:
            continue
        stored = tensor.reshape(value.stored_shape or value.shape)
        found.update((source, stored) for source in value.sources)
    return found


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, whole or not at all; names that share a tensor each have their own."""
    draft = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        save_file({name: tensor.cpu().contiguous().clone() for name, tensor in state.items()}, draft)
        draft.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: the weights cannot be written ({error}).") from error
    finally:
        draft.unlink(missing_ok=True)
