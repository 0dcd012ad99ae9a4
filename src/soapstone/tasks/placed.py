"""A block with all that follows from its placement, and the keys of its compute tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import Layout
from soapstone.strategy.pipeline import Turns
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.segments import Segments, segmented
from soapstone.tasks.task import Key

FORWARD, BACKWARD, UPDATE = 0, 1, 2
"""First number of a key: the pass."""
COMPUTE, SEAM, VALUE, WEIGHT = 0, 1, 2, 3
"""Third number of a key: what the task belongs to."""


@dataclass(frozen=True)
class Placed:
    """Block `number` of `count`, cut and placed."""

    number: int
    count: int
    block: Block
    layout: Layout
    placement: Placement
    segments: Segments
    turns: Turns

    def shards(self) -> Iterator[tuple[int, int, int]]:
        """All (shard, copy, device)."""
        for shard in range(self.layout.parts):
            for copy, device in enumerate(self.placement.devices_of(shard)):
                yield shard, copy, device

    def on(self, device: int, shards: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Those (shard, copy) of the shards that run on a device."""
        for shard in shards:
            for copy, where in enumerate(self.placement.devices_of(shard)):
                if where == device:
                    yield shard, copy

    @property
    def from_last(self) -> int:
        """The number counted from the last block: the second number of a backward key."""
        return self.count - 1 - self.number

    def forward(self, segment: int, shard: int, copy: int) -> Key:
        """The key of the forward task of a segment."""
        return (FORWARD, self.number, COMPUTE, segment, shard, copy)

    def backward(self, segment: int, shard: int, copy: int) -> Key:
        """The key of the backward task of a segment; segments run the other way."""
        return (BACKWARD, self.from_last, COMPUTE, self.segments.count - 1 - segment, shard, copy)

    def name_of(self, shard: int, copy: int, segment: int) -> str:
        """What a person would call a shard's part in a segment."""
        name = self.block.name
        if self.layout.parts > 1:
            name += f" [{shard + 1}/{self.layout.parts}]"
        if self.placement.copies > 1:
            name += f" copy {copy + 1}"
        return f"{name} part {segment + 1}" if self.segments.count > 1 else name


def placed_block(strategy: Strategy, number: int) -> Placed:
    """A block of a strategy with all that follows from its placement."""
    block = strategy.blocks[number]
    layout, placement = strategy.layouts[block.name], strategy.placements[block.name]
    own = strategy.turns[block.name]
    return Placed(
        number, len(strategy.blocks), block, layout, placement, segmented(layout, placement, own), own
    )


def placed_blocks(strategy: Strategy) -> list[Placed]:
    """The blocks of a strategy with all that follows from their placements."""
    return [placed_block(strategy, number) for number in range(len(strategy.blocks))]


def readers_of(blocks: Iterable[Placed]) -> Mapping[str, Sequence[tuple[Placed, int, int]]]:
    """For each value the operands that it is: a block, the number of its node, and of the node's operand."""
    found: dict[str, list[tuple[Placed, int, int]]] = {}
    for placed in blocks:
        for n, node in enumerate(placed.block.nodes):
            for i, operand in enumerate(node.operands):
                if isinstance(operand, str):
                    found.setdefault(operand, []).append((placed, n, i))
    return found
