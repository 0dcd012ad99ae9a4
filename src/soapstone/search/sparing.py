"""Searching where memory is short, by exact peaks.

Chains keep to footprints (cpp/footprint.h). A peak may be twice as much, and of two strategies the one with
the smaller footprint may have the larger peak: whether the gradients of weights are all there at once is for
the timeline to say. So what chains found, where it does not fit, is followed by

    rounds       chains that are held to less: of each device to what it has, times footprint by peak of what
                 was found last
    walks        chains whose every step is judged by its exact peak: a step may not lack more than the one
                 before, or only a little more at first, and from what fits it may not take much longer
    everything   where there are few strategies: all of them by their times, the first whose peak fits

A `Judge` works out what strategies of one graph have in common once: a few tenths of a millisecond each for
a model of a few layers, tens of milliseconds for hundreds of blocks on 16 devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from random import Random

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.plans import predicted
from soapstone.search.baselines import data_parallel
from soapstone.search.mcmc import RANDOM, RULES, Budget, mcmc, part_of
from soapstone.search.report import StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.sim.outcome import held_of, input_bytes
from soapstone.strategy.blocks import blocks
from soapstone.strategy.layout import layout
from soapstone.strategy.pipeline import Turns
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buffers import Ledger
from soapstone.tasks.flat import FlatProblem
from soapstone.tasks.placed import Placed
from soapstone.tasks.segments import segmented

FEW_STRATEGIES, MANY_STRATEGIES = 1_000, 30_000
"""[choice] Of no more strategies than the first all are tried, and up to the second where there is time."""

ALL_SHARE, EACH_S = 0.6, 2.5e-5
"""[choice] The part of the time for that, and what one takes ([measured] three blocks on three devices)."""

MOST_OF_ALL = 5_000
"""[choice] The peaks that are looked at where no seconds end it."""

PLENTY = 0.4
"""[choice] The part of a device's memory up to which data parallelism's footprint leaves no doubt: it is half
of a peak and more ([measured] 0.54 of three layers with 16,384 samples, 0.73 to 0.98 of eight models)."""

QUICK_STARTS = ("data_parallel", "model_parallel", RANDOM)
"""[choice] What chains of a round start from, beside what was found last and what is nearest to fitting."""

ROUNDS, ROUND_SHARE = 3, 0.2
"""[choice] How many searches there are at most that are held to less, and the part of the budget for each."""

SPARED = 0.97
"""[choice] They are held to this part of what would just be enough if peaks exceeded footprints as they did
in what was found."""

OTHERS, AT_RANDOM = 2, 3
"""[choice] How many walks there are from other starts, and from random strategies."""

STEPS_OF_A_WALK = 200
"""[choice] With time for fewer steps than these there is no walk from elsewhere."""

ALLOWED = 0.1
"""[choice] By what part of a device's memory a step may lack more than the one before, about, at first."""

MOST_STEPS = 1_000
"""[choice] Steps of a walk where no seconds end it."""

MOST_JUDGED, LEAST_JUDGED = 200_000, 100
"""[choice] Strategies that are judged where no seconds end it: divided by the number of blocks times devices,
and at least."""

ANY_S = 1e30
"""[choice] A temperature at which every proposal is accepted."""

Placements = tuple[Placement, ...]
"""Of all blocks, in their order."""


@dataclass(frozen=True, order=True)
class Judged:
    """What devices lack of memory in all, the makespan, and the exact peaks. What lacks less is better, then
    what is faster."""

    excess_bytes: int
    makespan_s: float
    peak_bytes: tuple[int, ...] = field(compare=False)

    @property
    def fits(self) -> bool:
        """Whether every device has enough."""
        return self.excess_bytes == 0


