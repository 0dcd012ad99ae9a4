"""Traces: a timeline as Chrome's trace events, which Perfetto and chrome://tracing show.

Devices are one group of rows and links another, a row for each that has anything to do. The form is
the "Trace Event Format" with complete events (`"ph": "X"`), in microseconds.
"""

from __future__ import annotations

from typing import Any

from soapstone.machine import Machine
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import TaskGraph

DEVICES, LINKS = 1, 2
"""Process ids: viewers group rows by process."""

MICROSECONDS = 1e6


def trace_document(graph: TaskGraph, timeline: Timeline, machine: Machine, title: str) -> dict[str, Any]:
    """The trace of a simulated iteration."""
    used = {task.resource for task in graph.tasks}
    links = [link.name for link in machine.links if link.name in used]
    rows = {device.name: (DEVICES, device.index) for device in machine.devices}
    rows |= {name: (LINKS, number) for number, name in enumerate(links)}
    labels = {
        device.name: f"{device.index}: {device.name} ({device.kind.name})" for device in machine.devices
    }
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "machine": machine.name, "makespan_s": timeline.makespan_s},
        "traceEvents": [
            *_named("process", DEVICES, 0, f"devices of {machine.name}"),
            *_named("process", LINKS, 0, f"links of {machine.name}"),
            *(
                event
                for name, row in rows.items()
                for event in _named("thread", *row, labels.get(name, name))
            ),
            *_events(graph, timeline, rows),
        ],
    }


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """The name of a process or thread, and its place among the others."""
    place = process if what == "process" else thread
    return [
        {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}},
        {
            "ph": "M",
            "name": f"{what}_sort_index",
            "pid": process,
            "tid": thread,
            "args": {"sort_index": place},
        },
    ]


def _events(graph: TaskGraph, timeline: Timeline, rows: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """An event for each task, in the order of their starts, as viewers want them."""
    order = sorted(range(len(graph.tasks)), key=lambda number: (timeline.start_s[number], number))
    events = []
    for number in order:
        task = graph.tasks[number]
        process, thread = rows[task.resource]
        args: dict[str, Any] = {"id": number}
        if task.size_bytes:
            args["bytes"] = task.size_bytes
        events.append(
            {
                "ph": "X",
                "name": task.name,
                "cat": task.kind.value,
                "pid": process,
                "tid": thread,
                "ts": timeline.start_s[number] * MICROSECONDS,
                "dur": task.duration_s * MICROSECONDS,
                "args": args,
            }
        )
    return events
