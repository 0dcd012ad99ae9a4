"""How each block of a strategy runs along the rows of a mesh of two axes, `data` by `tensor`.

Device `i * tensor + j` stands at row i and column j. The devices of a row share the i-th part of the samples.
Along a row a block runs in one of these ways:

| way | its shards along a row | what it writes |
|---|---|---|
| SAMPLES | a part of the row's samples each | split along samples |
| COPIES | the same, on every device | whole |
| FEATURES | a part of the heads or features, of a value that is split so | split along features |
| COLUMNS | a part of a layer's outputs or of an embedding's columns | as its readers wish |
| ROWS | a part of a layer's sum or of an embedding's rows | as its readers wish |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from soapstone.graph import Graph, Node, Role
from soapstone.ops import Kind
from soapstone.ops.box import Box
from soapstone.report.decisions import weights
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layout
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

PARALLEL_MODULES = frozenset({"linear", "embedding"})
"""The operators whose modules `ColwiseParallel` and `RowwiseParallel` know, and plans split alike."""


class Split(StrEnum):
    """How a value lies along a row of the mesh."""

    SAMPLES = "split along samples"
    WHOLE = "whole"
    FEATURES = "split along features"


class Way(StrEnum):
    """How a block runs along a row of the mesh."""

    SAMPLES = "along samples"
    COPIES = "in copies"
    FEATURES = "along features"
    UNSAMPLED = "whole, without samples"
    COLUMNS = "ColwiseParallel"
    ROWS = "RowwiseParallel"


WRITES: Mapping[Way, frozenset[Split]] = {
    Way.SAMPLES: frozenset({Split.SAMPLES}),
    Way.COPIES: frozenset({Split.WHOLE}),
    Way.FEATURES: frozenset({Split.FEATURES}),
    # A value without samples is the same for all of them: whoever reads it says what its gradient is.
    Way.UNSAMPLED: frozenset({Split.SAMPLES, Split.WHOLE}),
    Way.COLUMNS: frozenset(Split),
    Way.ROWS: frozenset({Split.SAMPLES, Split.WHOLE}),
}
"""How what a block writes may lie."""

CONVERTING = (Way.COLUMNS, Way.ROWS)
"""The ways of modules that take their input and give their output in any layout."""


def module_of(graph: Graph, block: Block) -> str:
    """The module whose weights a block's leader reads; empty if these are of several, or not its own."""
    read = [graph.value(name) for name in block.leader.reads if graph.value(name).role is Role.WEIGHT]
    names = [_own_name(value.sources or (value.name,), block.leader.scope) for value in read]
    modules = {name.rpartition(".")[0] for name in names}
    is_plain = len(modules) == 1 and {name.rpartition(".")[2] for name in names} <= {"weight", "bias"}
    return modules.pop() if is_plain else ""


def _own_name(sources: tuple[str, ...], scope: str) -> str:
    """The name of a weight, tied or not, in the module that uses it."""
    return next((name for name in sources if name.rpartition(".")[0] == scope), sources[0])


def plain_weights(graph: Graph, block: Block, way: Way) -> tuple[str, ...]:
    """The weights of a block that stay plain tensors: all but those of a layer that is split along them."""
    own = frozenset(block.leader.reads) if way in CONVERTING else frozenset()
    return tuple(name for name in weights(graph, block) if name not in own)


def data_operand(graph: Graph, node: Node) -> int:
    """The operand of a layer that is no weight."""
    values = enumerate(node.operands)
    return next(i for i, o in values if isinstance(o, str) and graph.value(o).role is not Role.WEIGHT)


def read_axis(graph: Graph, node: Node, operand: int, dim: str) -> int | None:
    """The axis of an operand that is cut where a node is split along a dim."""
    whole, split = (layout(graph, Block(node), degrees) for degrees in ({}, _halved(graph, node, dim)))
    return _cut(whole.reads(0, operand)[0], split.reads(0, operand)[0])


def written_axis(graph: Graph, node: Node, dim: str) -> int | None:
    """The axis of a node's first output that is cut where it is split along a dim."""
    whole, split = (layout(graph, Block(node), degrees) for degrees in ({}, _halved(graph, node, dim)))
    return _cut(whole.writes(0, 0)[0], split.writes(0, 0)[0])


def _halved(graph: Graph, node: Node, dim: str) -> dict[str, int]:
    """The dim in as few parts as it can be."""
    size = graph.signature(node).sizes[dim]
    return {dim: next(n for n in range(2, size + 1) if size % n == 0)}


def _cut(whole: Box | None, part: Box | None) -> int | None:
    pairs = enumerate(zip(whole or (), part or (), strict=True))
    return next((axis for axis, (one, other) in pairs if one != other), None)


