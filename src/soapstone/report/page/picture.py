"""The strategy as a picture, after FlexFlow's Figures 12 and 13: a tile for every block, cut into its shards.

A tile is a grid. Its rows are parts along samples, its columns are parts along all else, and copies stand
side by side in a column; each cell names its device. A *box* holds the tiles of one layer: the blocks that
share weights, such as the steps of an unrolled LSTM. Blocks that follow each other and are decided alike are
one tile, and layers that are so are one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from soapstone.graph import Graph
from soapstone.ops import Kind
from soapstone.report.decisions import Layer, flops, layers, weights
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

MOST_NAMES = 12
"""[choice] The most blocks that a tile names one by one."""


@dataclass(frozen=True)
class Tile:
    """Blocks that are decided alike: `cells[row][column]` are the devices of a shard's copies."""

    blocks: tuple[str, ...]
    count: int
    split: str
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    shape: str


@dataclass(frozen=True)
class Box:
    """One layer, or `layers` that follow each other and are decided alike. `shares_weights` tells whether
    several blocks of a layer use the same weights."""

    name: str
    layers: int
    operators: tuple[str, ...]
    shares_weights: bool
    flops_share: float
    parameters: int
    tiles: tuple[Tile, ...]


def boxes(strategy: Strategy) -> tuple[Box, ...]:
    """The boxes of a strategy, in the order of the graph."""
    found = [(layer, _tiles(strategy, layer)) for layer in layers(strategy)]
    return tuple(
        _box(strategy.graph, list(alike)) for _, alike in groupby(found, key=lambda each: _fold_key(*each))
    )


def _fold_key(layer: Layer, tiles: tuple[Tile, ...]) -> object:
    """Equal for layers that are drawn alike; a layer of several tiles stays alone."""
    if len(tiles) > 1:
        return layer.name
    return (tiles[0].cells, tiles[0].count, [part.partition("(")[0] for part in tiles[0].split.split(" × ")])


def _box(graph: Graph, alike: Sequence[tuple[Layer, tuple[Tile, ...]]]) -> Box:
    first, tiles = alike[0]
    members = [layer for layer, _ in alike]
    blocks = [block for layer in members for block in layer.blocks]
    read = {name for block in blocks for name in weights(graph, block)}
    total = graph.forward_flops
    if len(members) > 1:
        names = [name for _, own in alike for tile in own for name in tile.blocks]
        tiles = (Tile(tuple(names[:MOST_NAMES]), tiles[0].count, *_look(tiles[0])),)
    return Box(
        first.name if len(members) == 1 else f"{first.name} … {members[-1].name}",
        len(members),
        tuple(dict.fromkeys(layer.blocks[0].leader.op_name for layer in members)),
        any(len(layer.blocks) > 1 and weights(graph, layer.blocks[0]) for layer in members),
        sum(flops(graph, block) for block in blocks) / total if total else 0.0,
        sum(_count(graph.value(name).shape) for name in read),
        tiles,
    )


def _look(tile: Tile) -> tuple[str, tuple[tuple[tuple[int, ...], ...], ...], str]:
    return tile.split, tile.cells, tile.shape


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _tiles(strategy: Strategy, layer: Layer) -> tuple[Tile, ...]:
    """A tile for each run of the layer's blocks that are decided alike; of one micro-batch."""
    placements = strategy.of_one().placements

    def decided(block: Block) -> Placement:
        return placements[block.name]

    return tuple(
        _tile(strategy.graph, list(run), placement) for placement, run in groupby(layer.blocks, key=decided)
    )


def _tile(graph: Graph, blocks: Sequence[Block], placement: Placement) -> Tile:
    leader = blocks[0].leader
    kinds = graph.kinds(leader)
    cuts = [f"{kinds[dim]}({dim}) {degree}" for dim, degree in placement.degrees]
    if placement.copies > 1:
        cuts.append(f"{placement.copies} copies")
    shape = graph.value(leader.outputs[0]).shape
    return Tile(
        tuple(block.name for block in blocks[:MOST_NAMES]),
        len(blocks),
        " × ".join(cuts) or "whole",
        cells(placement, [kinds[dim] for dim, _ in placement.degrees]),
        " × ".join(map(str, shape)),
    )


def cells(placement: Placement, kinds: Sequence[Kind]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The shards as rows of columns: along samples downwards, along all else to the right."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for shard, at in enumerate(_places([degree for _, degree in placement.degrees])):
        row = column = 0
        for kind, (_, degree), part in zip(kinds, placement.degrees, at, strict=True):
            if kind is Kind.SAMPLE:
                row = row * degree + part
            else:
                column = column * degree + part
        found.setdefault(row, {})[column] = placement.devices_of(shard)
    return tuple(tuple(row[column] for column in sorted(row)) for _, row in sorted(found.items()))


def _places(degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The place of each shard along every split dim, in row-major order."""
    if not degrees:
        yield ()
        return
    for first in range(degrees[0]):
        for rest in _places(degrees[1:]):
            yield (first, *rest)
