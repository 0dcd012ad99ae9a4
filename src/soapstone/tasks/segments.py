"""Segments: a block's nodes, cut where shards must hear from each other before they go on.

A block runs as one task on each device unless (1) its leader is split along a sum and has
followers that need the sum, or (2) a node takes statistics over a dim that is split. Each such
place is a seam; what crosses it is an exchange among the block's own shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from soapstone.graph import ITEM_BYTES
from soapstone.ops.box import Box, Interval
from soapstone.strategy.layout import Layout
from soapstone.strategy.pipeline import Turns
from soapstone.strategy.placement import Placement
from soapstone.tasks.exchange import Sink, Source

STATISTICS_SHARE = 1 / 3
"""[choice] A batch norm reads its input once for the statistics, and reads and writes it after."""

STATISTICS_NUMBERS = 3
"""Numbers exchanged for each channel: count, mean and M2."""


@dataclass(frozen=True)
class Part:
    """A node's share in a segment."""

    node: int
    share: float = 1.0


@dataclass(frozen=True)
class Seam:
    """What crosses between two segments; `behind[i]` are the shards that hold source i. `is_mutual`
    says whether the gradient must cross back: the statistics' does; a partial sum's does not, since
    every shard has the whole gradient already."""

    sources: tuple[Source, ...]
    behind: tuple[tuple[int, ...], ...]
    sinks: tuple[Sink, ...]
    item_bytes: int
    is_mutual: bool


@dataclass(frozen=True)
class Segments:
    """The parts of each segment, and the seams between consecutive ones.

    `reads_in[n]` is the segment before which node n needs its operands, `writes_in[n]` the one after
    which its outputs exist.
    """

    parts: tuple[tuple[Part, ...], ...]
    seams: tuple[tuple[Seam, ...], ...]
    reads_in: tuple[int, ...]
    writes_in: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many segments there are."""
        return len(self.parts)


def segmented(layout: Layout, placement: Placement, turns: Turns) -> Segments:
    """The segments of a block under a placement, whose shards take turns."""
    parts: list[list[Part]] = [[]]
    seams: list[tuple[Seam, ...]] = []
    reads_in: list[int] = []
    writes_in: list[int] = []
    for number in range(len(layout.block.nodes)):
        reads_in.append(len(parts) - 1)
        shared = _statistics_seam(layout, placement, turns, number)
        if shared is None:
            parts[-1].append(Part(number))
        else:
            parts[-1].append(Part(number, STATISTICS_SHARE))
            parts.append([Part(number, 1 - STATISTICS_SHARE)])
            seams.append((shared,))
        writes_in.append(len(parts) - 1)
        if number == 0 and layout.is_partial and not layout.sums_pass:
            seams.append(_partial_seams(layout, placement, turns))
            parts.append([])
            writes_in[0] = len(parts) - 1
    return Segments(tuple(map(tuple, parts)), tuple(seams), tuple(reads_in), tuple(writes_in))


def _statistics_seam(layout: Layout, placement: Placement, turns: Turns, number: int) -> Seam | None:
    node = layout.block.nodes[number]
    signature = layout.graph.signature(node)
    split = [
        dim
        for dim in signature.shared & signature.sizes.keys()
        if any(box[dim] != signature.points[dim] for box in layout.boxes[number])
    ]
    if not split or not node.op.joins_statistics(node.attrs):
        return None
    kept = [dim for dim in signature.sizes if dim not in signature.shared]
    numbers = Interval(0, STATISTICS_NUMBERS)
    boxes = [(*(box[dim] for dim in kept), numbers) for box in layout.boxes[number]]
    behind = layout.alike(number)
    return Seam(
        tuple(
            Source(i, boxes[s[0]], placement.devices_of_all(s), turns.lanes[s[0]])
            for i, s in enumerate(behind)
        ),
        behind,
        _sinks(boxes, placement),
        ITEM_BYTES["f32"],
        is_mutual=True,
    )


def _partial_seams(layout: Layout, placement: Placement, turns: Turns) -> tuple[Seam, ...]:
    seams = []
    for i, name in enumerate(layout.block.leader.outputs):
        boxes = layout.writes(0, i)
        seams.append(
            Seam(
                tuple(
                    Source(layout.summands[s], box, placement.devices_of_all([s]), turns.lanes[s])
                    for s, box in enumerate(boxes)
                ),
                layout.alike(0),
                _sinks(boxes, placement),
                ITEM_BYTES[layout.graph.value(name).dtype],
                is_mutual=False,
            )
        )
    return tuple(seams)


def _sinks(boxes: list[Box] | tuple[Box, ...], placement: Placement) -> tuple[Sink, ...]:
    wanted = {(device, box) for shard, box in enumerate(boxes) for device in placement.devices_of(shard)}
    return tuple(Sink(box, device) for device, box in sorted(wanted))
