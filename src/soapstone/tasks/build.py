"""Graph x strategy x machine -> the one task graph, in plain Python: the specification.

What `docs/decisions/0004` and the design state, step by step:

    compute     a forward and a backward task for each shard of each block, on its device, cut into
                segments where shards must hear from each other (`segments`)
    data        an exchange for each value that other blocks read, forward; the same boxes the other
                way for its gradient, added where several shards read one element
    weights     a weight is cut at the borders of all boxes read of it; for each piece an exchange of
                gradients among the devices that hold it; then an update on each device
    links       a transfer occupies the narrowest link of its route; a collective occupies the link
                of every hop of its ring

Tasks are named by keys that say what they are, and numbered in the order of their keys, so neither
the order of building nor an incremental change can alter the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Protocol

from soapstone.cost.analytic import collective_s, transfer_s
from soapstone.cost.work import Work, work_of
from soapstone.graph import ITEM_BYTES, Graph, Role
from soapstone.machine import DeviceKind, Machine
from soapstone.ops.box import Box, Interval, contains, intersection, volume
from soapstone.strategy.blocks import Block, free_values
from soapstone.strategy.layout import Layout
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.exchange import Exchange, Move, Pattern, Sink, Source, exchange
from soapstone.tasks.segments import Segments, segmented
from soapstone.tasks.task import Key, Task, TaskGraph, TaskKind

FORWARD, BACKWARD, UPDATE = 0, 1, 2
"""First number of a key: the pass."""
COMPUTE, SEAM, VALUE, WEIGHT = 0, 1, 2, 3
"""Third number of a key: what the task belongs to."""


class Costs(Protocol):
    """How long compute takes. `cost.analytic` is one; measured costs are another."""

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """A node's shard on a device."""

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        """Updating this much of a weight."""


def task_graph(strategy: Strategy, machine: Machine, costs: Costs) -> TaskGraph:
    """The task graph of one training iteration."""
    return _Builder(strategy.checked(machine), machine, costs).built()


@dataclass(frozen=True)
class _Placed:
    """A block with all that follows from its placement."""

    number: int
    block: Block
    layout: Layout
    placement: Placement
    segments: Segments

    def shards(self) -> Iterator[tuple[int, int, int]]:
        """All (shard, copy, device)."""
        for shard in range(self.layout.parts):
            for copy, device in enumerate(self.placement.devices_of(shard)):
                yield shard, copy, device


