"""The layout of every value on a mesh, such that all who write and read it agree.

Blocks that read each other have equal layouts, but for the layers that are COLUMNS or ROWS: those take and
give any. So layouts are the classes of an equivalence (union-find), each with those that all its members can
have. A value that stays split along features is read by each device as it wrote it, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from soapstone.graph import Graph, Role
from soapstone.ops.box import Box, contains
from soapstone.report.ways import CONVERTING, WRITES, Split, Way, Ways, data_operand, plain_weights
from soapstone.strategy.blocks import Block, free_values
from soapstone.strategy.layout import Layout, layout
from soapstone.strategy.strategy import Strategy


@dataclass(frozen=True)
class Reading:
    """A block reads a value: as this operand of this node of it."""

    block: Block
    node: int
    operand: int
    value: str


@dataclass(frozen=True)
class Readings:
    """Who reads what of whom, and where it lies."""

    strategy: Strategy
    ways: Mapping[str, Way]

    @property
    def graph(self) -> Graph:
        return self.strategy.graph

    @cached_property
    def homes(self) -> Mapping[str, Block]:
        """The block that writes each value."""
        return {name: block for block in self.strategy.blocks for name in block.writes}

    @cached_property
    def every(self) -> tuple[Reading, ...]:
        """All that blocks read of other blocks, and of what is free."""
        return tuple(
            Reading(block, n, i, value)
            for block in self.strategy.blocks
            for n, node in enumerate(block.nodes)
            for i, value in enumerate(node.operands)
            if isinstance(value, str) and value not in block.writes
        )

    def is_converting(self, reading: Reading) -> bool:
        """Whether a module takes what it reads in any layout."""
        leads = reading.node == 0 and reading.operand == data_operand(self.graph, reading.block.leader)
        return leads and self.ways[reading.block.name] in CONVERTING

    def moving(self, splits: Mapping[str, Split]) -> dict[str, str]:
        """The blocks that read of a value split along features what another device wrote."""
        found: dict[str, str] = {}
        for reading in self.every:
            home = self.homes.get(reading.value)
            if home is None or splits[home.name] is not Split.FEATURES:
                continue
            if not self.is_local(home, reading):
                found[reading.block.name] = f"reads parts of '{home.name}' that lie on other devices"
        return found

    def torn_weights(self, splits: Mapping[str, Split]) -> dict[str, str]:
        """The blocks with a weight, no module's own, whose gradient is complete here and partial there."""
        found: dict[str, str] = {}
        seen: dict[str, Block] = {}
        for block in self.strategy.blocks:
            for name in plain_weights(self.graph, block, self.ways[block.name]):
                first = seen.setdefault(name, block)
                if splits[block.name] is Split.FEATURES:
                    found[block.name] = f"reads the weight '{name}' among features that are split"
                elif splits[first.name] is not splits[block.name]:
                    found[block.name] = f"shares '{name}' with '{first.name}', which is split otherwise"
        return found

    def is_local(self, home: Block, reading: Reading) -> bool:
        """Whether each device reads only what it wrote itself."""
        n = next(n for n, node in enumerate(home.nodes) if reading.value in node.outputs)
        written = self._layout(home).writes(n, home.nodes[n].outputs.index(reading.value))
        read = self._layout(reading.block).reads(reading.node, reading.operand)
        own, wanted = self._by_device(home, written), self._by_device(reading.block, read)
        return all(
            box is None or ((at := own[device]) is not None and contains(at, box))
            for device, box in wanted.items()
        )

    def _by_device(self, block: Block, boxes: tuple[Box | None, ...]) -> dict[int, Box | None]:
        placement = self.strategy.placements[block.name]
        return {device: box for s, box in enumerate(boxes) for device in placement.devices_of(s)}

    def _layout(self, block: Block) -> Layout:
        return layout(self.graph, block, self.strategy.placements[block.name].degree_of)


