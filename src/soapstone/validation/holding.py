"""What a task holds beside the buffers of the task graph, node by node.

A buffer of the task graph (`tasks.buffers`) lives for whole tasks. Inside one, as torch runs it,

    forward     each operator takes scratch memory of its own, one after the other, and keeps what its
                backward pass needs and the graph does not know of (the gates of an LSTM cell)
    backward    gradients between the nodes of a block come and go; what a node had kept is let go when it has
                been taken back; what the task leaves is not all there at once

The most of this at any node, beyond what the buffers have for the task anyway, is one buffer of the task.
What operators take and keep is measured (`cost.profiler`). And a rank holds more than its shards read: the
batch, buffers, constants and what follows from these whole (`runtime.inputs`), and copies of parts of weights
(`runtime.weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import log, prod

from soapstone.cost.profile import OpKey, key_of
from soapstone.cost.work import Work, work_of
from soapstone.graph import ITEM_BYTES, Graph, Node
from soapstone.ops.box import Box, contains, volume
from soapstone.runtime.weights import Weights, is_copied, is_laid_out_anew
from soapstone.strategy.blocks import free_values
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.kept import kept, passes_gradient
from soapstone.tasks.placed import Placed, placed_block
from soapstone.tasks.task import Buffer, BufferKind, Key, TaskGraph

Bytes = Mapping[Work, int]


@dataclass(frozen=True)
class Measured:
    """What passes of operators take of memory while they run, beyond what they leave, and what forward passes
    keep for backward ones beside operands and outputs."""

    scratch_bytes: Bytes = field(default_factory=dict)
    kept_bytes: Bytes = field(default_factory=dict)

    def scratch(self, work: Work) -> int:
        """What a pass takes."""
        return _scaled(work, self.scratch_bytes, self._scratch_shapes)

    def kept(self, work: Work) -> int:
        """What a forward pass keeps."""
        return _scaled(work, self.kept_bytes, self._kept_shapes)

    @cached_property
    def _scratch_shapes(self) -> Mapping[OpKey, Sequence[Work]]:
        return _by_key(self.scratch_bytes)

    @cached_property
    def _kept_shapes(self) -> Mapping[OpKey, Sequence[Work]]:
        return _by_key(self.kept_bytes)


def _by_key(works: Iterable[Work]) -> Mapping[OpKey, Sequence[Work]]:
    found: dict[OpKey, list[Work]] = {}
    for work in works:
        found.setdefault(key_of(work), []).append(work)
    return found


def _scaled(work: Work, known: Bytes, shapes: Mapping[OpKey, Sequence[Work]]) -> int:
    """What is known of a pass, or else of the operator's shape of the nearest size, in proportion to it."""
    if work in known:
        return known[work]
    alike = shapes.get(key_of(work), ())
    if not alike:
        return 0
    near = min(alike, key=lambda other: abs(log(max(1, other.size_bytes) / max(1, work.size_bytes))))
    return round(known[near] * work.size_bytes / max(1, near.size_bytes))


NOTHING = Measured()


def beside(strategy: Strategy, measured: Measured, linked: Set[Key]) -> Iterator[Buffer]:
    """The buffers of what tasks hold beside what the task graph knows of; `linked` are the backward tasks to
    which autograd itself carries gradients from the tasks before them."""
    for number in range(len(strategy.blocks)):
        placed = placed_block(strategy, number)
        for shard in range(placed.layout.parts):
            sizes = _Sizes(strategy.graph, placed, shard, measured)
            for segment in range(placed.segments.count):
                yield from _segment(sizes, segment, linked)


def whole_inputs(graph: Graph, device_count: int) -> Iterator[Buffer]:
    """What every rank holds that is made of no weight."""
    views = {name for node in graph.nodes if node.op.is_view for name in node.outputs}
    values = [graph.value(name) for name in free_values(graph) - views]
    size_bytes = sum(prod(value.shape) * ITEM_BYTES[value.dtype] for value in values)
    for device in range(device_count):
        yield Buffer(BufferKind.INPUT, device, size_bytes)


