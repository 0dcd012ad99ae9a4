"""Gradients that a device adds up by itself, within a call of autograd.

On a CPU it is measured: both gradients were just made, so that adding them has little of an update's time,
whose weights come from memory ([measured] 2 MiB on an Arm core: 0.16 ms, where three fifths of an update in a
step are 0.42). On a GPU, which has to get both from memory, it is that part of an update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.undisturbed import undisturbed
from soapstone.machine import Machine
from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import BufferKind, TaskGraph, TaskKind

ADDED_BYTES_PER_BYTE = 3.0
"""[choice] Adding one gradient to another reads both and writes one."""

SIZES = 2**12, 2**16, 2**19, 2**21, 2**23, 2**25
"""[choice] Bytes of the gradients that are added up to see how long it takes."""

ROUNDS = 9
ROUND_BYTES = 2**24
MOST_PER_ROUND = 64
"""[choice] How often that is timed, and so many bytes each time, or so many gradients."""


@dataclass(frozen=True)
class Adding:
    """What it takes to add gradients of some sizes to others, if that was measured."""

    size_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def of(self, size_bytes: int) -> float:
        """What it takes for one of this size; beyond the largest as long for each byte."""
        most = self.size_bytes[-1]
        if size_bytes > most:
            return self.seconds[-1] * size_bytes / most
        return float(np.interp(size_bytes, self.size_bytes, self.seconds))


def measured_adding(wire: Wire, clock: Callable[[], float]) -> Adding:
    """What it takes on CPUs by a clock while all ranks are at it; the same on every rank."""
    if wire.device.type != "cpu":
        return Adding()
    own = [_adding_s(wire, clock, size_bytes) for size_bytes in SIZES]
    told = wire.told_by_all(" ".join(map(str, own)), "adding up")
    columns = zip(*(map(float, each.split()) for each in told), strict=True)
    return Adding(SIZES, tuple(float(f"{fmean(column):.3g}") for column in columns))


def _adding_s(wire: Wire, clock: Callable[[], float], size_bytes: int) -> float:
    total, more = torch.zeros(size_bytes // 4), torch.ones(size_bytes // 4)
    count = max(1, min(MOST_PER_ROUND, ROUND_BYTES // size_bytes))
    found = []
    wire.meet("adding up")
    for _ in range(ROUNDS):
        start = clock()
        for _ in range(count):
            total.add_(more)
        found.append((clock() - start) / count)
    return undisturbed(found)


def adding_s(
    tasks: TaskGraph,
    timeline: Timeline,
    machine: Machine,
    costs: AnalyticCosts,
    measured: Adding,
) -> NDArray[np.float64]:
    """For each backward task what it takes to add its gradients to what its device has already: a weight that
    several cells read, or several micro-batches, has a gradient from each, and so has a value that several
    shards of a device read. What comes in messages is put together, which is none of this (`ends`)."""
    found = np.zeros(len(tasks.tasks))
    share = ADDED_BYTES_PER_BYTE / costs.update_bytes_per_byte
    makers: dict[tuple[int, int, object], list[int]] = {}
    for number, buffer in enumerate(tasks.buffers):
        if buffer.kind in (BufferKind.WEIGHT_GRADIENT, BufferKind.GRADIENT):
            same = (buffer.value, buffer.needed_by) if buffer.value else number
            own = makers.setdefault((buffer.device, buffer.size_bytes, same), [])
            made = [tasks.ids[key] for key in buffer.made_by]
            own += [each for each in made if tasks.tasks[each].kind is TaskKind.BACKWARD]
    for (device, size_bytes, _), numbers in makers.items():
        if measured.size_bytes:
            seconds = measured.of(size_bytes)
        else:
            seconds = share * costs.update_s(size_bytes, machine.devices[device].kind)
        found[sorted(numbers, key=lambda n: timeline.start_s[n])[1:]] += seconds
    return found
