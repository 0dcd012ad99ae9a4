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
graph, from when the rules are read on, which takes seconds the first time. Ctrl-C ends it with the best so
far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines import applicable, baseline, data_parallel
from soapstone.search.mcmc import EXPERTS, RANDOM, RULES, Budget, mcmc, part_of
from soapstone.search.report import CurvePoint, SearchReport, ShowSearch, StartReport, StopReason
from soapstone.search.unity.alike import Bench, together
from soapstone.search.unity.mapping import Mapped, Mapper
from soapstone.search.unity.selecting import Candidate, Selection, directions, fastest_alone
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem

FIRST_SHARE, FRUITLESS_SHARE = 0.4, 0.1
"""[choice] The parts of the seconds after which no more candidates are looked for: at the latest, and while
none was better than the graph that was given. [measured] Of the paper's seven models most have nothing to
rewrite, and with two fifths of 8 s spent on trying to, the result was 7 % worse than without."""

LAST_SHARE = 0.9
"""[choice] The part of all seconds after which there are no more either, however late the rules were read."""

ALONE_SHARE = 0.03
"""[choice] The part of the seconds that graphs are looked for in that are faster on one device."""

DIVISION_SHARE = 0.4
"""[choice] The part of the seconds after which a mapping divides devices no more ([measured] CANDLE-Uno on
192 devices in 11 s of CPU time: 271 ms, and 392 with a quarter; MLP and DLRM the same with both)."""

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

TRIAL_SHARE = 0.1
"""[choice] The part of the budget in which chains from such starts are tried all the same, all of them
together ([measured] an LSTM that translates, on 16 P100: its mapping takes 17.4 ms; of model parallelism,
which takes 36.7, half a second of chains makes 14.7)."""

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

    def less(self, seconds: float) -> Setting:
        """The same with so much less time."""
        left = self.budget.seconds
        return self if left is None else replace(self, budget=replace(self.budget, seconds=left - seconds))

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
    are_read = not rewrites or _are_read(graph)
    ready = setting.budget.clock()
    is_late = setting.is_after(DIVISION_SHARE, ready)
    mapper = Mapper(setting.machine, setting.costs, setting.without, is_late)
    selection, sequential, stop = _selected(graph, setting, mapper, began, ready, show, rewrites and are_read)
    if not are_read:
        stop = StopReason.INTERRUPTED
    scored = _scored(graph, setting, mapper, selection, sequential, stop)
    trials = 0
    if stop is not StopReason.INTERRUPTED:
        try:
            is_over = setting.less(ready - began).is_after(DESCENT_SHARE, ready)
            scored, trials = _descended(scored, setting, mapper, is_over)
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
    if experts:
        trial, going_on = _with_experts(best, next(_of(scored, graph)), setting, known or {})
        report = report if trial is None else joined(report, trial)
    else:
        finalists = _going_on(scored, sequential if setting.budget.seconds is None else None)
        going_on = [_chains_of(each, setting, known or {}, graph) for each in finalists]
    for left, each in zip(range(len(going_on), 0, -1), going_on, strict=True):
        if report.stop is StopReason.INTERRUPTED:
            break
        report = joined(report, _polished(each, setting, began, left, show))
    return replace(report, method="unity")


def _are_read(graph: Graph) -> bool:
    """Whether all rules are read that a graph may be rewritten by, before anybody counts the time: False if
    that was interrupted."""
    try:
        directions({node.op_name for node in graph.nodes})
    except KeyboardInterrupt:
        return False
    return True


def _selected(
    graph: Graph,
    setting: Setting,
    mapper: Mapper,
    began: float,
    ready: float,
    show: ShowSearch | None,
    rewrites: bool,
) -> tuple[Selection, Candidate | None, StopReason]:
    """The candidates; of them the one that is fastest on one device, once that is known. The search `began`,
    and was `ready` to look for them later."""
    seconds, clock = setting.budget.seconds, setting.budget.clock
    is_late, is_last = setting.is_after(FIRST_SHARE, ready), setting.is_after(LAST_SHARE, began)
    is_fruitless = setting.is_after(FRUITLESS_SHARE, ready)

    def is_over() -> bool:
        return not rewrites or is_late() or is_last() or (is_fruitless() and not selection.is_better)

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


