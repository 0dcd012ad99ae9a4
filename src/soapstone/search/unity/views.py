"""Where blocks may run: ranges of devices, and the placements that are looked at on each (Unity 3.2).

A machine mapping of Unity maps the tasks of an operator, numbered along the dims it is split in, to devices.
Here it is the `devices` of a Placement, and these are looked at on a range of devices:

    1-D   the shards side by side, or one on each node
    2-D   one dim over the nodes and the other over the devices of a node, either way round
    3-D   nodes in groups: samples over the groups and over the devices of a node, another dim over the nodes
          of a group; or samples over the nodes and two dims over the devices of a node, as in the paper's
          Figure 7d (model parallel on one socket, reduction between sockets, samples between nodes)
    copies  of what is not split on every device, or of what is split within a node on every node, for blocks
            without samples: they are computed from weights alone, and every device may do that for itself

A machine whose structure says more (sockets within nodes, nodes within racks) may have views of its own:
`register_view` adds an order of a range's devices, in which the shards of a block that is split over all of
them are looked at, too.

The range is what dynamic programming divides (`mapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement, placed

FEW = 8
"""[choice] Up to so many devices every number of shards is looked at; beyond, one device, the devices of a
node, one on each node, all, and as many of them as samples can be divided into."""

MOST_DIMS = 2
"""[choice] The most dims of one block that are split, but for samples over the nodes beside two others."""


@dataclass(frozen=True, order=True)
class Range:
    """Consecutive devices. `per_node` divides them into nodes (or equal parts of one)."""

    first: int
    count: int
    per_node: int

    @property
    def nodes(self) -> int:
        """How many nodes it spans."""
        return self.count // self.per_node

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices, by number."""
        return tuple(range(self.first, self.first + self.count))

    @property
    def across(self) -> tuple[int, ...]:
        """The devices in another order: the first of every node, then the second of every node, ..."""
        return tuple(
            self.first + n * self.per_node + i for i in range(self.per_node) for n in range(self.nodes)
        )

    def across_groups(self, together: int) -> tuple[int, ...]:
        """The devices with `together` nodes to a group, in the order (group, device of a node, node of the
        group): what is next to each other is on different nodes."""
        groups = self.nodes // together
        return tuple(
            self.first + (g * together + n) * self.per_node + i
            for g in range(groups)
            for i in range(self.per_node)
            for n in range(together)
        )

    def divisions(self) -> Iterator[tuple[Range, Range]]:
        """The ways to give one part of it to one side and the rest to another: in the middle (an odd one on
        either side), and at a quarter from either end; between nodes where there are several."""
        step = self.per_node if self.nodes > 1 else 1
        pieces = self.count // step
        halves, quarter = (pieces // 2, pieces - pieces // 2), pieces // 4
        for cut in dict.fromkeys((*halves, quarter, pieces - quarter)):
            if 0 < cut < pieces:
                yield self._part(0, cut * step), self._part(cut * step, self.count - cut * step)

    def _part(self, begin: int, count: int) -> Range:
        return Range(self.first + begin, count, self.per_node if self.nodes > 1 else count)


def whole(machine: Machine) -> Range:
    """All devices of a machine."""
    count = len(machine.devices)
    per_node = 0
    for node in machine.nodes:
        per_node = gcd(per_node, len(machine.devices_on(node)))
    return Range(0, count, per_node)


View = Callable[[Range], Sequence[int]]
"""An order of a range's devices; a sequence of another length says that it has none for that range."""

VIEWS: dict[str, View] = {}
"""The views that were registered, by name."""


def register_view(name: str, view: View) -> None:
    """Let an order of devices be looked at, on every machine from now on."""
    VIEWS[name] = view


def candidates(
    graph: Graph,
    block: Block,
    where: Range,
    *,
    richness: int = 1,
    without: frozenset[Kind] = frozenset(),
) -> tuple[Placement, ...]:
    """The placements of a block that are looked at on a range, as far as its leader allows them; dims of the
    kinds in `without` are left whole, but for samples.

    On many devices, richness 2 has samples beside another dim in any number of parts that lies within two
    nodes, or over any group of nodes; richness 1 within one node, or over the nodes, or over groups of about
    the root of their number; richness 0 leaves out what is one shard on each node.
    """
    kinds, sample = graph.kinds(block.leader), graph.sample_dims.get(block.name)
    found = {
        placement: None
        for placement in _split(graph, block, where, richness)
        if all(dim == sample or kinds.get(dim) not in without for dim, _ in placement.degrees)
    }
    if block.name not in graph.sample_dims and where.count > 1:
        found |= dict.fromkeys(_copied(graph, block, where))
    return tuple(found)


def _split(graph: Graph, block: Block, where: Range, richness: int) -> Iterator[Placement]:
    signature = graph.signature(block.leader)
    sample = graph.sample_dims.get(block.name, "")
    for parts in _shard_counts(where, richness, signature.sizes.get(sample)):
        for degrees in signature.legal_degrees(parts):
            split = {dim: degree for dim, degree in degrees.items() if degree > 1}
            is_on_nodes = where.nodes > 1 and sample in split and parts == where.count
            if len(split) > MOST_DIMS:
                if is_on_nodes and richness > 1 and len(split) == 3:
                    yield from _in_three(split, sample, where)
                continue
            if len(split) == MOST_DIMS and where.count > FEW:
                if is_on_nodes:
                    yield from _nested(split, sample, where, richness)
                continue
            yield placed(split, where.devices[:parts])
            if parts == where.count > 1:
                yield from _registered(split, where)
            if where.nodes > 1 and parts == where.nodes:
                yield placed(split, where.devices[:: where.per_node])


def _registered(split: Mapping[str, int], where: Range) -> Iterator[Placement]:
    orders = (tuple(view(where)) for view in VIEWS.values())
    yield from (placed(split, order) for order in orders if _is_order(order, where))


def _is_order(devices: tuple[int, ...], where: Range) -> bool:
    return sorted(devices) == list(where.devices)


def _shard_counts(where: Range, richness: int, samples: int | None) -> tuple[int, ...]:
    """How many shards there may be; samples need not divide by the number of devices."""
    count = where.count
    if count <= FEW:
        return tuple(range(1, count + 1))
    most = count if samples is None else max(n for n in range(1, count + 1) if samples % n == 0)
    return tuple(sorted({1, where.per_node, where.nodes if richness else 1, most, count}))


def _nested(split: Mapping[str, int], sample: str, where: Range, richness: int) -> Iterator[Placement]:
    """Samples over groups of devices and another dim within each, or the other way round."""
    outer, inner = split.values()
    is_sample_first = next(iter(split)) == sample
    within = inner if is_sample_first else outer
    if (within, split[sample]) == (where.nodes, where.per_node) and within != where.per_node:
        if richness:
            yield placed(split, where.across if is_sample_first else where.devices)
    elif within == where.per_node or (richness > 1 and within <= 2 * where.per_node):
        groups = Range(where.first, where.count, within)
        yield placed(split, where.devices if is_sample_first else groups.across)
    if within in _together(where, richness):
        order = where.across_groups(within)
        yield placed(split, order if is_sample_first else _turned(order, within))
    yield from _registered(split, where)


def _together(where: Range, richness: int) -> tuple[int, ...]:
    """How many nodes may be a group: every divisor, or the one next to the root, or none."""
    every = tuple(n for n in range(2, where.nodes) if where.nodes % n == 0)
    if richness > 1:
        return every
    return tuple(sorted(every, key=lambda n: abs(n * n - where.nodes))[:richness])


def _turned(devices: Sequence[int], inner: int) -> tuple[int, ...]:
    """Devices whose numbers are (outer, inner), in the order (inner, outer)."""
    return tuple(device for i in range(inner) for device in devices[i::inner])


def _in_three(split: Mapping[str, int], sample: str, where: Range) -> Iterator[Placement]:
    """Samples over the nodes, two other dims over the devices of each; the later of the two on neighbours."""
    if split[sample] != where.nodes:
        return
    sizes = list(split.values())
    at = list(split).index(sample)
    others = [size for i, size in enumerate(sizes) if i != at]
    devices = []
    for index in product(*map(range, sizes)):
        x, y = (n for i, n in enumerate(index) if i != at)
        devices.append(where.first + index[at] * where.per_node + x * others[1] + y)
    yield placed(split, devices)


def _copied(graph: Graph, block: Block, where: Range) -> Iterator[Placement]:
    yield Placement((), where.devices, where.count)
    if where.nodes > 1:
        for degrees in graph.signature(block.leader).legal_degrees(where.per_node):
            split = {dim: degree for dim, degree in degrees.items() if degree > 1}
            if len(split) == 1:
                yield placed(split, where.across, where.nodes)
