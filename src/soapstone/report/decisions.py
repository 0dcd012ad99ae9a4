"""What a strategy decides, in the words of a person: which layers are split how, and on which devices.

A *layer* is the blocks that one module runs with the same weights: all steps of an unrolled LSTM are one,
and so are blocks without weights that do the same in the same module. A *row* is one layer or several
consecutive ones that are decided alike; a layer whose blocks are not all split alike has a row for each
way, or one for the frequent ways and one for the rest. Rows are data: the command line prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from soapstone.graph import Graph, Role
from soapstone.machine import Machine
from soapstone.machine.units import counted
from soapstone.ops import Kind
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

KIND_ORDER = tuple(Kind)


@dataclass(frozen=True)
class Cut:
    """Parts along one dim. Layers that are decided alike may call it differently, so `dims` are names."""

    kind: Kind
    degree: int
    dims: tuple[str, ...]

    @property
    def text(self) -> str:
        """`sample(b) 4`."""
        return f"{self.kind}({'|'.join(self.dims)}) {self.degree}"


@dataclass(frozen=True)
class Devices:
    """Where blocks run: all on the devices of `union` (`is_shared`), or each on some of them. `each` is
    how many these are, None where that varies, too."""

    union: tuple[int, ...]
    each: int | None
    is_shared: bool

    def text(self, machine: Machine) -> str:
        """`devices 0-3`, `device 2 of node0`, `node1`, `all 16 devices`; `2 of devices 0-7, varying`."""
        where = devices_text(self.union, machine)
        return where if self.is_shared else f"{self.each or 'some'} of {where}, varying"


@dataclass(frozen=True)
class Row:
    """Layers that are decided alike. `blocks` of the layers' `of_blocks` blocks are so; the rest of a
    layer has rows of its own. `flops_share` is the blocks' part of the model's flops, `parameters_share` that
    of the weights that no row before it reads, so that each weight counts once. A row that stands for several
    `ways` to split a layer has no cuts."""

    layers: tuple[str, ...]
    operators: tuple[str, ...]
    blocks: int
    of_blocks: int
    cuts: tuple[Cut, ...]
    copies: int
    devices: Devices
    flops_share: float
    parameters_share: float
    ways: int = 1

    @property
    def name(self) -> str:
        """`fc1`, or `features.0 … features.12 (8 layers)`, or `encoder.0 (3 of 40 steps)`."""
        if len(self.layers) > 1:
            return f"{self.layers[0]} … {self.layers[-1]} ({len(self.layers)} layers)"
        if self.of_blocks == 1:
            return self.layers[0]
        count = self.of_blocks if self.blocks == self.of_blocks else f"{self.blocks} of {self.of_blocks}"
        return f"{self.layers[0]} ({count} blocks)"

    @property
    def split(self) -> str:
        """`sample(b) 2 × parameter(o) 2`, `whole`, `4 copies`, `in 3 other ways`."""
        if self.ways > 1:
            return f"in {self.ways} other ways"
        texts = [cut.text for cut in self.cuts]
        if self.copies > 1:
            texts.append(f"{self.copies} copies")
        return " × ".join(texts) or "whole"


def rows(strategy: Strategy, most_ways: int | None = None) -> tuple[Row, ...]:
    """The decisions of a strategy, in the order of the graph; at most so many rows for each layer. Those of
    a pipeline are those of one micro-batch."""
    strategy, counted = strategy.of_one(), set[str]()
    found = [row for layer in layers(strategy) for row in _layer_rows(strategy, layer, most_ways, counted)]
    return tuple(_joined(list(alike)) for _, alike in groupby(_numbered(found), key=_fold_key))


def foremost(found: Sequence[Row], most: int) -> tuple[Row, ...]:
    """At most so many rows, in their order: those with the largest parts of the flops and parameters."""
    ranked = sorted(
        range(len(found)), key=lambda i: (-max(found[i].flops_share, found[i].parameters_share), i)
    )
    kept = set(ranked[:most])
    return tuple(row for i, row in enumerate(found) if i in kept)


@dataclass(frozen=True)
class Layer:
    """Blocks of one module with the same weights, and what they are called."""

    name: str
    blocks: tuple[Block, ...]


def layers(strategy: Strategy) -> Iterator[Layer]:
    """The layers in the order of their first blocks."""
    graph, together = strategy.graph, dict[tuple[object, ...], list[Block]]()
    for block in strategy.blocks:
        together.setdefault(_layer_key(graph, block), []).append(block)
    scopes = [blocks[0].leader.scope for blocks in together.values()]
    for blocks, scope in zip(together.values(), scopes, strict=True):
        if not scope:
            name = blocks[0].name
        elif scopes.count(scope) > 1:
            name = f"{scope}:{blocks[0].name}"
        else:
            name = scope
        yield Layer(name, tuple(blocks))


def _layer_key(graph: Graph, block: Block) -> tuple[object, ...]:
    leader = block.leader
    read = weights(graph, block)
    if read:
        return (leader.op_name, *read)
    return (leader.op_name, leader.scope, *graph.signature(leader).sizes.items())


def weights(graph: Graph, block: Block) -> tuple[str, ...]:
    """The weights that a block reads."""
    read = (name for node in block.nodes for name in node.reads)
    return tuple(dict.fromkeys(name for name in read if graph.value(name).role is Role.WEIGHT))


def _layer_rows(strategy: Strategy, layer: Layer, most: int | None, counted: set[str]) -> Iterator[Row]:
    """A row for each way in which the layer's blocks are split, the most frequent first. With at most so
    many rows, the last is for all remaining ways. Weights that rows have counted are noted."""
    ways: dict[tuple[object, ...], list[Block]] = {}
    for block in layer.blocks:
        placement = strategy.placements[block.name]
        ways.setdefault((_cuts(strategy.graph, block, placement), placement.copies), []).append(block)
    groups = sorted(ways.values(), key=lambda blocks: -len(blocks))
    listed = groups if most is None or len(groups) <= most else groups[: most - 1]
    for blocks in listed:
        yield _row(strategy, layer, blocks, 1, counted)
    rest = groups[len(listed) :]
    if rest:
        yield _row(strategy, layer, [block for blocks in rest for block in blocks], len(rest), counted)


def _row(strategy: Strategy, layer: Layer, blocks: Sequence[Block], ways: int, counted: set[str]) -> Row:
    graph = strategy.graph
    placements = [strategy.placements[block.name] for block in blocks]
    read = {name for block in blocks for name in weights(graph, block)} - counted
    counted |= read
    return Row(
        (layer.name,),
        (layer.blocks[0].leader.op_name,),
        len(blocks),
        len(layer.blocks),
        _cuts(graph, blocks[0], placements[0]) if ways == 1 else (),
        placements[0].copies if ways == 1 else 1,
        _devices(placements),
        _share(sum(flops(graph, block) for block in blocks), graph.forward_flops),
        _share(sum(prod(graph.value(name).shape) for name in read), graph.parameter_count),
        ways,
    )


def _cuts(graph: Graph, block: Block, placement: Placement) -> tuple[Cut, ...]:
    kinds = graph.kinds(block.leader)
    cuts = [Cut(kinds[dim], degree, (dim,)) for dim, degree in placement.degrees]
    return tuple(sorted(cuts, key=lambda cut: KIND_ORDER.index(cut.kind)))


def _devices(placements: Sequence[Placement]) -> Devices:
    sets = {frozenset(placement.devices) for placement in placements}
    counts = {len(devices) for devices in sets}
    each = counts.pop() if len(counts) == 1 else None
    return Devices(tuple(sorted(frozenset().union(*sets))), each, is_shared=len(sets) == 1)


def flops(graph: Graph, block: Block) -> float:
    """Floating-point operations of the block's forward pass."""
    return sum(node.op.flop_count(graph.signature(node)) for node in block.nodes)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _numbered(found: Iterable[Row]) -> list[tuple[int, Row]]:
    return list(enumerate(found))


