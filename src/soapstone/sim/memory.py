"""Peak memory of each device, from the buffers of a task graph and its timeline.

A buffer lives from the start of the first task that makes it until the end of the last that needs it
(`soapstone.tasks.task.Buffer`); weights, their optimizer state and inputs live throughout. One that is
given up when another is made leaves its place to it. Scratch memory inside a task is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from soapstone.sim.reference import Timeline
from soapstone.tasks.task import BufferKind, TaskGraph

OPTIMIZER_STATE = "optimizer state"

STATES_PER_WEIGHT: Mapping[str, int] = MappingProxyType({"sgd": 0, "momentum": 1, "adam": 2})
"""How many numbers an optimizer remembers for each weight."""


@dataclass(frozen=True)
class DeviceMemory:
    """The most that one device holds, when it is first reached, and what it consists of."""

    peak_bytes: int
    at_s: float
    parts: Mapping[str, int]


def peak_memory(
    graph: TaskGraph, timeline: Timeline, device_count: int, states_per_weight: int = 1
) -> tuple[DeviceMemory, ...]:
    """The peak of every device; `states_per_weight` as in `STATES_PER_WEIGHT`."""
    return tuple(_peak(graph, timeline, device, states_per_weight) for device in range(device_count))


def _peak(graph: TaskGraph, timeline: Timeline, device: int, states_per_weight: int) -> DeviceMemory:
    parts: Counter[str] = Counter()
    changes: list[tuple[float, int, str]] = []
    for buffer in graph.buffers:
        if buffer.device != device:
            continue
        if not buffer.made_by:
            parts[buffer.kind] += buffer.size_bytes
            continue
        made_by = [graph.ids[key] for key in buffer.made_by]
        users = made_by + [graph.ids[key] for key in buffer.needed_by]
        start_s, end_s = min(timeline.start_s[t] for t in made_by), max(timeline.end_s[t] for t in users)
        if start_s < end_s:
            changes += [(start_s, buffer.size_bytes, buffer.kind), (end_s, -buffer.size_bytes, buffer.kind)]
    if states_per_weight:
        parts[OPTIMIZER_STATE] = states_per_weight * parts[BufferKind.WEIGHT]
    peak = DeviceMemory(parts.total(), 0.0, filled(parts))
    for time_s, change_bytes, kind in sorted(changes):
        parts[kind] += change_bytes
        if parts.total() > peak.peak_bytes:
            peak = DeviceMemory(parts.total(), time_s, filled(parts))
    return peak


def filled(parts: Mapping[str, int]) -> Mapping[str, int]:
    """The parts that are there, in a fixed order."""
    order = [*map(str, BufferKind), OPTIMIZER_STATE]
    return {kind: parts[kind] for kind in order if parts.get(kind)}
