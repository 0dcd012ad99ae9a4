"""The simulator's specification: Algorithm 1 of FlexFlow in a few lines.

A global queue ordered by (ready time, task order); a task starts when it is ready and its resource
has finished the task before; the makespan is the largest end. The native core must give the same
times, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from soapstone.tasks.task import TaskGraph


@dataclass(frozen=True)
class Timeline:
    """When every task starts and ends, by its id."""

    start_s: Sequence[float]
    end_s: Sequence[float]
    makespan_s: float


def simulate(graph: TaskGraph) -> Timeline:
    """The timeline of a task graph; a ValueError if tasks wait for each other in a circle."""
    count = len(graph.tasks)
    followers: list[list[int]] = [[] for _ in range(count)]
    waiting = [len(after) for after in graph.after]
    for task, after in enumerate(graph.after):
        for before in after:
            followers[before].append(task)
    start, end, ready = [0.0] * count, [0.0] * count, [0.0] * count
    free = dict.fromkeys(graph.resources, 0.0)
    queue = [(0.0, task) for task in range(count) if not waiting[task]]
    heapify(queue)
    while queue:
        ready_s, task = heappop(queue)
        resource = graph.tasks[task].resource
        start[task] = max(ready_s, free[resource])
        end[task] = free[resource] = start[task] + graph.tasks[task].duration_s
        for follower in followers[task]:
            ready[follower] = max(ready[follower], end[task])
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(queue, (ready[follower], follower))
    if any(waiting):
        raise ValueError("tasks wait for each other in a circle")
    return Timeline(start, end, max(end, default=0.0))
