"""Markov chains over strategies (FlexFlow 6): Metropolis-Hastings with the simulator as the energy.

FlexFlow 6.1, equation 1: a strategy that takes dt longer is accepted with probability exp(-beta dt)
-> `Chain::Step` in cpp/chain.cc. FlexFlow 6.2: starts from known and from random strategies, one chain
each, until its budget is used up or half of its proposals brought nothing better -> `_Chain.run`.

Beta is scaled to the problem: 1 / beta is a part of the chain's best makespan, so that it does not matter
whether iterations take milliseconds or minutes, nor on how many devices.

    mcmc-paper  the paper's: single blocks and placements drawn uniformly, beta constant
    mcmc        proposals that know structure (cpp/moves.h), 1 / beta falling while a chain runs, more
                starts, then rounds of chains from the best strategy so far, and at last a chain that
                moves less, where that costs no more time than is allowed

A strategy whose footprint (cpp/footprint.h) exceeds some device's memory is worse than any that fits; a
chain leaves it only for one that exceeds it by less.

A chain is determined by its start, its seed and the number of its proposals. With a budget of proposals
the whole search is; with one of seconds, the machine's speed decides where the chains are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from threading import Event, Lock
from time import monotonic

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines import applicable, baseline
from soapstone.search.report import CurvePoint, SearchReport, ShowSearch, StartReport, StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem

RANDOM = "random"

PAPER_COLDNESS = 200
"""[choice] Per block: in `mcmc-paper`, a change that costs 1 / (this * blocks) of the makespan is accepted
with probability 1 / e. With more blocks each matters less."""

HOT, COLD = 1e-3, 1e-6
"""[choice] 1 / beta at the first and at the last proposal of a chain of `mcmc`, in parts
of the best makespan."""

FEW_BLOCKS, WARMTH, WARM_SHARE = 24, 0.05, 0.85
"""[choice] A chain over fewer blocks than the first starts at the second by the number of blocks, cools down
to half of that in the third part of its time, and only then to `COLD`: with few blocks each is a large part
of the makespan, and so are the steps between good strategies ([measured] LeNet on 4 P100, 2.5 s of CPU time:
the optimum among ranges or better with 8 of 8 seeds; 6 of 8 without)."""

LEAST_PROPOSALS = 250
"""[choice] Before so many proposals a chain does not give up for want of progress."""

LEAST_GAIN = 1e-3
"""[choice] A best makespan that is not shorter by this part is no progress."""

SLICE_S, LEAST_SLICE = 0.03, 8
"""[choice] About how long the native core works between two looks at the clock, and the least number of
proposals that it makes."""

ROUND_CHAINS = 4
"""[choice] How many chains go on from the best strategy in each round."""

FIRST_SHARE, LAST_SHARE = 0.5, 0.1
"""[choice] The parts of the budget that all starts have together, and that the last chain has; the rounds
have the rest."""

QUIETER = "moving less"


@dataclass(frozen=True)
class Budget:
    """Seconds for the whole search, or proposals for each chain (then the search does not depend on the
    clock). Where both are given, what is used up first ends it. The clock may be another, such as that of
    the time that a process computes."""

    seconds: float | None = 30.0
    proposals: int | None = None
    clock: Callable[[], float] = monotonic


def part_of(budget: Budget, part: float) -> Budget:
    """A part of a budget."""
    seconds = None if budget.seconds is None else budget.seconds * part
    proposals = None if budget.proposals is None else max(1, int(budget.proposals * part))
    return replace(budget, seconds=seconds, proposals=proposals)


def part_over(elapsed_s: float, seconds: float) -> float:
    """The part of a time that is over, from 0 to 1: all of it where there is none at all."""
    return min(1.0, max(0.0, elapsed_s / seconds)) if seconds > 0 else 1.0


@dataclass(frozen=True)
class Rules:
    """What distinguishes one way of searching from the other.

    `starts` have `first_share` of the budget, and only if there is no more to come do they give up for want
    of progress. `temperature` is 1 / beta in parts of the best makespan, by the progress of a chain and the
    number of blocks. How proposals are simulated makes no difference but in speed. With `has_ranges`,
    proposals that know no structure place blocks on devices that follow each other, as FlexFlow's own code
    does, though not its paper.
    """

    name: str
    is_structured: bool
    first_share: float
    temperature: Callable[[float, int], float]
    starts: tuple[str, ...]
    simulation: native.Method = "engine"
    uses_threshold: bool = True
    has_ranges: bool = False


EXPERTS = ("krizhevsky", "wu", "megatron", "dlrm_expert")
"""The baselines that a person who knows the model would choose."""


def _temperature(progress: float, blocks: int) -> float:
    """1 / beta in parts of the best makespan, for `mcmc`."""
    if blocks >= FEW_BLOCKS:
        return _cooled(HOT, COLD, progress)
    warm = WARMTH / blocks
    if progress < WARM_SHARE:
        return _cooled(warm, warm / 2, progress / WARM_SHARE)
    return _cooled(warm / 2, COLD, (progress - WARM_SHARE) / (1 - WARM_SHARE))


def _cooled(first: float, last: float, progress: float) -> float:
    return first * float((last / first) ** progress)


RULES = {
    "mcmc-paper": Rules(
        "mcmc-paper",
        False,
        1.0,
        lambda _, blocks: 1 / (PAPER_COLDNESS * blocks),
        ("data_parallel", *EXPERTS, RANDOM),
    ),
    "mcmc": Rules(
        "mcmc",
        True,
        FIRST_SHARE,
        _temperature,
        ("data_parallel", "optcnn", *EXPERTS, "model_parallel", RANDOM),
    ),
}


def mcmc(  # noqa: PLR0913, a search has that many sides
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts | None = None,
    *,
    method: str | Rules = "mcmc",
    budget: Budget | None = None,
    seed: int = 0,
    threads: int = 2,
    optimizer: str = "momentum",
    capacity_bytes: Sequence[int] | None = None,
    slack: float = 0.0,
    known: Mapping[str, Strategy] | None = None,
    without: frozenset[Kind] = frozenset(),
    in_buckets: bool = False,
    show: ShowSearch | None = None,
) -> SearchReport:
    """The best strategy that the chains of a method find, one of `RULES` or another. They start from the
    strategies that are `known`, by name, beside those of the method. Dims of the kinds in `without` are
    not split (those that count samples are); a start that splits one is refused.

    A KeyboardInterrupt ends the search, and what was found until then is returned. Footprints may be as large
    as `capacity_bytes` says for each device, or else as large as its memory. `slack` is by what part the
    strategy may take longer than the best that was found, if links are then less busy. In buckets, times are
    those with small gradients summed together (`tasks.buckets`).
    """
    memory_bytes = [device.kind.memory_bytes for device in machine.devices]
    limits = _Limits(list(capacity_bytes or memory_bytes), 1 + STATES_PER_WEIGHT[optimizer])
    rules = method if isinstance(method, Rules) else RULES[method]
    problem = FlatProblem(graph, machine, costs or AnalyticCosts(), without=without, in_buckets=in_buckets)
    search = _Search(problem, rules, budget or Budget(), seed, limits)
    stop = search.run(threads, slack, show, known or {})
    record = search.record
    if record.strategy is None:
        raise KeyboardInterrupt  # before the first strategy was looked at
    return SearchReport(
        rules.name,
        seed,
        record.strategy,
        record.best_s,
        record.excess_bytes == 0,
        tuple(record.curve),
        tuple(search.reports),
        search.elapsed_s,
        stop,
    )


@dataclass(frozen=True)
class _Limits:
    """What devices can hold, and how many numbers there are for each weight."""

    capacity_bytes: list[int]
    numbers_per_weight: int


@dataclass
class _Record:
    """The best of all chains so far. Chains on several threads offer what they find, and their strategies
    when they end."""

    excess_bytes: float = float("inf")
    best_s: float = float("inf")
    number: float = float("inf")  # of the chain that the strategy is from
    strategy: Strategy | None = None
    proposals: int = 0
    curve: list[CurvePoint] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def offer(self, chain: _Chain, proposals: int, elapsed_s: float) -> None:
        """Take note of proposals, and of what they brought."""
        with self.lock:
            self.proposals += proposals
            found = (chain.native.best_excess_bytes, chain.native.best_s)
            if found < (self.excess_bytes, self.best_s):
                self.excess_bytes, self.best_s = found
                self.number = float("inf")  # the strategy is yet to come
                self.curve.append(CurvePoint(elapsed_s, self.proposals, self.best_s))

    def keep(self, chain: _Chain) -> None:
        """Take the strategy of a chain that has ended, if it is the best; of equally good ones, the first
        chain's."""
        found = (chain.native.best_excess_bytes, chain.native.best_s, chain.number)
        with self.lock:
            if found <= (self.excess_bytes, self.best_s, self.number):
                self.number, self.strategy = chain.number, chain.best()


