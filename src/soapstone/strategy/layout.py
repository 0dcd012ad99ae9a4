"""A block under given degrees: which part of every node each shard computes, reads and writes.

Independent of devices: what a Placement adds is only where the shards run. So layouts are few, and
what two layouts exchange over a value can be worked out once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

from soapstone.errors import StrategyError
from soapstone.graph import Graph, Node
from soapstone.ops.box import Box, Interval, contains
from soapstone.ops.signature import IterationBox, Signature
from soapstone.strategy.blocks import Block, follower_box, passes_sums

MOST_SHARDS = 100_000
"""[choice] How many shards the layouts that are remembered may have together: some 100 MB."""


@dataclass(frozen=True)
class Layout:
    """The shards of a block. `boxes[n][s]` is the iteration box of node n in shard s."""

    graph: Graph
    block: Block
    degrees: Mapping[str, int]
    boxes: tuple[tuple[IterationBox, ...], ...]

    @property
    def parts(self) -> int:
        """How many shards there are."""
        return len(self.boxes[0])

    def reads(self, node: int, operand: int) -> tuple[Box | None, ...]:
        """What each shard reads of an operand; None where it reads nothing."""
        if (node, operand) not in self._reads:
            signature = self.graph.signature(self.block.nodes[node])
            regions = [signature.read(operand, box) for box in self.boxes[node]]
            self._reads[node, operand] = tuple(None if r.is_empty else r.box for r in regions)
        return self._reads[node, operand]

    def writes(self, node: int, output: int) -> tuple[Box, ...]:
        """What each shard writes of an output."""
        if (node, output) not in self._writes:
            signature = self.graph.signature(self.block.nodes[node])
            self._writes[node, output] = tuple(signature.write(output, box) for box in self.boxes[node])
        return self._writes[node, output]

    @cached_property
    def _reads(self) -> dict[tuple[int, int], tuple[Box | None, ...]]:
        return {}

    @cached_property
    def _writes(self) -> dict[tuple[int, int], tuple[Box, ...]]:
        return {}

    def alike(self, node: int) -> tuple[tuple[int, ...], ...]:
        """The shards, put together where they compute the same part of a node: the followers of a
        split sum work side by side, as copies do."""
        groups: dict[tuple[Interval, ...], list[int]] = {}
        for shard, box in enumerate(self.boxes[node]):
            groups.setdefault(tuple(box.values()), []).append(shard)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def summands(self) -> tuple[int, ...]:
        """For each shard, which of the leader's partial sums it computes; all 0 when sums are whole."""
        signature = self.graph.signature(self.block.leader)
        split = [dim for dim in signature.summed_dims if self.degrees.get(dim, 1) > 1]
        numbers: list[int] = []
        for box in self.boxes[0]:
            number = 0
            for dim in split:
                step = signature.sizes[dim] // self.degrees[dim]
                number = number * self.degrees[dim] + box[dim].lo // step
            numbers.append(number)
        return tuple(numbers)

    @cached_property
    def is_partial(self) -> bool:
        """Whether the leader writes partial sums."""
        return len(set(self.summands)) > 1

    @cached_property
    def sums_pass(self) -> bool:
        """Whether partial sums are what the whole block writes: its followers, if any, take them as they
        would take the sum. Otherwise they must be added before a follower may go on."""
        return self.is_partial and (not self.block.followers or passes_sums(self.graph, self.block))

    def summand_of(self, shard: int) -> int:
        """Which of the partial sums that others read a shard writes; 0 where what it writes is whole."""
        return self.summands[shard] if self.sums_pass else 0


def layout(graph: Graph, block: Block, degrees: Mapping[str, int]) -> Layout:
    """The layout, or an error that says which node of the block cannot be split so."""
    found = _RECENT.layout(graph, block, degrees)
    if isinstance(found, str):
        raise StrategyError(f"block '{block.name}' cannot be split by {dict(degrees)}: {found}")
    return found


