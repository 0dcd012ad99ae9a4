"""Pipelines of balanced stages (GPipe, Huang et al. 2019; PipeDream, Narayanan et al. 2019, 2021).

Devices form stages of equally many neighbours; consecutive blocks are a stage. Within a stage every block is
split along samples, or as Megatron would. Where to cut is found by dynamic programming: the slowest stage
should be as fast as can be, where a stage is as slow as its compute or as what it receives and sends back.

    Shape       how many stages, how many micro-batches, and the split within a stage
    balanced    the cuts: best[s][j] = min over i of max(best[s - 1][i], cost of blocks i to j)
    estimated   (micro-batches + stages - 1) times the slowest stage, by which shapes are ranked

The first shapes by that estimate are simulated, and the fastest of those that seem to fit in memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.work import work_of
from soapstone.errors import StrategyError
from soapstone.graph import ITEM_BYTES, Graph
from soapstone.machine import Machine
from soapstone.search.baselines import megatron
from soapstone.search.baselines.part_costs import shape_of
from soapstone.search.baselines.scoring import Scorer
from soapstone.search.baselines.simple import each_block, over_samples
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import first_shard
from soapstone.strategy.pipeline import Pipeline, Schedule, repeated
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

MOST_MICRO_BATCHES = 8
"""[choice] The most micro-batches for each stage: with eight, less than an eighth of the time is lost to
filling and draining."""

SIMULATED = 6
"""[choice] How many of the shapes with the best estimates are simulated."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """A pipeline before it is cut. `group` is how many devices of a stage share each of Megatron's layers; 1
    for stages that are split along samples alone."""

    stages: int
    micro_batches: int
    group: int = 1


def objection(graph: Graph, machine: Machine) -> str | None:
    """Why a pipeline has no meaning for a model on a machine."""
    if len(machine.devices) < 2:
        return "it needs at least two devices"
    if graph.sample_count is None:
        return "it has no samples to make micro-batches of"
    possible = list(shapes(graph, machine))
    if not possible:
        return f"{graph.sample_count} samples cannot be cut into micro-batches for its stages"
    # Samples may divide, and yet a block of the model cannot be cut along them. What it costs is not asked.
    cutter = Cutter(graph, machine, AnalyticCosts())
    return None if any(map(cutter.is_possible, possible)) else str(cutter.refusal)


def shapes(
    graph: Graph, machine: Machine, stages: int | None = None, micro_batches: int | None = None
) -> Iterator[Shape]:
    """The pipelines that are possible on a machine, split along samples within stages; only those with so
    many stages or micro-batches."""
    devices, samples = len(machine.devices), graph.sample_count or 0
    blocks = len(Strategy(graph, {}).blocks)
    for count in range(1 if stages == 1 else 2, devices + 1):
        width = devices // count
        if devices % count or count > blocks or (stages is not None and count != stages):
            continue
        for parts in _micro_batches(count) if micro_batches is None else [micro_batches]:
            if samples and samples % (parts * width) == 0:
                yield Shape(count, parts)


def grouped_shapes(
    graph: Graph, machine: Machine, stages: int | None = None, micro_batches: int | None = None
) -> Iterator[Shape]:
    """Those whose stages are split as Megatron would, and along samples between its groups."""
    devices, samples = len(machine.devices), graph.sample_count or 0
    for count in range(1 if stages == 1 else 2, devices + 1):
        width = devices // count
        if devices % count or (stages is not None and count != stages):
            continue
        for group in (t for t in range(2, width + 1) if width % t == 0):
            if not megatron.Groups(graph, width, group).pairs:
                continue
            for parts in _micro_batches(count) if micro_batches is None else [micro_batches]:
                if samples and samples % (parts * (width // group)) == 0:
                    yield Shape(count, parts, group)


def _micro_batches(stages: int) -> list[int]:
    return [n for n in (2**i for i in range(1, 12)) if n <= MOST_MICRO_BATCHES * stages]


def pipeline(graph: Graph, machine: Machine, costs: AnalyticCosts) -> Strategy:
    """The fastest pipeline of those that seem best, and seem to fit."""
    cutter = Cutter(graph, machine, costs)
    ranked = cutter.ranked(shapes(graph, machine))
    found = cutter.fastest([cutter.strategy(shape) for _, shape in ranked[:SIMULATED]])
    if found is None:
        raise StrategyError(f"no block of '{graph.name}' can be cut into micro-batches")
    return found


class Cutter:
    """Cuts a graph into stages for a machine."""

    def __init__(
        self, graph: Graph, machine: Machine, costs: AnalyticCosts, optimizer: str = "momentum"
    ) -> None:
        self.graph, self.machine, self.costs = graph, machine, costs
        self.blocks = Strategy(graph, {}).blocks
        self.numbers_per_weight = 1 + STATES_PER_WEIGHT[optimizer]
        self._seconds: dict[Hashable, float] = {}
        self._within: dict[tuple[int, int], Strategy] = {}
        self._schedules: dict[int, Schedule] = {}
        self.refusal: StrategyError | None = None
        """Why the last shape that turned out not to be possible is not."""

    @cached_property
    def scorer(self) -> Scorer:
        """What simulates the strategies."""
        return Scorer(self.graph, self.machine, self.costs)

    def ranked(
        self, found: Iterable[Shape], is_over: Callable[[], bool] = lambda: False
    ) -> list[tuple[float, Shape]]:
        """The shapes that are possible with their estimates, the best first; as many as there is time for."""
        estimates: list[tuple[float, Shape]] = []
        for shape in found:
            if estimates and is_over():
                break
            try:
                _, slowest_s = self.cuts(shape)
            except StrategyError as error:
                self.refusal = error
                continue
            estimates.append(((shape.micro_batches + shape.stages - 1) * slowest_s, shape))
        return sorted(estimates, key=lambda pair: (pair[0], pair[1].stages, pair[1].group))

    def is_possible(self, shape: Shape) -> bool:
        """Whether every block can be cut into the micro-batches of a shape, and these within its stages."""
        within = self.within(len(self.machine.devices) // shape.stages, shape.group).placements
        try:
            for block in self.blocks:
                self._compute_s(block, within[block.name], shape.micro_batches)
        except StrategyError as error:
            self.refusal = error
            return False
        return True

    def fastest(self, strategies: Sequence[Strategy]) -> Strategy | None:
        """The fastest of some strategies; one that seems to fit in memory before any that does not."""
        return min(strategies, key=self.merit, default=None)

    def merit(self, strategy: Strategy) -> tuple[bool, float]:
        """Whether a strategy seems not to fit, and its simulated time: less is better."""
        makespan_s = self.scorer.makespan_s(strategy)
        needed = self.scorer.footprint_bytes(strategy, self.numbers_per_weight)
        is_too_large = any(
            own > device.kind.memory_bytes for own, device in zip(needed, self.machine.devices, strict=True)
        )
        return is_too_large, makespan_s

    def strategy(self, shape: Shape) -> Strategy:
        """The pipeline of a shape; one forward, one backward where the model allows it."""
        starts, _ = self.cuts(shape)
        width = len(self.machine.devices) // shape.stages
        within = self.within(width, shape.group)
        stage_of = np.searchsorted(starts, np.arange(len(self.blocks)), side="right") - 1
        placements = {
            block.name: shifted(within.placements[block.name], int(stage) * width)
            for block, stage in zip(self.blocks, stage_of, strict=True)
        }
        one = Strategy(self.graph, placements)
        return one.pipelined(Pipeline(shape.micro_batches, self._schedule(shape.micro_batches)))

    def _schedule(self, micro_batches: int) -> Schedule:
        """The order that the model allows; it is the same for all pipelines of so many micro-batches."""
        if micro_batches not in self._schedules:
            whole = each_block(self.graph, lambda _: Placement((), (0,)))
            try:
                whole.pipelined(Pipeline(micro_batches)).checked(self.machine)
                self._schedules[micro_batches] = Schedule.ONE_F_ONE_B
            except StrategyError:
                self._schedules[micro_batches] = Schedule.GPIPE
        return self._schedules[micro_batches]

    def within(self, width: int, group: int) -> Strategy:
        """The strategy within a stage of so many devices, for all blocks."""
        if (width, group) not in self._within:
            self._within[width, group] = (
                each_block(self.graph, lambda block: over_samples(self.graph, block, range(width)))
                if group == 1
                else megatron.Groups(self.graph, width, group).strategy
            )
        return self._within[width, group]

    def cuts(self, shape: Shape) -> tuple[list[int], float]:
        """The first block of each stage, and how long a micro-batch takes in the slowest of them."""
        width = len(self.machine.devices) // shape.stages
        within = self.within(width, shape.group).placements
        compute = np.array([self._compute_s(b, within[b.name], shape.micro_batches) for b in self.blocks])
        return balanced(compute, self._crossing_s(shape, width), shape.stages)

    def _compute_s(self, block: Block, placement: Placement, micro_batches: int) -> float:
        """Forward and backward pass of one micro-batch's shard on the slowest kind of device."""
        own = repeated(self.graph, block, placement, micro_batches)
        key = (self._alike[block.name], own.degrees)
        if key not in self._seconds:
            boxes = first_shard(self.graph, block, own.degree_of)
            works = [
                work_of(self.graph, node, boxes[n], backward=backward)
                for n, node in enumerate(block.nodes)
                for backward in (False, True)
            ]
            kinds = {device.kind.name: device.kind for device in self.machine.devices}.values()
            self._seconds[key] = max(
                sum(self.costs.compute_s(work, kind) for work in works if work is not None) for kind in kinds
            )
        return self._seconds[key]

    @cached_property
    def _alike(self) -> Mapping[str, int]:
        """A number for each block, the same for those that cost the same."""
        numbers: dict[Hashable, int] = {}
        return {b.name: numbers.setdefault(shape_of(self.graph, b), len(numbers)) for b in self.blocks}

    def _crossing_s(self, shape: Shape, width: int) -> Array:
        """What crosses a cut before each block takes on a link between two stages, for one micro-batch there
        and back."""
        firsts = [stage * width for stage in range(1, shape.stages)]
        bandwidth = min((self.machine.bandwidth(first - 1, first) for first in firsts), default=np.inf)
        return 2 * self._crossing_bytes / (shape.micro_batches * width) / bandwidth

    @cached_property
    def _crossing_bytes(self) -> Array:
        """What of the whole batch crosses a cut before each block."""
        number = {name: i for i, block in enumerate(self.blocks) for name in block.writes}
        last: dict[str, int] = {}
        for i, block in enumerate(self.blocks):
            for name in (name for node in block.nodes for name in node.reads if name in number):
                last[name] = i
        change_bytes = np.zeros(len(self.blocks) + 1)
        for name, reader in last.items():
            value = self.graph.value(name)
            size_bytes = np.prod(value.shape, dtype=float) * ITEM_BYTES[value.dtype]
            change_bytes[number[name] + 1] += size_bytes
            change_bytes[reader + 1] -= size_bytes
        return np.cumsum(change_bytes)[: len(self.blocks)]