class _Search:
    """All chains of one search."""

    def __init__(
        self,
        problem: FlatProblem,
        rules: Rules,
        budget: Budget,
        seed: int,
        limits: _Limits,
    ) -> None:
        self.clock = budget.clock
        self.began = self.clock()
        self.graph, self.machine, self.costs = problem.graph, problem.machine, problem.costs
        self.problem = problem
        self.rules, self.budget, self.seed, self.limits = rules, budget, seed, limits
        self.record, self.reports = _Record(), list[StartReport]()
        self.is_stopped = Event()
        self.chains = 0

    def run(
        self, threads: int, slack: float, show: ShowSearch | None, known: Mapping[str, Strategy]
    ) -> StopReason:
        """Run all starts, then rounds from the best, until nothing is left to do; then move less."""
        names = [name for name in self.rules.starts if name == RANDOM or name in self._applicable]
        starts = [self._start(name) for name in names]
        starts += [self._continued(name, strategy) for name, strategy in known.items()]
        with ThreadPoolExecutor(threads) as pool:
            try:
                self._round(pool, threads, starts, show)
                while self.rules.first_share < 1 and self._has_time():
                    before_s = self.record.best_s
                    name, best = f"round from {before_s:.6g} s", self.record.strategy
                    again = [self._continued(name, best) for _ in range(ROUND_CHAINS)]
                    self._round(pool, threads, again, show)
                    if self.budget.proposals is not None and self.record.best_s == before_s:
                        break
                if self.rules.first_share < 1:
                    self._round(pool, threads, [partial(self._quieter, slack)], show, is_last=True)
            except KeyboardInterrupt:
                return StopReason.INTERRUPTED
        seconds = self.budget.seconds
        if self.rules.first_share < 1 and (seconds is None or self.elapsed_s < seconds):
            return StopReason.CONVERGED
        stops = {report.stop for report in self.reports}
        return StopReason.CONVERGED if stops == {StopReason.CONVERGED} else StopReason.BUDGET

    @cached_property
    def _applicable(self) -> frozenset[str]:
        return frozenset(each.name for each in applicable(self.graph, self.machine))

    @property
    def elapsed_s(self) -> float:
        """Since the search began."""
        return self.clock() - self.began

    def _has_time(self) -> bool:
        return self.budget.seconds is None or self.elapsed_s < self._middle_s

    @property
    def _middle_s(self) -> float:
        """When the last chain is to start."""
        seconds = self.budget.seconds or 0.0
        return seconds if self.rules.first_share == 1 else seconds * (1 - LAST_SHARE)

    def _start(self, name: str) -> Callable[[float], StartReport]:
        number = self._number()

        def run(until: float) -> StartReport:
            strategy = None
            if name != RANDOM:
                strategy = baseline(name, self.graph, self.machine, self.costs)
            return _Chain(self, name, strategy, number).run(until)

        return run

    def _continued(self, name: str, strategy: Strategy | None) -> Callable[[float], StartReport]:
        number = self._number()
        return lambda until: _Chain(self, name, strategy, number).run(until)

    def _quieter(self, slack: float, until: float) -> StartReport:
        """Go on from the best strategy to one that keeps links less busy."""
        chain = _Chain(self, QUIETER, self.record.strategy, self._number())
        report = chain.quieten(until, self.record.best_s * (1 + slack))
        self.record.offer(chain, report.proposals, self.elapsed_s)
        self.record.best_s, self.record.strategy = chain.native.best_s, chain.best()
        return report

    def _number(self) -> int:
        self.chains += 1
        return self.chains

    def _round(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        chains: Sequence[Callable[[float], StartReport]],
        show: ShowSearch | None,
        *,
        is_last: bool = False,
    ) -> None:
        """Run chains, `threads` at a time, each for its share of the time that they have together."""
        seconds = self.budget.seconds
        share_s = float("inf")
        if seconds is not None:
            left_s = (seconds if is_last else self._middle_s) - self.elapsed_s
            share = self.rules.first_share if not self.reports else 1.0
            share_s = left_s * share / ceil(len(chains) / threads)
        turns: list[Future[StartReport]] = [pool.submit(self._turn, chain, share_s) for chain in chains]
        left = set(turns)
        try:
            while left:
                _, left = wait(left, timeout=0.1, return_when=FIRST_COMPLETED)
                if show is not None:
                    show(self._progress(), f"{self.record.best_s * 1e3:.4g} ms")
        except KeyboardInterrupt:
            self.is_stopped.set()
            for turn in turns:
                turn.cancel()
            raise
        finally:
            self.reports += [turn.result() for turn in turns if not turn.cancelled()]

    def _progress(self) -> float:
        if self.budget.seconds is not None:
            return part_over(self.elapsed_s, self.budget.seconds)
        return 0.0

    def _turn(self, chain: Callable[[float], StartReport], share_s: float) -> StartReport:
        """Run a chain for so long, from when it is its turn."""
        return chain(self.clock() + share_s)


