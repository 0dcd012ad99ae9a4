"""What ranks do in the tests of data: they train from sources that note what was asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from oracles.training import Recipe, trainer_of


class Noting(Dataset[Any]):
    """The samples of batches, one after the other; `asked` are the numbers of those that were taken."""

    def __init__(self, batches: Sequence[Sequence[Tensor]]) -> None:
        self.samples = [sample for batch in batches for sample in zip(*batch, strict=True)]
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        return self.samples[number]


class Telling:
    """Batches of which only the rows that are asked for are given; `asked` are those."""

    def __init__(self, batches: Sequence[Sequence[Tensor]]) -> None:
        self.wholes, self.asked = batches, list[int]()

    def __call__(self, rows: list[int]) -> Iterator[list[Tensor]]:
        for number, batch in enumerate(self.wholes):
            self.asked += [number * len(batch[0]) + row for row in rows]
            yield [tensor[rows] for tensor in batch]


def fed_case(
    rank: int, size: int, path: str, named: Any, constants: Any, batches: Any, kind: str, whole: bool
) -> tuple[list[float], Any, list[int], tuple[int, ...]]:
    """Train on what a source gives: the losses, the final state, what was asked, and the rank's rows."""
    trainer = trainer_of(rank, size, path, named, constants, Recipe())
    tensors = [[torch.from_numpy(array) for array in batch] for batch in batches]
    source = Noting(tensors) if kind == "dataset" else Telling(tensors)
    found = trainer.batches(source, whole=whole)
    losses = [trainer.step(next(found)) for _ in tensors]
    state = {name: tensor.numpy() for name, tensor in trainer.state_dict().items()}
    return losses, state if rank == 0 else {}, source.asked, trainer.rows