class _Builder:
    """Collects tasks by key, and what each waits for."""

    def __init__(self, strategy: Strategy, machine: Machine, costs: Costs) -> None:
        self.graph: Graph = strategy.graph
        self.machine, self.costs = machine, costs
        self.free = free_values(strategy.graph)
        self.placed = [
            _Placed(i, block, layout, placement, segmented(layout, placement))
            for i, block in enumerate(strategy.blocks)
            for layout, placement in [(strategy.layouts[block.name], strategy.placements[block.name])]
        ]
        self.home = {name: p for p in self.placed for name in p.block.writes}
        self.needs_backward = {
            p.number: any(name in self.graph.differentiable for name in p.block.writes) for p in self.placed
        }
        self.tasks: dict[Key, Task] = {}
        self.after: dict[Key, set[Key]] = {}

    def built(self) -> TaskGraph:
        for placed in self.placed:
            self._compute(placed)
        for number, name in enumerate(self.graph.values):
            if name in self.home and name not in self.free:
                self._value(number, name)
        for number, value in enumerate(self.graph.with_role(Role.WEIGHT)):
            self._weight(number, value.name)
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
        return TaskGraph(tasks, tuple(resources))

    # -- adding -------------------------------------------------------------------------------------

    def _add(
        self, key: Key, kind: TaskKind, name: str, resource: str, duration_s: float, size_bytes: int = 0
    ) -> None:
        self.tasks[key] = Task(key, kind, name, resource, duration_s, (), size_bytes)
        self.after.setdefault(key, set())

    def _wait(self, key: Key, before: Iterable[Key]) -> None:
        self.after.setdefault(key, set()).update(before)

    def _forward(self, placed: _Placed, segment: int, shard: int, copy: int) -> Key:
        return (FORWARD, placed.number, COMPUTE, segment, shard, copy)

    def _backward(self, placed: _Placed, segment: int, shard: int, copy: int) -> Key:
        """The key of the backward task of a segment; segments run the other way."""
        back = placed.segments.count - 1 - segment
        return (BACKWARD, len(self.placed) - 1 - placed.number, COMPUTE, back, shard, copy)

    # -- compute ------------------------------------------------------------------------------------

    def _compute(self, placed: _Placed) -> None:
        last = placed.segments.count - 1
        for shard, copy, device in placed.shards():
            for segment in range(placed.segments.count):
                self._segment(placed, segment, shard, copy, device, backward=False)
                if segment:
                    key = self._forward(placed, segment, shard, copy)
                    self._wait(key, [self._forward(placed, segment - 1, shard, copy)])
            if not self.needs_backward[placed.number]:
                continue
            for segment in range(last, -1, -1):
                self._segment(placed, segment, shard, copy, device, backward=True)
                before = (
                    self._forward(placed, last, shard, copy)
                    if segment == last
                    else self._backward(placed, segment + 1, shard, copy)
                )
                self._wait(self._backward(placed, segment, shard, copy), [before])
        for segment, seams in enumerate(placed.segments.seams):
            for number, seam in enumerate(seams):
                self._seam(placed, segment, number, list(seam.sources), list(seam.sinks), seam.item_bytes)
                if seam.is_mutual and self.needs_backward[placed.number]:
                    self._seam_back(
                        placed, segment, number, list(seam.sources), list(seam.sinks), seam.item_bytes
                    )

    def _segment(
        self, placed: _Placed, segment: int, shard: int, copy: int, device: int, *, backward: bool
    ) -> None:
        kind = self.machine.devices[device].kind
        duration_s = 0.0
        for part in placed.segments.parts[segment]:
            work = work_of(
                self.graph,
                placed.block.nodes[part.node],
                placed.layout.boxes[part.node][shard],
                backward=backward,
            )
            if work is not None:
                duration_s += part.share * self.costs.compute_s(work, kind)
        key = (self._backward if backward else self._forward)(placed, segment, shard, copy)
        which = TaskKind.BACKWARD if backward else TaskKind.FORWARD
        name = _shard_name(placed, shard, copy, segment)
        self._add(key, which, f"{name} {which}", self.machine.devices[device].name, duration_s)

    def _seam(
        self, placed: _Placed, segment: int, number: int, sources: list[Source], sinks: list[Sink], item: int
    ) -> None:
        """What shards of a block tell each other after a segment, on the way forward."""

        def gives(source: int, device: int) -> list[Key]:
            return [self._forward(placed, segment, source, c) for c in _copies(placed, source, device)]

        def takes(sink: int) -> list[Key]:
            return [
                self._forward(placed, segment + 1, shard, copy)
                for shard, copy, device in placed.shards()
                if device == sinks[sink].device
                and intersection(sources[shard].box, sinks[sink].box) is not None
            ]

        base = (FORWARD, placed.number, SEAM, segment, number)
        self._moved(
            base, exchange(sources, sinks, self.machine), item, f"{placed.block.name} sums", gives, takes
        )

    def _seam_back(
        self, placed: _Placed, segment: int, number: int, sources: list[Source], sinks: list[Sink], item: int
    ) -> None:
        """The gradient of what crossed a seam, on the way back."""

        def gives(source: int, device: int) -> list[Key]:
            return [self._backward(placed, segment + 1, source, c) for c in _copies(placed, source, device)]

        def takes(sink: int) -> list[Key]:
            return [
                self._backward(placed, segment, shard, copy)
                for shard, copy, device in placed.shards()
                if device == sinks[sink].device
                and intersection(sources[shard].box, sinks[sink].box) is not None
            ]

        base = (
            BACKWARD,
            len(self.placed) - 1 - placed.number,
            SEAM,
            placed.segments.count - 1 - segment,
            number,
        )
        what = f"{placed.block.name} sums' gradients"
        self._moved(base, exchange(sources, sinks, self.machine), item, what, gives, takes)

    # -- values -------------------------------------------------------------------------------------

    def _value(self, number: int, name: str) -> None:
        """What other blocks read of a value, and its gradient on the way back."""
        readers = [
            (placed, n, i)
            for placed in self.placed
            if name not in placed.block.writes
            for n, node in enumerate(placed.block.nodes)
            for i, operand in enumerate(node.operands)
            if operand == name
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
        self, writer: _Placed, node: int, boxes: Sequence[Box]
    ) -> tuple[list[Source], list[list[tuple[int, int]]]]:
        """The sources that a value's shards are, and the (shard, copy) pairs behind each."""
        summed = node > 0 or not writer.layout.is_partial or bool(writer.block.followers)
        behind: dict[tuple[int, Box], list[tuple[int, int]]] = {}
        for shard, copy, _ in writer.shards():
            summand = 0 if summed else writer.layout.summands[shard]
            behind.setdefault((summand, boxes[shard]), []).append((shard, copy))
        sources = [
            Source(summand, box, tuple(writer.placement.devices_of(s)[c] for s, c in held))
            for (summand, box), held in sorted(behind.items())
        ]
        return sources, [held for _, held in sorted(behind.items())]

    def _value_forward(
        self,
        number: int,
        name: str,
        writer: _Placed,
        node: int,
        boxes: Sequence[Box],
        readers: Sequence[tuple[_Placed, int, int]],
    ) -> None:
        sources, behind = self._written(writer, node, boxes)
        wanted: dict[tuple[int, Box], set[Key]] = {}
        for placed, n, i in readers:
            segment = placed.segments.reads_in[n]
            reads = placed.layout.reads(n, i)
            for shard, copy, device in placed.shards():
                box = reads[shard]
                if box is not None:
                    wanted.setdefault((device, box), set()).add(self._forward(placed, segment, shard, copy))
        sinks = [Sink(box, device) for device, box in sorted(wanted)]
        segment = writer.segments.writes_in[node]

        def gives(source: int, device: int) -> list[Key]:
            return [
                self._forward(writer, segment, shard, copy)
                for shard, copy in behind[source]
                if writer.placement.devices_of(shard)[copy] == device
            ]

        def takes(sink: int) -> list[Key]:
            return sorted(wanted[sinks[sink].device, sinks[sink].box])

        item = ITEM_BYTES[self.graph.value(name).dtype]
        base = (FORWARD, writer.number, VALUE, number)
        self._moved(base, exchange(sources, sinks, self.machine), item, name, gives, takes)

    def _value_backward(
        self,
        number: int,
        name: str,
        writer: _Placed,
        node: int,
        boxes: Sequence[Box],
        readers: Sequence[tuple[_Placed, int, int]],
    ) -> None:
        sources: list[Source] = []
        behind: list[tuple[_Placed, int, int]] = []
        for placed, n, i in readers:
            if not self.needs_backward[placed.number]:
                continue
            for shard, box in enumerate(placed.layout.reads(n, i)):
                if box is not None:
                    sources.append(Source(len(sources), box, placed.placement.devices_of(shard)))
                    behind.append((placed, placed.segments.reads_in[n], shard))
        wanted: dict[tuple[int, Box], set[Key]] = {}
        segment = writer.segments.writes_in[node]
        for shard, copy, device in writer.shards():
            wanted.setdefault((device, boxes[shard]), set()).add(self._backward(writer, segment, shard, copy))
        sinks = [Sink(box, device) for device, box in sorted(wanted)]

        def gives(source: int, device: int) -> list[Key]:
            placed, inner, shard = behind[source]
            return [self._backward(placed, inner, shard, c) for c in _copies(placed, shard, device)]

        def takes(sink: int) -> list[Key]:
            return sorted(wanted[sinks[sink].device, sinks[sink].box])

        item = ITEM_BYTES[self.graph.value(name).dtype]
        base = (BACKWARD, len(self.placed) - 1 - writer.number, VALUE, number)
        self._moved(base, exchange(sources, sinks, self.machine), item, f"{name} gradient", gives, takes)

    # -- weights ------------------------------------------------------------------------------------

    def _weight(self, number: int, name: str) -> None:
        """The gradients of a weight summed among its holders, and its updates."""
        read = [
            (placed, placed.segments.reads_in[n], shard, box)
            for placed in self.placed
            for n, node in enumerate(placed.block.nodes)
            for i, operand in enumerate(node.operands)
            if operand == name
            for shard, box in enumerate(placed.layout.reads(n, i))
            if box is not None
        ]
        if not read or name not in self.graph.differentiable:
            return
        item = ITEM_BYTES[self.graph.value(name).dtype]
        held: dict[int, int] = {}
        last = len(self.placed) - 1 - min(placed.number for placed, _, _, _ in read)
        for p, piece in enumerate(_pieces({box for _, _, _, box in read})):
            givers = [
                (placed, segment, shard) for placed, segment, shard, box in read if contains(box, piece)
            ]
            sources = [
                Source(i, piece, placed.placement.devices_of(shard))
                for i, (placed, _, shard) in enumerate(givers)
            ]
            holders = sorted({device for source in sources for device in source.devices})
            for device in holders:
                held[device] = held.get(device, 0) + volume(piece) * item

            def gives(source: int, device: int, givers: list[tuple[_Placed, int, int]] = givers) -> list[Key]:
                placed, segment, shard = givers[source]
                return [self._backward(placed, segment, shard, c) for c in _copies(placed, shard, device)]

            def takes(sink: int, holders: list[int] = holders) -> list[Key]:
                return [(UPDATE, number, holders[sink])]

            sinks = [Sink(piece, device) for device in holders]
            base = (BACKWARD, last, WEIGHT, number, p)
            self._moved(base, exchange(sources, sinks, self.machine), item, f"{name} gradient", gives, takes)
        for device, size_bytes in held.items():
            key = (UPDATE, number, device)
            duration_s = self.costs.update_s(size_bytes, self.machine.devices[device].kind)
            self._add(key, TaskKind.UPDATE, f"{name} update", self.machine.devices[device].name, duration_s)

    # -- moves --------------------------------------------------------------------------------------

    def _moved(
        self,
        base: Key,
        found: Exchange,
        item_bytes: int,
        what: str,
        gives: Gives,
        takes: Takes,
    ) -> None:
        """The tasks of an exchange, between those that give and those that take."""
        for source, sink in found.local:
            for key in takes(sink):
                self._wait(key, gives(source, found.sink_devices[sink]))
        for number, move in enumerate(found.moves):
            before = {key for source, device in move.sources for key in gives(source, device)}
            keys = self._move(base, number, move, item_bytes, what)
            for key in keys:
                self._wait(key, before)
            for sink in move.sinks:
                for key in takes(sink):
                    self._wait(key, keys)

    def _move(self, base: Key, number: int, move: Move, item_bytes: int, what: str) -> list[Key]:
        size_bytes = move.elements * item_bytes
        if move.pattern is Pattern.TRANSFER:
            a, b = move.devices
            link = self.machine.narrowest_link(a, b)
            duration_s = transfer_s(size_bytes, link.bandwidth_bytes_per_s, self.machine.latency(a, b))
            key = (*base, number, 0)
            name = f"{what} {self.machine.devices[a].name} to {self.machine.devices[b].name}"
            self._add(key, TaskKind.TRANSFER, name, link.name, duration_s, size_bytes)
            return [key]
        ring = [*move.devices, move.devices[0]]
        hops = list(pairwise(ring))
        bandwidth = min(self.machine.bandwidth(a, b) for a, b in hops)
        latency_s = max(self.machine.latency(a, b) for a, b in hops)
        count = len(move.devices)
        duration_s = collective_s(move.pattern, size_bytes, count, bandwidth, latency_s)
        keys: list[Key] = []
        for hop, (a, b) in enumerate(hops):
            key = (*base, number, hop)
            name = f"{what} {move.pattern} of {count}"
            link = self.machine.narrowest_link(a, b)
            self._add(
                key, TaskKind(move.pattern.value), name, link.name, duration_s, _hop_bytes(move, size_bytes)
            )
            keys.append(key)
        return keys


