"""Messages between the ranks of one computer, through memory that they share.

gloo carries a message between two processes of one computer over a socket: two copies into and out of the
kernel, by threads that take the cores from those that compute. Here each rank has a piece of memory that all
ranks of its computer map. A message is copied into a block of the sender's memory, whose place is entered in
a ring for the receiver; the receiver reads it there when it needs it and gives the block back. Nothing
happens in between: no thread but those that compute has a part in it.

    the sender's memory:  bell | entered, for each rank | ring of (place, tag), for each rank | blocks
    a block:              readers left | the bytes

`bell` is rung by whoever has entered something for its owner, and is what a rank sleeps on. The order of
memory is that of `native.word_*`.

A large sum is made in two rounds: each rank adds up its part of what all have given, in its own block, where
nobody else reads that part; then it takes the others' parts. Ranks may come to wait for their sums in
different orders, so a rank that waits for anything does its part of every sum that it can. All ranks get the
same bits: what they give is added in the order of the ranks.

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
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from soapstone import native
from soapstone.errors import TrainingError
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

SHORT_S = 1e-3
"""[choice] How often it looks for its part of sums while it waits for a reader, who rings no bell."""

IN_PARTS_BYTES = 2**16
"""[choice] Sums of more bytes than this are made in two rounds, but for those of two ranks that have to be
copied into a block."""

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
        self.blocks = -(-(self.rings + 16 * PLACES * ranks) // PAGE) * PAGE
        self.size_bytes = size_bytes

    def entered(self, rank: int) -> int:
        """The address of the word that counts what is entered for a rank."""
        return self.address + LINE * (1 + rank)

    def place(self, rank: int, number: int) -> int:
        """Where, in `words`, the place of a rank's message of this number is; its tag comes after it."""
        return self.rings // 8 + 2 * (PLACES * rank + number % PLACES)

    def content(self, block: int, dtype: torch.dtype, shape: Sequence[int], count: int) -> Tensor:
        """What a block holds, where it lies."""
        start, size_bytes = block + LINE, count * dtype.itemsize
        return self.bytes[start : start + size_bytes].view(dtype).view(tuple(shape))


