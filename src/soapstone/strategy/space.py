"""The space of placements: what may be drawn for a block on a machine, all of it or at random.

A placement of a block on a machine is a layout (degrees that the operators of the block allow, with
equal parts), a number of copies, and a choice of distinct devices for the shards' copies, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import perm
from random import Random

from soapstone.graph import Graph
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import Layout, layouts
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy


@dataclass(frozen=True)
class Space:
    """The placements of one block on `device_count` devices, in at most `most_copies` copies."""

    graph: Graph
    block: Block
    device_count: int
    most_copies: int = 1

    @cached_property
    def shapes(self) -> tuple[tuple[Layout, int], ...]:
        """Every (layout, copies) that fits on the devices, each shard's copy on a device of its own."""
        return tuple(
            (layout, copies)
            for parts in range(1, self.device_count + 1)
            for layout in layouts(self.graph, self.block, parts)
            for copies in range(1, min(self.most_copies, self.device_count // parts) + 1)
        )

    @cached_property
    def count(self) -> int:
        """How many placements there are."""
        return sum(perm(self.device_count, layout.parts * copies) for layout, copies in self.shapes)

    def __iter__(self) -> Iterator[Placement]:
        """Every placement."""
        for layout, copies in self.shapes:
            for devices in permutations(range(self.device_count), layout.parts * copies):
                yield Placement(_split(layout), devices, copies)

    def drawn(self, random: Random) -> Placement:
        """A placement whose shape, and then whose devices, are drawn uniformly."""
        layout, copies = random.choice(self.shapes)
        devices = random.sample(range(self.device_count), layout.parts * copies)
        return Placement(_split(layout), tuple(devices), copies)


def _split(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((dim, degree) for dim, degree in layout.degrees.items() if degree > 1)


def random_strategy(graph: Graph, device_count: int, random: Random, most_copies: int = 1) -> Strategy:
    """A strategy with every block placed at random."""
    empty = Strategy(graph, {})
    placements = {
        block.name: Space(graph, block, device_count, most_copies).drawn(random) for block in empty.blocks
    }
    return Strategy(graph, placements)
