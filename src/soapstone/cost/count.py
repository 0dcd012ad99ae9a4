"""Counting memory where nothing is computed: tensors that have shapes and no elements (`FakeTensorMode`), and
all memory that they would be given."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA_BYTES = 512
"""torch gives out a GPU's memory in multiples of this."""

_BESIDE = -1


class Count(TorchDispatchMode):
    """All memory that tensors are given while it is on, and when it is taken back."""

    def __init__(self, *, is_cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit_bytes = CUDA_BYTES if is_cuda else 1
        self._changes: list[tuple[int, int]] = []  # (number of a piece of memory, bytes more or less)
        self._numbers: dict[int, int] = {}  # where a piece of memory lies -> its number
        self._made = 0
        self._instead: dict[int, int] = {}  # number of a sum -> that of the memory which it may be added to
        self._is_elsewhere = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what is asked for, and look at what came of it."""
        del types
        found = func(*args, **(kwargs or {}))
        for each in _tensors(found):
            self._see(each)
        if func is torch.ops.aten.add.Tensor and _is_in_backward():
            self._added_up(found, args[0])
        return found

    def know(self, tensors: Iterable[Tensor]) -> int:
        """Take memory for known that was there before; how many bytes of it were not."""
        found = 0
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if memory._cdata not in self._numbers:
                self._numbers[memory._cdata] = 0
                found += memory.nbytes()
        return found

    def beside(self, size_bytes: int) -> None:
        """From now on so much is taken beside what tensors are given, until something else is said."""
        self._changes.append((_BESIDE, size_bytes))

    def elsewhere(self, shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
        """A tensor in memory that is not counted."""
        self._is_elsewhere = True
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=place)
        finally:
            self._is_elsewhere = False

    def highest_bytes(self, without: Iterable[Tensor] = ()) -> int:
        """The most that was taken at any time, without the memory of some tensors."""
        left_out = {self._numbers[tensor.untyped_storage()._cdata] for tensor in without}
        now = beside = highest = 0
        doubted: tuple[int, int] | None = None  # what a sum may be added to, and what is taken if it is not
        for number, size_bytes in self._changes:
            if doubted is not None and (number == _BESIDE or size_bytes > 0):
                highest, doubted = max(highest, doubted[1]), None
            if number == _BESIDE:
                beside = size_bytes
            elif number not in left_out:
                now += size_bytes
            if number in self._instead and size_bytes > 0:
                doubted = self._instead[number], now + beside
            elif doubted is not None and number == doubted[0]:
                doubted = None
            if doubted is None:
                highest = max(highest, now + beside)
        return highest if doubted is None else max(highest, doubted[1])

    def _added_up(self, total: Tensor, first: Any) -> None:
        """A sum of two gradients by autograd, which adds to the first in its place where that is no view and
        nobody else has it, but never where tensors have no elements: then it is taken back right after."""
        number = self._numbers.get(first.untyped_storage()._cdata, 0)
        if number and not first._is_view() and (first.shape, first.dtype) == (total.shape, total.dtype):
            self._instead[self._numbers[total.untyped_storage()._cdata]] = number

    def _see(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        at = memory._cdata
        if at in self._numbers:
            return
        self._made += 1
        size_bytes = 0 if self._is_elsewhere else -(-memory.nbytes() // self._unit_bytes) * self._unit_bytes
        self._numbers[at] = self._made
        self._changes.append((self._made, size_bytes))
        weakref.finalize(memory, self._taken_back, at, size_bytes)

    def _taken_back(self, at: int, size_bytes: int) -> None:
        self._changes.append((self._numbers.pop(at), -size_bytes))


def _is_in_backward() -> bool:
    """Whether autograd is at work."""
    return int(torch._C._current_graph_task_id()) >= 0


def _tensors(found: Any) -> Iterable[Tensor]:
    if isinstance(found, Tensor):
        return (found,)
    if isinstance(found, tuple | list):
        return [each for inner in found for each in _tensors(inner)]
    return ()
