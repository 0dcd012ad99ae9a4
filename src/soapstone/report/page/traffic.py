"""Where the bytes go, and where the time goes.

Bytes of a ring count for every hop, from a device to the next one of the ring. A device's time is

    compute     a task runs on it
    exposed     none does, while bytes to or from it are on their way
    idle        neither
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from soapstone.machine import Machine
from soapstone.plans import Simulation
from soapstone.tasks.task import COMPUTE_KINDS, Task, TaskGraph

MOST_MOVES = 12
"""[choice] How many of the largest moves are listed."""

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class MoveTotal:
    """What moves of one name carry in all: the bytes over links, how often, and how long that takes."""

    name: str
    kind: str
    size_bytes: int
    tasks: int
    longest_s: float


@dataclass(frozen=True)
class DeviceTime:
    """How a device spends the iteration."""

    compute_s: float
    exposed_s: float
    idle_s: float


@dataclass(frozen=True)
class Traffic:
    """Bytes between devices, those that are not zero, as (from, to, bytes); and the largest moves."""

    matrix: tuple[tuple[int, int, int], ...]
    largest: tuple[MoveTotal, ...]
    times: tuple[DeviceTime, ...]


def traffic(simulated: Simulation, machine: Machine) -> Traffic:
    """The traffic of a simulation."""
    graph = simulated.tasks
    matrix: Counter[tuple[int, int]] = Counter()
    for task in graph.tasks:
        if task.kind not in COMPUTE_KINDS:
            matrix[hop(graph, task)] += task.size_bytes
    return Traffic(
        tuple((a, b, size) for (a, b), size in sorted(matrix.items())),
        _largest(graph),
        _times(simulated, machine),
    )


def hop(graph: TaskGraph, task: Task) -> tuple[int, int]:
    """The devices that a communication task moves bytes from and to."""
    *base, number, turn = task.key
    devices = graph.exchanges[tuple(base)].moves[number].devices
    return devices[turn], devices[(turn + 1) % len(devices)]


def _largest(graph: TaskGraph) -> tuple[MoveTotal, ...]:
    together: defaultdict[tuple[tuple[int, ...], str, str], list[Task]] = defaultdict(list)
    for task in graph.tasks:
        if task.kind not in COMPUTE_KINDS:
            name = task.name.split(" to ")[0].rsplit(" ", 1)[0] if task.kind == "transfer" else task.name
            together[task.key[:-2], name, task.kind.value].append(task)
    totals = [
        MoveTotal(name, kind, sum(t.size_bytes for t in tasks), len(tasks), max(t.duration_s for t in tasks))
        for (_, name, kind), tasks in together.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.size_bytes, total.name))[:MOST_MOVES])


def _times(simulated: Simulation, machine: Machine) -> tuple[DeviceTime, ...]:
    graph, timeline = simulated.tasks, simulated.timeline
    place = {device.name: device.index for device in machine.devices}
    busy: list[Spans] = [[] for _ in machine.devices]
    moving: list[Spans] = [[] for _ in machine.devices]
    for task, start_s, end_s in zip(graph.tasks, timeline.start_s, timeline.end_s, strict=True):
        if task.kind in COMPUTE_KINDS:
            busy[place[task.resource]].append((start_s, end_s))
        else:
            for device in hop(graph, task):
                moving[device].append((start_s, end_s))
    found = []
    for own, others in zip(busy, moving, strict=True):
        compute_s = _length(_joined(own))
        either_s = _length(_joined([*own, *others]))
        found.append(DeviceTime(compute_s, either_s - compute_s, timeline.makespan_s - either_s))
    return tuple(found)


def _joined(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The spans without overlaps, in order."""
    begin = end = None
    for start_s, end_s in sorted(spans):
        if begin is None or end is None:
            begin, end = start_s, end_s
        elif start_s <= end:
            end = max(end, end_s)
        else:
            yield begin, end
            begin, end = start_s, end_s
    if begin is not None and end is not None:
        yield begin, end


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
