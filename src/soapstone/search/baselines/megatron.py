"""Megatron (Shoeybi et al. 2019): column- then row-parallel pairs within groups, samples between groups.

Devices form groups of t neighbours. A *column-parallel* dense layer is split along its output features;
all that follows works on a part of the features, or of the attention heads, by itself; a *row-parallel*
dense layer is split along the features it sums over, and one all-reduce in the group adds its parts up.
In between nothing moves. Here such a region is found and not declared: the split of a dense layer's
output is followed from block to block (`Groups._followed`) until every path ends in a dense layer that sums
over it. Tables of embeddings are split along their rows, the head along its words.

What lies outside of regions is computed by all devices of a group alike, as in Megatron. Two details
differ. The loss keeps its classes whole, so scores are exchanged within the group and each device takes
a part of the samples, where Megatron exchanges sums over its part of the words. And a layer that makes
queries, keys and values at once must exchange them, where Megatron stores its columns in another order.

t is the divisor of the number of devices, above one, that is simulated to be fastest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Box, Kind
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.part_costs import shape_of
from soapstone.search.baselines.scoring import Scorer
from soapstone.search.baselines.simple import each_block
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import Layout, layout
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy


def objection(graph: Graph, machine: Machine) -> str | None:
    """Why the strategy has no meaning for a model on a machine: it is for transformers in groups."""
    anatomy = Anatomy(graph)
    if len(machine.devices) < 2:
        return "it needs at least two devices"
    if not anatomy.attentions:
        return "it has no attention"
    if not any(Groups(graph, len(machine.devices), t).pairs for t in _sizes(machine)):
        return (
            "no attention lies between dense layers that can be split by columns and by rows over"
            f" {', '.join(map(str, _sizes(machine)))} devices"
        )
    return None


def megatron(graph: Graph, machine: Machine, costs: AnalyticCosts) -> Strategy:
    """The fastest of the group sizes that some attention's heads divide by."""
    scorer = Scorer(graph, machine, costs)
    groups = (Groups(graph, len(machine.devices), t) for t in _sizes(machine))
    return min((each.strategy for each in groups if each.pairs), key=scorer.makespan_s)


def _sizes(machine: Machine) -> list[int]:
    count = len(machine.devices)
    return [t for t in range(2, count + 1) if count % t == 0]


class _Reading(NamedTuple):
    """A block that reads a value of another: as this operand of this node in it."""

    block: Block
    node: int
    operand: int
    value: str