class Judge:
    """Exact figures of strategies of one graph without pipelines, on one machine."""

    def __init__(self, graph: Graph, machine: Machine, costs: AnalyticCosts, optimizer: str) -> None:
        self.graph, self.machine, self.costs, self.optimizer = graph, machine, costs, optimizer
        self.problem = FlatProblem(graph, machine, costs)
        self.limits = [device.kind.memory_bytes for device in machine.devices]
        self._planned = native.PlannedTasks(self.problem.native)
        self._ledger = Ledger(graph)
        self._blocks: dict[tuple[int, Placement], tuple[Placed, native.BlockHeld]] = {}
        self._known: dict[Placements, Judged] = {}

    @property
    def judged_count(self) -> int:
        """How many strategies have been judged."""
        return len(self._known)

    def knows(self, strategy: Strategy) -> bool:
        """Whether a strategy is one of the graph's that can be judged."""
        return strategy.graph is self.graph and strategy.pipeline is None and not strategy.apart

    def judged(self, own: Placements) -> Judged:
        """What a strategy takes."""
        if own not in self._known:
            self.place(self._planned, enumerate(own))
            known = [self._block(number, placement) for number, placement in enumerate(own)]
            inputs = input_bytes(Ledger(self.graph), [each for each, _ in known], len(self.limits))
            states = STATES_PER_WEIGHT[self.optimizer]
            makespan_s, _, _, _, peaks = self._planned.foretold([held for _, held in known], inputs, states)
            peak_bytes = tuple(peak for peak, _, _ in peaks)
            lacking = (max(0, a - b) for a, b in zip(peak_bytes, self.limits, strict=True))
            self._known[own] = Judged(sum(lacking), makespan_s, peak_bytes)
        return self._known[own]

    def place(
        self, target: native.PlannedTasks | native.Proposals, changes: Iterable[tuple[int, Placement]]
    ) -> None:
        """Place some blocks, by number."""
        for number, placement in changes:
            degrees = self.problem.degrees(self.problem.blocks[number], placement)
            target.place(number, degrees, placement.copies, list(placement.devices))

    def placements(self, strategy: Strategy) -> Placements:
        """The placements of a strategy."""
        return tuple(strategy.placements[block.name] for block in self.problem.blocks)

    def strategy(self, own: Placements) -> Strategy:
        """The strategy of placements."""
        names = [block.name for block in self.problem.blocks]
        return Strategy(self.graph, dict(zip(names, own, strict=True)))

    def footprint_bytes(self, own: Placements) -> list[int]:
        """What chains take for the peak of each device."""
        chain = native.Proposals(self.problem.native)
        self.place(chain, enumerate(own))
        return chain.footprint_bytes(1 + STATES_PER_WEIGHT[self.optimizer])

    def _block(self, number: int, placement: Placement) -> tuple[Placed, native.BlockHeld]:
        """A block where it is placed, and what its shards hold."""
        if (number, placement) not in self._blocks:
            block, turns = self.problem.blocks[number], Turns((0,) * placement.parts)
            cut = layout(self.graph, block, placement.degree_of)
            count, segments = len(self.problem.blocks), segmented(cut, placement, turns)
            own = Placed(number, count, block, cut, placement, segments, turns)
            self._blocks[number, placement] = own, held_of(self.problem, self._ledger, own)
        return self._blocks[number, placement]


def is_short(graph: Graph, machine: Machine, costs: AnalyticCosts, optimizer: str) -> bool:
    """Whether data parallelism does not fit. Its footprint decides where that is far from what devices have,
    and its peak where it is not."""
    problem, plain = FlatProblem(graph, machine, costs), data_parallel(graph, machine)
    chain = native.Proposals(problem.native)
    problem.place(chain, plain)
    held = chain.footprint_bytes(1 + STATES_PER_WEIGHT[optimizer])
    limits = [device.kind.memory_bytes for device in machine.devices]
    part = max(own / limit for own, limit in zip(held, limits, strict=True))
    return part > PLENTY and (part > 1 or not predicted(plain, machine, costs, optimizer).fits(machine))


def spaces_of(graph: Graph, machine: Machine, most: int) -> list[Space] | None:
    """The placements of each block, if there are no more strategies than so many."""
    spaces, count = list[Space](), 1
    for block in blocks(graph):
        spaces.append(Space(graph, block, len(machine.devices)))
        count *= spaces[-1].count
        if count > most:
            return None
    return spaces


