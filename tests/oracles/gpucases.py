"""What ranks do in the tests of GPUs that they share."""

from __future__ import annotations

from typing import Any

import torch

from oracles.training import Recipe, trainer_of


def shared_case(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any
) -> tuple[list[float], Any]:
    """Train on a GPU that the other ranks use too, with messages over gloo."""
    trainer = trainer_of(rank, size, path, named, constants, Recipe(), "cuda:0")
    losses = [trainer.step([torch.from_numpy(array) for array in batch]) for batch in batches]
    state = {name: tensor.cpu().numpy() for name, tensor in trainer.state_dict().items()}
    return losses, state if rank == 0 else {}