def _size_bytes(content_bytes: int) -> int:
    """The bytes of a block with so much content."""
    unit = LINE if content_bytes + LINE <= PAGE else PAGE
    return -(-(content_bytes + LINE) // unit) * unit


class Mailbox:
    """One rank's end of the messages to and from the other ranks of its computer. Ranks are numbered as in
    the whole run; `memories` has those of this computer, this rank's own included."""

    def __init__(self, rank: int, memories: Mapping[int, Memory], alive: Callable[[int], bool]) -> None:
        self.rank, self.memories, self.alive = rank, memories, alive
        self.ranks = frozenset(memories)
        self._own = memories[rank]
        self._index = {other: i for i, other in enumerate(sorted(memories))}
        self._end, self._limit = self._own.blocks, self._own.size_bytes
        self._blocks: dict[int, deque[int]] = {}
        self._kept: set[int] = set()
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

    def receive(self, peer: int, tag: int, timeout_s: float) -> Letter:
        """The next tensor that another rank leaves under a tag, once it is waited for."""
        return Letter(self, peer, tag, timeout_s)

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
        native.word_add(own.address + block, len(peers) + keeps)
        for peer in peers:
            if self._posted[peer] >= PLACES:
                self._wait_for_a_place(peer, timeout_s)
            place = own.place(self._index[peer], self._posted[peer])
            own.words[place + 1] = tag
            own.words[place] = block
            self._posted[peer] += 1
            native.word_add(own.entered(self._index[peer]), 1)
            native.word_ring(self.memories[peer].bell)

    def _wait_for_a_place(self, peer: int, timeout_s: float) -> None:
        """Until the oldest message for a rank has been taken out of its ring."""
        own, index = self._own, self._index[peer]
        # Sums go on meanwhile and may take a place, too: which one is next is asked anew each time.
        self.wait(lambda: own.words[own.place(index, self._posted[peer])] == 0, [peer], timeout_s)

    def kept(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor in a block of its own for as long as it lives, from which sums are made without a copy.
        Before it is written to again, `wait_until_read`."""
        block, size_bytes = self.block(count * dtype.itemsize), _size_bytes(count * dtype.itemsize)
        self._blocks[size_bytes].remove(block)
        self._kept.add(block)
        tensor = self._own.content(block, dtype, (count,), count)
        weakref.finalize(tensor, self._let_go, block, size_bytes)
        return tensor

    def _let_go(self, block: int, size_bytes: int) -> None:
        self._kept.remove(block)
        self._blocks[size_bytes].append(block)

    def wait_until_read(self, tensor: Tensor, timeout_s: float) -> None:
        """Until nobody reads a tensor any more that is in a block of its own."""
        word, until = tensor.data_ptr() - LINE, monotonic() + timeout_s
        while (seen := native.word_load(word)) != 0:
            self.go_on()
            if not native.word_wait(word, seen, self._watch_s, SHORT_S) and monotonic() > until:
                raise RuntimeError(f"timed out after {timeout_s:g} s")

    def block_of(self, tensor: Tensor) -> int | None:
        """The block of this rank that a tensor fills, if it was kept in one."""
        place = tensor.data_ptr() - LINE - self._own.address
        return place if place in self._kept else None

    def block(self, size_bytes: int) -> int:
        """A block of this rank's memory for so many bytes: one that everyone has read, or a new one."""
        size_bytes = _size_bytes(size_bytes)
        used = self._blocks.setdefault(size_bytes, deque())
        if used and native.word_load(self._own.address + used[0]) == 0:
            used.rotate(-1)
            return used[-1]
        if self._end + size_bytes > self._limit:
            raise TrainingError(
                "messages between the ranks of this computer take more memory than it has: take a smaller"
                " batch or fewer ranks"
            )
        block, self._end = self._end, self._end + size_bytes
        used.append(block)
        return block

    def reserved(self, size_bytes: int) -> int:
        """Whole pages of every rank's memory that are none of a block's, at the same place in each if all
        ranks ask for the same: where they begin."""
        self._limit = (self._limit - size_bytes) // PAGE * PAGE
        return self._limit

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
            if self._advance():
                continue
            if not native.word_wait(self._own.bell, seen, self._watch_s, LOOK_S):
                gone = [rank for rank in needed if rank != self.rank and not self.alive(rank)]
                self._collect()  # what it left before it ended
                if gone and not is_there():
                    raise RuntimeError(f"rank {gone[0]} is gone")
            if monotonic() > until:
                raise RuntimeError(f"timed out after {timeout_s:g} s")

    def go_on(self) -> None:
        """Do what can be done for sums without waiting."""
        if self.sums:
            self._collect()
            self._advance()

    def _advance(self) -> bool:
        went_on = [each.go_on() for each in list(self.sums)]
        return any(went_on)

    def _collect(self) -> None:
        """Sort what has been entered for this rank."""
        own = self._index[self.rank]
        for rank, memory in self.memories.items():
            if rank == self.rank:
                continue
            entered = native.word_load(memory.entered(own))
            while self._taken[rank] & 0xFFFFFFFF != entered:
                place = memory.place(own, self._taken[rank])
                block, tag = memory.words[place], memory.words[place + 1]
                memory.words[place] = 0
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


class Letter:
    """A message that lies in another rank's memory; it is there after `wait`, and until `give_back`."""

    __slots__ = ("block", "mailbox", "peer", "tag", "timeout_s")

    def __init__(self, mailbox: Mailbox, peer: int, tag: int, timeout_s: float) -> None:
        self.mailbox, self.peer, self.tag, self.timeout_s = mailbox, peer, tag, timeout_s
        self.block = 0

    def wait(self) -> None:
        """Until it is there."""
        box = self.mailbox
        box.wait(lambda: box.has(self.peer, self.tag), [self.peer], self.timeout_s)
        self.block = box.take(self.peer, self.tag)

    def content(self, dtype: torch.dtype, shape: Sequence[int], count: int) -> Tensor:
        """What it says, where it lies."""
        return self.mailbox.memories[self.peer].content(self.block, dtype, shape, count)

    def give_back(self) -> None:
        """Let the sender have its memory again."""
        self.mailbox.give_back(self.peer, self.block)


class Sum:
    """A sum under way; see the module's docstring."""

    def __init__(
        self, mailbox: Mailbox, tensor: Tensor, ranks: Sequence[int], tag: int, timeout_s: float
    ) -> None:
        self.mailbox, self.tensor, self.ranks, self.tag = mailbox, tensor.view(-1), ranks, tag
        self.timeout_s = timeout_s
        self.others = [rank for rank in ranks if rank != mailbox.rank]
        kept = mailbox.block_of(tensor)
        is_large = tensor.numel() * tensor.element_size() > IN_PARTS_BYTES
        self.in_parts = kept is not None or (is_large and len(ranks) > 2)
        self.is_added = False
        self.is_copied = kept is None
        if kept is None:
            self.block = mailbox.leave(tensor, self.others, tag, timeout_s, keeps=self.in_parts)
        else:
            self.block = kept
            mailbox.enter(kept, self.others, tag, timeout_s)
        if self.in_parts:
            mailbox.sums.append(self)
            mailbox.go_on()

    def wait(self) -> None:
        """Until it is there; the tensor then holds it."""
        box = self.mailbox
        if not self.in_parts:
            self._wait(self.tag)
            self._add(self.tensor, slice(None))
            return
        if not self.is_added:
            self._wait(self.tag)
            self.go_on()
        self._wait(self.tag + 1)
        parts = self._parts()
        for rank in self.others:
            block = box.take(rank, self.tag + 1)
            self.tensor[parts[rank]].copy_(self._given(rank, block)[parts[rank]])
            box.give_back(rank, block)
        if self.is_copied:
            own = parts[box.rank]
            self.tensor[own].copy_(self._given(box.rank, self.block)[own])
            box.give_back(box.rank, self.block)

    def go_on(self) -> bool:
        """Add up this rank's part, if all have given theirs and it is not done yet."""
        box = self.mailbox
        if self.is_added or not all(box.has(rank, self.tag) for rank in self.others):
            return False
        box.sums.remove(self)
        self.is_added = True
        own = self._parts()[box.rank]
        self._add(self._given(box.rank, self.block)[own], own)
        box.enter(self.block, self.others, self.tag + 1, self.timeout_s)
        return True

    def _wait(self, tag: int) -> None:
        """Until the others have entered something for a round."""
        box = self.mailbox
        box.wait(lambda: all(box.has(rank, tag) for rank in self.others), self.others, self.timeout_s)

    def _given(self, rank: int, block: int) -> Tensor:
        count = self.tensor.numel()
        return self.mailbox.memories[rank].content(block, self.tensor.dtype, (count,), count)

    def _parts(self) -> dict[int, slice]:
        """The part of the tensor that each rank adds up."""
        count, n = self.tensor.numel(), len(self.ranks)
        return {rank: slice(count * i // n, count * (i + 1) // n) for i, rank in enumerate(self.ranks)}

    def _add(self, total: Tensor, part: slice) -> None:
        """Add to what this rank has of a part what the others have: those before it, then those after it."""
        box = self.mailbox
        blocks = {rank: box.take(rank, self.tag) for rank in self.others}
        given = {rank: self._given(rank, blocks[rank])[part] for rank in self.others}
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
            found.append(str(Path(f"/proc/self/ns/{file}").readlink()))
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
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
