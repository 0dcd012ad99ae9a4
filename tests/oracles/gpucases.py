"""What ranks do in the tests of GPUs that they share."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from oracles.training import Recipe, named_tensors, tiny, trainer_of
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.runtime import wire
from soapstone.runtime.run import state_of
from soapstone.runtime.trainer import Options, Trainer
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy


def trainer_on_gpu(name: str, *, replay: bool = False, fuse: bool = True) -> Trainer:
    """A trainer of a tiny model, all of it on one GPU."""
    module, _, captured = tiny(name, 1)
    machine, blocks = preset("cpu:1x1"), Strategy(captured.graph, {}).blocks
    strategy = Strategy(captured.graph, {block.name: Placement((), (0,)) for block in blocks})
    plan = Plan(strategy, machine, simulation(strategy, machine).prediction)
    model = deepcopy(module)
    state = state_of(captured.graph, named_tensors(model), captured.constants)
    own, options = wire.Wire(device=torch.device("cuda", 0)), Options(replay=replay, fuse=fuse)
    return Trainer(plan, state, dict(model.named_parameters()), Recipe().optimizer_of, own, options)


def shared_case(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any
) -> tuple[list[float], Any]:
    """Train on a GPU that the other ranks use too, with messages over gloo."""
    return _trained(rank, size, path, named, constants, batches)[:2]


def replayed_case(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any
) -> tuple[list[float], Any, bool | str]:
    """Likewise, with sums in parts of 256 bytes; whether the steps were replayed, or why not."""
    usual, wire.LANE_BYTES = wire.LANE_BYTES, 256
    try:
        return _trained(rank, size, path, named, constants, batches)
    finally:
        wire.LANE_BYTES = usual


def carried_case(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any
) -> tuple[list[float], Any]:
    """Likewise, with messages and sums by belts."""
    return _trained(rank, size, path, named, constants, batches, Recipe(by_belts=True))[:2]


def summed_case(rank: int, size: int) -> list[Any]:
    """Sums of tensors of a GPU that the other ranks use too."""
    return sums_of_slices(wire.Wire(rank, size, torch.device("cuda", 0)))


def sums_of_slices(own: wire.Wire) -> list[Any]:
    """Sums of tensors that are contiguous or not, whole and in parts, as they come to one who takes a slice;
    and the tensors that were added up, which the sum has come back to."""
    ranks, usual = range(own.size), wire.LANE_BYTES
    own.prepare([ranks])
    found = []
    for lane_bytes in (usual, 16):
        wire.LANE_BYTES = lane_bytes
        numbers = torch.arange(12.0, device=own.device).view(3, 4) * (own.rank + 1)
        for tensor in (numbers.t(), numbers.t().contiguous()):
            slot = wire.Slot(own.sum_up(tensor, ranks, "sum"), slice(0, 12), (4, 3))
            found.append(torch.as_tensor(slot.wait()).cpu().numpy())
        found.append(tensor.cpu().numpy())
    wire.LANE_BYTES = usual
    return found


def _trained(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any, recipe: Recipe | None = None
) -> tuple[list[float], Any, bool | str]:
    trainer = trainer_of(rank, size, path, named, constants, recipe or Recipe(), "cuda:0")
    losses = [trainer.step([torch.from_numpy(array) for array in batch]) for batch in batches]
    state = {name: tensor.cpu().numpy() for name, tensor in trainer.state_dict().items()}
    replay = trainer.run.executor.replay
    how = "not tried" if replay is None else replay.refusal or replay.is_recorded
    return losses, state if rank == 0 else {}, how