def shifted(placement: Placement, by: int) -> Placement:
    """The same on devices with other numbers."""
    return replace(placement, devices=tuple(device + by for device in placement.devices))


def balanced(compute_s: Array, crossing_s: Array, stages: int) -> tuple[list[int], float]:
    """Where consecutive items begin new stages so that the slowest stage is fastest, and how long it takes;
    `crossing_s[i]` is what a stage that begins with item i receives. No stage is empty."""
    count = len(compute_s)
    before = np.concatenate([[0.0], np.cumsum(compute_s)])
    # By first item and end: how long a stage takes, which is never empty.
    takes = np.maximum(before[None, :] - before[:-1, None], crossing_s[:, None])
    takes[np.arange(count)[:, None] >= np.arange(count + 1)[None, :]] = np.inf
    best = np.where(np.arange(count + 1) > 0, before, np.inf)
    came = np.zeros((stages, count + 1), dtype=int)
    for stage in range(1, stages):
        slowest = np.maximum(best[:-1, None], takes)
        came[stage] = slowest.argmin(axis=0)
        best = slowest[came[stage], np.arange(count + 1)]
    starts, end = list[int](), count
    for stage in range(stages - 1, 0, -1):
        end = int(came[stage, end])
        starts.append(end)
    return [0, *reversed(starts)], float(best[count])
