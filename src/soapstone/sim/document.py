"""`tasks.json`: a task graph and its timeline, for anyone to check.

The rule that gives the times is in `soapstone.sim.reference`; ids are the task order, which breaks ties.
"""

from __future__ import annotations

from typing import Any

from soapstone.sim.reference import Timeline
from soapstone.tasks.task import TaskGraph


def tasks_document(graph: TaskGraph, timeline: Timeline) -> dict[str, Any]:
    """The task graph as nested dicts and lists."""
    return {
        "tasks": [
            {
                "id": number,
                "kind": task.kind.value,
                "name": task.name,
                "resource": task.resource,
                "duration_s": task.duration_s,
                "after": list(after),
                "start_s": timeline.start_s[number],
                "end_s": timeline.end_s[number],
                "bytes": task.size_bytes,
            }
            for number, (task, after) in enumerate(zip(graph.tasks, graph.after, strict=True))
        ],
        "makespan_s": timeline.makespan_s,
        "resources": list(graph.resources),
    }