def fastest_of_all(
    judge: Judge,
    spaces: Sequence[Space],
    limit_s: float = inf,
    is_over: Callable[[], bool] = lambda: False,
) -> Placements | None:
    """Of all strategies the fastest that fits and takes less than a limit; None if there is none, or none
    was found until it is over."""
    for makespan_s, own in sorted(_timed(judge, spaces, is_over), key=lambda timed: timed[0]):
        if makespan_s >= limit_s or is_over():
            return None
        if judge.judged(own).fits:
            return own
    return None


def _timed(
    judge: Judge, spaces: Sequence[Space], is_over: Callable[[], bool]
) -> Iterator[tuple[float, Placements]]:
    """The makespan of every strategy, until it is over."""
    chain, before = native.Proposals(judge.problem.native), Placements()
    for own in product(*map(tuple, spaces)):
        judge.place(chain, ((n, new) for n, new in enumerate(own) if not before or new is not before[n]))
        before = own
        yield chain.makespan(), own
        if is_over():
            return


def spared(
    judge: Judge, starts: Sequence[Strategy], budget: Budget, seed: int, threads: int
) -> tuple[Strategy, bool] | None:
    """The fastest that is found of what fits, from starts that may not, and whether it is the fastest of all;
    None if nothing is found. An interrupt ends it with the best so far."""
    began, spaces = budget.clock(), spaces_of(judge.graph, judge.machine, _affordable(budget))
    share = 1.0 if spaces is None else 1 - ALL_SHARE
    search = _Sparing(judge, [judge.placements(each) for each in starts], part_of(budget, share), seed)

    def is_over() -> bool:
        if budget.seconds is None:
            return judge.judged_count >= MOST_OF_ALL
        return budget.clock() - began >= budget.seconds

    try:
        search.rounds(threads)
        search.walks()
        if spaces is not None:
            fastest = fastest_of_all(judge, spaces, search.fitting_s, is_over)
            search.offer(search.best if fastest is None else fastest)
    except KeyboardInterrupt:
        spaces = None
    found = judge.judged(search.best)
    return (judge.strategy(search.best), spaces is not None and not is_over()) if found.fits else None


def _affordable(budget: Budget) -> int:
    """How many strategies there is time to try."""
    if budget.seconds is None:
        return MANY_STRATEGIES
    return max(FEW_STRATEGIES, min(MANY_STRATEGIES, int(ALL_SHARE * budget.seconds / EACH_S)))


