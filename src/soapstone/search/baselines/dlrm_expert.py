"""DLRM's expert design (Naumov et al. 2019): tables on devices of their own, all else data parallel.

The tables of a recommendation model are too large for one device and too sparsely read for an exchange
of their gradients, so each lives on one device, which looks up the rows of all samples. Where there are
more devices than tables, and where a table does not fit on a device, its columns are spread over several.
"""

from __future__ import annotations

from math import prod

from soapstone.graph import Graph, Role
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.simple import can_split, each_block, over_samples
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

COPIES_OF_WEIGHTS = 3
"""[choice] A trained table takes its own size three times: weight, gradient and momentum."""

SHARE_OF_MEMORY = 0.5
"""[choice] The most of a device's memory that one piece of a table may take: others must fit beside it."""


def objection(graph: Graph, machine: Machine) -> str | None:
    """Why the strategy has no meaning for a model: it is for those that are tables above all."""
    del machine
    anatomy = Anatomy(graph)
    tables = {name for block in anatomy.tables for name in anatomy.weights_of(block.leader)}
    if len(tables) < 2:
        return "it has only one embedding table" if tables else "it has no embedding tables"
    held = sum(prod(graph.value(name).shape) for name in tables)
    if 2 * held < graph.parameter_count:
        return "less than half of its parameters are in embedding tables"
    return None


def dlrm_expert(graph: Graph, machine: Machine) -> Strategy:
    """Tables over devices, largest first, each piece to a device that has the fewest of them."""
    anatomy, count = Anatomy(graph), len(machine.devices)
    pieces, held = [0] * count, [0] * count
    homes: dict[str, Placement] = {}
    by_size = sorted(anatomy.tables, key=lambda block: -_table_bytes(graph, block))
    tables = {frozenset(anatomy.weights_of(block.leader)) for block in by_size}
    for block in by_size:
        dim = anatomy.dim_of_kind(block, Kind.PARAMETER)
        degree = _columns(graph, machine, block, dim, max(1, count // len(tables)))
        chosen = sorted(sorted(range(count), key=lambda d: (pieces[d], held[d], d))[:degree])
        for device in chosen:
            pieces[device] += 1
            held[device] += _table_bytes(graph, block) // degree
        homes[block.name] = placed({dim: degree} if dim else {}, chosen)
    return each_block(graph, lambda b: homes.get(b.name) or over_samples(graph, b, range(count)))


def _columns(graph: Graph, machine: Machine, block: Block, dim: str | None, wanted: int) -> int:
    """Into how many parts a table's columns are split: as wanted, or more where a part would not fit."""
    count = len(machine.devices)
    room_bytes = SHARE_OF_MEMORY * min(device.kind.memory_bytes for device in machine.devices)
    possible = [n for n in range(1, count + 1) if dim and can_split(graph, block, {dim: n})] or [1]
    fitting = [n for n in possible if _table_bytes(graph, block) * COPIES_OF_WEIGHTS <= n * room_bytes]
    least = min(fitting, default=possible[-1])
    return max(n for n in possible if n <= max(wanted, least))


def _table_bytes(graph: Graph, block: Block) -> int:
    values = [graph.value(name) for name in block.leader.reads]
    return sum(value.size_bytes for value in values if value.role is Role.WEIGHT)
