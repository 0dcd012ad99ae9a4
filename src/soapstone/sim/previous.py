"""What resources did one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.sim.reference import Timeline
from soapstone.tasks.task import TaskGraph


def previous(graph: TaskGraph, timeline: Timeline) -> Mapping[int, int]:
    """For each task but the first of a resource, the one that its resource ran before it."""
    order = sorted(range(len(graph.tasks)), key=lambda i: (timeline.start_s[i], timeline.end_s[i], i))
    last: dict[str, int] = {}
    found: dict[int, int] = {}
    for task in order:
        resource = graph.tasks[task].resource
        if resource in last:
            found[task] = last[resource]
        last[resource] = task
    return found
