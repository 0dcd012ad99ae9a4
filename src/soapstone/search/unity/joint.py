"""Joint search (Unity 5): substitutions and machine mappings together, then the simulator and Markov chains.

    graph splitting           -> `splitting`     into parts that are rewritten one at a time
    substitution selection    -> `selecting`     by backtracking, each candidate at its best mapping
    machine mapping           -> `mapping`       by dynamic programming, with a cache across candidates

Beyond the paper: Unity's cost is a sum, without overlap of compute and communication and without contention.
So the winner and the runners-up (and always the graph as it was given) are simulated, also as they are mapped
when the exchange of gradients counts only in part; blocks that look alike are moved together (`alike`), and
the best go on as the starts of Markov chains. Where a mapping does not fit in memory, it is made again with a
price on every byte of weights that a device holds.

What sequential optimization finds is found here, too: the graph that takes least on one device is one of the
finalists, and it is polished as the others are.

With a budget of proposals the search depends on the seed alone: candidates are limited by number. With one of
seconds, `FIRST_SHARE` of it is for candidates, and `FRUITLESS_SHARE` while none is better than the given
graph. Ctrl-C ends it with the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines import applicable, baseline, data_parallel
from soapstone.search.mcmc import EXPERTS, RULES, Budget, mcmc
from soapstone.search.report import CurvePoint, SearchReport, ShowSearch, StartReport, StopReason
from soapstone.search.unity.alike import Bench, together
from soapstone.search.unity.mapping import Mapped, Mapper
from soapstone.search.unity.selecting import Candidate, Selection, fastest_alone
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem

FIRST_SHARE, FRUITLESS_SHARE = 0.4, 0.1
"""[choice] The parts of the seconds after which no more candidates are looked for: at the latest, and while
none was better than the graph that was given. [measured] Of the paper's seven models most have nothing to
rewrite, and with two fifths of 8 s spent on trying to, the result was 7 % worse than without."""

ALONE_SHARE = 0.03
"""[choice] The part of the seconds that graphs are looked for in that are faster on one device."""

DIVISION_SHARE = 0.25
"""[choice] The part of the seconds after which a mapping divides devices no more."""

DESCENT_SHARE = 0.55
"""[choice] The part of the seconds after which kinds of blocks are no longer moved."""

SHOWN = (0.7, 0.4)
"""[choice] The parts of the gradients' exchange that mappings are also made with ([measured] XDL on 192
devices: 2.72 ms with all of it counted, 2.03 with either)."""

FINALISTS = 3
"""[choice] How many rewritten graphs are simulated, besides the one that was given."""

POLISHED = 2
"""[choice] How many of them go on as starts of Markov chains."""

NEAR = 1.05
"""[choice] A finalist goes on only if it takes at most so much longer than the best."""

WORTH = 1.2
"""[choice] A start that takes longer than so many times the mapping is not worth the time of a chain."""

SAME = 1e-6
"""[choice] Finalists whose times differ by no more than this part are taken for the same one."""

SPARING = (1e-12, 1e-11, 1e-10, 1e-9, 1e-8)
"""[choice] Seconds that a byte of weights on a device is priced at, in turn, until a mapping fits: from far
below what it takes to read one to far above."""

POLISHING = replace(RULES["mcmc"], name="unity")


@dataclass(frozen=True)
class Scored:
    """A candidate as the simulator sees it."""

    candidate: Candidate
    strategy: Strategy
    makespan_s: float
    excess_bytes: int

    @property
    def rank(self) -> tuple[int, float, int]:
        """What fits comes before what does not, then the faster one, then the one with fewer rewrites."""
        return self.excess_bytes, self.makespan_s, len(self.candidate.rules)


@dataclass(frozen=True)
class Setting:
    """What is the same for all of a search; dims of the kinds in `without` stay whole, but for samples."""

    machine: Machine
    costs: AnalyticCosts
    budget: Budget
    seed: int
    threads: int
    optimizer: str
    slack: float
    without: frozenset[Kind] = frozenset()

    def bench(self, graph: Graph) -> Bench:
        """Where strategies of a graph are simulated."""
        return Bench(FlatProblem(graph, self.machine, self.costs), self.machine, self.optimizer)

    def score(self, candidate: Candidate, strategy: Strategy, bench: Bench) -> Scored:
        """A strategy simulated."""
        bench.place(strategy.placements)
        return Scored(candidate, strategy, bench.makespan_s, bench.excess_bytes)

    def is_after(self, share: float, began: float) -> Callable[[], bool]:
        """Whether so much of the seconds is over."""
        seconds = self.budget.seconds
        return lambda: seconds is not None and self.budget.clock() - began > share * seconds


def unity(
    graph: Graph,
    setting: Setting,
    known: Mapping[str, Strategy] | None = None,
    show: ShowSearch | None = None,
    *,
    rewrites: bool = True,
    experts: bool = False,
) -> SearchReport:
    """The best graph and strategy that the joint search finds.

    Chains also start from strategies of the given graph that are `known`, by name. With `experts` they start
    from the experts' strategies, too, as far as these are nearly as good, and run on the given graph in any
    case. Without `rewrites` the graph stays as it is.
    """
    began = setting.budget.clock()
    is_late = setting.is_after(DIVISION_SHARE, began)
    mapper = Mapper(setting.machine, setting.costs, setting.without, is_late)
    selection, sequential, stop = _selected(graph, setting, mapper, began, show, rewrites)
    scored = _scored(graph, setting, mapper, selection, sequential, stop)
    trials = 0
    if stop is not StopReason.INTERRUPTED:
        try:
            scored, trials = _descended(scored, setting, mapper, setting.is_after(DESCENT_SHARE, began))
        except KeyboardInterrupt:
            stop = StopReason.INTERRUPTED
    best = scored[0]
    elapsed_s = setting.budget.clock() - began
    first = StartReport(
        "mappings",
        max(each.makespan_s for each in scored),
        best.makespan_s,
        selection.tried + 1 + trials,
        len(scored),
        stop,
    )
    report = SearchReport(
        "unity",
        setting.seed,
        best.strategy,
        best.makespan_s,
        best.excess_bytes == 0,
        (CurvePoint(elapsed_s, first.proposals, best.makespan_s),),
        (first,),
        elapsed_s,
        stop,
        rewrites=best.candidate.rules,
    )
    if stop is StopReason.INTERRUPTED:
        return report
    going_on = _going_on(scored, sequential if setting.budget.seconds is None else None)
    given = dict(known or {})
    if experts:
        unchanged = next(each for each in scored if each.candidate.graph is graph)
        going_on = [best, unchanged] if best is not unchanged else [best]
        given |= _experts(unchanged, setting)
    for left, each in zip(range(len(going_on), 0, -1), going_on, strict=True):
        starts = given if each.candidate.graph is graph else {}
        polished = _polished(each, setting, starts, began, left, show)
        report = joined(report, polished)
        if report.stop is StopReason.INTERRUPTED:
            break
    return replace(report, method="unity")


def _selected(
    graph: Graph, setting: Setting, mapper: Mapper, began: float, show: ShowSearch | None, rewrites: bool
) -> tuple[Selection, Candidate | None, StopReason]:
    """The candidates; of them the one that is fastest on one device, once that is known."""
    seconds, clock = setting.budget.seconds, setting.budget.clock
    is_late = setting.is_after(FIRST_SHARE, began)
    is_fruitless = setting.is_after(FRUITLESS_SHARE, began)

    def is_over() -> bool:
        return not rewrites or is_late() or (is_fruitless() and not selection.is_better)

    def found(tried: int, cost_s: float) -> None:
        if show is not None:
            part = (clock() - began) / seconds if seconds else 0.0
            show(min(1.0, part), f"{tried} graphs, {cost_s * 1e3:.4g} ms as a sum")

    selection, sequential = Selection(mapper, is_over, found), None
    try:
        sequential = selection.see(graph, ())
        if rewrites:
            limit = setting.is_after(ALONE_SHARE, clock())
            alone = fastest_alone(graph, setting.machine, setting.costs, lambda: limit() or is_over())
            sequential = selection.see(alone.graph, alone.rules)
        selection.run(graph)
    except KeyboardInterrupt:
        return selection, sequential, StopReason.INTERRUPTED
    return selection, sequential, StopReason.BUDGET if is_over() else StopReason.CONVERGED


def _scored(
    graph: Graph,
    setting: Setting,
    mapper: Mapper,
    selection: Selection,
    sequential: Candidate | None,
    stop: StopReason,
) -> list[Scored]:
    """The finalists, the best first: the given graph, the one that is fastest on one device, and others."""
    ranked = sorted(selection.seen.values(), key=lambda each: (each.cost_s, len(each.rules)))
    given = next((each for each in ranked if each.graph is graph), None)
    if given is None:  # interrupted before the first mapping was known
        strategy = data_parallel(graph, setting.machine)
        given = Candidate(graph, Mapped(strategy, float("inf")))
    always = [given] if sequential is None or sequential is given else [given, sequential]
    finalists = [*always, *[each for each in ranked if all(each is not one for one in always)][:FINALISTS]]
    scored = []
    for each in finalists:
        bench = setting.bench(each.graph)
        found = setting.score(each, each.mapped.strategy, bench)
        others = [mapper.counting(shown=part) for part in SHOWN]
        others += [mapper.counting(byte_s) for byte_s in SPARING]
        for n, other in enumerate(others if stop is not StopReason.INTERRUPTED else ()):
            if n >= len(SHOWN) and not found.excess_bytes:
                break
            again = setting.score(each, other.mapped(each.graph).strategy, bench)
            found = min(found, again, key=lambda one: one.rank)
        scored.append(found)
    scored.sort(key=lambda each: each.rank)
    if setting.budget.seconds is None:
        return scored
    # Seconds are shared, and not with what is no faster than the graph that was given.
    at = next(n for n, each in enumerate(scored) if each.candidate is given)
    return scored[: at + 1]


def _descended(
    scored: Sequence[Scored], setting: Setting, mapper: Mapper, is_over: Callable[[], bool]
) -> tuple[list[Scored], int]:
    """The finalists after blocks that look alike were moved together, the best first, and how often."""
    found, tried = [], 0
    for each in scored:
        if each.makespan_s > WORTH * scored[0].makespan_s:
            found.append(each)
            continue
        best, trials = together(setting.bench(each.candidate.graph), mapper, each.strategy, is_over)
        found.append(replace(each, **vars(best)))
        tried += trials
    return sorted(found, key=lambda each: each.rank), tried


def _going_on(scored: Sequence[Scored], sequential: Candidate | None) -> list[Scored]:
    """The finalists that are polished: near the best, and not just as fast by a longer way. One that is named
    goes on in any case, so that what comes of it alone is never better."""
    found = [scored[0]]
    for each in scored[1:]:
        is_new = all(abs(each.makespan_s - other.makespan_s) > SAME * other.makespan_s for other in found)
        is_near = len(found) < POLISHED and is_new and each.makespan_s <= NEAR * scored[0].makespan_s
        if is_near or each.candidate is sequential:
            found.append(each)
    return found


def _experts(unchanged: Scored, setting: Setting) -> dict[str, Strategy]:
    """What people would do with the given graph, where that is nearly as good as its mapping."""
    graph, found = unchanged.candidate.graph, dict[str, Strategy]()
    bench = setting.bench(graph)
    for each in applicable(graph, setting.machine):
        if each.name in (*EXPERTS, "model_parallel"):
            strategy = baseline(each.name, graph, setting.machine, setting.costs, setting.seed)
            if setting.score(unchanged.candidate, strategy, bench).makespan_s <= WORTH * unchanged.makespan_s:
                found[each.name] = strategy
    return found


def _polished(
    best: Scored,
    setting: Setting,
    known: Mapping[str, Strategy],
    began: float,
    sharing: int,
    show: ShowSearch | None,
) -> SearchReport:
    """What Markov chains make of a finalist, in its share of the time that is left."""
    budget = setting.budget
    if budget.seconds is not None:
        left_s = budget.seconds - (budget.clock() - began)
        budget = replace(budget, seconds=max(0.1, left_s / sharing))
    found = mcmc(
        best.candidate.graph,
        setting.machine,
        setting.costs,
        method=replace(POLISHING, starts=_starts(best, setting)),
        budget=budget,
        seed=setting.seed,
        threads=setting.threads,
        optimizer=setting.optimizer,
        slack=setting.slack,
        known={"best mapping": best.strategy, **known},
        without=setting.without,
        show=show,
    )
    return replace(found, rewrites=best.candidate.rules)


def _starts(best: Scored, setting: Setting) -> tuple[str, ...]:
    """Data parallelism, where it is nearly as good or nobody waits for the chains."""
    if setting.budget.seconds is None:
        return ("data_parallel",)
    graph = best.candidate.graph
    plain = setting.score(best.candidate, data_parallel(graph, setting.machine), setting.bench(graph))
    return ("data_parallel",) if plain.makespan_s <= WORTH * best.makespan_s else ()


def joined(one: SearchReport, two: SearchReport) -> SearchReport:
    """Two searches, one after the other, as one: the better of what they found, of equal ones the first's."""
    better = min(one, two, key=lambda each: (not each.fits, each.makespan_s))
    curve = list(one.curve)
    for point in two.curve:
        if not curve or point.best_s < curve[-1].best_s:
            at_s, after = one.elapsed_s + point.elapsed_s, one.proposals + point.proposals
            curve.append(CurvePoint(at_s, after, point.best_s))
    return replace(
        better,
        curve=tuple(curve),
        starts=(*one.starts, *two.starts),
        elapsed_s=one.elapsed_s + two.elapsed_s,
        stop=two.stop,
        lower_bound_s=None,
    )
