"""Searching for a pipeline: how many stages and micro-batches, where to cut, and how to split within stages.

    shapes      every number of stages that divides the devices, with numbers of micro-batches, split within
                along samples or as Megatron does; cut by dynamic programming and ranked by an estimate
                (`baselines.pipeline`), then simulated, the best estimates first
    rounds      from the fastest: a block, drawn at random, is split otherwise on the devices of its stage, or
                the first or last block of a stage goes to the next one, and stays so if that is faster

A pipeline that seems not to fit in memory is worse than any that does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from random import Random

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import SearchError, StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.units import counted
from soapstone.search.baselines.pipeline import Cutter, Shape, grouped_shapes, shapes, shifted
from soapstone.search.mcmc import Budget, part_over
from soapstone.search.report import CurvePoint, SearchReport, ShowSearch, StartReport, StopReason
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layout, layouts
from soapstone.strategy.pipeline import Schedule, repeated
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

RANKING_SHARE = 0.2
"""[choice] The part of the budget in which shapes are cut and ranked."""

SHAPES_SHARE = 0.5
"""[choice] The part of the budget after which no further shape is simulated."""

ROUNDS = 3
"""[choice] How many of the fastest shapes are bettered, each with an equal part of what is left."""

PATIENCE = 40
"""[choice] Proposals for each block without a gain, after which a round ends."""


@dataclass(frozen=True)
class Wanted:
    """What of a pipeline is decided beforehand; None for what is to be found."""

    stages: int | None = None
    micro_batches: int | None = None


def pipeline_search(  # noqa: PLR0913, a search has a parameter for each of its options
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    *,
    wanted: Wanted | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    optimizer: str = "momentum",
    show: ShowSearch | None = None,
    worth_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> SearchReport:
    """The fastest pipeline that is found. If none of the shapes takes less than `worth_s`, none is bettered.
    A KeyboardInterrupt ends the search with the best so far."""
    own = wanted or Wanted()
    cutter = Cutter(graph, machine, costs, optimizer)
    search = _Search(cutter, budget or Budget(), seed, show, clock)
    possible = chain(
        shapes(graph, machine, own.stages, own.micro_batches),
        grouped_shapes(graph, machine, own.stages, own.micro_batches),
    )
    ranked = cutter.ranked(possible, lambda: search.is_past(RANKING_SHARE))
    if not ranked:
        raise SearchError(_objection(cutter, own))
    stop = StopReason.BUDGET
    try:
        search.try_shapes([shape for _, shape in ranked])
        is_worth_it = search.best[0] < (False, worth_s) or worth_s == math.inf
        stop = search.better() if is_worth_it else StopReason.CONVERGED
    except KeyboardInterrupt:
        if not search.found:
            raise
        stop = StopReason.INTERRUPTED
    return search.report(stop)


def _objection(cutter: Cutter, wanted: Wanted) -> str:
    stages = "any number of stages" if wanted.stages is None else counted(wanted.stages, "stage")
    count = wanted.micro_batches
    parts = "" if count is None else f" with {counted(count, 'micro-batch')}"
    why = cutter.refusal or "stages divide the devices, micro-batches the samples of each"
    return (
        f"there is no pipeline of {stages}{parts} for"
        f" {counted(cutter.graph.sample_count or 0, 'sample')} on"
        f" {counted(len(cutter.machine.devices), 'device')}: {why}"
    )


class _Search:
    """The search under way: `found` are merit and strategy of all that was tried, the best first."""

    def __init__(
        self,
        cutter: Cutter,
        budget: Budget,
        seed: int,
        show: ShowSearch | None,
        clock: Callable[[], float],
    ) -> None:
        self.cutter, self.budget, self.seed, self.show, self.clock = cutter, budget, seed, show, clock
        self.began = clock()
        self.found: list[tuple[tuple[bool, float], int, Shape, Strategy]] = []
        self.starts: list[StartReport] = []
        self.curve: list[CurvePoint] = []

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    def is_past(self, share: float) -> bool:
        """Whether so much of the time is used up."""
        return self.budget.seconds is not None and self.elapsed_s > share * self.budget.seconds

    @property
    def best(self) -> tuple[tuple[bool, float], int, Shape, Strategy]:
        return min(self.found, key=lambda each: each[:2])

    def keep(self, shape: Shape, strategy: Strategy, merit: tuple[bool, float]) -> None:
        """Note a strategy and what it is worth."""
        self.found.append((merit, len(self.found), shape, strategy))
        (_, best_s), _, _, _ = self.best
        proposals = sum(start.proposals for start in self.starts)
        if not self.curve or best_s < self.curve[-1].best_s:
            self.curve.append(CurvePoint(self.elapsed_s, proposals, best_s))
        if self.show is not None:
            seconds = self.budget.seconds
            self.show(
                0.0 if seconds is None else part_over(self.elapsed_s, seconds), f"{best_s * 1e3:.4g} ms"
            )

    def try_shapes(self, ranked: list[Shape]) -> None:
        """Simulate shapes in the order of their estimates, as far as the time for it goes."""
        for shape in ranked:
            strategy = self.cutter.strategy(shape)
            merit = self.cutter.merit(strategy)
            self.starts.append(StartReport(_name(shape), merit[1], merit[1], 1, 0, StopReason.CONVERGED))
            self.keep(shape, strategy, merit)
            if self.is_past(SHAPES_SHARE):
                return

    def better(self) -> StopReason:
        """Better the fastest shapes, one after the other."""
        fastest = sorted(self.found, key=lambda each: each[:2])[:ROUNDS]
        stops = []
        for turn, (merit, _, shape, strategy) in enumerate(fastest):
            left_s = None if self.budget.seconds is None else self.budget.seconds - self.elapsed_s
            until = None if left_s is None else self.clock() + left_s / (len(fastest) - turn)
            moves = _Chain(self.cutter, strategy, shape, self.seed + turn)
            done, accepted, stop = moves.run(self.budget.proposals, until, self.clock)
            other = moves.strategy()
            found = min((merit, strategy), (self.cutter.merit(other), other), key=lambda pair: pair[0])
            name = f"round of {_name(shape)}"
            self.starts.append(StartReport(name, merit[1], found[0][1], done, accepted, stop))
            self.keep(shape, found[1], found[0])
            stops.append(stop)
        return StopReason.BUDGET if StopReason.BUDGET in stops else StopReason.CONVERGED

    def report(self, stop: StopReason) -> SearchReport:
        """What was found."""
        (is_too_large, makespan_s), _, _, strategy = self.best
        return SearchReport(
            "pipeline",
            self.seed,
            strategy,
            makespan_s,
            not is_too_large,
            tuple(self.curve),
            tuple(self.starts),
            self.elapsed_s,
            stop,
        )


def _name(shape: Shape) -> str:
    within = "" if shape.group == 1 else f", groups of {shape.group}"
    return f"{counted(shape.stages, 'stage')}, {counted(shape.micro_batches, 'micro-batch')}{within}"


class _Chain:
    """A pipeline that changes block by block, each change simulated by the native core."""

    def __init__(self, cutter: Cutter, strategy: Strategy, shape: Shape, seed: int) -> None:
        assert strategy.pipeline is not None
        self.cutter, self.shape, self.pipeline = cutter, shape, strategy.pipeline
        self.graph, self.random = cutter.graph, Random(seed)
        self.problem, self.blocks = cutter.scorer.problem, cutter.blocks
        self.width = len(cutter.machine.devices) // shape.stages
        one = strategy.of_one()
        self.placements = {block.name: one.placements[block.name] for block in self.blocks}
        self.stage = {n: min(p.devices) // self.width for n, p in self.placements.items()}
        self.native = native.Proposals(self.problem.native, seed)
        self.problem.place(self.native, strategy)
        self.turns = strategy.turns
        self.current_s = self.native.makespan()
        self.is_bound = not self._is_too_large()
        self._ways: dict[str, list[Placement]] = {}

    def run(
        self, proposals: int | None, until: float | None, clock: Callable[[], float]
    ) -> tuple[int, int, StopReason]:
        """Propose until the time or the number is used up, or nothing has come of it for long."""
        done = accepted = gained_at = 0
        while True:
            if (proposals is not None and done >= proposals) or (until is not None and clock() >= until):
                return done, accepted, StopReason.BUDGET
            if done - gained_at > PATIENCE * len(self.blocks):
                return done, accepted, StopReason.CONVERGED
            done += 1
            if self._propose():
                accepted, gained_at = accepted + 1, done

    def strategy(self) -> Strategy:
        """The strategy as it is now."""
        return Strategy(self.graph, dict(self.placements)).pipelined(self.pipeline)

    def _propose(self) -> bool:
        block = self.random.choice(self.blocks)
        drawn = self._moved(block) if self.random.random() < 0.25 else self._split(block)
        if drawn is None:
            return False
        stage, placement = drawn
        found_s = self._simulated(block, stage, placement, self.current_s)
        if found_s >= self.current_s:
            self.native.reject()
            return False
        self.native.accept()
        if self.is_bound and self._is_too_large():
            old = self.placements[block.name]
            self._simulated(block, self.stage[block.name], old, math.inf)
            self.native.accept()
            return False
        self.placements[block.name], self.stage[block.name] = placement, stage
        self.current_s = found_s
        return True

    def _simulated(self, block: Block, stage: int, placement: Placement, threshold_s: float) -> float:
        turns = self.turns[block.name]
        whole = repeated(self.graph, block, placement, turns.count)
        in_flight = self.shape.stages - stage if turns.count > 1 else 0
        return self.native.propose(
            self.problem.number[block.name],
            self.problem.degrees(block, whole),
            whole.copies,
            list(whole.devices),
            threshold_s,
            turns.count,
            in_flight if self.pipeline.schedule is Schedule.ONE_F_ONE_B else 0,
        )

    def _moved(self, block: Block) -> tuple[int, Placement] | None:
        """The first or last block of a stage, in the stage before or after."""
        names = [own.name for own in self.blocks]
        at, stage = names.index(block.name), self.stage[block.name]
        near = {self.stage[names[i]] for i in (at - 1, at + 1) if 0 <= i < len(names)} - {stage}
        if not near or sum(own == stage for own in self.stage.values()) == 1:
            return None
        other = self.random.choice(sorted(near))
        return other, shifted(self.placements[block.name], (other - stage) * self.width)

    def _split(self, block: Block) -> tuple[int, Placement] | None:
        """The block split otherwise, on the devices of its stage."""
        if block.name not in self._ways:
            self._ways[block.name] = list(self._splits(block))
        ways, stage = self._ways[block.name], self.stage[block.name]
        if len(ways) < 2:
            return None
        return stage, shifted(self.random.choice(ways), stage * self.width)

    def _splits(self, block: Block) -> Iterator[Placement]:
        """The ways to split a block over all devices of the first stage."""
        yield Placement((), tuple(range(self.width)), self.width)
        for found in layouts(self.graph, block, self.width):
            own = placed(dict(found.degrees), range(self.width))
            try:
                layout(
                    self.graph,
                    block,
                    repeated(self.graph, block, own, self.turns[block.name].count).degree_of,
                )
            except StrategyError:
                continue
            yield own

    def _is_too_large(self) -> bool:
        needed = self.native.footprint_bytes(self.cutter.numbers_per_weight)
        return any(
            own > device.kind.memory_bytes
            for own, device in zip(needed, self.cutter.machine.devices, strict=True)
        )
