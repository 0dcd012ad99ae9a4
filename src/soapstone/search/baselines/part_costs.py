"""What parts of a graph take on their own: one block, or the exchange between two.

OptCNN (Jia et al. 2018, section 4) estimates a strategy by a sum

    t_C   the compute of each layer        `BlockCosts.compute_s`
    t_S   the exchange of its gradients    `BlockCosts.sync_s`
    t_X   the tensors along each edge      `exchange_s`

Here each term is the simulated time of a task graph that the native core builds for those blocks alone,
so costs, routes and collectives are those of every other prediction. What overlaps in the whole task
graph is added up in this sum: that is OptCNN's simplification, and the reason why its plans are scored
again by the simulator.

Equal parts cost the same: `shape_of` says when two blocks are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, Node, Role
from soapstone.machine import DeviceKind, Machine
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.tasks.flat import FlatProblem

FREE_COMPUTE = AnalyticCosts(most_flops=inf, most_bandwidth=inf)
"""Costs under which compute takes no time but for its launch."""


@dataclass(frozen=True)
class Setting:
    """A machine with costs, and (once it is `known`) how the native core sees them: the same for all
    parts, and long to write down for a large machine."""

    machine: Machine
    costs: AnalyticCosts
    known: list[tuple[native.MachineData, list[DeviceKind]]] = field(default_factory=list)


class Part(FlatProblem):
    """Some blocks of a graph as a problem of their own: values from elsewhere are simply there, and
    weights are synchronised only if asked for."""

    def __init__(self, graph: Graph, setting: Setting, chosen: tuple[Block, ...], *, trains: bool) -> None:
        self.graph, self.setting = graph, setting
        self.machine, self.costs = setting.machine, setting.costs
        self.blocks = chosen
        self.number = {block.name: i for i, block in enumerate(chosen)}
        self._home = {name: i for i, block in enumerate(chosen) for name in block.writes}
        self._values, self._weights = self._exchanged(), self._trained() if trains else {}
        self.native = native.Problem(
            self._machine_data(),
            [self._block_data(block) for block in chosen],
            [self._value_data(name) for name in self._values],
            [self._weight_data(name) for name in self._weights],
            self.curves,
        )

    def _machine_data(self) -> native.MachineData:
        if not self.setting.known:
            data = super()._machine_data()
            self.setting.known.append((data, self._kinds))
        data, self._kinds = self.setting.known[0]
        return data

    def times(self, *placements: Sequence[Placement]) -> NDArray[np.float64]:
        """The simulated time for every combination of the blocks' placements, an axis for each block;
        infinite where a block cannot be split so."""
        found = np.full([len(own) for own in placements], inf)
        proposals = native.Proposals(self.native)
        for index in _placed_in_turn(self, proposals, placements):
            found[index] = proposals.makespan()
        return found


def _placed_in_turn(
    part: Part, proposals: native.Proposals, placements: Sequence[Sequence[Placement]], done: int = 0
) -> Iterator[tuple[int, ...]]:
    """Place every combination, those of the last block changing fastest, and give its indices."""
    if done == len(placements):
        yield ()
        return
    for i, placement in enumerate(placements[done]):
        degrees = part.degrees(part.blocks[done], placement)
        if proposals.place(done, degrees, placement.copies, list(placement.devices)):
            for rest in _placed_in_turn(part, proposals, placements, done + 1):
                yield (i, *rest)


@dataclass(frozen=True)
class BlockCosts:
    """What a block takes under each of some placements; infinite where it cannot be placed so."""

    compute_s: NDArray[np.float64]
    sync_s: NDArray[np.float64]


class PartCosts:
    """The costs of blocks and edges of a graph on a machine, each kind of them worked out once."""

    def __init__(self, graph: Graph, machine: Machine, costs: AnalyticCosts) -> None:
        self.graph = graph
        self._usual = Setting(machine, costs)
        self._instant = Setting(_without_launches(machine), FREE_COMPUTE)
        self._shapes: dict[str, Hashable] = {}
        self._blocks: dict[Hashable, BlockCosts] = {}
        self._edges: dict[Hashable, NDArray[np.float64]] = {}
        self._seams: dict[Hashable, NDArray[np.float64]] = {}

    def of(self, graph: Graph) -> PartCosts:
        """The costs of another graph on the same machine: what is alike is not worked out again."""
        other = copy(self)
        other.graph, other._shapes = graph, {}
        return other

    @property
    def evaluated(self) -> int:
        """How many placements, or pairs of them, were simulated."""
        tables = (*self._edges.values(), *self._seams.values(), *(b.compute_s for b in self._blocks.values()))
        return sum(table.size for table in tables)

    def block(self, block: Block, placements: tuple[Placement, ...]) -> BlockCosts:
        """What the block takes under each placement."""
        key = (self.shape(block), placements)
        if key not in self._blocks:
            compute_s = Part(self.graph, self._usual, (block,), trains=False).times(placements)
            trained_s = Part(self.graph, self._usual, (block,), trains=True).times(placements)
            sync_s = np.where(np.isfinite(compute_s), trained_s, 0.0) - np.where(
                np.isfinite(compute_s), compute_s, 0.0
            )
            self._blocks[key] = BlockCosts(compute_s, sync_s)
        return self._blocks[key]

    def exchange_s(
        self, writer: Block, reader: Block, before: tuple[Placement, ...], after: tuple[Placement, ...]
    ) -> NDArray[np.float64]:
        """How long what the reader reads of the writer travels, and its gradient back, for each placement
        of either; all placements must be possible."""
        key = (self.shape(writer), self.shape(reader), connections(writer, reader), before, after)
        if key not in self._edges:
            both = Part(self.graph, self._instant, (writer, reader), trains=False)
            own = self._seams_s(writer, before)[:, np.newaxis] + self._seams_s(reader, after)
            self._edges[key] = np.maximum(both.times(before, after) - own, 0.0)
        return self._edges[key]

    def _seams_s(self, block: Block, placements: tuple[Placement, ...]) -> NDArray[np.float64]:
        """What the block's own shards exchange among themselves, which is no part of an edge."""
        key = (self.shape(block), placements)
        if key not in self._seams:
            self._seams[key] = Part(self.graph, self._instant, (block,), trains=False).times(placements)
        return self._seams[key]

    def shape(self, block: Block) -> Hashable:
        """What the costs of a block depend on, but for where it runs."""
        if block.name not in self._shapes:
            self._shapes[block.name] = shape_of(self.graph, block)
        return self._shapes[block.name]