def copied_parts(strategy: Strategy, tasks: TaskGraph) -> Iterator[Buffer]:
    """The copies of parts of weights that several nodes of a rank read."""
    graph, blocks = strategy.graph, [placed_block(strategy, n) for n in range(len(strategy.blocks))]
    weights = Weights(graph, blocks, tasks.exchanges)
    users: dict[tuple[str, Box, int], list[tuple[Key, Key]]] = {}
    for name, readers in weights.readers.items():
        for reader in readers:
            placed, segment = reader.placed, reader.placed.segments.reads_in[reader.node]
            boxes = placed.layout.reads(reader.node, reader.operand)
            for shard, copy, device in placed.shards():
                box = boxes[shard]
                if box is not None:
                    both = placed.forward(segment, shard, copy), placed.backward(segment, shard, copy)
                    users.setdefault((name, box, device), []).append(both)
    held = {device: weights.boxes_on(device) for _, _, device in users}
    for (name, box, device), passes in users.items():
        around = next(own for own in held[device][name] if contains(own, box))
        if is_copied(box, around, len(passes)) or (len(passes) == 1 and is_laid_out_anew(box, around)):
            size_bytes = volume(box) * ITEM_BYTES[graph.value(name).dtype]
            made_by = tuple(forward for forward, _ in passes)
            needed_by = tuple(backward for _, backward in passes if backward in tasks.ids)
            yield Buffer(BufferKind.ACTIVATION, device, size_bytes, made_by, needed_by)


def _segment(sizes: _Sizes, segment: int, linked: Set[Key]) -> Iterator[Buffer]:
    placed, shard = sizes.placed, sizes.shard
    nodes = [part.node for part in placed.segments.parts[segment]]
    ends = [n for n in nodes if placed.segments.writes_in[n] == segment]
    scratch = _most_run(sizes, nodes)
    own = sum(sizes.kept(n) for n in ends)
    back = {way: _most_taken_back(sizes, nodes, linked=way) for way in (False, True)}
    for copy, device in enumerate(placed.placement.devices_of(shard)):
        forward, backward = placed.forward(segment, shard, copy), placed.backward(segment, shard, copy)
        if scratch:
            yield Buffer(BufferKind.SCRATCH, device, scratch, (forward,), ())
        if own:
            yield Buffer(BufferKind.ACTIVATION, device, own, (forward,), (backward,))
        most = back[backward in linked]
        if most:
            yield Buffer(BufferKind.SCRATCH, device, most, (backward,), ())


@dataclass
class _Sizes:
    """The bytes that belong to a shard of a block."""

    graph: Graph
    placed: Placed
    shard: int
    measured: Measured
    _known: dict[tuple[int, bool], Work | None] = field(default_factory=dict)

    @cached_property
    def given(self) -> Set[str]:
        """The values that other blocks read, whose gradients come from there."""
        own = {node.name for node in self.placed.block.nodes}
        readers = [node for node in self.graph.nodes if node.name not in own]
        return {name for node in readers for name in node.reads if name in self.placed.block.writes}

    def node(self, number: int) -> Node:
        return self.placed.block.nodes[number]

    def work(self, number: int, *, backward: bool) -> Work | None:
        if (number, backward) not in self._known:
            box = self.placed.layout.boxes[number][self.shard]
            self._known[number, backward] = work_of(self.graph, self.node(number), box, backward=backward)
        return self._known[number, backward]

    def scratch(self, number: int, *, backward: bool) -> int:
        work = self.work(number, backward=backward)
        return 0 if work is None else self.measured.scratch(work)

    def kept(self, number: int) -> int:
        work = self.work(number, backward=False)
        differs = any(name in self.graph.differentiable for name in self.node(number).outputs)
        return self.measured.kept(work) if work is not None and differs else 0

    def written(self, number: int) -> Mapping[str, int]:
        """The bytes of each of a node's outputs."""
        return {
            name: volume(self.placed.layout.writes(number, i)[self.shard]) * self._item(name)
            for i, name in enumerate(self.node(number).outputs)
        }

    def read(self, number: int, operand: int) -> int:
        box = self.placed.layout.reads(number, operand)[self.shard]
        name = self.node(number).operands[operand]
        return 0 if box is None or not isinstance(name, str) else volume(box) * self._item(name)

    def _item(self, name: str) -> int:
        return ITEM_BYTES[self.graph.value(name).dtype]


