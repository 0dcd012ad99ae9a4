"""The task graph as the runtime runs it: gradients that are added up together are one all-reduce.

The task graph has an all-reduce for each piece of a weight; the runtime puts those of the same ranks into
buckets (`tasks.buckets`). A bucket moves the bytes of all its members with the latency of one, when the
last of them is ready, and every update waits for its bucket. All weights are updated in one go at the end.
Sums of the loss that nobody has to wait for (`deferring`) take no time. A device takes its tasks in the order
of all ranks (`order`), also where another could start earlier. All else is the same; what memory it takes is
not said here (`rehearsal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from soapstone.graph import Graph, Role
from soapstone.runtime.collectives import USED, Chosen, chosen
from soapstone.runtime.deferring import deferred
from soapstone.runtime.linking import Links
from soapstone.runtime.listing import listed
from soapstone.runtime.order import execution_order
from soapstone.runtime.regions import found_regions
from soapstone.runtime.weights import Weights
from soapstone.sim.reference import Timeline
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buckets import shelves
from soapstone.tasks.buffers import is_weight
from soapstone.tasks.placed import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    UPDATE,
    WEIGHT,
    Placed,
    placed_blocks,
)
from soapstone.tasks.task import COMPUTE_KINDS, Key, Task, TaskGraph, TaskKind


@dataclass(frozen=True)
class AsRun:
    """The tasks with their new dependencies; `led_by` says for each member of a bucket, other than the
    last, which task now does its work (hop by hop); `left_out` are the tasks that nobody does; `begins` are
    those with which a call of autograd begins; `walked` are each device's compute tasks in order;
    `collectives` are the moves that are made by one, by their keys."""

    tasks: TaskGraph
    led_by: Mapping[Key, Key]
    left_out: frozenset[Key]
    begins: frozenset[Key]
    walked: Mapping[str, Sequence[Key]]
    collectives: frozenset[Key]


def as_run(
    strategy: Strategy,
    tasks: TaskGraph,
    timeline: Timeline,
    *,
    device_count: int = 2,
    backend: str = "gloo",
) -> AsRun:
    """The task graph with its gradients in buckets; members that are led take no time of their own. `backend`
    is what carries messages (`Wire.backend`)."""
    graph = strategy.graph
    unsummed = deferred(graph, placed_blocks(strategy), tasks.exchanges)
    left_out = frozenset(task.key for task in tasks.tasks if task.key[:-2] in unsummed)
    order = execution_order(tasks, timeline)
    led_by: dict[Key, Key] = {}
    buckets = _buckets(graph, tasks, order)
    for bucket in buckets:
        hops = len(_hops(tasks, bucket[-1]))
        for member in bucket[:-1]:
            led_by.update({(*member, hop): (*bucket[-1], hop) for hop in range(hops)})
    extra: dict[Key, set[Key]] = {}
    for member, leader in led_by.items():
        extra.setdefault(leader, set()).add(member)
    moves = _collectives(strategy, tasks, device_count, backend)
    regions = backward_regions(strategy, tasks, order, device_count, moves)
    walked = _walked(tasks, order, regions)
    before = {b: {a} for keys in walked.values() for a, b in pairwise(keys)}
    for keys in set(regions.values()):
        before.setdefault(keys[0], set()).update(_taken_at_once(tasks, keys))
    for key, maker in _posted_after(tasks, order, walked):
        before.setdefault(key, set()).add(maker)
    changed = []
    for task in tasks.tasks:
        after = set(task.after) | extra.get(task.key, set()) | before.get(task.key, set())
        if task.kind is TaskKind.UPDATE:
            after |= {led_by[key] for key in task.after if key in led_by}
        duration_s = 0.0 if task.key in led_by or task.key in left_out else task.duration_s
        changed.append(replace(task, after=tuple(sorted(after)), duration_s=duration_s))
    begins = frozenset(keys[0] for keys in regions.values())
    sums = {
        task.key[:-1] for task in tasks.tasks if task.kind is TaskKind.ALL_REDUCE and task.key[2] == WEIGHT
    }
    collectives = frozenset(sums | {(*key, number) for key, number in moves})
    tasks = replace(tasks, tasks=tuple(changed), buffers=())
    return AsRun(tasks, led_by, left_out, begins, walked, collectives)


def _walked(
    tasks: TaskGraph, order: Sequence[int], regions: Mapping[Key, tuple[Key, ...]]
) -> Mapping[str, Sequence[Key]]:
    """The compute tasks of each device in the order in which it does them: those of a region in autograd's,
    updates last, all of them."""
    ordered = [tasks.tasks[number] for number in order]
    computed = [task for task in ordered if task.kind in COMPUTE_KINDS]
    found: dict[str, dict[Key, None]] = {}
    for task in sorted(computed, key=lambda task: task.kind is TaskKind.UPDATE):
        own = found.setdefault(task.resource, {})
        own.update(dict.fromkeys(regions.get(task.key, (task.key,))))
    return {resource: tuple(keys) for resource, keys in found.items()}


def _taken_at_once(tasks: TaskGraph, region: Sequence[Key]) -> Iterator[Key]:
    """The messages that a region takes from other devices: all of them when it starts."""
    for key in region:
        for before in _task(tasks, key).after:
            if _task(tasks, before).kind not in COMPUTE_KINDS:
                yield before


def _posted_after(
    tasks: TaskGraph, order: Sequence[int], walked: Mapping[str, Sequence[Key]]
) -> Iterator[tuple[Key, Key]]:
    """Messages that are not given away as soon as they are made, each with the task that is waited for: a
    rank posts its messages in the order of all, also while autograd takes a region back in another."""
    place = {key: i for keys in walked.values() for i, key in enumerate(keys)}
    last: dict[str, Key] = {}  # device -> of the tasks that made what was posted, the last that is done
    for number in order:
        task = tasks.tasks[number]
        if task.kind in COMPUTE_KINDS or task.key[2] == WEIGHT:
            continue
        made_by: dict[str, Key] = {}
        for key in task.after:
            own = _task(tasks, key)
            if own.kind in COMPUTE_KINDS:
                made_by[own.resource] = max(key, made_by.get(own.resource, key), key=place.__getitem__)
        for resource, key in made_by.items():
            before = last.get(resource, key)
            if place[before] > place[key]:
                yield task.key, before
            else:
                last[resource] = key


def _collectives(strategy: Strategy, tasks: TaskGraph, device_count: int, backend: str) -> Chosen:
    """The moves that are made by collectives."""
    weights = Weights(strategy.graph, placed_blocks(strategy), tasks.exchanges)
    summed = [p.holders for pieces in weights.pieces.values() for p in pieces if p.is_summed]
    moves, _ = chosen(tasks, USED[backend], [*summed, tuple(range(device_count))])
    return moves


def backward_regions(
    strategy: Strategy, tasks: TaskGraph, order: Sequence[int], device_count: int, moves: Chosen
) -> Mapping[Key, tuple[Key, ...]]:
    """For each backward task all those that autograd takes back in one call with it, on its device, in the
    order in which it does: what was run last is the first, after gradients that are a weight's already.
    `order` is that of all ranks, and `moves` are made by collectives."""
    graph, blocks = strategy.graph, placed_blocks(strategy)
    weights = Weights(graph, blocks, tasks.exchanges)
    unsummed = deferred(graph, blocks, tasks.exchanges)
    found: dict[Key, tuple[Key, ...]] = {}
    for rank in range(device_count):
        links = Links(strategy, tasks, rank, torch.device("cpu"), moves, unsummed)
        members: dict[int, list[tuple[int, Key]]] = {}
        own = listed(links, weights, order)
        regions = found_regions(links, own, fuse=True)
        run = {what: i for i, (_, key, what) in enumerate(own) if key[0] == FORWARD and key[2] == COMPUTE}
        given: set[Key] = set()
        for _, key, what in own:
            if key[0] == BACKWARD and key[2] == COMPUTE:
                members.setdefault(regions[what].number, []).append((-run[what], key))
                if _is_weight(graph, links.block(what[0])):
                    given.add(key)
        for each in members.values():
            together = {key for _, key in each}
            at_once = {key for key in given & together if together.isdisjoint(_task(tasks, key).after)}
            keys = tuple(key for _, key in sorted(each, key=lambda one: (one[1] not in at_once, *one)))
            found.update(dict.fromkeys(keys, keys))
    return found


def _task(tasks: TaskGraph, key: Key) -> Task:
    return tasks.tasks[tasks.ids[key]]


def _is_weight(graph: Graph, placed: Placed) -> bool:
    """Whether a block gives a weight as it is."""
    return all(is_weight(graph, node) for node in placed.block.nodes)


def _hops(tasks: TaskGraph, move: Key) -> list[Key]:
    hops: list[Key] = []
    while (*move, len(hops)) in tasks.ids:
        hops.append((*move, len(hops)))
    return hops


def _buckets(graph: Graph, tasks: TaskGraph, order: Sequence[int]) -> list[list[Key]]:
    """The moves of each bucket, in the order in which the ranks come to them."""
    read = dict.fromkeys(name for node in graph.nodes for name in node.reads)
    weights = [name for name in read if graph.value(name).role is Role.WEIGHT]
    shelf = shelves(graph)
    found: dict[tuple[tuple[int, ...], int], list[Key]] = {}
    for number in order:
        task = tasks.tasks[number]
        if task.kind is not TaskKind.ALL_REDUCE or task.key[0] == UPDATE or task.key[2] != WEIGHT:
            continue
        exchange = tasks.exchanges[task.key[:-2]]
        if task.key[-1] == 0 and exchange.is_one_sum:
            devices = tuple(sorted(exchange.moves[0].devices))
            found.setdefault((devices, shelf[weights[task.key[3]]]), []).append(task.key[:-1])
    return list(found.values())
