"""The best strategy there is, with a proof, for small problems (FlexFlow 8.3); a bound for large ones.

    exact_search  depth-first search with A*-like pruning -> cpp/exact.h, over bounds of partial strategies
                  -> cpp/partial.h; it starts from the best of a few short Markov chains
    lower_bound   what no strategy can do better than, on any machine -> cpp/lower_bound.h

What is proved: no strategy of the space (`strategy.space`: every layout of every block, its shards on
different devices, one copy; with `has_ranges`, on devices that follow each other by number) has a simulated
makespan less than `(1 - tolerance)` times the one returned. The default tolerance only absorbs rounding.
Relabelling the devices can change a simulated makespan, since ties are broken by the task order and rings run
by device number; so bounds that hold for all relabellings lead the way, and all relabellings of a whole
strategy are simulated (`docs/decisions/0009-exact-search.md`).

Memory limits are not part of the search: `fits` says whether the strategy returned keeps within them. If it
does not, a slower one that fits may exist, and the proof is not about those.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import perm, prod
from time import monotonic

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.units import counted
from soapstone.search.report import StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT, peak_memory
from soapstone.sim.reference import simulate
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.flat import FlatProblem

ROUNDING = 1e-9
"""[choice] Bounds and makespans are sums of the same numbers in another order; this is far more than their
rounding, and far less than anyone measures."""

MOST_PLACEMENTS = 100_000
"""[choice] Each placement of each block is tried at the root: with more, not even that ends in minutes."""

CHAINS, COOLINGS, PROPOSALS = 8, 14, 8000
"""[choice] How the strategy to start from is found: chains, steps of cooling in each, proposals in a step."""
FIRST_PART, COOLING = 0.1, 0.6
"""[choice] The first temperature as a part of the makespan, and what is left of it after a step."""

SLICE = 500
"""[choice] Partial strategies between two looks at the clock: a few hundredths of a second."""

PARTS, SHARED_SLICE = 12, 5000
"""[choice] Into how many parts the tree is cut for each thread, and how many partial strategies a thread
looks at before all of them tell each other what they found: a few tenths of a second."""


@dataclass(frozen=True)
class ExactResult:
    """The best strategy that was found, and what is known of all others: none is better than
    `lower_bound_s`. `bounded` counts partial strategies for which a bound was worked out, `simulated` whole
    strategies; `space` is how many strategies there are, and `symmetry` how many relabellings of the
    devices stood for each other."""

    strategy: Strategy
    makespan_s: float
    lower_bound_s: float
    tolerance: float
    stop: StopReason
    fits: bool
    bounded: int
    simulated: int
    space: int
    symmetry: int
    elapsed_s: float

    @property
    def is_optimal(self) -> bool:
        """Whether it is proved that no strategy is better by more than the tolerance."""
        return self.stop is StopReason.OPTIMAL

    @property
    def gap(self) -> float:
        """By what part of the lower bound the strategy may at most be off the optimum."""
        return self.makespan_s / self.lower_bound_s - 1


@dataclass(frozen=True)
class LowerBound:
    """What no strategy can do better than, by reason. `compute_s` is all work on all devices at once,
    `path_s` the longest way through the model and back."""

    compute_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        """The larger one."""
        return max(self.compute_s, self.path_s)

    @property
    def reason(self) -> str:
        """What the larger one says, in words."""
        return "compute" if self.compute_s >= self.path_s else "the longest path"

    def gap(self, makespan_s: float) -> float:
        """By what part of the bound a strategy may at most be off the optimum."""
        return makespan_s / self.seconds - 1


ShowExact = Callable[[float, float, int], None]
"""Called now and then with the best makespan, the lower bound and how many partial strategies were seen."""


def lower_bound(graph: Graph, machine: Machine, costs: AnalyticCosts) -> LowerBound:
    """A bound for every strategy whose blocks have at most as many shards as there are devices."""
    return LowerBound(*native.lower_bound(FlatProblem(graph, machine, costs).native))


def exact_search(  # noqa: PLR0913, a search has that many sides
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    *,
    budget_s: float | None = None,
    tolerance: float = ROUNDING,
    has_ranges: bool = False,
    start: Strategy | None = None,
    proposals: int = PROPOSALS,
    threads: int = 1,
    optimizer: str = "momentum",
    progress: ShowExact | None = None,
) -> ExactResult:
    """The best strategy, proved unless the budget is used up or the search is interrupted (Ctrl-C).

    `start` is a strategy of the space to begin with, besides those of the chains, which make so many
    `proposals` in each step of their cooling. Nothing depends on chance; with a budget, the machine's speed
    decides how far the search comes. With several threads, each looks into another part of the tree once it
    is known which block to place first. An interrupt before any strategy was offered is a KeyboardInterrupt.
    """
    began = monotonic()

    def is_late() -> bool:
        return budget_s is not None and monotonic() - began > budget_s

    problem = FlatProblem(graph, machine, costs)
    space = _space_of(problem, has_ranges)
    search = native.ExactSearch(problem.native, tolerance, has_ranges)
    offered = 0
    if start is not None:
        search.offer(_placed(problem, start, has_ranges))
        offered = 1
    stop: StopReason | None = None
    for seed in range(CHAINS):
        if offered and is_late():
            break
        try:
            search.offer(_annealed(problem, seed, proposals, has_ranges, is_late))
        except KeyboardInterrupt:
            if not offered:
                raise
            stop = StopReason.INTERRUPTED
            break
        offered += 1
    tree = _Tree(problem, search, tolerance, has_ranges)
    stop = stop or _run(tree, threads, is_late, progress)
    strategy = _strategy(problem, tree.best.best())
    bound_s = max(tree.lower_bound_s, LowerBound(*native.lower_bound(problem.native)).seconds)
    return ExactResult(
        strategy,
        tree.best_s,
        tree.best_s if stop is StopReason.OPTIMAL and tolerance <= ROUNDING else bound_s,
        tolerance,
        stop,
        _fits(strategy, machine, costs, optimizer),
        sum(each.bounded for each in tree.searches),
        sum(each.simulated for each in tree.searches),
        space,
        search.symmetry,
        monotonic() - began,
    )


class _Tree:
    """The tree of partial strategies: one search of all of it, then several of its parts."""

    def __init__(
        self, problem: FlatProblem, search: native.ExactSearch, tolerance: float, has_ranges: bool
    ) -> None:
        self.problem, self.tolerance, self.has_ranges = problem, tolerance, has_ranges
        self.searches = [search]
        self.known_s = 0.0  # what is proved of the parts that are done, if they are not all
        self.waiting: list[int] = []  # parts that nobody looks into yet

    @property
    def best(self) -> native.ExactSearch:
        """The search that has found the best strategy."""
        return min(self.searches, key=lambda each: each.best_s)

    @property
    def best_s(self) -> float:
        """The makespan of that."""
        return self.best.best_s

    @property
    def lower_bound_s(self) -> float:
        """No strategy is better."""
        if self.waiting:
            return self.known_s
        return max(self.known_s, min(each.lower_bound_s for each in self.searches))

    def step(self, search: native.ExactSearch) -> bool:
        """Look at some partial strategies; True if there is nothing left to do for this search."""
        while search.step(SHARED_SLICE if len(self.searches) > 1 else SLICE):
            if not self.waiting:
                return True
            search.split(self.first_block, self.waiting.pop(), self.parts)
        return False

    def share(self, threads: int) -> None:
        """Cut the tree into parts, and have so many searches look into them.

        What was looked into so far is looked into again; it was little.
        """
        whole = self.searches[0]
        self.known_s, self.first_block, self.parts = whole.lower_bound_s, whole.first_block, PARTS * threads
        best = whole.best()
        for _ in range(threads - 1):
            other = native.ExactSearch(self.problem.native, self.tolerance, self.has_ranges)
            other.offer(best)
            self.searches.append(other)
        self.waiting = list(range(self.parts))[::-1]
        for search in self.searches:
            search.split(self.first_block, self.waiting.pop(), self.parts)

    def tell(self) -> None:
        """Have all searches know the best makespan."""
        for search in self.searches:
            search.beat(self.best_s)


def _run(tree: _Tree, threads: int, is_late: Callable[[], bool], progress: ShowExact | None) -> StopReason:
    """Search until everything is looked into, or the budget is used up."""
    left = tree.searches
    try:
        with ThreadPoolExecutor(threads) as pool:
            while left:
                if progress is not None:
                    progress(tree.best_s, tree.lower_bound_s, sum(each.bounded for each in tree.searches))
                if is_late():
                    return StopReason.BUDGET
                if len(tree.searches) < threads and left[0].has_settled and left[0].first_block >= 0:
                    tree.share(threads)
                    left = tree.searches
                is_done = list(pool.map(tree.step, left))
                tree.tell()
                left = [each for each, done in zip(left, is_done, strict=True) if not done]
    except KeyboardInterrupt:
        return StopReason.INTERRUPTED
    return StopReason.OPTIMAL


def _space_of(problem: FlatProblem, has_ranges: bool) -> int:
    """How many strategies there are, if the placements are few enough to be tried."""
    devices = len(problem.machine.devices)
    proposals = native.Proposals(problem.native)
    counts = []
    for number in range(len(problem.blocks)):
        parts = [prod(degrees) for degrees in proposals.degrees(number)]
        counts.append(sum(devices - each + 1 if has_ranges else perm(devices, each) for each in parts))
        if sum(counts) > MOST_PLACEMENTS:
            raise StrategyError(
                f"graph '{problem.graph.name}' has more than {MOST_PLACEMENTS:,} placements on"
                f" {counted(devices, 'device')}, too many for an exact search: use another search, or fewer"
                " devices"
            )
    return prod(counts)


def _annealed(
    problem: FlatProblem, seed: int, count: int, has_ranges: bool, is_late: Callable[[], bool]
) -> list[tuple[list[int], int, list[int]]]:
    """Where a short chain from a random strategy ends when it is cooled down, as far as there is time."""
    proposals = native.Proposals(problem.native, seed, has_ranges=has_ranges)
    proposals.place_at_random()
    first_s = proposals.makespan() * FIRST_PART
    for step in range(COOLINGS):
        if is_late():
            break
        proposals.step(count, first_s * COOLING**step)
    return [proposals.placed(number) for number in range(len(problem.blocks))]


def is_in_space(strategy: Strategy, has_ranges: bool = False) -> bool:
    """Whether an exact search may find a strategy: one copy of every shard, on devices of their own, which
    follow each other if they have to."""
    return all(_is_in_space(placement, has_ranges) for placement in strategy.placements.values())


def _is_in_space(placement: Placement, has_ranges: bool) -> bool:
    devices = placement.devices
    if has_ranges:
        return placement.copies == 1 and devices == tuple(range(devices[0], devices[0] + len(devices)))
    return placement.copies == 1 and len(set(devices)) == len(devices)


def _placed(
    problem: FlatProblem, strategy: Strategy, has_ranges: bool
) -> list[tuple[list[int], int, list[int]]]:
    strategy.checked(problem.machine)
    placements = [strategy.placements[block.name] for block in problem.blocks]
    for block, placement in zip(problem.blocks, placements, strict=True):
        if not _is_in_space(placement, has_ranges):
            raise StrategyError(
                f"an exact search cannot start from this strategy: block '{block.name}' has copies, or"
                f" several shards on a device{', or devices that do not follow each other' * has_ranges}"
            )
    return [
        (problem.degrees(block, placement), placement.copies, list(placement.devices))
        for block, placement in zip(problem.blocks, placements, strict=True)
    ]


def _strategy(problem: FlatProblem, found: list[tuple[list[int], int, list[int]]]) -> Strategy:
    placements = {
        block.name: placed(
            dict(zip(problem.graph.signature(block.leader).sizes, degrees, strict=True)), devices
        )
        for block, (degrees, _, devices) in zip(problem.blocks, found, strict=True)
    }
    return Strategy(problem.graph, placements)


def _fits(strategy: Strategy, machine: Machine, costs: AnalyticCosts, optimizer: str) -> bool:
    tasks = task_graph(strategy, machine, costs)
    peaks = peak_memory(tasks, simulate(tasks), len(machine.devices), STATES_PER_WEIGHT[optimizer])
    return all(
        peak.peak_bytes <= device.kind.memory_bytes
        for peak, device in zip(peaks, machine.devices, strict=True)
    )