def shape_of(graph: Graph, block: Block) -> Hashable:
    """All that the native core knows of a block alone: blocks with the same cost the same."""
    inner = {name: (n, i) for n, node in enumerate(block.nodes) for i, name in enumerate(node.outputs)}

    def operand(node: Node, position: int) -> Hashable:
        name = node.operands[position]
        if not isinstance(name, str):
            return name is None
        value = graph.value(name)
        weight = value.role is Role.WEIGHT
        return (value.shape, value.dtype, name in graph.differentiable, weight, inner.get(name))

    def output(name: str) -> Hashable:
        value = graph.value(name)
        return (value.shape, value.dtype, name in graph.differentiable)

    nodes = tuple(
        (
            node.op_name,
            tuple(sorted(node.attrs.items())),
            tuple(operand(node, i) for i in range(len(node.operands))),
            tuple(output(name) for name in node.outputs),
        )
        for node in block.nodes
    )
    return nodes, block.carried


def connections(writer: Block, reader: Block) -> Hashable:
    """Which outputs of one block are which operands of another."""
    written = {name: (n, i) for n, node in enumerate(writer.nodes) for i, name in enumerate(node.outputs)}
    return tuple(
        (written[operand], n, i)
        for n, node in enumerate(reader.nodes)
        for i, operand in enumerate(node.operands)
        if isinstance(operand, str) and operand in written
    )


def _without_launches(machine: Machine) -> Machine:
    devices = [replace(d, kind=replace(d.kind, launch_overhead_s=0.0)) for d in machine.devices]
    return replace(machine, devices=tuple(devices))
