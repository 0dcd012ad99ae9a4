"""Which samples of a batch each rank reads.

A shard reads boxes of the batch's tensors, directly or by way of free values (`inputs`), which every rank
makes for itself. The samples behind those boxes are all that a rank has to load:

    through a free node     a box of what it writes is followed to the boxes that it reads; where the
                            notation does not tell which, to all
    a sum over samples      (how many labels count) would need all of them: each rank adds up the samples
                            that it answers for, and the ranks add up what they have
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from soapstone.graph import Graph, Node
from soapstone.ops.box import Box, Interval, whole
from soapstone.ops.signature import Access, IterationBox, Signature
from soapstone.runtime.part import sample_axes
from soapstone.strategy.blocks import free_values
from soapstone.tasks.placed import Placed

Wanted = dict[str, set[Box]]
"""By a free value's name, the boxes of it that are read."""


@dataclass(frozen=True)
class Rows:
    """The samples of a batch: those that each rank reads, those that it answers for (each sample has
    one rank that does), and the free nodes that are sums over samples, with the dim that counts them."""

    read: tuple[tuple[int, ...], ...]
    owned: tuple[tuple[int, ...], ...]
    sums: Mapping[str, str]


def rows_of(graph: Graph, blocks: Sequence[Placed], ranks: int) -> Rows:
    """Who reads which samples."""
    names = free_values(graph)
    free = [node for node in graph.nodes if all(name in names for name in node.outputs)]
    sums = {node.name: dim for node in free if (dim := _summed_dim(graph, free, node)) is not None}
    wanted: list[Wanted] = [{} for _ in range(ranks)]
    for placed in blocks:
        for shard, _, device in placed.shards():
            for n, node in enumerate(placed.block.nodes):
                for i, operand in enumerate(node.operands):
                    box = placed.layout.reads(n, i)[shard]
                    if isinstance(operand, str) and operand in names and box is not None:
                        wanted[device].setdefault(operand, set()).add(box)
    changed = {*graph.updates.values()} & names
    for own in wanted:
        for name in changed:
            own.setdefault(name, set()).add(whole(graph.value(name).shape))
        _follow(graph, [node for node in free if node.name not in sums], own)
    found = [_samples(graph, own) for own in wanted]
    nobodys = set(range(graph.sample_count or 0)).difference(*found)
    found[0] |= nobodys  # only a sum over samples reads them
    owned: list[set[int]] = []
    for rows in found:
        owned.append(rows.difference(*owned))
    return Rows(tuple(tuple(sorted(r)) for r in found), tuple(tuple(sorted(r)) for r in owned), sums)


def runs(rows: Sequence[int]) -> list[Interval]:
    """Ascending numbers as intervals."""
    found = [[row for _, row in group] for _, group in groupby(enumerate(rows), lambda p: p[1] - p[0])]
    return [Interval(run[0], run[-1] + 1) for run in found]


def points_of(signature: Signature, dim: str, samples: Interval, sample_count: int) -> IterationBox:
    """The part of an iteration space that some samples are, counted by a dim."""
    scale = signature.sizes[dim] // sample_count
    return {**signature.points, dim: Interval(samples.lo * scale, samples.hi * scale)}


def _samples(graph: Graph, wanted: Wanted) -> set[int]:
    rows: set[int] = set()
    for name, axis in sample_axes(graph).items():
        for box in wanted.get(name, ()):
            rows.update(range(*box[axis]))
    return rows


def _summed_dim(graph: Graph, free: Sequence[Node], node: Node) -> str | None:
    """The dim over which a node sums samples up, if that is what it does and each sample counts for
    itself."""
    dim, count = graph.sample_dims.get(node.name), graph.sample_count
    signature = graph.signature(node)
    if dim is None or not count or dim not in signature.splits or dim in signature.output_dims:
        return None
    if signature.sizes[dim] % count or any(graph.value(o).shape for o in node.outputs):
        return None
    for row in (0, count - 1):
        wanted: Wanted = {}
        _read(node, signature, points_of(signature, dim, Interval(row, row + 1), count), wanted)
        _follow(graph, free, wanted)
        if _samples(graph, wanted) != {row}:
            return None
    return dim


def _follow(graph: Graph, free: Sequence[Node], wanted: Wanted) -> None:
    """Follow what is wanted of free values back to what they are computed from."""
    for node in reversed(free):
        signature = graph.signature(node)
        for output, name in enumerate(node.outputs):
            for box in wanted.get(name, ()):
                _read(node, signature, _points(signature, signature.outputs[output], box), wanted)


def _read(node: Node, signature: Signature, points: IterationBox, wanted: Wanted) -> None:
    for i, operand in enumerate(node.operands):
        if isinstance(operand, str):
            region = signature.read(i, points)
            if not region.is_empty:
                wanted.setdefault(operand, set()).add(region.box)


def _points(signature: Signature, written: Access, box: Box) -> IterationBox:
    """The points of the iteration space that a box of an output needs; more of them where an axis is
    not simply one dim, or several of which the first counts in the largest steps."""
    found = dict(signature.points)
    for axis, interval in zip(written, box, strict=True):
        if not axis.terms or axis.const or axis.divisor != 1:
            continue
        dim, stride = max(axis.terms, key=lambda term: term[1])
        if dim in signature.whole or stride < 1:
            continue
        inside = sum(abs(step) * (signature.sizes[other] - 1) for other, step in axis.terms if other != dim)
        if inside < stride:
            found[dim] = Interval(interval.lo // stride, -(-interval.hi // stride))
    return found