def _most_run(sizes: _Sizes, nodes: Sequence[int]) -> int:
    """The most that a forward task holds at any of its nodes beyond the buffers that it has all along."""
    pending = most = 0
    for n in reversed(nodes):
        most = max(most, sizes.scratch(n, backward=False) - pending)
        is_own = not (n and sizes.node(n).op.is_view)
        pending += sizes.kept(n) + (sum(sizes.written(n).values()) if is_own else 0)
    return most


def _most_taken_back(sizes: _Sizes, nodes: Sequence[int], *, linked: bool) -> int:
    """The most that a backward task holds at any of its nodes beyond the buffers that it has all along. What
    it starts from is autograd's own where it is linked to the tasks before it, and let go of when used."""
    graph = sizes.graph
    taken = [n for n in nodes if any(name in graph.differentiable for name in sizes.node(n).outputs)]
    home = {name: n for n in taken for name in sizes.node(n).outputs}
    flow = _Flow()
    pending = sum(sum(_left(sizes, n, home).values()) for n in taken)
    freed = most = 0
    last_keeper = _last_keepers(sizes, taken, home)
    for n in reversed(taken):
        node = sizes.node(n)
        for i, operand in enumerate(node.operands):
            if isinstance(operand, str) and operand in home and operand in graph.differentiable:
                passes = node.op.is_view or passes_gradient(graph, node, i)
                flow.give(operand, sizes.read(n, i), node.outputs[0] if passes else None)
        pending -= sum(_left(sizes, n, home).values())
        most = max(most, flow.size_bytes + sizes.scratch(n, backward=True) - pending - freed)
        flow.drop(node.outputs)
        freed += sum(size for name, size in sizes.written(n).items() if linked and name in sizes.given)
        freed += sizes.kept(n) + sum(
            sizes.written(home[name])[name] for name, keeper in last_keeper.items() if keeper == n
        )
    return most


def _left(sizes: _Sizes, number: int, home: Mapping[str, int]) -> Mapping[int, int]:
    """The bytes of the gradients that a node's backward pass leaves for others, by operand."""
    graph = sizes.graph
    return {
        i: sizes.read(number, i)
        for i, operand in enumerate(sizes.node(number).operands)
        if isinstance(operand, str) and operand in graph.differentiable and operand not in home
    }


def _last_keepers(sizes: _Sizes, taken: Sequence[int], home: Mapping[str, int]) -> Mapping[str, int]:
    """For each value that was made in the segment and is no view, the node that has it until the last."""
    found: dict[str, int] = {}
    for n in reversed(taken):
        node = sizes.node(n)
        needs = kept(sizes.graph, node)
        names = [node.operands[i] for i in needs.operands] + (list(node.outputs) if needs.output else [])
        for name in names:
            if isinstance(name, str) and name in home and not sizes.node(home[name]).op.is_view:
                found[name] = n
    return found


class _Flow:
    """The gradients between the nodes of a task: which are there, and which are one and the same memory."""

    def __init__(self) -> None:
        self._place: dict[str, int | None] = {}  # value -> its memory; None for that of the task's own roots
        self._size_bytes: dict[int, int] = {}
        self._count = 0

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return sum(self._size_bytes.values())

    def give(self, name: str, size_bytes: int, same_as: str | None) -> None:
        """A consumer has made its part of the gradient of a value: of its own, or the gradient of another."""
        if name in self._place:
            return
        if same_as is not None:
            self._place[name] = self._place.get(same_as)
            return
        self._place[name] = self._count
        self._size_bytes[self._count] = size_bytes
        self._count += 1

    def drop(self, names: Sequence[str]) -> None:
        """The gradients of these values are not needed any more."""
        gone = {self._place.pop(name) for name in names if name in self._place}
        for place in gone - set(self._place.values()):
            if place is not None:
                self._size_bytes.pop(place)
