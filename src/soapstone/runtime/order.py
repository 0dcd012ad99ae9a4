"""The order in which all ranks walk the task graph: earliest simulated start first.

One total order for everyone is what makes communication meet: a rank posts its sends, receives and
collectives in this order and waits for nothing but what stands earlier in it, so by induction over the
order no wait can last for ever.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from soapstone.sim.reference import Timeline
from soapstone.tasks.task import TaskGraph


def execution_order(graph: TaskGraph, timeline: Timeline) -> tuple[int, ...]:
    """The tasks' ids, each after all it waits for; among those that could come next, the one with the
    earliest simulated start, then the first in task order. (Starts alone do not say it all: a task of
    no duration starts when its followers do.)"""
    followers: list[list[int]] = [[] for _ in graph.tasks]
    waiting = [len(after) for after in graph.after]
    for task, after in enumerate(graph.after):
        for before in after:
            followers[before].append(task)
    queue = [(timeline.start_s[task], task) for task, count in enumerate(waiting) if not count]
    heapify(queue)
    order: list[int] = []
    while queue:
        _, task = heappop(queue)
        order.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(queue, (timeline.start_s[follower], follower))
    return tuple(order)