class _Chain:
    """One chain: a native one, and what it started from."""

    def __init__(self, search: _Search, name: str, strategy: Strategy | None, number: int) -> None:
        self.search, self.name, self.number = search, name, number
        rules, problem = search.rules, search.problem
        self.native = native.Proposals(
            problem.native,
            search.seed * 1_000_003 + number,
            method=rules.simulation,
            uses_threshold=rules.uses_threshold,
            is_structured=rules.is_structured,
            has_ranges=rules.has_ranges,
        )
        self.native.limit(search.limits.capacity_bytes, search.limits.numbers_per_weight)
        if strategy is None:
            self.native.place_at_random()
        else:
            for number_of_block, degrees, placement in _placements(problem, strategy):
                devices = list(placement.devices)
                if not self.native.place(number_of_block, degrees, placement.copies, devices):
                    block = problem.blocks[number_of_block].name
                    raise StrategyError(
                        f"the search cannot start from '{name}': block '{block}' is split by"
                        f" {placement.degree_of}, which it may not be"
                    )
        self.first_s = self.native.makespan()
        self.mark_s, self.marked_at = self.first_s, 0  # the last progress worth the name

    def run(self, until: float) -> StartReport:
        """Make proposals until the time, the budget or the progress ends."""
        done = accepted = 0
        limit, clock = self.search.budget.proposals, self.search.clock
        size, began, stop = 0, clock(), None
        while stop is None:
            now = clock()
            progress = part_over(now - began, until - began) if limit is None else done / limit
            accepted += self._step(size, min(1.0, progress))
            done += size
            size = self._next_size(size, done, clock() - now)
            stop = self._stop(done, until)
        self.search.record.keep(self)
        return StartReport(self.name, self.first_s, self.native.best_s, done, accepted, stop)

    def quieten(self, until: float, limit_s: float) -> StartReport:
        """Make proposals that keep links less busy and the makespan within a limit."""
        done = accepted = size = 0
        limit, clock = self.search.budget.proposals, self.search.clock
        stop: StopReason | None = None
        while stop is None:
            now = clock()
            accepted += self.native.quieten(size, limit_s)
            done += size
            size = self._next_size(size, done, clock() - now)
            if self.search.is_stopped.is_set():
                stop = StopReason.INTERRUPTED
            elif (limit is not None and done >= limit) or clock() >= until:
                stop = StopReason.BUDGET
        return StartReport(self.name, self.first_s, self.native.best_s, done, accepted, stop)

    def _next_size(self, size: int, done: int, took_s: float) -> int:
        """How many proposals to make before the next look at the clock. Without a limit in proposals, the
        clock may decide."""
        most = max(LEAST_SLICE, done // 8)
        limit = self.search.budget.proposals
        if limit is not None:
            return min(most, limit - done)
        return max(LEAST_SLICE, min(most, size * 2 if took_s < SLICE_S else size // 2))

    def _step(self, size: int, progress: float) -> int:
        """Some proposals at the temperature of this point of the chain."""
        blocks = len(self.search.problem.blocks)
        best_s = self.native.best_s if self.native.best_s < float("inf") else self.first_s
        temperature_s = best_s * self.search.rules.temperature(progress, blocks)
        accepted = self.native.step(size, temperature_s)
        self.search.record.offer(self, size, self.search.elapsed_s)
        return accepted

    def _stop(self, done: int, until: float) -> StopReason | None:
        limit = self.search.budget.proposals
        if self.native.best_s < self.mark_s * (1 - LEAST_GAIN):
            self.mark_s, self.marked_at = self.native.best_s, self.native.best_at
        if self.search.is_stopped.is_set():
            return StopReason.INTERRUPTED
        if self.search.rules.first_share == 1 and done - self.marked_at > max(done / 2, LEAST_PROPOSALS):
            return StopReason.CONVERGED
        if done and (done == limit or self.search.clock() >= until):
            return StopReason.BUDGET
        return None

    def best(self) -> Strategy:
        """The best strategy that the chain has been at."""
        problem = self.search.problem
        placements: dict[str, Placement] = {}
        for number, block in enumerate(problem.blocks):
            degrees, copies, devices = self.native.best(number)
            dims = problem.graph.signature(block.leader).sizes
            placements[block.name] = placed(dict(zip(dims, degrees, strict=True)), devices, copies)
        return Strategy(problem.graph, placements)


def _placements(problem: FlatProblem, strategy: Strategy) -> Iterator[tuple[int, list[int], Placement]]:
    for number, block in enumerate(problem.blocks):
        placement = strategy.placements[block.name]
        yield number, problem.degrees(block, placement), placement
