"""Messages between the ranks of one computer, through memory that they share.

gloo carries a message between two processes of one computer over a socket: two copies into and out of the
kernel, by threads that take the cores from those that compute. Here each rank has a piece of memory that all
ranks of its computer map. A message is copied into a block of the sender's memory, whose place is entered in
a ring for the receiver; the receiver copies it out when it needs it and gives the block free. Nothing happens
in between: no thread but those that compute has a part in it.

    the sender's memory:  bell | entered, for each rank | ring of places, for each rank | blocks
    a block:              readers left | tag | the bytes

`bell` is rung by whoever has entered something for its owner, and is what a rank sleeps on. The order of
memory is that of `native.word_add` and `native.word_load`.

A sum of a large tensor over more than two ranks is made in two rounds: each rank adds up its part of what all
have given, then takes the others' parts. Ranks may come to wait for their sums in different orders, so a rank
that waits for anything does its part of every sum that it can. All ranks get the same bits: parts are added
in the order of the ranks.

The memory has no name: it is a file descriptor that the others open through its owner's process, so nothing
is left of it when the ranks end, however they do.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from soapstone import native
from soapstone.machine.cores import usable_cores

LINE = 64
"""Bytes of a cache line: words that different ranks write to are this far apart."""

PLACES = 2**15
"""[choice] The messages that may be on their way from one rank to another; the next waits."""

PAGE = 4096
WATCH_S = 5e-5
"""[choice] How long a rank watches for a message before it sleeps, where it has a core for itself: about
what falling asleep and waking up take."""

LOOK_S = 0.1
"""[choice] How often a sleeping rank looks whether those it waits for still live."""

IN_PARTS_BYTES = 2**16
"""[choice] Sums of more than two ranks and more bytes than this are made in two rounds."""

_OF_SUMS = 1 << 62
"""Tags of sums have this bit, so that they are none of a message's."""


