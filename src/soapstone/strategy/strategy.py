"""A Strategy: a Placement for every block of a graph (FlexFlow 4: S).

Different blocks may be placed on different devices: that freedom is the O of SOAP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.layout import Layout, layout
from soapstone.strategy.placement import Placement


@dataclass(frozen=True)
class Strategy:
    """Blocks of a graph, and by their names where each runs. `apart` names nodes that lead blocks of
    their own, though they could follow another."""

    graph: Graph
    placements: Mapping[str, Placement]
    apart: frozenset[str] = frozenset()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, in the order of the graph."""
        return blocks(self.graph, self.apart)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """How each block is cut, by its name."""
        return {
            block.name: layout(self.graph, block, self.placements[block.name].degree_of)
            for block in self.blocks
        }

    def checked(self, machine: Machine) -> Strategy:
        """The strategy itself if every block has a legal placement on the machine's devices."""
        names = [block.name for block in self.blocks]
        for name in self.placements:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise StrategyError(f"the strategy places '{name}', which leads no block of the graph{hint}")
        for name in names:
            if name not in self.placements:
                raise StrategyError(f"the strategy has no placement for block '{name}'")
            for device in self.placements[name].devices:
                if not 0 <= device < len(machine.devices):
                    last = len(machine.devices) - 1
                    raise StrategyError(
                        f"block '{name}' is placed on device {device}; the machine has 0 to {last}"
                    )
        assert self.layouts.keys() == set(names)
        return self