class Agreement:
    """The layout of every block's values and of every input, such that all who share a value agree."""

    def __init__(self, ways: Ways) -> None:
        self.readings = Readings(ways.strategy, ways.of_blocks)
        self.root: dict[str, str] = {}
        self.allowed: dict[str, frozenset[Split]] = {}
        self.objections: dict[str, str] = {}
        self.free = _sampled(ways.graph)
        for name, way in ways.of_blocks.items():
            can = WRITES[way]
            if name not in ways.graph.sample_dims and way in CONVERTING:
                can -= {Split.SAMPLES}
            self.root[name], self.allowed[name] = name, can
        for value in self.free:
            self.root[f"%{value}"] = f"%{value}"
            self.allowed[f"%{value}"] = frozenset({Split.SAMPLES, Split.WHOLE})
        self._unify()
        self.of_blocks = {name: self._chosen(name) for name in ways.of_blocks}
        self.of_inputs = {
            value.name: self._chosen(f"%{value.name}")
            for value in ways.graph.with_role(Role.INPUT)
            if value.name in self.free
        }
        if not self.objections:
            self.objections |= self.readings.moving(self.of_blocks) | self.readings.torn_weights(
                self.of_blocks
            )

    def _unify(self) -> None:
        graph = self.readings.graph
        for node in graph.nodes:
            for value in (v for v in node.reads if v in self.free):
                for output in (v for v in node.outputs if v in self.free):
                    self._join(f"%{output}", f"%{value}", node.name)
        for reading in self.readings.every:
            name = reading.block.name
            if self.readings.is_converting(reading):
                continue
            if reading.value in self.free:
                if self.allowed[self._find(name)] == {Split.FEATURES}:
                    self._narrow(f"%{reading.value}", frozenset({Split.WHOLE}), name)
                else:
                    self._join(f"%{reading.value}", name, name)
            elif (home := self.readings.homes.get(reading.value)) is not None:
                self._join(home.name, name, name)

    def _find(self, key: str) -> str:
        while self.root[key] != key:
            key = self.root[key]
        return key

    def _join(self, one: str, two: str, reader: str) -> None:
        a, b = self._find(one), self._find(two)
        both = self.allowed[a] & self.allowed[b]
        if not both:
            first, second = (_words(self.allowed[key]) for key in (a, b))
            self.objections.setdefault(
                reader, f"reads {one.lstrip('%')!r}, which is {first}, but is {second}"
            )
            return
        self.root[a] = b
        self.allowed[b] = both

    def _narrow(self, key: str, to: frozenset[Split], reader: str) -> None:
        root = self._find(key)
        if not self.allowed[root] & to:
            words = _words(self.allowed[root])
            self.objections.setdefault(
                reader, f"reads {key.lstrip('%')!r}, which is {words}, not {_words(to)}"
            )
            return
        self.allowed[root] &= to

    def _chosen(self, key: str) -> Split:
        """The layout where only one is left; else features, if nothing has to move for that, or whole."""
        allowed = self.allowed[self._find(key)]
        if len(allowed) == 1:
            return next(iter(allowed))
        if Split.FEATURES in allowed and self._stays_split(self._find(key)):
            return Split.FEATURES
        return Split.WHOLE if Split.WHOLE in allowed else Split.SAMPLES

    def _stays_split(self, root: str) -> bool:
        """Whether all that is read of a group of blocks is read split, by layers that sum over it."""
        readings = self.readings
        read = [
            (home, reading)
            for reading in readings.every
            if (home := readings.homes.get(reading.value)) is not None and self._find(home.name) == root
        ]
        leaving = [
            pair for pair in read if self._find(pair[1].block.name) != root or readings.is_converting(pair[1])
        ]
        summing = all(
            readings.is_converting(reading) and readings.ways[reading.block.name] is Way.ROWS
            for _, reading in leaving
        )
        return bool(leaving) and summing and all(readings.is_local(*pair) for pair in read)


def _sampled(graph: Graph) -> frozenset[str]:
    """The free values with samples: inputs that have them, and what is computed from these."""
    free = free_values(graph)
    found = {value.name for value in graph.with_role(Role.INPUT) if value.samples is not None}
    for node in graph.nodes:
        if found.intersection(node.reads):
            found.update(name for name in node.outputs if name in free)
    return frozenset(found)


def _words(splits: frozenset[Split]) -> str:
    return " or ".join(sorted(splits))
