"""What a step of a pipeline takes where steps follow each other without draining (PipeDream-2BW).

With two versions of the weights (Narayanan et al. 2021) the gradient of a step is taken at the weights that
the update two steps before left. So several steps are one task graph, with

    turns     going on from one step to the next: the forward task of a shard waits for the backward task of
              the same shard as many micro-batches before as may be in flight, in whichever step that is
    updates   the forward task of a block waits for those of its weights two steps before, and for no other

and Algorithm 1 gives its times. A step takes what the makespan grows by for each further step, once the
pipeline is full; never less than the busiest resource has to do in one.

This is what the schedule allows, not what `runtime` does: it ends a step before it begins the next, whatever
the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from soapstone import native
from soapstone.graph import Role
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.placed import UPDATE, placed_block
from soapstone.tasks.task import Key, TaskGraph

FILLING, COUNTED = 4, 4
"""[choice] Steps until the pipeline is taken to be full, and steps after them whose mean counts."""

VERSIONS = 2
"""[paper] PipeDream-2BW: the weights of a step are those of so many updates before."""

_Edge = tuple[Key, Key, int]
"""A task, one that it waits for, and how many steps before."""


def steady_step_s(strategy: Strategy, tasks: TaskGraph) -> float | None:
    """What a step takes in a run of steps that are not drained; None where nothing runs ahead of its backward
    pass, so that there is nothing to drain. `tasks` are those of one step."""
    if not any(turns.in_flight for turns in strategy.turns.values()):
        return None
    between = [*_turns(strategy), *_updates(strategy, tasks)]
    full_s, later_s = (_makespan_s(tasks, between, count) for count in (FILLING, FILLING + COUNTED))
    return max((later_s - full_s) / COUNTED, _busiest_s(tasks))


def _turns(strategy: Strategy) -> Iterator[_Edge]:
    """The order of micro-batches across steps."""
    for number in range(len(strategy.blocks)):
        placed = placed_block(strategy, number)
        own = placed.turns
        for shard, copy, _ in placed.shards():
            lane = own.lanes[shard]
            if 0 <= lane < own.in_flight:
                steps, before = divmod(lane - own.in_flight, own.count)
                other = shard + (before - lane) * own.step
                yield placed.forward(0, shard, copy), placed.backward(0, other, copy), -steps
            elif not own.in_flight:  # computed once for all micro-batches
                yield placed.forward(0, shard, copy), placed.forward(0, shard, copy), 1


def _updates(strategy: Strategy, tasks: TaskGraph) -> Iterator[_Edge]:
    """The updates that a block's weights must have seen, on each of its devices."""
    graph = strategy.graph
    read = dict.fromkeys(name for node in graph.nodes for name in node.reads)
    weights = [name for name in read if graph.value(name).role is Role.WEIGHT]
    numbers = {name: i for i, name in enumerate(weights)}
    for number in range(len(strategy.blocks)):
        placed = placed_block(strategy, number)
        own = {numbers[name] for node in placed.block.nodes for name in node.reads if name in numbers}
        for shard, copy, device in placed.shards():
            for key in ((UPDATE, weight, device) for weight in own):
                if key in tasks.ids:
                    yield placed.forward(0, shard, copy), key, VERSIONS


def _makespan_s(tasks: TaskGraph, between: list[_Edge], steps: int) -> float:
    """So many steps, simulated as one graph; those of a step come before those of the next."""
    count, resources = len(tasks.tasks), {name: i for i, name in enumerate(tasks.resources)}
    added: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for task, before, ago in between:
        added[tasks.ids[task]].append((tasks.ids[before], ago))
    after, begin = list[int](), [0]
    for step in range(steps):
        for number, own in enumerate(tasks.after):
            after += [before + step * count for before in own]
            after += [before + (step - ago) * count for before, ago in added[number] if step >= ago]
            begin.append(len(after))
    durations = np.tile(np.array([task.duration_s for task in tasks.tasks]), steps)
    used = np.tile(np.array([resources[task.resource] for task in tasks.tasks], dtype=np.int32), steps)
    waits = np.array(after, dtype=np.int32)
    return native.simulate(durations, used, np.array(begin, dtype=np.int64), waits, len(resources))[2]


def _busiest_s(tasks: TaskGraph) -> float:
    busy_s: defaultdict[str, float] = defaultdict(float)
    for task in tasks.tasks:
        busy_s[task.resource] += task.duration_s
    return max(busy_s.values(), default=0.0)
