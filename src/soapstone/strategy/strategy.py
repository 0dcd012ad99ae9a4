"""A Strategy: a Placement for every block of a graph (FlexFlow 4: S).

Different blocks may be placed on different devices: that freedom is the O of SOAP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.lanes import check_lanes
from soapstone.strategy.layout import Layout, layout
from soapstone.strategy.pipeline import (
    Pipeline,
    Schedule,
    Turns,
    micro_dim,
    one_of,
    repeated,
    stages,
    turns,
)
from soapstone.strategy.placement import Placement


@dataclass(frozen=True)
class Strategy:
    """Blocks of a graph, and by their names where each runs. `apart` names nodes that lead blocks of
    their own, though they could follow another. With a `pipeline`, placements are those of all
    micro-batches: `pipelined` makes them of those of one."""

    graph: Graph
    placements: Mapping[str, Placement]
    apart: frozenset[str] = frozenset()
    pipeline: Pipeline | None = None

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

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has."""
        return 1 if self.pipeline is None else self.pipeline.micro_batches

    @cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The blocks that run in micro-batches, by stages: those that share devices are in one."""
        if self.pipeline is None:
            return ()
        count = self.pipeline.micro_batches
        return stages(
            self.placements, [b.name for b in self.blocks if micro_dim(self.graph, b, count) is not None]
        )

    @cached_property
    def turns(self) -> Mapping[str, Turns]:
        """When the shards of each block take their turns, by the block's name."""
        pipeline = self.pipeline or Pipeline(1)
        ahead = dict[str, int]()
        if pipeline.schedule is Schedule.ONE_F_ONE_B:
            ahead = {name: len(self.stages) - s for s, stage in enumerate(self.stages) for name in stage}
        return {
            block.name: turns(
                self.graph,
                block,
                self.placements[block.name],
                pipeline.micro_batches,
                ahead.get(block.name, 0),
            )
            for block in self.blocks
        }

    def pipelined(self, pipeline: Pipeline) -> Strategy:
        """This strategy of one micro-batch, for all micro-batches of a pipeline."""
        placements = {
            block.name: repeated(self.graph, block, self.placements[block.name], pipeline.micro_batches)
            for block in self.blocks
        }
        return replace(self, placements=placements, pipeline=pipeline)

    def of_one(self) -> Strategy:
        """The strategy of one micro-batch, of which `pipelined` makes this one."""
        if self.pipeline is None:
            return self
        placements = {
            block.name: one_of(self.graph, block, self.placements[block.name], self.pipeline.micro_batches)
            for block in self.blocks
        }
        return replace(self, placements=placements, pipeline=None)

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
        self.of_one()  # refuses placements that are not those of one micro-batch, repeated
        check_lanes(self.graph, self.blocks, self.layouts, self.turns)
        return self
