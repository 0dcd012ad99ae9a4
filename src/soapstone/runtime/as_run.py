"""The task graph as the runtime runs it: gradients that are added up together are one all-reduce.

The task graph has an all-reduce for each piece of a weight; the runtime puts those of the same ranks into
buckets (`tasks.buckets`). A bucket moves the bytes of all its members with the latency of one, when the
last of them is ready, and every update waits for its bucket. All weights are updated in one go at the end, so
gradients live until then: in their bucket, where there is one. Sums of the loss that nobody has to wait for
(`deferring`) take no time. A device takes its tasks in the order of all ranks (`order`), also where another
could start earlier. All else is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from soapstone.graph import ITEM_BYTES, Graph, Role
from soapstone.ops.box import contains, volume
from soapstone.runtime.collectives import USED, Chosen, chosen
from soapstone.runtime.deferring import deferred
from soapstone.runtime.linking import Links, placed_blocks
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
    SEAM,
    UPDATE,
    VALUE,
    WEIGHT,
    Placed,
    placed_block,
)
from soapstone.tasks.task import COMPUTE_KINDS, Buffer, BufferKind, Key, Task, TaskGraph, TaskKind


@dataclass(frozen=True)
class AsRun:
    """The tasks with their new dependencies; `led_by` says for each member of a bucket, other than the
    last, which task now does its work (hop by hop); `left_out` are the tasks that nobody does; `linked` are
    the backward tasks to which autograd itself carries gradients from tasks before them."""

    tasks: TaskGraph
    led_by: Mapping[Key, Key]
    left_out: frozenset[Key]
    linked: frozenset[Key]


def as_run(
    strategy: Strategy,
    tasks: TaskGraph,
    timeline: Timeline,
    *,
    device_count: int = 2,
    backend: str = "gloo",
    is_gpu: bool = False,
) -> AsRun:
    """The task graph with its gradients in buckets; members that are led take no time of their own. A rank
    keeps what it has sent, unless that was copied elsewhere (`mailbox`, `staging`), and, where it is a CPU,
    buckets from step to step. `backend` is what carries messages (`Wire.backend`)."""
    graph = strategy.graph
    unsummed = deferred(graph, placed_blocks(strategy), tasks.exchanges)
    left_out = frozenset(task.key for task in tasks.tasks if task.key[:-2] in unsummed)
    led_by: dict[Key, Key] = {}
    buckets = _buckets(graph, tasks, timeline)
    for bucket in buckets:
        hops = len(_hops(tasks, bucket[-1]))
        for member in bucket[:-1]:
            led_by.update({(*member, hop): (*bucket[-1], hop) for hop in range(hops)})
    extra: dict[Key, set[Key]] = {}
    for member, leader in led_by.items():
        extra.setdefault(leader, set()).add(member)
    moves = _collectives(strategy, tasks, device_count, backend)
    regions = backward_regions(strategy, tasks, timeline, device_count, moves)
    walked = _walked(tasks, timeline, regions)
    before = {b: {a} for keys in walked.values() for a, b in pairwise(keys)}
    place = {key: i for keys in walked.values() for i, key in enumerate(keys)}
    changed = []
    for task in tasks.tasks:
        after = set(task.after) | extra.get(task.key, set()) | before.get(task.key, set())
        if task.kind is TaskKind.UPDATE:
            after |= {led_by[key] for key in task.after if key in led_by}
        duration_s = 0.0 if task.key in led_by or task.key in left_out else task.duration_s
        changed.append(replace(task, after=tuple(sorted(after)), duration_s=duration_s))
    buffers = (
        *_held_by_regions(_kept_to_the_end(tasks, buckets), regions, place),
        *_copies(tasks, buckets, stay=not is_gpu),
        *_fresh_gradients(tasks, regions, place),
        *_added_up(strategy, tasks, moves, unsummed, regions, comes_to_memory=backend != "memory"),
        *(_sent(tasks) if backend == ("nccl" if is_gpu else "gloo") else ()),
    )
    return AsRun(
        replace(tasks, tasks=tuple(changed), buffers=buffers), led_by, left_out, _linked(tasks, regions)
    )


def _walked(
    tasks: TaskGraph, timeline: Timeline, regions: Mapping[Key, tuple[Key, ...]]
) -> Mapping[str, Sequence[Key]]:
    """The compute tasks of each device in the order in which it does them: those of a region in autograd's,
    updates last, all of them."""
    ordered = [tasks.tasks[number] for number in execution_order(tasks, timeline)]
    computed = [task for task in ordered if task.kind in COMPUTE_KINDS]
    found: dict[str, dict[Key, None]] = {}
    for task in sorted(computed, key=lambda task: task.kind is TaskKind.UPDATE):
        own = found.setdefault(task.resource, {})
        own.update(dict.fromkeys(regions.get(task.key, (task.key,))))
    return {resource: tuple(keys) for resource, keys in found.items()}


def _updates(tasks: TaskGraph) -> Mapping[int, tuple[Key, ...]]:
    """The updates of each device."""
    found: dict[int, list[Key]] = {}
    for task in tasks.tasks:
        if task.kind is TaskKind.UPDATE:
            found.setdefault(task.key[-1], []).append(task.key)
    return {device: tuple(keys) for device, keys in found.items()}


def _kept_to_the_end(tasks: TaskGraph, buckets: Sequence[Sequence[Key]]) -> Iterator[Buffer]:
    """The buffers, with gradients of weights needed until the last update, or until they are in
    one of these buckets, where all of a weight that a device has goes into one."""
    updates = _updates(tasks)
    into = {member[:-1]: (*bucket[-1], 0) for bucket in buckets if len(bucket) > 1 for member in bucket}
    pieces: dict[tuple[int, int], list[Key]] = {}  # weight, device -> the exchanges of its pieces
    for key, exchange in tasks.exchanges.items():
        if key[0] == BACKWARD and key[2] == WEIGHT:
            for sink in exchange.sinks:
                pieces.setdefault((key[3], sink.device), []).append(key)
    for buffer in tasks.buffers:
        if buffer.kind is BufferKind.WEIGHT_GRADIENT:
            ((_, weight, device),) = buffer.needed_by
            own = pieces[weight, device]
            is_moved = len(own) == 1 and own[0] in into
            yield replace(buffer, needed_by=(into[own[0]],) if is_moved else updates[device])
        else:
            yield buffer


def _copies(tasks: TaskGraph, buckets: Sequence[Sequence[Key]], *, stay: bool) -> Iterator[Buffer]:
    """What buckets of several gradients hold on each of their devices, throughout if they stay."""
    updates = _updates(tasks)
    for bucket in buckets:
        moves = [tasks.exchanges[move[:-1]].moves[0] for move in bucket]
        if len(bucket) > 1:
            size_bytes = sum(_size_bytes(tasks, move) for move in bucket)
            for device in moves[0].devices:
                made_by = () if stay else ((*bucket[-1], 0),)
                needed_by = () if stay else updates[device]
                yield Buffer(BufferKind.WEIGHT_GRADIENT, device, size_bytes, made_by, needed_by)


def _collectives(strategy: Strategy, tasks: TaskGraph, device_count: int, backend: str) -> Chosen:
    """The moves that are made by collectives."""
    weights = Weights(strategy.graph, placed_blocks(strategy), tasks.exchanges)
    summed = [p.holders for pieces in weights.pieces.values() for p in pieces if p.is_summed]
    moves, _ = chosen(tasks, USED[backend], [*summed, tuple(range(device_count))])
    return moves


def backward_regions(
    strategy: Strategy, tasks: TaskGraph, timeline: Timeline, device_count: int, moves: Chosen
) -> Mapping[Key, tuple[Key, ...]]:
    """For each backward task all those that autograd takes back in one call with it, on its device, in the
    order in which it does: what was run last is the first, after gradients that are a weight's already.
    `moves` are made by collectives."""
    graph, blocks = strategy.graph, placed_blocks(strategy)
    weights = Weights(graph, blocks, tasks.exchanges)
    unsummed, order = deferred(graph, blocks, tasks.exchanges), execution_order(tasks, timeline)
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


def _linked(tasks: TaskGraph, regions: Mapping[Key, tuple[Key, ...]]) -> frozenset[Key]:
    """The backward tasks that take a gradient made in their own region."""
    return frozenset(
        key
        for buffer in tasks.buffers
        if buffer.kind is BufferKind.GRADIENT
        for key in buffer.needed_by
        if not set(regions.get(key, ())).isdisjoint(buffer.made_by)
    )


def _held_by_regions(
    buffers: Iterable[Buffer], regions: Mapping[Key, tuple[Key, ...]], place: Mapping[Key, int]
) -> Iterator[Buffer]:
    """The buffers, with the gradients that a region starts from held until it has been taken back, and those
    that autograd adds up within a region held as one sum."""
    linked: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.kind is not BufferKind.GRADIENT:
            yield buffer
            continue
        into = {regions[key] for key in buffer.needed_by if key in regions}
        roots = [keys for keys in into if not set(keys) & set(buffer.made_by)]
        if buffer.value and into and not roots:
            same = buffer.device, buffer.value, buffer.size_bytes, buffer.needed_by
            linked.setdefault(same, []).append(buffer)
            continue
        held = {*buffer.needed_by, *(key for keys in roots for key in keys)}
        yield replace(buffer, needed_by=tuple(sorted(held)))
    for parts in linked.values():
        first, *others = sorted(parts, key=lambda part: min(place[key] for key in part.made_by))
        yield first
        yield from (replace(other, needed_by=()) for other in others)


def _fresh_gradients(
    tasks: TaskGraph, regions: Mapping[Key, tuple[Key, ...]], place: Mapping[Key, int]
) -> Iterator[Buffer]:
    """What autograd holds while it adds to the gradient of a weight that is used more than once. Within a
    region it adds up what is to be added: the new part and, the first time, a new sum beside the old one
    ([measured] three times a linear layer's weight at the second use, twice from then on), one weight after
    the other. The sum of a later region is apart from the gradient that there is, until it is added to it."""
    most: dict[tuple[int, Key], int] = {}  # device, task -> what it holds while it adds
    for buffer in tasks.buffers:
        if buffer.kind is not BufferKind.WEIGHT_GRADIENT:
            continue
        makers = sorted(buffer.made_by, key=lambda key: place[key])
        together: dict[tuple[Key, ...], list[Key]] = {}
        for key in makers:
            together.setdefault(regions.get(key, (key,)), []).append(key)
        for number, keys in enumerate(together.values()):
            if number:
                yield replace(buffer, made_by=tuple(keys), needed_by=())
            for use, key in enumerate(keys[1:]):
                at, size_bytes = (buffer.device, key), buffer.size_bytes * (2 if use == 0 else 1)
                most[at] = max(most.get(at, 0), size_bytes)
    for (device, key), size_bytes in most.items():
        yield Buffer(BufferKind.WEIGHT_GRADIENT, device, size_bytes, (key,), ())


def _added_up(
    strategy: Strategy,
    tasks: TaskGraph,
    moves: Chosen,
    unsummed: frozenset[Key],
    regions: Mapping[Key, tuple[Key, ...]],
    *,
    comes_to_memory: bool,
) -> Iterator[Buffer]:
    """What devices hold beside a buffer of the task graph that stands for their own part of a sum and, then,
    for the sum. A collective adds up a copy of the part, which is let go of. Otherwise the sum is made beside
    the part, of what has come, when somebody takes it; what comes is in memory of its own, unless it is read
    where the sender has it."""
    takers: dict[tuple[Key, str], set[Key]] = {}
    for task in tasks.tasks:
        for key in task.after if task.kind in COMPUTE_KINDS else ():
            takers.setdefault((key, task.resource), set()).add(task.key)
    names = list(strategy.graph.producers)
    for base, exchange in tasks.exchanges.items():
        at_hand = {
            sink
            for source, sink in exchange.local
            if contains(exchange.sources[source].box, exchange.sinks[sink].box)
        }
        item_bytes = _item_bytes(strategy, names, base) if at_hand and base not in unsummed else 0
        summed: set[int] = set()  # sinks whose sum is there
        for m, move in enumerate(exchange.moves if item_bytes else ()):
            own = _hops(tasks, (*base, m))
            for sink in sorted(at_hand.intersection(move.sinks)):
                device = exchange.sinks[sink].device
                size_bytes = volume(exchange.sinks[sink].box) * item_bytes
                readers = set[Key]().union(*(takers.get((hop, tasks.resources[device]), ()) for hop in own))
                if (base, m) in moves:
                    yield Buffer(BufferKind.SCRATCH, device, size_bytes, tuple(own), ())
                elif readers:
                    together = regions.get(min(readers), (min(readers),))  # which take what they need at once
                    if sink not in summed:
                        summed.add(sink)
                        yield Buffer(BufferKind.SCRATCH, device, size_bytes, together, together)
                    if comes_to_memory:
                        come_bytes = item_bytes * sum(
                            volume(t.box) for t in move.transfers if sink in t.sinks
                        )
                        yield Buffer(
                            BufferKind.RECEIVED, device, come_bytes, tuple(own), tuple(sorted(readers))
                        )


def _item_bytes(strategy: Strategy, names: Sequence[str], base: Key) -> int:
    """The size of an element of what an exchange moves, of values by number; 0 for weights' gradients, which
    stay, and for statistics, which are small."""
    graph = strategy.graph
    if base[2] == VALUE:
        return ITEM_BYTES[graph.value(names[base[3]]).dtype]
    if base[2] != SEAM or base[0] != FORWARD:
        return 0
    placed = placed_block(strategy, base[1])
    is_partial = not placed.segments.seams[base[3]][base[4]].is_mutual
    return ITEM_BYTES[graph.value(placed.block.leader.outputs[base[4]]).dtype] if is_partial else 0


def _sent(tasks: TaskGraph) -> Iterator[Buffer]:
    """What each device has sent: a message is let go of when all are known to have arrived."""
    last = {task.resource: task.key for task in tasks.tasks if task.kind in COMPUTE_KINDS}
    for task in tasks.tasks:
        if task.kind in COMPUTE_KINDS or task.key[2] == WEIGHT:
            continue
        move = tasks.exchanges[task.key[:-2]].moves[task.key[-2]]
        sender = move.devices[task.key[-1]]
        end = last.get(tasks.resources[sender])
        if end is not None:
            yield Buffer(BufferKind.SENT, sender, task.size_bytes, (task.key,), (end,))


def _size_bytes(tasks: TaskGraph, move: Key) -> int:
    """The bytes that an all-reduce adds up."""
    task = tasks.tasks[tasks.ids[*move, 0]]
    count = len(tasks.exchanges[move[:-1]].moves[0].devices)
    return task.size_bytes * count // (2 * (count - 1))


def _hops(tasks: TaskGraph, move: Key) -> list[Key]:
    hops: list[Key] = []
    while (*move, len(hops)) in tasks.ids:
        hops.append((*move, len(hops)))
    return hops


def _buckets(graph: Graph, tasks: TaskGraph, timeline: Timeline) -> list[list[Key]]:
    """The moves of each bucket, in the order in which the ranks come to them."""
    read = dict.fromkeys(name for node in graph.nodes for name in node.reads)
    weights = [name for name in read if graph.value(name).role is Role.WEIGHT]
    shelf = shelves(graph)
    found: dict[tuple[tuple[int, ...], int], list[Key]] = {}
    for number in execution_order(tasks, timeline):
        task = tasks.tasks[number]
        if task.kind is not TaskKind.ALL_REDUCE or task.key[0] == UPDATE or task.key[2] != WEIGHT:
            continue
        exchange = tasks.exchanges[task.key[:-2]]
        if task.key[-1] == 0 and exchange.is_one_sum:
            devices = tuple(sorted(exchange.moves[0].devices))
            found.setdefault((devices, shelf[weights[task.key[3]]]), []).append(task.key[:-1])
    return list(found.values())