def _fold_key(numbered: tuple[int, Row]) -> tuple[object, ...]:
    """Equal for rows that are decided alike. A layer that is not split alike throughout stays alone."""
    number, row = numbered
    if row.blocks < row.of_blocks:
        return (number,)
    return (-1, tuple((cut.kind, cut.degree) for cut in row.cuts), row.copies, row.devices)


def _joined(numbered: Sequence[tuple[int, Row]]) -> Row:
    """One row for consecutive ones that are decided alike."""
    alike = [row for _, row in numbered]
    if len(alike) == 1:
        return alike[0]
    first = alike[0]
    return replace(
        first,
        layers=tuple(layer for row in alike for layer in row.layers),
        operators=tuple(dict.fromkeys(op for row in alike for op in row.operators)),
        blocks=sum(row.blocks for row in alike),
        of_blocks=sum(row.of_blocks for row in alike),
        cuts=tuple(
            replace(cut, dims=tuple(dict.fromkeys(dim for row in alike for dim in row.cuts[i].dims)))
            for i, cut in enumerate(first.cuts)
        ),
        flops_share=sum(row.flops_share for row in alike),
        parameters_share=sum(row.parameters_share for row in alike),
    )


def devices_text(devices: Sequence[int], machine: Machine) -> str:
    """Devices as short as can be said: whole nodes by their names, others by ranges of numbers."""
    chosen = set(devices)
    if len(chosen) == len(machine.devices):
        return f"all {len(chosen)} devices" if len(chosen) > 1 else "device 0"
    nodes = [node for node in machine.nodes if any(d.index in chosen for d in machine.devices_on(node))]
    whole = [node for node in nodes if all(d.index in chosen for d in machine.devices_on(node))]
    if whole == nodes and all(len(machine.devices_on(node)) > 1 for node in nodes):
        places = [machine.nodes.index(node) for node in nodes]
        return ", ".join(_range(machine.nodes[a], machine.nodes[b]) for a, b in _runs(places))
    ranges = ", ".join(_range(str(a), str(b)) for a, b in _runs(sorted(chosen)))
    noun = "device" if len(chosen) == 1 else "devices"
    on_node = f" of {nodes[0]}" if len(nodes) == 1 and len(machine.nodes) > 1 else ""
    return f"{noun} {ranges}{on_node}"


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def pipeline_text(strategy: Strategy) -> str:
    """A pipeline in words: `a pipeline of 4 stages, 8 micro-batches of 4 samples, 1f1b`."""
    assert strategy.pipeline is not None
    count, samples = strategy.pipeline.micro_batches, strategy.graph.sample_count or 0
    stages = counted(len(strategy.stages), "stage")
    return (
        f"a pipeline of {stages}, {counted(count, 'micro-batch')} of {counted(samples // count, 'sample')}, "
        f"{strategy.pipeline.schedule}"
    )


def pipeline_document(strategy: Strategy) -> dict[str, object] | None:
    """The same as JSON has it; None for a strategy that is none."""
    if strategy.pipeline is None:
        return None
    return {
        "micro_batches": strategy.pipeline.micro_batches,
        "schedule": strategy.pipeline.schedule.value,
        "stages": [list(stage) for stage in strategy.stages],
    }
