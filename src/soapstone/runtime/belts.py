"""Messages and sums between GPUs of one computer that have no link of their own: belts in shared memory.

A belt carries bytes from one rank to another, in the order in which they are put on it. It is a ring in host
memory that both processes map and both GPUs can read and write. The sender's GPU copies a piece into the ring
and writes down how many pieces there are; the receiver's GPU, which waits for that number, copies it out and
writes down, now and then, how many it has taken. The ranks' threads only ask for all this, ahead of time:
they wait for nothing, and no message waits for a thread.

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
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from itertools import zip_longest
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from soapstone.runtime.lanes import CudaHost, CudaLane, Host, Lane, Mark, Refused
from soapstone.runtime.mailbox import LINE, PAGE, Mailbox, Memory

log = logging.getLogger(__name__)

BELTS_BYTES = 128 * 2**20
"""[choice] What may be on all belts of a rank for one use at once. What is more waits until there is room."""

PER_RING = 8
"""[choice] The largest piece of a message or sum is this part of a ring: one is copied out while the next is
copied in ([measured] four slices of an H200, sums of 16 MiB: 2.9 ms in pieces of 4 MiB, 3.1 ms of 2 MiB).

A receiver writes down how many pieces it has taken when they are as many bytes since the last time. A sender
never waits in vain for that: when there is no room for a piece, the pieces from the one that has to be taken
to the last one put are more than 5/8 of the ring, and within any 3/8 of it (these bytes, a piece, and what a
piece left free at the end of the ring) the receiver writes."""

IN_PIECES = 4
LEAST_BYTES = 2**19
"""[choice] A message goes in at least so many pieces, unless they are smaller than this: the first is on its
way alone."""

FEW_BYTES = 2**16
"""[choice] A sum of no more bytes than this is made by everyone."""

LOOK_S = 2e-5
"""[choice] How often the host looks whether a lane has come to a mark."""

PATIENCE_S = 5.0
"""[choice] How long it waits for lanes to end when belts are not needed any more."""

ALIVE_S = 0.1
"""[choice] How often it looks whether the other ranks still live."""

FAR = 2**30
"""Pieces that are as good as endlessly many: what waits for fewer goes on."""


Piece = tuple[int, int]
"""Bytes in memory: their address, and how many there are."""


def first_piece(size_bytes: int, most_bytes: int) -> int:
    """The bytes of a message's first piece, and of all but the last, of so many at most."""
    part = -(-size_bytes // IN_PIECES // PAGE) * PAGE
    return min(size_bytes, most_bytes, max(part, LEAST_BYTES)) or most_bytes


class Use(IntEnum):
    """What a belt is for. Messages, and the two rounds of sums, do not wait for each other."""

    MESSAGES = 0
    GIVEN = 1
    ADDED = 2


class Belt:
    """One end of a belt; `at` is where it lies in the sender's memory, and its ring has so many bytes."""

    def __init__(self, memory: Memory, at: int, ring_bytes: int) -> None:
        self._words = memory.bytes[at : at + 2 * LINE].view(torch.int32)
        self._written, self._taken = memory.address + at, memory.address + at + LINE
        self._ring, self._ring_bytes = memory.address + at + PAGE, ring_bytes
        self._count = 0
        self._end = 0  # bytes so far, with what was left free at the ring's end
        self._said = 0  # of these, what the sender knows to be taken
        self._under_way: deque[tuple[int, int]] = deque()  # number and start of pieces in the ring

    def put(self, piece: Piece, lane: Lane) -> None:
        """Put bytes on the belt."""
        address, size_bytes = piece
        number, start = self._next(size_bytes)
        before = None
        while self._under_way and self._under_way[0][1] < self._end - self._ring_bytes:
            before, _ = self._under_way.popleft()
        self._under_way.append((number, start))
        if before is not None:
            lane.wait(self._taken, before)
        lane.copy(self._ring + start % self._ring_bytes, address, size_bytes)
        lane.write(self._written, number)

    def take(self, piece: Piece, lane: Lane) -> None:
        """Take bytes off the belt."""
        address, size_bytes = piece
        number, start = self._next(size_bytes)
        lane.wait(self._written, number)
        lane.copy(address, self._ring + start % self._ring_bytes, size_bytes)
        if PER_RING * (self._end - self._said) >= self._ring_bytes:
            lane.write(self._taken, number)
            self._said = self._end

    def _next(self, size_bytes: int) -> tuple[int, int]:
        """The number of the next piece, from one, and where it starts in all that ever was on the belt."""
        start = self._end
        free = self._ring_bytes - start % self._ring_bytes
        if size_bytes > free:
            start += free
        self._end = start + -(-size_bytes // LINE) * LINE
        self._count += 1
        return self._count, start

    def let_go(self) -> None:
        """Let whoever waits for this belt go on, with whatever lies on it."""
        far = (self._count + FAR) & 0xFFFFFFFF
        self._words[:: LINE // 4] = far - 2**32 if far >= 2**31 else far


class Belts:
    """One rank's ends of all belts. `host` lets its GPU reach the host's memory, and `lane` makes a lane."""

    def __init__(self, mailbox: Mailbox, host: Host, lane: Callable[[], Lane]) -> None:
        self.mailbox, self.rank, self.ranks = mailbox, mailbox.rank, mailbox.ranks
        others = sorted(self.ranks - {self.rank})
        index = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        ring_bytes = BELTS_BYTES // len(index) // (PER_RING * PAGE) * PER_RING * PAGE
        self.piece_bytes = ring_bytes // PER_RING
        belt_bytes = PAGE + ring_bytes
        size_bytes = belt_bytes * len(index) * len(Use)
        start = mailbox.reserved(size_bytes)
        for memory in mailbox.memories.values():
            host.open(memory.address + start, size_bytes)

        def belts(use: Use, sender: int, receiver: int) -> Belt:
            at = start + belt_bytes * (use * len(index) + index[receiver])
            return Belt(mailbox.memories[sender], at, ring_bytes)

        self._to = {(use, rank): belts(use, self.rank, rank) for use in Use for rank in others}
        self._from = {(use, rank): belts(use, rank, self.rank) for use in Use for rank in others}
        self._give, self._take, self._tell, self._hear, self._aside = (lane() for _ in range(5))
        self._out = {rank: lane() for rank in others}
        self._in = {rank: lane() for rank in others}
        self._adding: Tensor | None = None  # where parts of a sum come to
        self._sent: set[int] = set()  # to whom, since it was last settled
        lanes = (self._give, self._take, self._tell, self._hear, self._aside)
        all_lanes = [*lanes, *self._out.values(), *self._in.values()]
        weakref.finalize(self, _left, all_lanes, list(mailbox.memories.values()), start, host).atexit = False

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor that is made by what was launched before this."""
        tensor, lane = tensor.contiguous(), self._out[peer]
        lane.after(None)
        for piece in self._pieces(tensor, first_piece(tensor.nbytes, self.piece_bytes)):
            self._to[Use.MESSAGES, peer].put(piece, lane)
        lane.hold(tensor)
        self._sent.add(peer)

    def settle(self) -> None:
        """Let what is computed from now on change what was sent."""
        for peer in sorted(self._sent):
            self._out[peer].mark().hold_back()
        self._sent.clear()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> tuple[Tensor, Mark]:
        """Receive a tensor: where it will be, and the mark at which it is there."""
        lane = self._in[peer]
        tensor = lane.room(shape, dtype)
        for piece in self._pieces(tensor, first_piece(tensor.nbytes, self.piece_bytes)):
            self._from[Use.MESSAGES, peer].take(piece, lane)
        return tensor, lane.mark()

    def sum_up(self, flat: Tensor, ranks: Sequence[int], ready: object | None) -> Mark:
        """Add a tensor up over ranks, in place; the mark at which it is done, until which the caller
        holds it. It is made by what was launched before this, or before another mark."""
        ranks = sorted(ranks)
        for lane in (self._give, self._take):
            lane.after(ready)
        if 0 < flat.nbytes <= FEW_BYTES:
            self._summed_by_all(flat, ranks)
        elif flat.nbytes:
            self._summed_in_parts(flat, ranks)
        return self._hear.mark()

    def _summed_by_all(self, flat: Tensor, ranks: Sequence[int]) -> None:
        for piece in self._pieces(flat):
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
            for pieces in zip_longest(*(self._pieces(parts[rank]) for rank in others))
        ]
        given = []
        for each in rounds:
            for rank, piece in each:
                self._to[Use.GIVEN, rank].put(piece, self._give)
            given.append(self._give.mark())
        for part in own.split(self.piece_bytes // flat.itemsize) if own.numel() else ():
            self._add(part, ranks)
            self._tell.after(self._take.mark())
            for rank in others:
                self._to[Use.ADDED, rank].put(self._pieces(part)[0], self._tell)
        for each, mark in zip(rounds, given, strict=True):
            self._hear.after(mark)  # what was given is overwritten
            for rank, piece in each:
                self._from[Use.ADDED, rank].take(piece, self._hear)
        for lane in (self._take, self._tell):
            self._hear.after(lane.mark())

    def _add(self, part: Tensor, ranks: Sequence[int]) -> None:
        """Let a part be the sum of what all ranks have of it, in their order."""
        size_bytes = part.nbytes
        room = self._room(len(ranks) * size_bytes)
        first = room.data_ptr()
        for i, rank in enumerate(ranks):
            piece = (first + i * size_bytes, size_bytes)
            if rank == self.rank:
                self._take.copy(piece[0], part.data_ptr(), size_bytes)
            else:
                self._from[Use.GIVEN, rank].take(piece, self._take)
        given = room.view(part.dtype).view(len(ranks), -1)
        self._take.do(partial(torch.sum, given, 0, dtype=part.dtype, out=part))

    def _room(self, size_bytes: int) -> Tensor:
        """Memory for the parts of a sum, of which one is made after the other."""
        if self._adding is None:
            self._adding = self._take.room((len(self.ranks) * self.piece_bytes,), torch.uint8)
        return self._adding[:size_bytes]

    def told(self, tensor: Tensor, ready: object | None) -> tuple[Tensor, Mark]:
        """A copy of a tensor on the host, and the mark at which it is there."""
        self._aside.after(ready)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._aside.do(partial(staged.copy_, tensor, non_blocking=True))
        self._aside.hold(tensor)
        return staged, self._aside.mark()

    def reach(self, mark: Mark, timeout_s: float) -> None:
        """Wait until a lane has come to a mark; a RuntimeError if it cannot, because a rank is gone, or does
        not in time."""
        start = last = monotonic()
        while not mark.query():
            sleep(LOOK_S)
            now = monotonic()
            if now - last > ALIVE_S:
                last = now
                for rank in sorted(self.ranks - {self.rank}):
                    if not self.mailbox.alive(rank):
                        raise RuntimeError(f"rank {rank} is gone")
            if now - start > timeout_s:
                raise RuntimeError(f"timed out after {timeout_s:g} s")

    def _pieces(self, tensor: Tensor, most: int | None = None) -> Sequence[Piece]:
        """The bytes of a contiguous tensor, in pieces of so many at most."""
        first, size_bytes, most = tensor.data_ptr(), tensor.nbytes, most or self.piece_bytes
        if size_bytes <= most:
            return [(first, size_bytes)] if size_bytes else []
        return [(first + at, min(most, size_bytes - at)) for at in range(0, size_bytes, most)]

    def _others(self, ranks: Sequence[int]) -> list[int]:
        """The others, those after this rank first: so not all give to the same one."""
        place = ranks.index(self.rank)
        return [*ranks[place + 1 :], *ranks[:place]]

    def let_go(self) -> None:
        """Let the GPU go on when others are gone: what it gets is worth nothing."""
        for belt in (*self._to.values(), *self._from.values()):
            belt.let_go()


def _left(lanes: Sequence[Lane], memories: Sequence[Memory], start: int, host: Host) -> None:
    """Let go of memory when the last of it has been copied; if that does not end, the memory stays."""
    marks = [lane.mark() for lane in lanes]
    until = monotonic() + PATIENCE_S
    while not all(mark.query() for mark in marks):
        if monotonic() > until:
            _in_use.extend(memories)
            return
        sleep(LOOK_S)
    for memory in memories:
        host.close(memory.address + start)


_in_use: list[Memory] = []
"""Memory of belts that were given up with something under way."""


def local_belts(mailbox: Mailbox, device: torch.device, store: Any) -> Belts | None:
    """The belts of this rank, if the GPUs of all ranks of its computer can use them; every one must ask."""
    belts: Belts | None = None
    why = "yes"
    try:
        belts = Belts(mailbox, CudaHost(), lambda: CudaLane(device))
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