class Memory:
    """What one rank has for the others, as each of them maps it."""

    def __init__(self, descriptor: int, size_bytes: int, ranks: int) -> None:
        self.mapped = mmap.mmap(descriptor, size_bytes)
        self.bytes = torch.frombuffer(self.mapped, dtype=torch.uint8)
        self.words = memoryview(self.mapped).cast("q")
        self.address = self.bytes.data_ptr()
        self.bell = self.address
        self.rings = LINE * (1 + ranks)
        self.blocks = -(-(self.rings + 8 * PLACES * ranks) // PAGE) * PAGE
        self.size_bytes = size_bytes

    def entered(self, rank: int) -> int:
        """The address of the word that counts what is entered for a rank."""
        return self.address + LINE * (1 + rank)

    def place(self, rank: int, number: int) -> int:
        """Where, in `words`, the place of a rank's message of this number is."""
        return self.rings // 8 + PLACES * rank + number % PLACES

    def content(self, block: int, dtype: torch.dtype, shape: Sequence[int], count: int) -> Tensor:
        """What a block holds, where it lies."""
        start, size_bytes = block + LINE, count * dtype.itemsize
        return self.bytes[start : start + size_bytes].view(dtype).view(tuple(shape))


class Mailbox:
    """One rank's end of the messages to and from the other ranks of its computer. Ranks are numbered as in
    the whole run; `memories` has those of this computer, this rank's own included."""

    def __init__(self, rank: int, memories: Mapping[int, Memory], alive: Callable[[int], bool]) -> None:
        self.rank, self.memories, self.alive = rank, memories, alive
        self.ranks = frozenset(memories)
        self._own = memories[rank]
        self._index = {other: i for i, other in enumerate(sorted(memories))}
        self._end = self._own.blocks
        self._blocks: dict[int, deque[int]] = {}
        self._posted = dict.fromkeys(memories, 0)
        self._taken = dict.fromkeys(memories, 0)
        self._arrived: dict[tuple[int, int], deque[int]] = {}
        self._summed: dict[int, int] = {}
        self.sums: list[Sum] = []
        self._watch_s = WATCH_S if len(memories) <= usable_cores() else 0.0

    @property
    def held_bytes(self) -> int:
        """The memory that blocks of this rank take."""
        return self._end - self._own.blocks

    # -- messages -----------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        """Leave a tensor for another rank."""
        self.leave(tensor, [peer], tag, timeout_s)

    def receive(self, into: Tensor, peer: int, tag: int, timeout_s: float) -> Arrival:
        """Take the next tensor that another rank leaves under a tag, once it is waited for."""
        return Arrival(self, into, peer, tag, timeout_s)

    def sum_up(self, tensor: Tensor, ranks: Sequence[int], channel: int, timeout_s: float) -> Sum:
        """Add a tensor up over ranks, in place, once it is waited for. A channel is for the same ranks
        always, which ask for its sums in the same order."""
        number = self._summed[channel] = self._summed.get(channel, -1) + 1
        return Sum(self, tensor, sorted(ranks), _OF_SUMS | channel << 40 | number << 1, timeout_s)

    def leave(
        self, tensor: Tensor, peers: Sequence[int], tag: int, timeout_s: float, *, keeps: bool = False
    ) -> int:
        """Copy a tensor into a block of its own, and tell those for whom it is; the block. One that this
        rank keeps is not used again before it has given it back too."""
        block = self.block(tensor.numel() * tensor.element_size())
        self._own.content(block, tensor.dtype, tensor.shape, tensor.numel()).copy_(tensor)
        self.enter(block, peers, tag, timeout_s, keeps=keeps)
        return block

    def enter(
        self, block: int, peers: Sequence[int], tag: int, timeout_s: float, *, keeps: bool = False
    ) -> None:
        """Tell others of a block that is theirs to read."""
        own = self._own
        own.words[block // 8 + 1] = tag
        native.word_add(own.address + block, len(peers) + keeps)
        for peer in peers:
            if self._posted[peer] >= PLACES:
                self._wait_for_a_place(peer, timeout_s)
            own.words[own.place(self._index[peer], self._posted[peer])] = block
            self._posted[peer] += 1
            native.word_add(own.entered(self._index[peer]), 1)
            native.word_add(self.memories[peer].bell, 1)

    def _wait_for_a_place(self, peer: int, timeout_s: float) -> None:
        """Until the oldest message for a rank has been taken out of its ring."""
        number = self._posted[peer] - PLACES
        own = self._own
        place = own.place(self._index[peer], number)
        self.wait(lambda: own.words[place] == 0, [peer], timeout_s)

    def block(self, size_bytes: int) -> int:
        """A block of this rank's memory for so many bytes: one that everyone has read, or a new one."""
        size_bytes = -(-(size_bytes + LINE) // LINE) * LINE
        if size_bytes > PAGE:
            size_bytes = -(-size_bytes // PAGE) * PAGE
        used = self._blocks.setdefault(size_bytes, deque())
        if used and native.word_load(self._own.address + used[0]) == 0:
            used.rotate(-1)
            return used[-1]
        if self._end + size_bytes > self._own.size_bytes:
            raise RuntimeError("no memory is left for messages between the ranks of this computer")
        block, self._end = self._end, self._end + size_bytes
        used.append(block)
        return block

    # -- waiting ------------------------------------------------------------------------------------

    def wait(self, is_there: Callable[[], bool], needed: Sequence[int], timeout_s: float) -> None:
        """Until something is there that others bring, `needed` above all; a RuntimeError if it cannot come
        any more or does not come in time."""
        until = monotonic() + timeout_s
        while True:
            seen = native.word_load(self._own.bell)
            self._collect()
            if is_there():
                return
            if any(each.go_on() for each in list(self.sums)):
                continue
            if not native.word_wait(self._own.bell, seen, self._watch_s, LOOK_S):
                gone = [rank for rank in needed if rank != self.rank and not self.alive(rank)]
                self._collect()
                if gone and not is_there():
                    raise RuntimeError(f"rank {gone[0]} is gone")
                if monotonic() > until:
                    raise RuntimeError(f"timed out after {timeout_s:g} s")

    def _collect(self) -> None:
        """Sort what has been entered for this rank."""
        own = self._index[self.rank]
        for rank, memory in self.memories.items():
            if rank == self.rank:
                continue
            entered = native.word_load(memory.entered(own))
            while self._taken[rank] & 0xFFFFFFFF != entered:
                place = memory.place(own, self._taken[rank])
                block = memory.words[place]
                memory.words[place] = 0
                tag = memory.words[block // 8 + 1]
                self._arrived.setdefault((rank, tag), deque()).append(block)
                self._taken[rank] += 1

    def has(self, peer: int, tag: int) -> bool:
        """Whether something of a rank with a tag is there to be taken."""
        return bool(self._arrived.get((peer, tag)))

    def take(self, peer: int, tag: int) -> int:
        """The block of the oldest message of a rank with a tag."""
        blocks = self._arrived[peer, tag]
        block = blocks.popleft()
        if not blocks:
            del self._arrived[peer, tag]
        return block

    def give_back(self, peer: int, block: int) -> None:
        """Say that a block has been read."""
        native.word_add(self.memories[peer].address + block, -1)


class Arrival:
    """A message that is taken when it is waited for."""

    __slots__ = ("into", "mailbox", "peer", "tag", "timeout_s")

    def __init__(self, mailbox: Mailbox, into: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        self.mailbox, self.into, self.peer, self.tag = mailbox, into, peer, tag
        self.timeout_s = timeout_s

    def wait(self) -> None:
        """Until it is there; it is copied to where it belongs."""
        box = self.mailbox
        box.wait(lambda: box.has(self.peer, self.tag), [self.peer], self.timeout_s)
        block = box.take(self.peer, self.tag)
        memory = box.memories[self.peer]
        self.into.copy_(memory.content(block, self.into.dtype, self.into.shape, self.into.numel()))
        box.give_back(self.peer, block)


class Sum:
    """A sum under way; see the module's docstring."""

    def __init__(
        self, mailbox: Mailbox, tensor: Tensor, ranks: Sequence[int], tag: int, timeout_s: float
    ) -> None:
        self.mailbox, self.tensor, self.ranks, self.tag = mailbox, tensor, ranks, tag
        self.timeout_s = timeout_s
        self.others = [rank for rank in ranks if rank != mailbox.rank]
        self.in_parts = len(ranks) > 2 and tensor.numel() * tensor.element_size() > IN_PARTS_BYTES
        self.own_block = mailbox.leave(tensor, self.others, tag, timeout_s, keeps=self.in_parts)
        self.sum_block: int | None = None
        if self.in_parts:
            mailbox.sums.append(self)

    def wait(self) -> None:
        """Until it is there; the tensor then holds it."""
        box = self.mailbox
        if not self.in_parts:
            self._wait(self.tag)
            self._add_all()
            return
        self._wait(self.tag)
        self.go_on()
        self._wait(self.tag + 1)
        assert self.sum_block is not None
        blocks = {rank: box.take(rank, self.tag + 1) for rank in self.others} | {box.rank: self.sum_block}
        for rank, place in self._parts().items():
            part = self.tensor.view(-1)[place]
            part.copy_(box.memories[rank].content(blocks[rank], part.dtype, part.shape, part.numel()))
            box.give_back(rank, blocks[rank])

    def go_on(self) -> bool:
        """Add up this rank's part, if all have given theirs and it is not done yet."""
        box = self.mailbox
        if self.sum_block is not None or not all(box.has(rank, self.tag) for rank in self.others):
            return False
        box.sums.remove(self)
        part = self._parts()[box.rank]
        blocks = {rank: box.take(rank, self.tag) for rank in self.others} | {box.rank: self.own_block}
        given = [self._given(rank, blocks[rank])[part] for rank in self.ranks]
        self.sum_block = box.block(given[0].numel() * given[0].element_size())
        own = box.memories[box.rank]
        total = own.content(self.sum_block, given[0].dtype, given[0].shape, given[0].numel())
        torch.add(given[0], given[1], out=total)
        for other in given[2:]:
            total.add_(other)
        for rank in self.ranks:
            box.give_back(rank, blocks[rank])
        box.enter(self.sum_block, self.others, self.tag + 1, self.timeout_s, keeps=True)
        return True

    def _wait(self, tag: int) -> None:
        """Until the others' of a round are there; the first round may be over already."""
        box = self.mailbox
        if tag == self.tag and self.sum_block is not None:
            return
        box.wait(lambda: all(box.has(rank, tag) for rank in self.others), self.others, self.timeout_s)

    def _given(self, rank: int, block: int) -> Tensor:
        count = self.tensor.numel()
        return self.mailbox.memories[rank].content(block, self.tensor.dtype, (count,), count)

    def _parts(self) -> dict[int, slice]:
        """The part of the flat tensor that each rank adds up."""
        count, n = self.tensor.numel(), len(self.ranks)
        return {rank: slice(count * i // n, count * (i + 1) // n) for i, rank in enumerate(self.ranks)}

    def _add_all(self) -> None:
        """Add up all of it: what comes before this rank's, this rank's, and the rest, in that order."""
        box, total = self.mailbox, self.tensor.view(-1)
        blocks = {rank: box.take(rank, self.tag) for rank in self.others}
        given = {rank: self._given(rank, blocks[rank]) for rank in self.others}
        before = [given[rank] for rank in self.others if rank < box.rank]
        if len(before) > 1:
            first = before[0] + before[1]
            for each in before[2:]:
                first.add_(each)
            before = [first]
        for each in [*before, *(given[rank] for rank in self.others if rank > box.rank)]:
            total.add_(each)
        for rank in self.others:
            box.give_back(rank, blocks[rank])


# -- finding each other -----------------------------------------------------------------------------


def local_mailbox(rank: int, store: Any) -> Mailbox | None:
    """The mailbox of this rank, if it shares a computer with others and all of them can map each other's
    memory; every rank must ask. Which ranks those are is torchrun's to say."""
    size, local = (int(os.environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    is_one = size > 1 and 0 <= local < size and hasattr(os, "memfd_create")
    name = f"soapstone/mailbox/{store.add(f'soapstone/mailbox/asked/{rank}', 1)}"
    own: tuple[int, int] | None = None
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if is_one else 0
    if is_one:
        with suppress(OSError):
            descriptor = os.memfd_create("soapstone")
            os.ftruncate(descriptor, size_bytes)
            own = (os.getpid(), descriptor)
    store.set(f"{name}/of/{rank}", json.dumps([_computer(), own, size_bytes]))
    if not is_one:
        return None
    ranks = range(rank - local, rank - local + size)
    said = {other: json.loads(store.get(f"{name}/of/{other}")) for other in ranks}
    memories, processes = _mapped(said, size)
    store.set(f"{name}/mapped/{rank}", "yes" if len(processes) == size else "no")
    everyone = [store.get(f"{name}/mapped/{other}") == b"yes" for other in ranks]
    if own is not None:
        os.close(own[1])
    if not all(everyone):
        _close(list(processes.values()))
        return None
    found = Mailbox(rank, memories, lambda other: not _is_over(processes[other]))
    weakref.finalize(found, _close, list(processes.values()))
    return found


def _computer() -> list[str]:
    """What tells one computer, or one container, from another."""
    found = []
    for file in ("pid", "net", "user"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/ns/{file}"))
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        found.append(boot.read().strip())
    return found


def _mapped(said: Mapping[int, Any], ranks: int) -> tuple[dict[int, Memory], dict[int, int]]:
    """The memories of the ranks that can be mapped, and descriptors of their processes."""
    memories: dict[int, Memory] = {}
    processes: dict[int, int] = {}
    here = _computer()
    for other, (computer, where, size_bytes) in said.items():
        if where is None or computer != here:
            continue
        with suppress(OSError, ValueError):
            descriptor = os.open(f"/proc/{where[0]}/fd/{where[1]}", os.O_RDWR)
            memories[other] = Memory(descriptor, size_bytes, ranks)
            os.close(descriptor)
            processes[other] = os.pidfd_open(where[0])
    return memories, processes


def _is_over(process: int) -> bool:
    """Whether a process has ended: its descriptor can be read then."""
    return bool(select.select([process], [], [], 0)[0])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