@dataclass(frozen=True)
class Ways:
    """The way of every block on a mesh of one shape."""

    strategy: Strategy
    data: int
    tensor: int

    @property
    def graph(self) -> Graph:
        return self.strategy.graph

    @cached_property
    def _found(self) -> Mapping[str, Way | str]:
        return {block.name: self._way(block) for block in self.strategy.blocks}

    @cached_property
    def objections(self) -> Mapping[str, str]:
        """The blocks that fit in no way, whatever the others do."""
        found = {name: way for name, way in self._found.items() if not isinstance(way, Way)}
        return found | self._shared_weights

    @cached_property
    def of_blocks(self) -> Mapping[str, Way]:
        return {name: way for name, way in self._found.items() if isinstance(way, Way)}

    def _way(self, block: Block) -> Way | str:
        placement = self.strategy.placements[block.name]
        sample = self.graph.sample_dims.get(block.name)
        if sorted(placement.devices) != list(range(self.data * self.tensor)):
            return f"runs on {_listed(placement.devices)}, not once on each device"
        others = [dim for dim, _ in placement.degrees if dim != sample]
        samples = placement.degree_of.get(sample or "", 1)
        if len(others) > 1:
            return "is split along several dims beside samples"
        if others:
            return self._split_way(block, placement, others[0], samples)
        return self._sampled_way(block, placement, sample, samples)

    def _sampled_way(self, block: Block, placement: Placement, sample: str | None, samples: int) -> Way | str:
        joins = [node.name for node in block.nodes if node.op.joins_statistics(node.attrs)]
        if joins and samples > 1:
            return f"joins statistics of all samples in '{joins[0]}'"
        if sample is None:
            return Way.UNSAMPLED
        if placement.devices != tuple(range(self.data * self.tensor)):
            return f"has its samples in another order of devices: {_listed(placement.devices)}"
        if samples == self.data * self.tensor:
            return Way.SAMPLES
        if samples == self.data:
            return Way.COPIES
        return f"has {samples} parts along samples in {placement.copies} copies"

    def _split_way(self, block: Block, placement: Placement, dim: str, samples: int) -> Way | str:
        kind = self.graph.kinds(block.leader)[dim]
        shown = f"is split along {kind}({dim})"
        way = self._weight_way(block, kind)
        if way is None:
            return f"{shown}, and is no linear layer or embedding of its own"
        if (samples, placement.degree_of[dim]) != (self.data, self.tensor):
            return f"{shown} {placement.degree_of[dim]} times and along samples {samples} times"
        by_row = [j for _, j in sorted(self._places(placement, dim))]
        if [device for row in by_row for device in row] != list(range(self.data * self.tensor)):
            return f"{shown} in another order of devices: {_listed(placement.devices)}"
        return way

    def _weight_way(self, block: Block, kind: Kind) -> Way | None:
        """The way of a block that is split along a dim of that kind."""
        is_layer = block.leader.op_name in PARALLEL_MODULES and bool(module_of(self.graph, block))
        match kind:
            case Kind.PARAMETER if is_layer:
                return Way.COLUMNS
            case Kind.REDUCTION if is_layer:
                return Way.ROWS
            case Kind.ATTRIBUTE if not weights(self.graph, block):
                return Way.FEATURES
        return None

    def _places(self, placement: Placement, dim: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """For each part along samples, the devices of its parts along the dim, in order."""
        dims = [name for name, _ in placement.degrees]
        stride = dict.fromkeys(dims, 1)
        for earlier, later in zip(reversed(dims[:-1]), reversed(dims[1:]), strict=True):
            stride[earlier] = stride[later] * placement.degree_of[later]
        other = next((stride[name] for name in dims if name != dim), 0)
        for i in range(self.data):
            yield i, tuple(placement.devices[i * other + j * stride[dim]] for j in range(self.tensor))

    @cached_property
    def _shared_weights(self) -> dict[str, str]:
        """The split layers whose weights another block reads, too, and has split along another axis."""
        axes: dict[str, dict[str, int | None]] = {}
        for block in self.strategy.blocks:
            for name in weights(self.graph, block):
                axes.setdefault(name, {})[block.name] = self._weight_axis(block, name)
        found: dict[str, str] = {}
        for readers in axes.values():
            for block_name, axis in readers.items():
                others = [name for name, other in readers.items() if other != axis]
                if axis is not None and others:
                    found[block_name] = f"shares a weight with '{others[0]}', which is split otherwise"
        return found

    def _weight_axis(self, block: Block, name: str) -> int | None:
        """The axis along which a style splits a weight; None if the block leaves it whole."""
        leader = block.leader
        if self._found[block.name] not in CONVERTING or name not in leader.reads:
            return None
        sample = self.graph.sample_dims.get(block.name)
        dim = next(dim for dim, _ in self.strategy.placements[block.name].degrees if dim != sample)
        return read_axis(self.graph, leader, leader.operands.index(name), dim)


def _listed(devices: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, devices[:4]))
    noun = "device" if len(devices) == 1 else "devices"
    return f"{noun} {shown}{', …' if len(devices) > 4 else ''}"