@dataclass(frozen=True)
class _Chains:
    """Chains on the graph of a candidate, and what they start from: by name, and what is known."""

    candidate: Candidate
    starts: tuple[str, ...]
    known: Mapping[str, Strategy]


def _of(scored: Sequence[Scored], graph: Graph) -> Iterator[Scored]:
    """Those of the graph that was given."""
    return (each for each in scored if each.candidate.graph is graph)


def _chains_of(best: Scored, setting: Setting, known: Mapping[str, Strategy], graph: Graph) -> _Chains:
    """Chains from a mapping and, on the graph that was given, from what is known of it."""
    own = known if best.candidate.graph is graph else {}
    return _Chains(best.candidate, _starts(best, setting), {"best mapping": best.strategy, **own})


def _with_experts(
    best: Scored, unchanged: Scored, setting: Setting, known: Mapping[str, Strategy]
) -> tuple[SearchReport | None, list[_Chains]]:
    """What came of a trial of starts that are not nearly as good as the mapping, and the chains after it:
    from the best mapping, and from that of the given graph with what people would do. Where the trial is far
    better than the mapping, no start is to be left out: then from all that `mcmc` has."""
    graph = unchanged.candidate.graph
    near, far = _experts(unchanged, setting)
    trial = _tried(unchanged, far, setting) if far else None
    given = {**known, **near}
    if trial is not None and trial.fits and trial.makespan_s < unchanged.makespan_s:
        given["best trial"] = trial.strategy
        if trial.makespan_s * WORTH < best.makespan_s:
            return trial, [_Chains(unchanged.candidate, RULES["mcmc"].starts, given)]
    finalists = [best, unchanged] if best is not unchanged else [best]
    return trial, [_chains_of(each, setting, given, graph) for each in finalists]


def _experts(unchanged: Scored, setting: Setting) -> tuple[dict[str, Strategy], dict[str, Strategy]]:
    """What people would do with the given graph: what is nearly as good as its mapping, and what is not. Data
    parallelism is among the latter only, since all chains have it as a start where it is."""
    graph, near, far = unchanged.candidate.graph, dict[str, Strategy](), dict[str, Strategy]()
    bench = setting.bench(graph)
    for each in applicable(graph, setting.machine):
        if each.name in ("data_parallel", *EXPERTS, "model_parallel"):
            strategy = baseline(each.name, graph, setting.machine, setting.costs, setting.seed)
            if setting.score(unchanged.candidate, strategy, bench).makespan_s > WORTH * unchanged.makespan_s:
                far[each.name] = strategy
            elif each.name != "data_parallel":
                near[each.name] = strategy
    return near, far


def _tried(unchanged: Scored, far: Mapping[str, Strategy], setting: Setting) -> SearchReport:
    """What short chains make of starts that are not nearly as good, and of a random one."""
    budget = part_of(setting.budget, TRIAL_SHARE)
    return mcmc(
        unchanged.candidate.graph,
        setting.machine,
        setting.costs,
        method=replace(POLISHING, starts=(RANDOM,), first_share=1.0),
        budget=budget,
        seed=setting.seed,
        threads=setting.threads,
        optimizer=setting.optimizer,
        known=far,
        without=setting.without,
    )


def _polished(
    chains: _Chains, setting: Setting, began: float, sharing: int, show: ShowSearch | None
) -> SearchReport:
    """What Markov chains make of a finalist, in its share of the time that is left."""
    budget = setting.budget
    if budget.seconds is not None:
        left_s = budget.seconds - (budget.clock() - began)
        budget = replace(budget, seconds=max(0.1, left_s / sharing))
    found = mcmc(
        chains.candidate.graph,
        setting.machine,
        setting.costs,
        method=replace(POLISHING, starts=chains.starts),
        budget=budget,
        seed=setting.seed,
        threads=setting.threads,
        optimizer=setting.optimizer,
        slack=setting.slack,
        known=chains.known,
        without=setting.without,
        show=show,
    )
    return replace(found, rewrites=chains.candidate.rules)


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
