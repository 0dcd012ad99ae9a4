"""What the passes of a strategy's shards take: the durations of the compute tasks of a task graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from soapstone.cost.work import Work, work_of
from soapstone.graph import Graph
from soapstone.machine import DeviceKind, Machine
from soapstone.ops.box import shape_of
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.placed import Placed, placed_blocks
from soapstone.tasks.task import BufferKind, TaskGraph


class Costs(Protocol):
    """How long compute takes. `cost.analytic` is one; measured costs are another."""

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """A node's shard on a device."""

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        """Updating this much of a weight."""


class Works:
    """What there is to do in each pass of a node's shard, found once for all shards of one size."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[object, ...], Work | None] = {}

    def of(self, placed: Placed, node: int, shard: int, *, backward: bool) -> Work | None:
        """The work of a pass; None when there is nothing to do."""
        made, box = placed.block.nodes[node], placed.layout.boxes[node][shard]
        reads = [placed.layout.reads(node, i)[shard] for i in range(len(made.operands))]
        shapes = tuple(None if read is None else shape_of(read) for read in reads)
        key = (made.name, backward, tuple(i.length for i in box.values()), shapes)
        if key not in self._known:
            self._known[key] = work_of(self._graph, made, box, backward=backward)
        return self._known[key]


class Passes:
    """How long passes take by some costs, each work asked for once."""

    def __init__(self, works: Works, costs: Costs) -> None:
        self._works, self._costs = works, costs
        self._known: dict[tuple[int, str], float] = {}  # by the identity of a work, which `works` keeps

    def duration_s(
        self, placed: Placed, segment: int, shard: int, kind: DeviceKind, *, backward: bool
    ) -> float:
        """A segment of a shard on a device."""
        duration_s = 0.0
        for part in placed.segments.parts[segment]:
            work = self._works.of(placed, part.node, shard, backward=backward)
            if work is not None:
                duration_s += part.share * self._seconds(work, kind)
        return duration_s

    def _seconds(self, work: Work, kind: DeviceKind) -> float:
        key = (id(work), kind.name)
        if key not in self._known:
            self._known[key] = self._costs.compute_s(work, kind)
        return self._known[key]


def passes_in(tasks: TaskGraph, strategy: Strategy) -> dict[int, list[tuple[Work | None, float]]]:
    """For each task that computes, by its number, the passes in it, and which part of each; None for a view
    on the way forward that torch has to make, which no cost model has any time for."""
    works = Works(strategy.graph)
    found: dict[int, list[tuple[Work | None, float]]] = {}
    for placed in placed_blocks(strategy):
        for shard, copy, _ in placed.shards():
            for segment in range(placed.segments.count):
                for backward in (False, True):
                    key = (placed.backward if backward else placed.forward)(segment, shard, copy)
                    if key not in tasks.ids:
                        continue
                    own = found.setdefault(tasks.ids[key], [])
                    for part in placed.segments.parts[segment]:
                        op = placed.block.nodes[part.node].op
                        is_view = op.is_view and not op.is_identity
                        work = works.of(placed, part.node, shard, backward=backward)
                        if work is not None or (is_view and not backward):
                            own.append((work, part.share))
    return found


def recosted(
    tasks: TaskGraph, strategy: Strategy, machine: Machine, costs: Sequence[Costs]
) -> list[list[float]]:
    """For each of the costs what the passes and updates of a strategy's task graph would take by it, in the
    order of its tasks; zero for all else. The graph is not built again."""
    works = Works(strategy.graph)
    ways = [(each, Passes(works, each)) for each in costs]
    found = [[0.0] * len(tasks.tasks) for _ in costs]
    for placed in placed_blocks(strategy):
        for shard, copy, device in placed.shards():
            kind = machine.devices[device].kind
            for segment in range(placed.segments.count):
                for backward in (False, True):
                    key = (placed.backward if backward else placed.forward)(segment, shard, copy)
                    if key not in tasks.ids:
                        continue
                    for own, (_, passes) in zip(found, ways, strict=True):
                        own[tasks.ids[key]] = passes.duration_s(
                            placed, segment, shard, kind, backward=backward
                        )
    for buffer in tasks.buffers:
        if buffer.kind is BufferKind.WEIGHT_GRADIENT:
            kind = machine.devices[buffer.device].kind
            for key in buffer.needed_by:
                for own, (each, _) in zip(found, ways, strict=True):
                    own[tasks.ids[key]] = each.update_s(buffer.size_bytes, kind)
    return found
