"""The timeline for the page: rows of resources, tasks as packed arrays, and the critical path.

Times are numbers of 32 bits that count parts of the whole span, and arrays are base64 of little-endian
numbers: a hundred thousand tasks take about two megabytes. Names are kept once each, without the kind
of their task.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soapstone.machine import Machine
from soapstone.plans import Simulation
from soapstone.report.page.actual import Actual
from soapstone.sim.previous import previous
from soapstone.sim.reference import Timeline
from soapstone.tasks.flat import KINDS
from soapstone.tasks.task import TaskGraph

TICKS = 2**32 - 1
"""The span of a timeline in the unit of its packed times."""


@dataclass(frozen=True)
class Packed:
    """Rows of resources, devices first, and the tasks in the order of row and start. `ids` are the task
    order; `names` are lines, and `name` the line of each task."""

    rows: tuple[str, ...]
    device_rows: int
    span_s: float
    count: int
    ids: str
    row: str
    kind: str
    start: str
    end: str
    size_bytes: str
    name: str
    names: str
    critical: str
    actual_start: str | None
    actual_end: str | None


def packed(simulated: Simulation, machine: Machine, actual: Actual | None) -> Packed:
    """The timeline of a simulation, with the times of a real run where there is one."""
    graph, timeline = simulated.tasks, simulated.timeline
    used = {task.resource for task in graph.tasks}
    rows = [device.name for device in machine.devices]
    rows += [link.name for link in machine.links if link.name in used]
    number = {name: i for i, name in enumerate(rows)}
    row = np.array([number[task.resource] for task in graph.tasks], dtype=np.int64)
    start, end = np.asarray(timeline.start_s), np.asarray(timeline.end_s)
    order = np.lexsort((np.arange(len(row)), start, row))
    span_s = max(timeline.makespan_s, 0.0 if actual is None else actual.makespan_s)
    path = np.zeros(len(row), dtype=np.uint8)
    path[list(critical_path(graph, timeline))] = 1
    lines, line = _names(graph)
    return Packed(
        rows=tuple(rows),
        device_rows=len(machine.devices),
        span_s=span_s,
        count=len(row),
        ids=_text(order.astype("<u4")),
        row=_text(row[order].astype("<u2")),
        kind=_text(np.array([KINDS.index(task.kind) for task in graph.tasks], dtype="u1")[order]),
        start=_ticks(start[order], span_s),
        end=_ticks(end[order], span_s),
        size_bytes=_text(np.array([task.size_bytes for task in graph.tasks], dtype="<f8")[order]),
        name=_text(line[order].astype("<u4")),
        names="\n".join(lines),
        critical=_text(path[order]),
        actual_start=None if actual is None else _ticks(np.asarray(actual.start_s)[order], span_s),
        actual_end=None if actual is None else _ticks(np.asarray(actual.end_s)[order], span_s),
    )


def _names(graph: TaskGraph) -> tuple[list[str], NDArray[np.int64]]:
    lines: dict[str, int] = {}
    found = [
        lines.setdefault(task.name.removesuffix(f" {task.kind}").replace("\n", " "), len(lines))
        for task in graph.tasks
    ]
    return list(lines), np.array(found, dtype=np.int64)


def _ticks(seconds: NDArray[np.float64], span_s: float) -> str:
    parts = seconds / span_s if span_s else np.zeros(len(seconds))
    return _text(np.rint(np.clip(parts, 0.0, 1.0) * TICKS).astype("<u4"))


def _text(array: NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def critical_path(graph: TaskGraph, timeline: Timeline) -> tuple[int, ...]:
    """The tasks that the last end follows from, the first one first: each starts the moment the one before
    it ends, for it waited for that one, or for its resource."""
    if not graph.tasks:
        return ()
    before = previous(graph, timeline)
    task = max(range(len(graph.tasks)), key=lambda i: (timeline.end_s[i], i))
    path = [task]
    while timeline.start_s[task] > 0:
        start_s = timeline.start_s[task]
        causes = [i for i in graph.after[task] if timeline.end_s[i] == start_s]
        if not causes and task in before and timeline.end_s[before[task]] == start_s:
            causes = [before[task]]
        if not causes:
            break
        task = max(causes, key=lambda i: (timeline.end_s[i] - timeline.start_s[i], i))
        path.append(task)
    return tuple(reversed(path))