class Gives(Protocol):
    """The tasks after which a device can give a source."""

    def __call__(self, source: int, device: int, /) -> list[Key]: ...


class Takes(Protocol):
    """The tasks that wait for a sink."""

    def __call__(self, sink: int, /) -> list[Key]: ...


def _hop_bytes(move: Move, size_bytes: int) -> int:
    """What a ring moves over one of its links."""
    count = len(move.devices)
    if move.pattern is Pattern.ALL_REDUCE:
        return 2 * (count - 1) * size_bytes // count
    return (count - 1) * size_bytes


def _copies(placed: _Placed, shard: int, device: int) -> list[int]:
    return [c for c, where in enumerate(placed.placement.devices_of(shard)) if where == device]


def _shard_name(placed: _Placed, shard: int, copy: int, segment: int) -> str:
    name = placed.block.name
    if placed.layout.parts > 1:
        name += f" [{shard + 1}/{placed.layout.parts}]"
    if placed.placement.copies > 1:
        name += f" copy {copy + 1}"
    return f"{name} part {segment + 1}" if placed.segments.count > 1 else name


def _pieces(boxes: set[Box]) -> list[Box]:
    """The boxes, cut at each other's borders so that any two pieces are equal or apart."""
    whole = sorted(boxes)
    if all(intersection(a, b) is None for i, a in enumerate(whole) for b in whole[:i]):
        return whole
    cuts = [sorted({edge for box in whole for edge in box[axis]}) for axis in range(len(whole[0]))]
    atoms = product(*([Interval(lo, hi) for lo, hi in pairwise(edges)] for edges in cuts))
    return [atom for atom in atoms if any(contains(box, atom) for box in whole)]
