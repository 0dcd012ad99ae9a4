"""The order in which all ranks walk the task graph: earliest simulated start first, and the forward pass
before all else.

A message has its turn as soon as what it brings is made, not when its link is free in the simulation: to post
it takes a moment of the rank that computes, and if it waited for a busy link it would wait for the next
task too ([measured] a random strategy of LeNet on four CPU ranks: 2.4 ms of 23 at one message).

A loss that is a sum lets each of its terms start its way back as soon as it is there, amid the forward pass.
Autograd takes back in one call what no forward task interrupts, and gradients of weights that are used often
are then added up within it, which is faster ([measured] an unrolled RNN of 20 steps on one device: a sixth).
So times are simulated anew, with each device's way back after its forward pass. By the times of the task
graph the terms would go back in the order in which they were made; autograd takes first what was made last,
and messages, which go in the order of all, would be held back until the first term ([measured] an RNN with
its layers on three slices of a GPU: 31 of 114 ms). In a pipeline forward tasks wait for backward ones, and
the simulated order stays.

One total order for everyone is what makes communication meet: a rank posts its sends, receives and
collectives in this order and waits for nothing but what stands earlier in it, so by induction over the
order no wait can last for ever.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush

from soapstone.sim.reference import Timeline, simulate
from soapstone.tasks.placed import FORWARD
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph


def execution_order(graph: TaskGraph, timeline: Timeline) -> tuple[int, ...]:
    """The tasks' ids, each after all it waits for; among those that could come next, the one whose turn is
    earliest by the simulated timeline, messages before tasks that compute, then the first in task order.
    (Turns alone do not say it all: a task of no duration starts when its followers do.)"""
    followers: list[list[int]] = [[] for _ in graph.tasks]
    waiting = [len(after) for after in graph.after]
    for task, after in enumerate(graph.after):
        for before in after:
            followers[before].append(task)
    is_later = _is_later(graph)
    timeline = _forward_first(graph, timeline, is_later)

    def turn(task: int) -> tuple[bool, float, bool, int]:
        if graph.tasks[task].kind in COMPUTE_KINDS:
            return is_later[task], timeline.start_s[task], True, task
        made_s = max((timeline.end_s[before] for before in graph.after[task]), default=0.0)
        return is_later[task], made_s, False, task

    queue = [turn(task) for task, n in enumerate(waiting) if not n]
    heapify(queue)
    order: list[int] = []
    while queue:
        task = heappop(queue)[-1]
        order.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(queue, turn(follower))
    return tuple(order)


def _is_later(graph: TaskGraph) -> list[bool]:
    """Which tasks come after the forward pass, unless the forward pass itself waits for such tasks."""
    found = [task.key[0] != FORWARD for task in graph.tasks]
    if any(found[before] and not found[task] for task, after in enumerate(graph.after) for before in after):
        return [False] * len(found)
    return found


def _forward_first(graph: TaskGraph, timeline: Timeline, is_later: list[bool]) -> Timeline:
    """The timeline in which no device computes anything of the way back before its forward pass is over."""
    computing = [number for number, task in enumerate(graph.tasks) if task.kind in COMPUTE_KINDS]
    last: dict[str, int] = {}  # resource -> the forward task that it ends with
    for number in computing:
        resource = graph.tasks[number].resource
        if not is_later[number]:
            last[resource] = max(last.get(resource, number), number, key=timeline.end_s.__getitem__)
    back = {
        number: last[graph.tasks[number].resource]
        for number in computing
        if is_later[number] and graph.tasks[number].resource in last
    }
    end_s = timeline.end_s
    if all(
        any(end_s[each] >= end_s[before] for each in graph.after[number]) for number, before in back.items()
    ):
        return timeline
    tasks = list(graph.tasks)
    for number, before in back.items():
        tasks[number] = replace(tasks[number], after=(*tasks[number].after, tasks[before].key))
    return simulate(replace(graph, tasks=tuple(tasks)))
