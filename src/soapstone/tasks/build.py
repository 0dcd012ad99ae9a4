"""Graph x strategy x machine -> the one task graph, in plain Python: the specification.

What `docs/decisions/0004` and the design state, step by step:

    compute     a forward and a backward task for each shard of each block, on its device, cut into
                segments where shards must hear from each other (`segments`)
    data        an exchange for each value that other blocks read, forward; the same boxes the other
                way for its gradient, added where several shards read one element
    weights     a weight is cut at the borders of all boxes read of it; for each piece an exchange of
                gradients among the devices that hold it; then an update on each device
    turns       with a pipeline, which micro-batch of a block waits for which (`strategy.pipeline`)
    links       a transfer occupies the narrowest link of its route; a collective occupies the link
                of every hop of its ring
    taking      where messages take some of a device's own time, a move that brings it some ends with a task
                of the device, which those that wait for the move wait for; sums of all are no messages
    buckets     where they are asked for, all-reduces of gradients on one shelf among the same devices
                are one, at the place of the last of them (`buckets`)

Tasks are named by keys that say what they are, and numbered in the order of their keys, so neither
the order of building nor an incremental change can alter the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

from soapstone.cost.analytic import collective_s, transfer_s
from soapstone.graph import ITEM_BYTES, Graph, Role
from soapstone.machine import Machine
from soapstone.ops.box import Box, Interval, contains, intersection, volume
from soapstone.strategy.blocks import free_values
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buckets import shelves
from soapstone.tasks.buffers import Ends, Ledger, Slot, nothing
from soapstone.tasks.exchange import Exchange, Move, Pattern, Sink, Source, exchange
from soapstone.tasks.passes import Costs, Passes, Works
from soapstone.tasks.placed import (
    BACKWARD,
    FORWARD,
    SEAM,
    UPDATE,
    VALUE,
    WEIGHT,
    Placed,
    placed_blocks,
    readers_of,
)
from soapstone.tasks.segments import Seam
from soapstone.tasks.task import BufferKind, Key, Task, TaskGraph, TaskKind


def task_graph(strategy: Strategy, machine: Machine, costs: Costs, *, in_buckets: bool = False) -> TaskGraph:
    """The task graph of one training iteration: an all-reduce for the gradient of each piece of a weight, or
    for each bucket of them, as the runtime has it."""
    return _Builder(strategy.checked(machine), machine, costs, in_buckets).built()


_Giver = tuple[Placed, int, tuple[int, ...]]
"""Those that give a gradient: a block, a segment of it, and the shards that compute the same part."""


@dataclass(frozen=True)
class _Summed:
    """A gradient that waits for its bucket: its exchange, and who gives and takes."""

    base: Key
    what: str
    found: Exchange
    item_bytes: int
    ends: Ends

    @property
    def size_bytes(self) -> int:
        return self.found.moves[0].elements * self.item_bytes


class _Builder:
    """Collects tasks by key, and what each waits for."""

    def __init__(self, strategy: Strategy, machine: Machine, costs: Costs, in_buckets: bool) -> None:
        self.graph: Graph = strategy.graph
        self.machine, self.costs = machine, costs
        self.shelves = shelves(strategy.graph) if in_buckets else None
        self.buckets: dict[tuple[int, tuple[int, ...]], list[_Summed]] = {}
        self.free = free_values(strategy.graph)
        self.placed = placed_blocks(strategy)
        self.home = {name: p for p in self.placed for name in p.block.writes}
        self.readers = readers_of(self.placed)
        self.needs_backward = {
            p.number: any(name in self.graph.differentiable for name in p.block.writes) for p in self.placed
        }
        self.tasks: dict[Key, Task] = {}
        self.after: dict[Key, set[Key]] = {}
        self.exchanges: dict[Key, Exchange] = {}
        self.ledger = Ledger(self.graph)
        self.passes = Passes(Works(self.graph), costs)

    def built(self) -> TaskGraph:
        for placed in self.placed:
            self.ledger.activations(placed)
            self._compute(placed)
        self.ledger.inputs(self.placed, self.free)
        for number, name in enumerate(self.graph.producers):
            if name in self.home:
                self._value(number, name)
        read = dict.fromkeys(name for node in self.graph.nodes for name in node.reads)
        for number, name in enumerate(name for name in read if self.graph.value(name).role is Role.WEIGHT):
            self._weight(number, name)
        for bucket in self.buckets.values():
            self._bucket(bucket)
        ordered = sorted(self.tasks)
        tasks = tuple(
            Task(
                t.key, t.kind, t.name, t.resource, t.duration_s, tuple(sorted(self.after[key])), t.size_bytes
            )
            for key in ordered
            for t in [self.tasks[key]]
        )
        resources = [device.name for device in self.machine.devices] + [
            link.name for link in self.machine.links
        ]
        return TaskGraph(tasks, tuple(resources), self.ledger.buffers(), self.exchanges)

    # -- adding -------------------------------------------------------------------------------------

    def _add(
        self, key: Key, kind: TaskKind, name: str, resource: str, duration_s: float, size_bytes: int = 0
    ) -> None:
        self.tasks[key] = Task(key, kind, name, resource, duration_s, (), size_bytes)
        self.after.setdefault(key, set())

    def _wait(self, key: Key, before: Iterable[Key]) -> None:
        self.after.setdefault(key, set()).update(before)

    # -- compute ------------------------------------------------------------------------------------

    def _compute(self, placed: Placed) -> None:
        last = placed.segments.count - 1
        for shard, copy, device in placed.shards():
            for segment in range(placed.segments.count):
                self._segment(placed, segment, shard, copy, device, backward=False)
                if segment:
                    key = placed.forward(segment, shard, copy)
                    self._wait(key, [placed.forward(segment - 1, shard, copy)])
            if not self.needs_backward[placed.number]:
                continue
            for segment in range(last, -1, -1):
                self._segment(placed, segment, shard, copy, device, backward=True)
                before = (
                    placed.forward(last, shard, copy)
                    if segment == last
                    else placed.backward(segment + 1, shard, copy)
                )
                self._wait(placed.backward(segment, shard, copy), [before])
            self._turn(placed, shard, copy)
        for segment, seams in enumerate(placed.segments.seams):
            for number, seam in enumerate(seams):
                self._seam(placed, segment, number, seam, backward=False)
                if seam.is_mutual and self.needs_backward[placed.number]:
                    self._seam(placed, segment, number, seam, backward=True)

    def _turn(self, placed: Placed, shard: int, copy: int) -> None:
        """The order of micro-batches: no more of them in flight than the pipeline says."""
        own, last = placed.turns, placed.segments.count - 1
        if own.in_flight == 0:
            final = shard + (own.count - 1 - own.lanes[shard]) * own.step
            self._wait(placed.backward(last, shard, copy), [placed.forward(last, final, copy)])
        elif own.lanes[shard] >= own.in_flight:
            before = placed.backward(0, shard - own.in_flight * own.step, copy)
            self._wait(placed.forward(0, shard, copy), [before])

    def _segment(
        self, placed: Placed, segment: int, shard: int, copy: int, device: int, *, backward: bool
    ) -> None:
        kind = self.machine.devices[device].kind
        duration_s = self.passes.duration_s(placed, segment, shard, kind, backward=backward)
        key = (placed.backward if backward else placed.forward)(segment, shard, copy)
        which = TaskKind.BACKWARD if backward else TaskKind.FORWARD
        name = placed.name_of(shard, copy, segment)
        self._add(key, which, f"{name} {which}", self.machine.devices[device].name, duration_s)

    def _seam(self, placed: Placed, segment: int, number: int, seam: Seam, *, backward: bool) -> None:
        """What shards of a block tell each other after a segment; its gradient on the way back."""
        key = placed.backward if backward else placed.forward
        before, then = (segment + 1, segment) if backward else (segment, segment + 1)

        def gives(source: int, device: int) -> list[Key]:
            return [key(before, shard, copy) for shard, copy in placed.on(device, seam.behind[source])]

        @cache  # each of the moves that end at a sink asks
        def takes(sink: int) -> list[Key]:
            return [
                key(then, shard, copy)
                for source, shards in zip(seam.sources, seam.behind, strict=True)
                if intersection(source.box, seam.sinks[sink].box) is not None
                for shard, copy in placed.on(seam.sinks[sink].device, shards)
            ]

        def holds(source: int, device: int) -> list[Slot]:
            value = placed.block.leader.outputs[number]
            return [
                self.ledger.written[placed.number, shard, copy, value]
                for shard, copy in placed.on(device, seam.behind[source])
            ]

        if backward:
            back, what = placed.segments.count - 1 - segment, "sums' gradients"
            base = (BACKWARD, placed.from_last, SEAM, back, number)
        else:
            base, what = (FORWARD, placed.number, SEAM, segment, number), "sums"
        what = f"{placed.block.name} {what}"
        ends = Ends(gives, takes, nothing if seam.is_mutual else holds, nothing)
        self._moved(base, what, seam.item_bytes, seam.sources, seam.sinks, ends)

    # -- values -------------------------------------------------------------------------------------

    def _value(self, number: int, name: str) -> None:
        """What other blocks read of a value, and its gradient on the way back."""
        readers = [
            (placed, n, i) for placed, n, i in self.readers.get(name, ()) if name not in placed.block.writes
        ]
        if not readers:
            return
        writer = self.home[name]
        node = next(n for n, made in enumerate(writer.block.nodes) if name in made.outputs)
        boxes = writer.layout.writes(node, writer.block.nodes[node].outputs.index(name))
        self._value_forward(number, name, writer, node, boxes, readers)
        if name in self.graph.differentiable:
            self._value_backward(number, name, writer, node, boxes, readers)

    def _written(
        self, writer: Placed, boxes: Sequence[Box]
    ) -> tuple[list[Source], list[list[tuple[int, int]]]]:
        """The sources that a value's shards are, and the (shard, copy) pairs behind each."""
        behind: dict[tuple[int, Box], list[tuple[int, int]]] = {}
        for shard, copy, _ in writer.shards():
            summand = writer.layout.summand_of(shard)
            behind.setdefault((summand, boxes[shard]), []).append((shard, copy))
        sources = [
            Source(
                summand,
                box,
                writer.placement.devices_of_all(s for s, _ in held),
                writer.turns.lanes[held[0][0]],
            )
            for (summand, box), held in sorted(behind.items())
        ]
        return sources, [held for _, held in sorted(behind.items())]

    def _value_forward(
        self,
        number: int,
        name: str,
        writer: Placed,
        node: int,
        boxes: Sequence[Box],
        readers: Sequence[tuple[Placed, int, int]],
    ) -> None:
        sources, behind = self._written(writer, boxes)
        wanted: dict[tuple[int, Box], set[Key]] = {}
        kept: dict[tuple[int, Box], set[Key]] = {}
        for placed, n, i in readers:
            segment = placed.segments.reads_in[n]
            reads = placed.layout.reads(n, i)
            is_kept = i in self.ledger.kept(placed.block.nodes[n]).operands
            for shard, copy, device in placed.shards():
                box = reads[shard]
                if box is not None:
                    wanted.setdefault((device, box), set()).add(placed.forward(segment, shard, copy))
                if box is not None and is_kept:
                    kept.setdefault((device, box), set()).add(placed.backward(segment, shard, copy))
        sinks = [Sink(box, device) for device, box in sorted(wanted)]
        segment = writer.segments.writes_in[node]

        def gives(source: int, device: int) -> list[Key]:
            return [
                writer.forward(segment, shard, copy)
                for shard, copy in behind[source]
                if writer.placement.devices_of(shard)[copy] == device
            ]

        def takes(sink: int) -> list[Key]:
            return sorted(wanted[sinks[sink].device, sinks[sink].box])

        def holds(source: int, device: int) -> list[Slot]:
            return [
                self.ledger.written[writer.number, shard, copy, name]
                for shard, copy in behind[source]
                if writer.placement.devices_of(shard)[copy] == device
            ]

        def keeps(sink: int) -> set[Key]:
            return kept.get((sinks[sink].device, sinks[sink].box), set())

        item = ITEM_BYTES[self.graph.value(name).dtype]
        base = (FORWARD, writer.number, VALUE, number)
        self._moved(base, name, item, sources, sinks, Ends(gives, takes, holds, keeps))

    def _value_backward(
        self,
        number: int,
        name: str,
        writer: Placed,
        node: int,
        boxes: Sequence[Box],
        readers: Sequence[tuple[Placed, int, int]],
    ) -> None:
        sources: list[Source] = []
        behind: list[_Giver] = []
        for placed, n, i in readers:
            for shards, box in self._gradients(placed, n, i):
                devices, lane = placed.placement.devices_of_all(shards), placed.turns.lanes[shards[0]]
                sources.append(Source(len(sources), box, devices, lane))
                behind.append((placed, placed.segments.reads_in[n], shards))
        wanted: dict[tuple[int, Box], set[Key]] = {}
        segment = writer.segments.writes_in[node]
        for shard, copy, device in writer.shards():
            wanted.setdefault((device, boxes[shard]), set()).add(writer.backward(segment, shard, copy))
        sinks = [Sink(box, device) for device, box in sorted(wanted)]

        def gives(source: int, device: int) -> list[Key]:
            placed, inner, shards = behind[source]
            return [placed.backward(inner, shard, copy) for shard, copy in placed.on(device, shards)]

        def takes(sink: int) -> list[Key]:
            return sorted(wanted[sinks[sink].device, sinks[sink].box])

        item = ITEM_BYTES[self.graph.value(name).dtype]
        slots: dict[tuple[int, int], Slot] = {}

        def holds(source: int, device: int) -> list[Slot]:
            if (source, device) not in slots:
                size_bytes = volume(sources[source].box) * item
                slots[source, device] = self.ledger.hold(
                    BufferKind.GRADIENT, device, size_bytes, gives(source, device), value=name
                )
            return [slots[source, device]]

        base = (BACKWARD, writer.from_last, VALUE, number)
        ends = Ends(gives, takes, holds, nothing, BufferKind.GRADIENT)
        self._moved(base, f"{name} gradient", item, sources, sinks, ends)

    def _gradients(self, placed: Placed, node: int, operand: int) -> list[tuple[tuple[int, ...], Box]]:
        """The boxes of an operand whose gradient a node computes, each with the shards that do."""
        if not any(name in self.graph.differentiable for name in placed.block.nodes[node].outputs):
            return []
        reads = placed.layout.reads(node, operand)
        return [
            (shards, box)
            for shards in placed.layout.alike(node)
            for box in [reads[shards[0]]]
            if box is not None
        ]

    # -- weights ------------------------------------------------------------------------------------

    def _weight(self, number: int, name: str) -> None:
        """The gradients of a weight summed among its holders, and its updates."""
        read = [
            (placed, placed.segments.reads_in[n], shards, box)
            for placed, n, i in self.readers[name]
            for shards, box in self._gradients(placed, n, i)
        ]
        if not read or name not in self.graph.differentiable:
            return
        item = ITEM_BYTES[self.graph.value(name).dtype]
        held: dict[int, int] = {}
        made_by: dict[int, set[Key]] = {}
        last = max(placed.from_last for placed, _, _, _ in read)
        for p, piece in enumerate(_pieces({box for _, _, _, box in read})):
            givers = [
                (placed, segment, shards) for placed, segment, shards, box in read if contains(box, piece)
            ]
            sources = [
                Source(i, piece, placed.placement.devices_of_all(shards))
                for i, (placed, _, shards) in enumerate(givers)
            ]
            holders = sorted({device for source in sources for device in source.devices})
            for device in holders:
                held[device] = held.get(device, 0) + volume(piece) * item

            def gives(source: int, device: int, givers: list[_Giver] = givers) -> list[Key]:
                placed, segment, shards = givers[source]
                return [placed.backward(segment, shard, copy) for shard, copy in placed.on(device, shards)]

            def takes(sink: int, holders: list[int] = holders) -> list[Key]:
                return [(UPDATE, number, holders[sink])]

            sinks = [Sink(piece, device) for device in holders]
            base = (BACKWARD, last, WEIGHT, number, p)
            ends = Ends(gives, takes, nothing, nothing)
            self._moved(base, f"{name} gradient", item, sources, sinks, ends, weight=name)
            for source in range(len(sources)):
                for device in sources[source].devices:
                    made_by.setdefault(device, set()).update(gives(source, device))
        for device, size_bytes in held.items():
            key = (UPDATE, number, device)
            self.ledger.hold(BufferKind.WEIGHT, device, size_bytes)
            self.ledger.hold(BufferKind.WEIGHT_GRADIENT, device, size_bytes, made_by[device], [key])
            duration_s = self.costs.update_s(size_bytes, self.machine.devices[device].kind)
            self._add(key, TaskKind.UPDATE, f"{name} update", self.machine.devices[device].name, duration_s)

    # -- moves --------------------------------------------------------------------------------------

    def _moved(
        self,
        base: Key,
        what: str,
        item_bytes: int,
        sources: Sequence[Source],
        sinks: Sequence[Sink],
        ends: Ends,
        weight: str | None = None,
    ) -> None:
        """The tasks of an exchange, between those that give and those that take; of a weight's gradient that
        goes into a bucket, they come later."""
        found = self.exchanges[base] = exchange(sources, sinks, self.machine)
        for source, sink in found.local:
            for key in ends.takes(sink):
                self._wait(key, ends.gives(source, sinks[sink].device))
        if weight is not None and self.shelves is not None and found.is_one_sum:
            bucket = self.buckets.setdefault((self.shelves[weight], found.moves[0].devices), [])
            bucket.append(_Summed(base, what, found, item_bytes, ends))
            return
        keys: list[list[Key]] = []
        for number, move in enumerate(found.moves):
            keys.append(self._move((*base, number), move, move.elements * item_bytes, what))
            self._between(keys[-1], move, ends)
        self.ledger.exchanged(found, sources, sinks, item_bytes, keys, ends)

    def _between(self, keys: Sequence[Key], move: Move, ends: Ends) -> None:
        """The tasks of a move wait for those that give, and those that take for them."""
        before = {key for source, device in move.sources for key in ends.gives(source, device)}
        for key in keys:
            self._wait(key, before)
        last = self._taken(keys, move)
        for sink in move.sinks:
            for key in ends.takes(sink):
                self._wait(key, last)

    def _taken(self, keys: Sequence[Key], move: Move) -> Sequence[Key]:
        """What those that take a move wait for: its tasks, or what messages take of devices after them."""
        if move.pattern is Pattern.ALL_REDUCE:
            return keys
        messages = len(move.devices) - 1
        at = move.devices[1:] if move.pattern is Pattern.TRANSFER else move.devices
        devices = [self.machine.devices[number] for number in at]
        taking = [device for device in devices if device.kind.message_overhead_s]
        taken: list[Key] = []
        for number, device in enumerate(taking, len(keys)):
            taken.append((*keys[0][:-1], number))
            duration_s = messages * device.kind.message_overhead_s
            name = f"{self.tasks[keys[0]].name} taken"
            self._add(taken[-1], TaskKind.TAKE, name, device.name, duration_s)
            self._wait(taken[-1], keys)
        return taken or keys

    def _bucket(self, bucket: Sequence[_Summed]) -> None:
        """One all-reduce for several gradients, when all of them are there."""
        last = max(bucket, key=lambda summed: summed.base)
        what = last.what if len(bucket) == 1 else f"{last.what} and {len(bucket) - 1} more"
        size_bytes = sum(summed.size_bytes for summed in bucket)
        keys = self._move((*last.base, 0), last.found.moves[0], size_bytes, what)
        for summed in bucket:
            self._between(keys, summed.found.moves[0], summed.ends)
            found = summed.found
            self.ledger.exchanged(found, found.sources, found.sinks, summed.item_bytes, [keys], summed.ends)

    def _move(self, base: Key, move: Move, size_bytes: int, what: str) -> list[Key]:
        if move.pattern is Pattern.TRANSFER:
            a, b = move.devices
            link = self.machine.narrowest_link(a, b)
            duration_s = transfer_s(size_bytes, link.bandwidth_bytes_per_s, self.machine.latency(a, b))
            key = (*base, 0)
            name = f"{what} {self.machine.devices[a].name} to {self.machine.devices[b].name}"
            self._add(key, TaskKind.TRANSFER, name, link.name, duration_s, size_bytes)
            return [key]
        ring = [*move.devices, move.devices[0]]
        hops = list(pairwise(ring))
        bandwidth = min(self.machine.bandwidth(a, b) for a, b in hops)
        latency_s = max(self.machine.latency(a, b) for a, b in hops)
        count = len(move.devices)
        duration_s = collective_s(move.pattern, size_bytes, count, bandwidth, latency_s, self.machine.sums)
        keys: list[Key] = []
        for hop, (a, b) in enumerate(hops):
            key = (*base, hop)
            name = f"{what} {move.pattern} of {count}"
            link = self.machine.narrowest_link(a, b)
            self._add(
                key, TaskKind(move.pattern.value), name, link.name, duration_s, _hop_bytes(move, size_bytes)
            )
            keys.append(key)
        return keys


def _hop_bytes(move: Move, size_bytes: int) -> int:
    """What a ring moves over one of its links."""
    count = len(move.devices)
    if move.pattern is Pattern.ALL_REDUCE:
        return 2 * (count - 1) * size_bytes // count
    return (count - 1) * size_bytes


def _pieces(boxes: set[Box]) -> list[Box]:
    """The boxes, cut at each other's borders so that any two pieces are equal or apart."""
    whole = sorted(boxes)
    if all(intersection(a, b) is None for i, a in enumerate(whole) for b in whole[:i]):
        return whole
    cuts = [sorted({edge for box in whole for edge in box[axis]}) for axis in range(len(whole[0]))]
    atoms = product(*([Interval(lo, hi) for lo, hi in pairwise(edges)] for edges in cuts))
    return [atom for atom in atoms if any(contains(box, atom) for box in whole)]
