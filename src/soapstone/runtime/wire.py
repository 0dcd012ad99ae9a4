"""The wire: messages and collectives between ranks, all of them asynchronous.

What torch.distributed asks of its users, and this module sees to: a tensor that is sent is contiguous,
and it and its Work live until the send is done; a receive has room for exactly what comes; process
groups are made by all ranks in the same order, and once (each costs milliseconds, threads and file
descriptors). On GPUs that gloo serves, messages are staged in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soapstone.errors import TrainingError

TAG_LIMIT = 2**31
"""Tags are 32-bit numbers."""


class _Done:
    """The work of a message that need not be sent."""

    def wait(self) -> None:
        """It is done."""

    def is_completed(self) -> bool:
        """It is done."""
        return True


class Pending:
    """A message or collective under way; `wait` gives the tensor that it brings."""

    __slots__ = ("buffer", "device", "work")

    def __init__(self, work: Any, buffer: Tensor, device: torch.device) -> None:
        self.work, self.buffer, self.device = work, buffer, device

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        self.work.wait()
        return self.buffer if self.buffer.device == self.device else self.buffer.to(self.device)

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return bool(self.work.is_completed())


class Wire:
    """What one rank says to the others. `device` is where its tensors live."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.timeout = timedelta(seconds=timeout_s)
        backend = dist.get_backend() if dist.is_initialized() else "none"
        self.host = torch.device("cpu") if backend == "gloo" else device
        self._groups: dict[tuple[int, ...], Any] = {}
        self._sent: list[Pending] = []

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the process groups that will be needed; every rank must ask for the same ones."""
        for ranks in sorted({tuple(sorted(group)) for group in groups}):
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send a tensor, which must not change until `settle`."""
        staged = tensor.detach().to(self.host).contiguous()
        self._sent.append(Pending(dist.isend(staged, peer, tag=tag), staged, self.device))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int) -> Pending:
        """Receive a tensor."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self.host)
        return Pending(dist.irecv(buffer, peer, tag=tag), buffer, self.device)

    def sum_up(self, tensor: Tensor, ranks: Sequence[int]) -> Pending:
        """Add a tensor up over ranks; it is overwritten where it need not be staged."""
        staged = tensor.detach().to(self.host).contiguous()
        group = self._groups[tuple(sorted(ranks))]
        return Pending(dist.all_reduce(staged, group=group, async_op=True), staged, self.device)

    def report(self, tensor: Tensor) -> Pending:
        """Add a tensor up over all ranks, apart from all other sums: it may be asked for at another
        place in the order on each rank."""
        if self.size == 1:
            return Pending(_Done(), tensor, self.device)
        staged = tensor.detach().to(self.host).contiguous()
        return Pending(dist.all_reduce(staged, async_op=True), staged, self.device)

    def shared(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int) -> Tensor:
        """The owner's tensor, on every rank; others give None."""
        if self.size == 1 and tensor is not None:
            return tensor
        if tensor is None:
            buffer = torch.empty(tuple(shape), dtype=dtype, device=self.host)
        else:
            buffer = tensor.to(self.host).contiguous()
        dist.broadcast(buffer, owner)
        return buffer.to(self.device)

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        sent, self._sent = self._sent, []
        for message in sent:
            message.work.wait()

    def agree(self, text: str, what: str) -> None:
        """Refuse to go on unless every rank says the same text; `what` names it."""
        if self.size == 1:
            return
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise TrainingError(f"rank {rank} has another {what} than rank 0: start all with the same")