class _Sparing:
    """A search for what fits, and the best of what it has judged."""

    def __init__(self, judge: Judge, starts: Sequence[Placements], budget: Budget, seed: int) -> None:
        self.judge, self.budget, self.seed = judge, budget, seed
        self.began, self.before = budget.clock(), judge.judged_count
        shards = len(judge.problem.blocks) * len(judge.limits)
        self.most_judged = max(LEAST_JUDGED, MOST_JUDGED // shards)
        self.starts = sorted(dict.fromkeys(starts), key=judge.judged)
        self.first, self.best = starts[0], self.starts[0]

    def is_over(self) -> bool:
        """Whether nothing more is to be judged."""
        seconds = self.budget.seconds
        if seconds is None:
            return self.judge.judged_count - self.before >= self.most_judged
        return self.budget.clock() - self.began >= seconds

    @property
    def fitting_s(self) -> float:
        """The makespan of the best, if it fits."""
        found = self.judge.judged(self.best)
        return found.makespan_s if found.fits else inf

    def offer(self, own: Placements) -> None:
        """Keep what is better than the best so far."""
        self.best = min(self.best, own, key=self.judge.judged)

    def rounds(self, threads: int) -> None:
        """Chains that are held to less, until what they find fits or there is nothing to be found."""
        judge, own, room = self.judge, self.first, self.judge.limits
        for turn in range(ROUNDS):
            if self.is_over():
                return
            room = self._room(own, room)
            found = mcmc(
                judge.graph,
                judge.machine,
                judge.costs,
                method=replace(RULES["mcmc"], starts=QUICK_STARTS),
                budget=part_of(self.budget, ROUND_SHARE),
                seed=self.seed + turn,
                threads=threads,
                optimizer=judge.optimizer,
                capacity_bytes=room,
                known={"so far": judge.strategy(own), "nearest to fitting": judge.strategy(self.best)},
            )
            own = judge.placements(found.strategy)
            self.offer(own)
            if found.stop is StopReason.INTERRUPTED:
                raise KeyboardInterrupt
            if judge.judged(own).fits or not found.fits:
                return

    def _room(self, own: Placements, before: Sequence[int]) -> list[int]:
        """What each device may be told to hold so that, by what is known of a strategy, its peak fits; never
        more than before."""
        held, peaks = self.judge.footprint_bytes(own), self.judge.judged(own).peak_bytes
        rows = zip(self.judge.limits, held, peaks, before, strict=True)
        return [
            min(known, int(SPARED * limit * footprint / peak)) if 0 < footprint < peak else known
            for limit, footprint, peak, known in rows
        ]

    def walks(self) -> None:
        """Walk from what is nearest to fitting, from other starts and from anywhere, and last from the best.
        Where a walk has time for few steps only, the best has all of the rest."""
        others = [each for each in self.starts if each != self.best][:OTHERS]
        starts = [self.best, *others, *[None] * AT_RANDOM]
        for number, start in enumerate(starts):
            steps = self._walk(start, number, len(starts) + 1 - number)
            if self.budget.seconds is not None and steps < STEPS_OF_A_WALK:
                break
        self._walk(self.best, len(starts), 1)

    def _walk(self, start: Placements | None, number: int, sharing: int) -> int:
        """Go on for a share of what is left of the time; returns how many steps that were."""
        began, seconds, proposals = self.budget.clock(), self.budget.seconds, self.budget.proposals
        share_s = inf if seconds is None else (seconds - (began - self.began)) / sharing
        most = inf if proposals is None and seconds is not None else min(MOST_STEPS, proposals or MOST_STEPS)
        walk, steps = _Walk(self.judge, start, self.seed * 1_000_003 + number), 0
        while steps < most and not self.is_over():
            taken_s = self.budget.clock() - began
            if taken_s >= share_s:
                break
            walk.step(max(steps / most, taken_s / share_s))
            self.offer(walk.own)
            steps += 1
        return steps


class _Walk:
    """A chain of which every step is judged: a native one, taken back where a step is not to be."""

    def __init__(self, judge: Judge, start: Placements | None, seed: int) -> None:
        self.judge = judge
        self.chain = native.Proposals(judge.problem.native, seed, is_structured=True)
        self.temperature, self.random = RULES["mcmc"].temperature, Random(seed)
        self.allowed_bytes = ALLOWED * sum(judge.limits) / len(judge.limits)
        self.dims = [list(judge.graph.signature(block.leader).sizes) for block in judge.problem.blocks]
        if start is None:
            self.chain.place_at_random()
        else:
            judge.place(self.chain, enumerate(start))
        self.own = self._placed()

    def step(self, progress: float) -> None:
        """Make one proposal at the temperature of this point of the walk."""
        now = self.judge.judged(self.own)
        part = self.temperature(progress, len(self.dims))
        if not self.chain.step(1, now.makespan_s * part if now.fits else ANY_S):
            return
        proposed = self._placed()
        more_bytes = self.random.expovariate(1.0) * self.allowed_bytes * (1 - progress) ** 2
        if self.judge.judged(proposed).excess_bytes <= now.excess_bytes + more_bytes:
            self.own = proposed
        else:
            pairs = enumerate(zip(self.own, proposed, strict=True))
            self.judge.place(self.chain, ((n, old) for n, (old, new) in pairs if old != new))

    def _placed(self) -> Placements:
        return tuple(
            placed(dict(zip(dims, degrees, strict=True)), devices, copies)
            for dims, (degrees, copies, devices) in zip(
                self.dims, map(self.chain.placed, range(len(self.dims))), strict=True
            )
        )
