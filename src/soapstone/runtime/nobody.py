"""A wire with nobody at its other ends: for steps that a rank does without the others."""

# ruff: noqa: ARG002, a wire that leads nowhere asks neither whom nor why

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from soapstone.runtime.wire import Pending, Wire


class NobodysWire(Wire):
    """What is sent is gone, what is received is memory of its size. What is sent is held as by the wire whose
    `backend` it has, and by which it shares memory with its neighbours."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        neighbours: frozenset[int] = frozenset(),
    ) -> None:
        # What `Wire` makes at its start (groups, staging) is for real messages.
        self.rank, self.size, self.device, self.backend = rank, size, device, backend
        self.host = device
        self._neighbours = neighbours
        self.waited_s = 0.0
        self._sent: list[Any] = []
        self.is_staged = backend == "gloo" and device.type == "cuda"

    @property
    def neighbours(self) -> frozenset[int]:
        """As they were given; all, where there is only shared memory."""
        return frozenset(range(self.size)) if self.backend == "memory" else self._neighbours

    @property
    def posts_aside(self) -> bool:
        """Nothing is recorded."""
        return False

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Nobody is in any group."""

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> None:
        """Hold what is sent where its memory is read until `settle`."""
        if peer in self.neighbours:
            return
        sent = tensor.detach().contiguous()
        if self.backend in ("gloo", "nccl") and not self.is_staged:
            self._sent.append(sent)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, what: str) -> Pending:
        """Memory for a message."""
        return self._came(self._room(shape, dtype))

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def brought(self, buffer: Tensor) -> Tensor:
        """What comes is where it is needed."""
        return buffer

    def _came(self, tensor: Tensor) -> Pending:
        return Pending(self, None, tensor, "")

    def sum_up(self, tensor: Tensor, ranks: Sequence[int], what: str, ready: Any = None) -> Pending:
        """A sum comes to where its part was."""
        return self._came(tensor.detach().contiguous())

    def bucket(self, count: int, dtype: torch.dtype, ranks: Sequence[int]) -> None:
        """Any memory is as good."""

    def read_by_all(self, bucket: Tensor, what: str) -> None:
        """Nobody reads it."""

    def gather_up(self, tensor: Tensor, ranks: Sequence[int], what: str) -> Pending:
        """Memory for everyone's tensor."""
        return self._came(self._room((len(ranks), *tensor.shape), tensor.dtype))

    def swap(self, tensor: Tensor, ranks: Sequence[int], count: int, what: str) -> Pending:
        """Memory for what the others have."""
        return self._came(self._room(tensor.shape, tensor.dtype))

    def scatter_sum(self, tensor: Tensor, ranks: Sequence[int], count: int, what: str) -> Pending:
        """Memory for a part of a sum."""
        return self._came(self._room((count,), tensor.dtype))

    def report(self, tensor: Tensor, what: str, ready: Any = None) -> Pending:
        """Numbers for the host."""
        return self._came(tensor)

    def shared(
        self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int, what: str
    ) -> Tensor:
        """The owner's tensor, or memory for it."""
        return self._room(shape, dtype) if tensor is None else tensor

    def settle(self) -> None:
        """Let go of all that was sent."""
        self._sent.clear()
