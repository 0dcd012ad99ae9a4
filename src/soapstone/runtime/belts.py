"""Messages and sums between GPUs of one computer that have no link of their own: belts in shared memory.

A belt carries bytes from one rank to another, in the order in which they are put on it. It is a ring in host
memory that both processes map and both GPUs can read and write. The sender's GPU copies a piece into the ring
and writes down how many pieces there are; the receiver's GPU, which waits for that number, copies it out and
writes down how many it has taken. The ranks' threads only ask for all this, ahead of time: they wait for
nothing, and no message waits for a thread.

    a belt:   pieces written | pieces taken | the ring

Both ends work out for themselves where each piece lies, from the sizes of all pieces before it. So both must
ask for the same messages in the same order, as ranks do: there is one order of all (`order`). That order is
also why nothing can wait for ever: a lane waits for nothing but what stands earlier in it, on whichever rank.

A sum of many bytes is made in two rounds: each rank is given its part by all others and adds it up; then it
gives the sum of its part to all. A sum of few bytes is made by everyone, in the order of the ranks. Either
way all ranks get the same bits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from itertools import zip_longest
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from soapstone.runtime.lanes import CudaLane, Lane, Refused, opened
from soapstone.runtime.mailbox import LINE, PAGE, Mailbox, Memory

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
"""[choice] A larger message goes in pieces of this size: the first is copied out while the next is copied
in."""

RING_BYTES = 16 * 2**20
"""[choice] What may be on a belt at once; the next piece waits until there is room."""

FEW_BYTES = 2**16
"""[choice] A sum of no more bytes than this is made by everyone."""

LOOK_S = 2e-5
"""[choice] How often the host looks whether a lane has come to a mark."""

ALIVE_S = 0.1
"""[choice] How often it looks whether the other ranks still live."""

FAR = 2**30
"""Pieces that are as good as endlessly many: what waits for fewer goes on."""


Piece = tuple[int, int]
"""Bytes in memory: their address, and how many there are."""


class Use(IntEnum):
    """What a belt is for. Messages, and the two rounds of sums, do not wait for each other."""

    MESSAGES = 0
    GIVEN = 1
    ADDED = 2


class Belt:
    """One end of a belt; `at` is where it lies in the sender's memory."""

    def __init__(self, memory: Memory, at: int) -> None:
        self._words = memory.bytes[at : at + 2 * LINE].view(torch.int32)
        self._written, self._taken = memory.address + at, memory.address + at + LINE
        self._ring = memory.address + at + PAGE
        self._count = 0
        self._end = 0  # bytes so far, with what was left free at the ring's end
        self._under_way: deque[tuple[int, int]] = deque()  # number and start of pieces in the ring

    def put(self, piece: Piece, lane: Lane) -> None:
        """Put bytes on the belt."""
        address, size_bytes = piece
        number, start = self._next(size_bytes)
        before = None
        while self._under_way and self._under_way[0][1] < self._end - RING_BYTES:
            before, _ = self._under_way.popleft()
        self._under_way.append((number, start))
        if before is not None:
            lane.wait(self._taken, before)
        lane.copy(self._ring + start % RING_BYTES, address, size_bytes)
        lane.write(self._written, number)

    def take(self, piece: Piece, lane: Lane) -> None:
        """Take bytes off the belt."""
        address, size_bytes = piece
        number, start = self._next(size_bytes)
        lane.wait(self._written, number)
        lane.copy(address, self._ring + start % RING_BYTES, size_bytes)
        lane.write(self._taken, number)

    def _next(self, size_bytes: int) -> tuple[int, int]:
        """The number of the next piece, from one, and where it starts in all that ever was on the belt."""
        start = self._end
        if start % RING_BYTES + size_bytes > RING_BYTES:
            start += RING_BYTES - start % RING_BYTES
        self._end = start + -(-size_bytes // LINE) * LINE
        self._count += 1
        return self._count, start

    def let_go(self) -> None:
        """Let whoever waits for this belt go on, with whatever lies on it."""
        far = (self._count + FAR) & 0xFFFFFFFF
        self._words[:: LINE // 4] = far - 2**32 if far >= 2**31 else far


class Belts:
    """One rank's ends of all belts. `opened` lets its GPU reach memory, and `lane` makes one."""

    def __init__(
        self, mailbox: Mailbox, opened: Callable[[int, int], None], lane: Callable[[], Lane]
    ) -> None:
        self.mailbox, self.rank, self.ranks = mailbox, mailbox.rank, mailbox.ranks
        others = sorted(self.ranks - {self.rank})
        index = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        belt_bytes = PAGE + RING_BYTES
        size_bytes = belt_bytes * len(index) * len(Use)
        start = mailbox.reserved(size_bytes)
        for memory in mailbox.memories.values():
            opened(memory.address + start, size_bytes)

        def belts(use: Use, sender: int, receiver: int) -> Belt:
            at = start + belt_bytes * (use * len(index) + index[receiver])
            return Belt(mailbox.memories[sender], at)

        self._to = {(use, rank): belts(use, self.rank, rank) for use in Use for rank in others}
        self._from = {(use, rank): belts(use, rank, self.rank) for use in Use for rank in others}
        self._out, self._give, self._take, self._tell, self._hear, self._aside = (lane() for _ in range(6))
        self._in = {rank: lane() for rank in others}

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor that is made by what was launched before this."""
        tensor = tensor.contiguous()
        self._out.after(None)
        for piece in _pieces(tensor):
            self._to[Use.MESSAGES, peer].put(piece, self._out)
        self._out.hold(tensor)

    def receive(self, room: Tensor, peer: int) -> object:
        """Receive a tensor in memory that is free once what was launched before this is done; the mark at
        which it is there."""
        lane = self._in[peer]
        lane.after(None)
        for piece in _pieces(room):
            self._from[Use.MESSAGES, peer].take(piece, lane)
        return lane.mark()

    def sum_up(self, flat: Tensor, ranks: Sequence[int], ready: object | None) -> object:
        """Add a tensor up over ranks, in place; the mark at which it is done. It is made by what was launched
        before this, or before another mark."""
        ranks = sorted(ranks)
        for lane in (self._give, self._take):
            lane.after(ready)
        if 0 < flat.nbytes <= FEW_BYTES:
            self._summed_by_all(flat, ranks)
        elif flat.nbytes:
            self._summed_in_parts(flat, ranks)
        return self._hear.mark()

    def _summed_by_all(self, flat: Tensor, ranks: Sequence[int]) -> None:
        for piece in _pieces(flat):
            for rank in self._others(ranks):
                self._to[Use.GIVEN, rank].put(piece, self._give)
        self._take.after(self._give.mark())  # what was given is overwritten from here on
        self._add(flat, ranks)
        self._hear.after(self._take.mark())

    def _summed_in_parts(self, flat: Tensor, ranks: Sequence[int]) -> None:
        others = self._others(ranks)
        size = -(-flat.numel() // len(ranks) // LINE) * LINE
        parts = {rank: flat[i * size : (i + 1) * size] for i, rank in enumerate(ranks)}
        own = parts[self.rank]
        rounds = [
            [(rank, piece) for rank, piece in zip(others, pieces, strict=True) if piece is not None]
            for pieces in zip_longest(*(_pieces(parts[rank]) for rank in others))
        ]
        given = []
        for each in rounds:
            for rank, piece in each:
                self._to[Use.GIVEN, rank].put(piece, self._give)
            given.append(self._give.mark())
        for part in own.split(PIECE_BYTES // flat.itemsize) if own.numel() else ():
            self._add(part, ranks)
            self._tell.after(self._take.mark())
            for rank in others:
                self._to[Use.ADDED, rank].put(_pieces(part)[0], self._tell)
        for each, mark in zip(rounds, given, strict=True):
            self._hear.after(mark)  # what was given is overwritten
            for rank, piece in each:
                self._from[Use.ADDED, rank].take(piece, self._hear)
        for lane in (self._take, self._tell):
            self._hear.after(lane.mark())

    def _add(self, part: Tensor, ranks: Sequence[int]) -> None:
        """Let a part be the sum of what all ranks have of it, in their order."""
        room = self._take.room(part, len(ranks))
        first, size_bytes = room.data_ptr(), part.nbytes
        for i, rank in enumerate(ranks):
            piece = (first + i * size_bytes, size_bytes)
            if rank == self.rank:
                self._take.copy(piece[0], part.data_ptr(), size_bytes)
            else:
                self._from[Use.GIVEN, rank].take(piece, self._take)
        self._take.do(partial(torch.sum, room, 0, out=part))

    def told(self, tensor: Tensor, ready: object | None) -> tuple[Tensor, object]:
        """A copy of a tensor on the host, and the mark at which it is there."""
        self._aside.after(ready)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._aside.do(partial(staged.copy_, tensor, non_blocking=True))
        self._aside.hold(tensor)
        return staged, self._aside.mark()

    def reach(self, mark: Any, timeout_s: float) -> None:
        """Wait until a lane has come to a mark; a RuntimeError if it cannot, because a rank is gone, or does
        not in time."""
        start = last = monotonic()
        while not mark.query():
            sleep(LOOK_S)
            now = monotonic()
            if now - last > ALIVE_S:
                last = now
                gone = [
                    rank for rank in sorted(self.ranks) if rank != self.rank and not self.mailbox.alive(rank)
                ]
                if gone:
                    raise RuntimeError(f"rank {gone[0]} is gone")
            if now - start > timeout_s:
                raise RuntimeError(f"timed out after {timeout_s:g} s")

    def _others(self, ranks: Sequence[int]) -> list[int]:
        """The others, those after this rank first: so not all give to the same one."""
        place = ranks.index(self.rank)
        return [*ranks[place + 1 :], *ranks[:place]]

    def let_go(self) -> None:
        """Let the GPU go on when others are gone: what it gets is worth nothing."""
        for belt in (*self._to.values(), *self._from.values()):
            belt.let_go()


def _pieces(tensor: Tensor) -> Sequence[Piece]:
    """The bytes of a contiguous tensor, in pieces."""
    first, size_bytes = tensor.data_ptr(), tensor.nbytes
    if size_bytes <= PIECE_BYTES:
        return [(first, size_bytes)] if size_bytes else []
    return [(first + at, min(PIECE_BYTES, size_bytes - at)) for at in range(0, size_bytes, PIECE_BYTES)]


def local_belts(mailbox: Mailbox, device: torch.device, store: Any) -> Belts | None:
    """The belts of this rank, if the GPUs of all ranks of its computer can use them; every one must ask."""
    belts: Belts | None = None
    why = "yes"
    try:
        belts = Belts(mailbox, opened, lambda: CudaLane(device))
    except (Refused, RuntimeError) as error:
        why = str(error)
    name = f"soapstone/belts/{store.add(f'soapstone/belts/asked/{mailbox.rank}', 1)}"
    store.set(f"{name}/{mailbox.rank}", why)
    said = {rank: store.get(f"{name}/{rank}").decode() for rank in sorted(mailbox.ranks)}
    refused = {rank: each for rank, each in said.items() if each != "yes"}
    if refused:
        log.info("GPUs' messages go through gloo: %s", refused)
        return None
    return belts