@dataclass(frozen=True)
class Groups:
    """A graph in groups of `size` devices out of `count`."""

    graph: Graph
    count: int
    size: int

    @cached_property
    def anatomy(self) -> Anatomy:
        """What the blocks are."""
        return Anatomy(self.graph)

    @cached_property
    def regions(self) -> tuple[Mapping[str, str], ...]:
        """Regions from column- to row-parallel layers: for each block of one, the dim that is split."""
        found: list[Mapping[str, str]] = []
        taken: dict[str, str] = {}
        for block in self.anatomy.dense_layers:
            dim = self.anatomy.dim_of_kind(block, Kind.PARAMETER)
            if dim is None or block.name in taken:
                continue
            region = self._followed(block, dim)
            if region is not None and all(taken.get(name, own) == own for name, own in region.items()):
                found.append(region)
                taken |= region
        return tuple(found)

    @cached_property
    def pairs(self) -> tuple[Mapping[str, str], ...]:
        """The regions with attention in them."""
        attentions = {block.name for block in self.anatomy.attentions}
        return tuple(region for region in self.regions if attentions & region.keys())

    @cached_property
    def strategy(self) -> Strategy:
        """Every block split within groups along its dim, if it has one, and between groups along samples."""
        return each_block(self.graph, self._placement)

    @cached_property
    def _dims(self) -> dict[str, str]:
        """The dim that each block is split along within a group, for those that are."""
        dims = {name: dim for region in self.regions for name, dim in region.items()}
        for block in self.anatomy.tables:
            rows = next(iter(block.leader.op.gathers))
            if self._can_split(block, rows):
                dims[block.name] = rows
        for block in self._heads:
            dim = self.anatomy.dim_of_kind(block, Kind.PARAMETER)
            if dim is not None and block.name not in dims and self._can_split(block, dim):
                dims[block.name] = dim
        return dims

    @cached_property
    def _heads(self) -> tuple[Block, ...]:
        """The dense layers that nothing but losses read."""
        return tuple(
            block
            for block in self.anatomy.dense_layers
            if (readings := self._readings[block.name])
            and all(self._is_loss(each.block) for each in readings)
        )

    @cached_property
    def _readings(self) -> dict[str, list[_Reading]]:
        """Who reads what each block writes."""
        found: dict[str, list[_Reading]] = {block.name: [] for block in self.anatomy.blocks}
        for block in self.anatomy.blocks:
            for n, node in enumerate(block.nodes):
                for i, value in enumerate(node.operands):
                    if isinstance(value, str) and self.anatomy.home.get(value, block.name) != block.name:
                        found[self.anatomy.home[value]].append(_Reading(block, n, i, value))
        return found

    def _is_loss(self, block: Block) -> bool:
        """Whether a block sums over its samples."""
        sample = self.graph.sample_dims.get(block.name)
        return sample is not None and sample in self.graph.signature(block.leader).summed_dims

    def _followed(self, first: Block, dim: str) -> dict[str, str] | None:
        """The region that begins with a block split along a dim; None if its parts cannot be kept apart
        until they are summed."""
        region, pending, is_summed = {first.name: dim}, [first], False
        while pending:
            block = pending.pop()
            if not self._can_split(block, region[block.name]):
                return None
            for reading in self._readings[block.name]:
                reader = reading.block
                then = self._dim_for(reading, self._split_axis(block, region[block.name], reading.value))
                if then is None or region.get(reader.name, then) != then:
                    return None
                if then in self.anatomy.contracted(reader.leader):
                    is_summed = True
                elif reader.name not in region:
                    pending.append(reader)
                region[reader.name] = then
        return region if is_summed else None

    def _split_axis(self, block: Block, dim: str, value: str) -> int | None:
        """The axis of a value that is split when the block that writes it is."""
        n = next(n for n, node in enumerate(block.nodes) if value in node.outputs)
        output = block.nodes[n].outputs.index(value)
        whole, split = (self._layout(block, degrees) for degrees in ({}, {dim: self.size}))
        assert whole is not None
        return None if split is None else _cut(whole.writes(n, output)[0], split.writes(n, output)[0])

    def _dim_for(self, reading: _Reading, axis: int | None) -> str | None:
        """The dim along which a block must be split so that each shard reads its part of an operand that
        is split along an axis."""
        block, at = reading.block, (reading.node, reading.operand)
        signature, whole = self.graph.signature(block.leader), self._layout(block, {})
        contracted = self.anatomy.contracted(block.leader)
        assert whole is not None
        for dim in signature.splits:
            split = self._layout(block, {dim: self.size})
            if split is None or (dim not in signature.output_dims and dim not in contracted):
                continue
            if axis is not None and _cut(whole.reads(*at)[0], split.reads(*at)[0]) == axis:
                return dim
        return None

    def _can_split(self, block: Block, dim: str) -> bool:
        return self._layout(block, {dim: self.size}) is not None

    def _layout(self, block: Block, degrees: Mapping[str, int]) -> Layout | None:
        """The layout of a block, or of one that is alike; None if it cannot be split so."""
        if block.name not in self._shapes:
            self._shapes[block.name] = shape_of(self.graph, block)
        key = (self._shapes[block.name], tuple(degrees.items()))
        if key not in self._layouts:
            try:
                self._layouts[key] = layout(self.graph, block, degrees)
            except StrategyError:
                self._layouts[key] = None
        return self._layouts[key]

    @cached_property
    def _shapes(self) -> dict[str, Hashable]:
        return {}

    @cached_property
    def _layouts(self) -> dict[Hashable, Layout | None]:
        return {}

    def _placement(self, block: Block) -> Placement:
        groups, devices = self.count // self.size, tuple(range(self.count))
        sample = self.graph.sample_dims.get(block.name, "")
        dim = self._dims.get(block.name, sample)
        if dim != sample and self._layout(block, {sample: groups, dim: self.size}):
            order = [own for own in self.graph.signature(block.leader).sizes if own in (sample, dim)]
            if order[0] == dim and groups > 1:
                devices = tuple(g * self.size + i for i in range(self.size) for g in range(groups))
            return placed({own: groups if own == sample else self.size for own in order}, devices)
        heads = {head.name for head in self._heads}
        reads_head = not heads.isdisjoint(self.anatomy.before[block.name])
        if reads_head and self._layout(block, {sample: self.count}):
            return placed({sample: self.count}, devices)
        if self._layout(block, {sample: groups}):
            return placed({sample: groups}, devices, self.size)
        return Placement((), devices, self.count)


def _cut(whole: Box | None, part: Box | None) -> int | None:
    """The axis along which a box is a part of another, if there is one such axis."""
    if whole is None or part is None:
        return None
    cut = [axis for axis, (all_of_it, own) in enumerate(zip(whole, part, strict=True)) if own != all_of_it]
    return cut[0] if len(cut) == 1 else None
