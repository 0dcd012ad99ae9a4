"""Gradients that a device adds up by itself, within a call of autograd."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import BufferKind, TaskGraph

ADDED_BYTES_PER_BYTE = 3.0
"""[choice] Adding one gradient to another reads both and writes one."""


def adding_s(
    tasks: TaskGraph, timeline: Timeline, machine: Machine, costs: AnalyticCosts
) -> NDArray[np.float64]:
    """For each backward task what it takes to add its gradients to what its device has already: a weight that
    several cells read, or several micro-batches, has a gradient from each, and so has a value that several
    shards of a device read."""
    found = np.zeros(len(tasks.tasks))
    share = ADDED_BYTES_PER_BYTE / costs.update_bytes_per_byte
    makers: dict[tuple[int, int, object], list[int]] = {}
    for number, buffer in enumerate(tasks.buffers):
        if buffer.kind in (BufferKind.WEIGHT_GRADIENT, BufferKind.GRADIENT):
            same = (buffer.value, buffer.needed_by) if buffer.value else number
            own = makers.setdefault((buffer.device, buffer.size_bytes, same), [])
            own += [tasks.ids[key] for key in buffer.made_by]
    for (device, size_bytes, _), numbers in makers.items():
        seconds = share * costs.update_s(size_bytes, machine.devices[device].kind)
        found[sorted(numbers, key=lambda n: timeline.start_s[n])[1:]] += seconds
    return found
