"""Buffers: what each device holds, collected while the tasks are built.

A device holds the boxes its shards write; the boxes they read that none of its own contains (received,
or put together from several); the gradients of both; the inputs its shards read and its part of the
weights. `soapstone.sim.memory` lays them over the timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from soapstone.graph import ITEM_BYTES, Graph, Node, Role
from soapstone.ops.box import contains, volume
from soapstone.tasks.exchange import Exchange, Sink, Source
from soapstone.tasks.kept import Kept, kept
from soapstone.tasks.placed import Placed
from soapstone.tasks.task import Buffer, BufferKind, Key


@dataclass(eq=False)
class Slot:
    """A buffer whose readers are still being found."""

    kind: BufferKind
    device: int
    size_bytes: int
    made_by: frozenset[Key]
    needed_by: set[Key] = field(default_factory=set)
    value: str = ""


@dataclass(frozen=True)
class Ends:
    """Both ends of an exchange: the tasks after which a device can give a source, those that wait for
    a sink, the buffers in which a device holds a source, the tasks that come back to a sink later,
    and what a sink is that is put together from elsewhere."""

    gives: Callable[[int, int], Sequence[Key]]
    takes: Callable[[int], Sequence[Key]]
    holds: Callable[[int, int], Sequence[Slot]]
    keeps: Callable[[int], Iterable[Key]]
    kind: BufferKind = BufferKind.RECEIVED


def nothing(*_: int) -> tuple[()]:
    """No buffer, or no task, whatever is asked."""
    return ()


class Ledger:
    """All buffers of a task graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots: list[Slot] = []
        self.written: dict[tuple[int, int, int, str], Slot] = {}  # by block, shard, copy and value
        self._kept: dict[str, Kept] = {}

    def buffers(self) -> tuple[Buffer, ...]:
        """What was entered, in an order that does not depend on the order of entering."""
        found = [
            (s.device, s.kind, s.size_bytes, tuple(sorted(s.made_by)), tuple(sorted(s.needed_by)), s.value)
            for s in self.slots
        ]
        return tuple(
            Buffer(kind, device, size_bytes, made_by, needed_by, value)
            for device, kind, size_bytes, made_by, needed_by, value in sorted(found)
        )

    def hold(
        self,
        kind: BufferKind,
        device: int,
        size_bytes: int,
        made_by: Iterable[Key] = (),
        needed_by: Iterable[Key] = (),
        value: str = "",
    ) -> Slot:
        """Enter a buffer; more tasks that need it may be added to the slot."""
        slot = Slot(kind, device, size_bytes, frozenset(made_by), set(needed_by), value)
        self.slots.append(slot)
        return slot

    def kept(self, node: Node) -> Kept:
        """What the node's backward pass needs, found once."""
        if node.name not in self._kept:
            self._kept[node.name] = kept(self.graph, node)
        return self._kept[node.name]

    def inputs(self, blocks: Sequence[Placed], free: frozenset[str]) -> None:
        """Enter what devices read of inputs, and of all that follows from these alone."""
        read = {
            (device, operand, box)
            for placed in blocks
            for n, node in enumerate(placed.block.nodes)
            for i, operand in enumerate(node.operands)
            if isinstance(operand, str) and operand in free
            for shard, box in enumerate(placed.layout.reads(n, i))
            if box is not None
            for device in placed.placement.devices_of(shard)
        }
        for device, name, box in sorted(read):
            self.hold(BufferKind.INPUT, device, volume(box) * self.item_bytes(name))

    def activations(self, placed: Placed) -> None:
        """Enter what the shards of a block write. A view is no memory of its own."""
        sizes = {
            name: self.sizes_bytes(placed, n, i)
            for n, node in enumerate(placed.block.nodes)
            for i, name in enumerate(node.outputs)
        }
        for shard, copy, device in placed.shards():
            slots: dict[str, Slot] = {}
            for n, node in enumerate(placed.block.nodes):
                first, last = placed.segments.reads_in[n], placed.segments.writes_in[n]
                made_by = {placed.forward(first, shard, copy), placed.forward(last, shard, copy)}
                back = placed.backward(first, shard, copy)
                seen = view_of(placed, n)
                for name in node.outputs:
                    slots[name] = (
                        self.hold(BufferKind.ACTIVATION, device, sizes[name][shard], made_by)
                        if seen is None
                        else slots[seen]
                    )
                    self.written[placed.number, shard, copy, name] = slots[name]
                for slot in (slots[o] for o in (*node.operands, *node.outputs) if o in slots):
                    slot.needed_by.update(made_by)
                for name in self.kept_names(node):
                    if name in slots:
                        slots[name].needed_by.add(back)

    def sizes_bytes(self, placed: Placed, node: int, output: int) -> list[int]:
        """What each shard of a block holds for an output; a view of a weight is the weight's memory."""
        boxes, made = placed.layout.writes(node, output), placed.block.nodes[node]
        if is_weight(self.graph, made):
            return [0] * len(boxes)
        return [volume(box) * self.item_bytes(made.outputs[output]) for box in boxes]

    def kept_names(self, node: Node) -> list[str]:
        """The values that the node's backward pass needs."""
        kept = self.kept(node)
        read = [node.operands[i] for i in sorted(kept.operands)]
        return [o for o in read if isinstance(o, str)] + (list(node.outputs) if kept.output else [])

    def item_bytes(self, name: str) -> int:
        """The size of one element of a value."""
        return ITEM_BYTES[self.graph.value(name).dtype]

    def exchanged(
        self,
        found: Exchange,
        sources: Sequence[Source],
        sinks: Sequence[Sink],
        item_bytes: int,
        keys: Sequence[Sequence[Key]],
        ends: Ends,
    ) -> None:
        """Enter what an exchange needs; `keys[i]` are the tasks of its move i."""
        for move, own in zip(found.moves, keys, strict=True):
            for source, device in move.sources:
                for slot in ends.holds(source, device):
                    slot.needed_by.update(own)
        at_hand: dict[int, int] = {}  # sink -> the first source of its own device that it is a part of
        for source, sink in found.local:
            for slot in ends.holds(source, sinks[sink].device):
                slot.needed_by.update(ends.takes(sink))
            if contains(sources[source].box, sinks[sink].box):
                at_hand.setdefault(sink, source)
        arrivals = _arrivals(found, keys)
        for number, wanted in enumerate(sinks):
            readers = {*ends.takes(number), *ends.keeps(number)}
            if number in at_hand:
                for slot in ends.holds(at_hand[number], wanted.device):
                    slot.needed_by.update(readers)
            else:
                made_by = arrivals.get(number) or ends.takes(number)
                self.hold(ends.kind, wanted.device, volume(wanted.box) * item_bytes, made_by, readers)


def _arrivals(found: Exchange, keys: Sequence[Sequence[Key]]) -> Mapping[int, set[Key]]:
    """The tasks that bring something to each sink."""
    arrivals: dict[int, set[Key]] = {}
    for move, own in zip(found.moves, keys, strict=True):
        for sink in move.sinks:
            arrivals.setdefault(sink, set()).update(own)
    return arrivals


def view_of(placed: Placed, number: int) -> str | None:
    """The value of the block that a node is only a view of; None for any other node."""
    node = placed.block.nodes[number]
    operand = node.operands[placed.block.carried[number - 1]] if number and node.op.is_view else None
    return operand if isinstance(operand, str) else None


def is_weight(graph: Graph, node: Node) -> bool:
    """Whether what a node writes is the memory of a weight."""
    return node.op.is_view and [graph.value(name).role for name in node.reads] == [Role.WEIGHT]