class _Recent:
    """What was worked out last, for all blocks that look alike: the layers of a network have their layouts in
    common, strategies of one graph most of theirs, and on hundreds of devices each takes tens of
    milliseconds."""

    def __init__(self) -> None:
        self.known = OrderedDict[Hashable, Layout]()
        self.shards, self.lock = 0, Lock()

    def layout(self, graph: Graph, block: Block, degrees: Mapping[str, int]) -> Layout | str:
        """The layout, or what is in the way, which is not remembered: it names nodes."""
        key = (_looks(graph, block), tuple(degrees.items()))
        with self.lock:
            known = self.known.get(key)
            if known is not None:
                self.known.move_to_end(key)
        if known is not None:
            found = Layout(graph, block, dict(degrees), known.boxes)
            vars(found).update(_reads=known._reads, _writes=known._writes)
            return found
        made = _layout(graph, block, degrees)
        if isinstance(made, Layout):
            self._keep(key, made)
        return made

    def _keep(self, key: Hashable, made: Layout) -> None:
        with self.lock:
            if key not in self.known:
                self.known[key] = made
                self.shards += made.parts
            while self.shards > MOST_SHARDS:
                self.shards -= self.known.popitem(last=False)[1].parts


def _looks(graph: Graph, block: Block) -> Hashable:
    """All that boxes follow from, names left out."""
    inner = {name: (n, i) for n, node in enumerate(block.nodes) for i, name in enumerate(node.outputs)}
    return block.carried, tuple(
        (
            node.op_name,
            tuple(sorted(node.attrs.items())),
            tuple((graph.shape(o), inner.get(o) if isinstance(o, str) else None) for o in node.operands),
        )
        for node in block.nodes
    )


_RECENT = _Recent()


def first_shard(graph: Graph, block: Block, degrees: Mapping[str, int]) -> tuple[IterationBox, ...]:
    """The first shard's part of every node of a block, which is as large as any other's."""
    signature = graph.signature(block.leader)
    found: str | tuple[tuple[IterationBox, ...], ...] | None = signature.objection(degrees)
    if found is None:
        part = {dim: points.part(0, degrees.get(dim, 1)) for dim, points in signature.points.items()}
        found = _followed(graph, block, (part,))
    if isinstance(found, str):
        raise StrategyError(f"block '{block.name}' cannot be split by {dict(degrees)}: {found}")
    return tuple(row[0] for row in found)


def _layout(graph: Graph, block: Block, degrees: Mapping[str, int]) -> Layout | str:
    signature = graph.signature(block.leader)
    objection = signature.objection(degrees)
    if objection is not None:
        return objection
    rows = _followed(graph, block, tuple(signature.shards(degrees)))
    return rows if isinstance(rows, str) else Layout(graph, block, dict(degrees), rows)


def _followed(
    graph: Graph, block: Block, shards: tuple[IterationBox, ...]
) -> tuple[tuple[IterationBox, ...], ...] | str:
    """What shards of the leader are in each node of the block, or what is in the way."""
    rows: list[tuple[IterationBox, ...]] = [shards]
    written = _written(graph, block.leader, rows[0])
    for node, position in zip(block.followers, block.carried, strict=True):
        operand = node.operands[position]
        assert isinstance(operand, str)
        inner = graph.signature(node)
        boxes = [follower_box(inner, position, box) for box in written[operand]]
        kept = [box for box in boxes if box is not None]
        if len(kept) < len(boxes):
            return f"a shard would cut across the factored axes of '{node.name}'"
        rows.append(tuple(kept))
        if not _is_at_hand(inner, node, rows[-1], written):
            return f"a shard of '{node.name}' would read what another shard of the block wrote"
        written |= _written(graph, node, rows[-1])
    return tuple(rows)


def _written(graph: Graph, node: Node, boxes: tuple[IterationBox, ...]) -> dict[str, tuple[Box, ...]]:
    signature = graph.signature(node)
    return {name: tuple(signature.write(i, box) for box in boxes) for i, name in enumerate(node.outputs)}


def _is_at_hand(
    signature: Signature,
    node: Node,
    boxes: tuple[IterationBox, ...],
    written: Mapping[str, tuple[Box, ...]],
) -> bool:
    """Whether each shard reads of the block's own values only what it wrote itself."""
    return all(
        contains(own, signature.read(i, box).box)
        for i, operand in enumerate(node.operands)
        if isinstance(operand, str) and operand in written
        for own, box in zip(written[operand], boxes, strict=True)
    )


def layouts(graph: Graph, block: Block, parts: int) -> Iterator[Layout]:
    """Every layout of a block with this many shards."""
    for degrees in graph.signature(block.leader).legal_degrees(parts):
        found = _layout(graph, block, degrees)
        if isinstance(found, Layout):
            yield found
