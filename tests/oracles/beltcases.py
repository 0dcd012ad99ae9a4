"""Belts between ranks on a CPU, whose lanes are threads, and what ranks do with them in tests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from time import sleep
from typing import Any

import torch

from oracles.mailcases import opened, payload
from soapstone import native
from soapstone.runtime import belts as module
from soapstone.runtime.belts import Belts
from soapstone.runtime.mailbox import Mailbox

TIMEOUT_S = 15.0


class ThreadMark:
    """A place that a thread comes to."""

    def __init__(self) -> None:
        self.event = Event()

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        assert self.event.wait(TIMEOUT_S), "a lane does not go on"

    hold_back = synchronize


class ThreadLane:
    """A lane that is a thread. Computing is done when it has been asked for, so nobody waits for it."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._todo.get()()

    def wait(self, address: int, value: int) -> None:
        def until() -> None:
            while ctypes.c_int32(native.word_load(address) - value).value < 0:
                sleep(1e-5)

        self._todo.put(until)

    def write(self, address: int, value: int) -> None:
        self._todo.put(lambda: native.word_add(address, value - native.word_load(address)))

    def copy(self, to: int, origin: int, size_bytes: int) -> None:
        self._todo.put(lambda: ctypes.memmove(to, origin, size_bytes))

    def do(self, act: Callable[[], object]) -> None:
        self._todo.put(act)

    def after(self, mark: object | None) -> None:
        if mark is not None:
            assert isinstance(mark, ThreadMark)
            self._todo.put(mark.synchronize)

    def mark(self) -> ThreadMark:
        mark = ThreadMark()
        self._todo.put(mark.event.set)
        return mark

    def hold(self, tensor: torch.Tensor) -> None:
        self._todo.put(tensor.numel)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 77, dtype=dtype)


class OwnMemory:
    """Threads reach all memory anyway."""

    def open(self, address: int, size_bytes: int) -> None:
        pass

    def close(self, address: int) -> None:
        pass


def belts_of(mailbox: Mailbox) -> Belts:
    return Belts(mailbox, OwnMemory(), ThreadLane)


def talking(rank: int, size: int, acts: Sequence[Any], seed: int, ring_bytes: int) -> Any:
    """Ask for everything in the order of all, then wait for it in an order of this rank's own; several times,
    so that rings are gone round. `acts` are ("message", sender, receiver, count) or ("sum", ranks, count)."""
    del size
    usual = module.BELTS_BYTES, module.FEW_BYTES
    module.BELTS_BYTES, module.FEW_BYTES = 3 * ring_bytes, 256
    try:
        return _said(rank, acts, seed)
    finally:
        module.BELTS_BYTES, module.FEW_BYTES = usual


def _said(rank: int, acts: Sequence[Any], seed: int) -> Any:
    belts = belts_of(opened(rank))
    found = []
    for again in range(3):
        pending = []
        for number, act in enumerate(acts):
            name = number + 100 * again
            if act[0] == "sum" and rank in act[1]:
                own = payload(rank, name, act[2])
                pending.append((number, own, belts.sum_up(own, act[1], None)))
            elif act[0] == "message" and act[1] == rank:
                belts.send(payload(rank, name, act[3]), act[2])
            elif act[0] == "message" and act[2] == rank:
                pending.append((number, *belts.receive((act[3],), torch.float32, act[1])))
        order = torch.randperm(len(pending), generator=torch.Generator().manual_seed(seed + rank)).tolist()
        for i in order:
            pending[i][2].synchronize()
        found.append({number: got.tolist() for number, got, _ in pending})
    return found


def sent_weights(rank: int, size: int, count: int) -> list[float]:
    """What comes of a tensor that its owner changes as soon as all that was sent is settled."""
    del size
    belts = belts_of(opened(rank))
    own = torch.zeros(count)
    found = []
    for step in range(20):
        if rank == 0:
            belts.send(own, 1)
            belts.settle()
            own += 1.0
        else:
            sleep(0.002 * (step % 3))
            got, mark = belts.receive((count,), torch.float32, 0)
            mark.synchronize()
            assert got.eq(got[0]).all()
            found.append(float(got[0]))
    return found


def left_alone(rank: int, size: int, way: str) -> str:
    """Rank 1 ends its process; the others wait for it. What lanes wait for comes when it is let go."""
    del size
    belts, own = belts_of(opened(rank)), torch.ones(100_000)
    if rank == 1:
        os._exit(1)
    if way == "message":
        _, mark = belts.receive((1000,), torch.float32, 1)
    else:
        mark = belts.sum_up(own, range(3), None)
    try:
        belts.reach(mark, 0.3 if way == "time" else TIMEOUT_S)
    except RuntimeError as error:
        assert not mark.query()
        belts.let_go()
        mark.synchronize()
        return str(error)
    return ""
