"""Memory over time: how much each device holds when, and what is there at its peak.

The rule is that of `sim.memory`: a buffer lives from the start of the first task that makes it to the end
of the last that needs it. A curve is thinned to a fixed number of points, each the most of its stretch, so
that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soapstone.machine import Machine
from soapstone.plans import Plan, Simulation
from soapstone.sim.memory import OPTIMIZER_STATE, STATES_PER_WEIGHT
from soapstone.tasks.task import Buffer, BufferKind

POINTS = 240
"""[choice] Stretches of a curve: more than a small chart has pixels for."""

MOST_BUFFERS = 6
"""[choice] How many of the largest buffers at a peak are named."""


@dataclass(frozen=True)
class Held:
    """A buffer that is there at the peak, called after the task that makes it."""

    kind: str
    name: str
    size_bytes: int


@dataclass(frozen=True)
class Occupancy:
    """One device: its curve as the most bytes of each stretch, its peak and what that consists of."""

    capacity_bytes: int
    peak_bytes: int
    at_s: float
    parts: tuple[tuple[str, int], ...]
    largest: tuple[Held, ...]
    curve: tuple[int, ...]


_Lives = list[tuple[float, float, Buffer]]


def occupancy(plan: Plan, simulated: Simulation, machine: Machine) -> tuple[Occupancy, ...]:
    """The memory of every device over the iteration."""
    lasting = [0] * len(machine.devices)
    lives: list[_Lives] = [[] for _ in machine.devices]
    states = STATES_PER_WEIGHT[plan.optimizer]
    timeline, ids = simulated.timeline, simulated.tasks.ids
    for buffer in simulated.tasks.buffers:
        if not buffer.made_by:
            more = states * buffer.size_bytes if buffer.kind is BufferKind.WEIGHT else 0
            lasting[buffer.device] += buffer.size_bytes + more
            continue
        made_by = [ids[key] for key in buffer.made_by]
        users = made_by + [ids[key] for key in buffer.needed_by]
        start_s, end_s = min(timeline.start_s[t] for t in made_by), max(timeline.end_s[t] for t in users)
        if start_s < end_s:
            lives[buffer.device].append((start_s, end_s, buffer))
    return tuple(
        Occupancy(
            device.kind.memory_bytes,
            peak.peak_bytes,
            peak.at_s,
            tuple(peak.parts.items()),
            _largest(simulated, lives[device.index], peak.at_s),
            _curve(lasting[device.index], lives[device.index], timeline.makespan_s),
        )
        for device, peak in zip(machine.devices, simulated.memory, strict=True)
    )


def _largest(simulated: Simulation, lives: _Lives, at_s: float) -> tuple[Held, ...]:
    there = [buffer for start_s, end_s, buffer in lives if start_s <= at_s < end_s]
    there.sort(key=lambda buffer: (-buffer.size_bytes, buffer.made_by))
    tasks, ids = simulated.tasks.tasks, simulated.tasks.ids
    return tuple(
        Held(buffer.kind.value, tasks[ids[buffer.made_by[0]]].name, buffer.size_bytes)
        for buffer in there[:MOST_BUFFERS]
    )


def _curve(lasting: int, lives: Sequence[tuple[float, float, Buffer]], makespan_s: float) -> tuple[int, ...]:
    changes = sorted(
        change
        for start_s, end_s, buffer in lives
        for change in ((start_s, buffer.size_bytes), (end_s, -buffer.size_bytes))
    )
    now, done, points = lasting, 0, list[int]()
    for stretch in range(POINTS):
        until_s = makespan_s * (stretch + 1) / POINTS
        most = now
        while done < len(changes) and (changes[done][0] < until_s or stretch == POINTS - 1):
            now += changes[done][1]
            most = max(most, now)
            done += 1
        points.append(most)
    return tuple(points)


PART_ORDER = (*map(str, BufferKind), OPTIMIZER_STATE)
"""The parts of memory in the order in which they are shown."""
