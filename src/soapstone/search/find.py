"""Finding a plan: a search by its name, and what is taken of what it found.

find      the search itself: one entry of `SEARCHES` for each way to search
settled   the plan: what was found, with its exact prediction; where that does not fit in memory, the
          fastest that does of the baselines and of what a search by exact peaks finds (`sparing`), for
          `auto` with gradients in buckets;
          of `auto`, where gradients in buckets, which the searches leave out, make something else faster
          than it (data parallelism, an expert's strategy, or what chains in buckets find), that
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial
from math import inf
from types import MappingProxyType

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import SearchError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.checks import did_you_mean
from soapstone.machine.units import Quantity
from soapstone.plans import Plan, Prediction, planned, predicted
from soapstone.search.baselines import BASELINES, applicable, baseline
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.exact import lower_bound
from soapstone.search.mcmc import EXPERTS, RULES, Budget, mcmc, part_of
from soapstone.search.pipelines import Wanted, pipeline_search
from soapstone.search.proofs import Prove, exact_report, ranges_report
from soapstone.search.report import PROOFS, SearchReport, ShowSearch, StopReason
from soapstone.search.sparing import (
    FEW_STRATEGIES,
    Judge,
    fastest_of_all,
    is_short,
    spaces_of,
    spared,
)
from soapstone.search.unity import Setting, joined, unity
from soapstone.sim.outcome import bucketed_s, bucketed_times
from soapstone.strategy.blocks import blocks
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import native_tasks

RESORTS = ("data_parallel", "optcnn", *EXPERTS, "pipeline", "model_parallel", "zero")
"""The baselines that are tried when what was found does not fit in memory."""

AS_THEY_ARE = ("mcmc-paper", "pipeline", "exact", "exact-ranges")
"""The searches after which not all of few strategies are tried: who asks for one of these asks for it alone.
Nor are they where a slower strategy is wanted for less traffic."""

SPARING = "what a search with less memory found"
"""What the search by exact peaks is called where its strategy is taken."""

OF_ALL = "the fastest of all that fit"
"""The same where it has tried all."""

SPARING_SHARE, LEAST_SPARING = 0.4, 0.1
"""[choice] The part of the seconds that is kept for the search by exact peaks where data parallelism seems
not to fit, and the part that it has at least where something else does not."""

DEFAULT_BUDGET = "30s"

DEFAULT_SEARCH = "auto"

LARGE = 20_000
"""[choice] Blocks times devices above which mappings of the joint search take more time than they are worth
([measured] NMT on 64 K80, 20 s: 931 ms against 854 of the chains alone; Inception-v3 on 64 P100, 8,064 of
these: 438.0 against 438.7)."""

PIPELINE_SHARE, PIPELINE_WORTH, LEAST_REST = 0.15, 1.25, 0.02
"""[choice] The part of the time that is for pipelines; if none takes less than so many times what was found
and fits, none is bettered ([measured] of small LSTMs on 16 P100 that made them faster by 14 to 16 %), and
chains have the rest, where it is more than the last part of all."""

SETTLING_S_PER_SHARD, MOST_SETTLING = 4.5e-4, 0.4
"""[measured] What settling takes for each block and device: on 192 devices Inception-v3 has 24,200 of these
and BERT-Large 53,000, and the bound, the exact prediction and the figures of it and of the rivals took 7 and
19 s of CPU time, and buckets take 4 more; and [choice] the largest part of the seconds that is kept back for
it."""

BUCKETED = "what chains in buckets found"
"""What the search with gradients in buckets is called where its strategy is taken."""

BUCKETS_SHARE, WORTH_A_SEARCH = 0.15, 0.005
"""[choice] The part of the budget that is for chains in buckets, where buckets change the time of what was
found by more than that part."""

LEAST_GAIN = 0.001
"""[choice] By what part something must be faster in buckets to be taken instead of what was found."""

LONGEST_S = 365 * 24 * 3600
"""[choice] The longest budget: a year."""

_BUDGET = Quantity(
    "a time to search",
    "seconds, or a time such as 30s, 5m or 0.5h",
    {"": Fraction(1), "ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)},
    ("h", "m", "s", "ms"),
)


def budget_seconds(text: str) -> float:
    """The seconds that `30s`, `5m`, `0.5h` or `90` means; a ValueError says what is wrong with it."""
    seconds = _BUDGET.exactly(text)
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"is {text!r}; it must be above 0 and at most a year")
    return float(seconds)


@dataclass(frozen=True)
class Options:
    """How to search, and what for: `optimizer` says how much memory a weight takes, `slack` by what part the
    strategy may take longer than the best that was found, if links are then less busy. `pipeline` is what is
    decided beforehand where a pipeline is searched for."""

    search: str = DEFAULT_SEARCH
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    threads: int = 2
    optimizer: str = "momentum"
    slack: float = 0.0
    pipeline: Wanted = field(default_factory=Wanted)


Search = Callable[[Graph, Machine, AnalyticCosts, Options, ShowSearch | None], SearchReport]


def _by_chains(
    method: str,
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
) -> SearchReport:
    return mcmc(
        graph,
        machine,
        costs,
        method=method,
        budget=options.budget,
        seed=options.seed,
        threads=options.threads,
        optimizer=options.optimizer,
        slack=options.slack,
        show=show,
    )


def _proved(
    prove: Prove,
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
) -> SearchReport:
    seconds, optimizer = options.budget.seconds, options.optimizer
    return prove(graph, machine, costs, seconds, options.seed, options.threads, optimizer, show)


def _as_pipeline(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
    worth_s: float = inf,
) -> SearchReport:
    return pipeline_search(
        graph,
        machine,
        costs,
        wanted=options.pipeline,
        budget=options.budget,
        seed=options.seed,
        optimizer=options.optimizer,
        show=show,
        worth_s=worth_s,
        clock=options.budget.clock,
    )


def _jointly(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
) -> SearchReport:
    return unity(graph, _setting(machine, costs, options, options.budget), None, show)


def _setting(machine: Machine, costs: AnalyticCosts, options: Options, budget: Budget) -> Setting:
    return Setting(machine, costs, budget, options.seed, options.threads, options.optimizer, options.slack)


def _by_all(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
) -> SearchReport:
    """The joint search, the chains of `mcmc` and pipelines together; of a large problem the chains alone.

    With seconds, the experts' strategies are further starts of the joint search's chains, where they are
    nearly as good as its mapping; OptCNN's is left out, since the mapping is found in the same way, in a
    larger space. Of unrolled models the chains of `mcmc` have its time. `PIPELINE_SHARE` of the time is for
    pipelines, and what they leave of it for chains again. With proposals, which are for each chain and
    not to be shared, the chains come first, just as `mcmc` has them, so that the result is never worse than
    theirs, and pipelines, which no number of proposals limits, are left out.
    """
    seconds = options.budget.seconds
    if len(blocks(graph)) * len(machine.devices) > LARGE:
        return replace(_by_chains("mcmc", graph, machine, costs, options, show), method="auto")
    if seconds is None:
        chains = _by_chains("mcmc", graph, machine, costs, options, show)
        if chains.stop is StopReason.INTERRUPTED:
            return replace(chains, method="auto")
        setting = _setting(machine, costs, options, options.budget)
        found = joined(chains, unity(graph, setting, {"chains so far": chains.strategy}, show))
        return replace(found, method="auto")
    began, clock = options.budget.clock(), options.budget.clock
    has_pipelines = BASELINES["pipeline"].objection(graph, machine) is None
    share = PIPELINE_SHARE if has_pipelines else 0.0
    budget = replace(options.budget, seconds=seconds * (1 - share))
    if is_unrolled(graph):
        found = _by_chains("mcmc", graph, machine, costs, replace(options, budget=budget), show)
    else:
        found = unity(graph, _setting(machine, costs, options, budget), None, show, experts=True)
    if has_pipelines and found.stop is not StopReason.INTERRUPTED:
        rest = replace(options, budget=replace(options.budget, seconds=seconds * share))
        worth_s = PIPELINE_WORTH * found.makespan_s if found.fits else inf
        found = joined(found, _as_pipeline(graph, machine, costs, rest, show, worth_s))
        left_s = seconds - (clock() - began)
        is_over = found.stop is StopReason.INTERRUPTED or options.budget.proposals is not None
        if left_s > LEAST_REST * seconds and not is_over:
            rest = replace(options, budget=replace(options.budget, seconds=left_s))
            found = _gone_on(replace(found, stop=StopReason.BUDGET), machine, costs, rest, show)
    return replace(found, method="auto")


def is_unrolled(graph: Graph) -> bool:
    """Whether most dense layers of a graph are steps of recurrent layers, or share weights like those.
    Mappings of such graphs are slow to make and no good starts: steps are best placed by layers, and overlap,
    which a sum of costs does not see ([measured] seeds 0 and 1, 10 s of CPU time on 16 P100: NMT took 10 %
    longer than by chains alone; transformers whose layers share weights were not measured)."""
    anatomy = Anatomy(graph)
    return 2 * len(anatomy.steps) > len(anatomy.dense_layers)


SEARCHES: Mapping[str, Search] = MappingProxyType(
    {
        "auto": _by_all,
        **{name: partial(_by_chains, name) for name in RULES},
        "unity": _jointly,
        "exact": partial(_proved, exact_report),
        "exact-ranges": partial(_proved, ranges_report),
        "pipeline": _as_pipeline,
    }
)
"""Every way to search, by name."""


def find(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None = None,
) -> SearchReport:
    """What the search of `options` finds. A KeyboardInterrupt ends it with the best so far. Of the seconds of
    its budget as much is left as it takes to make a plan of what was found and to hold it against buckets."""
    if not blocks(graph):
        raise SearchError(
            f"model '{graph.name}' has nothing to split: no operator of it depends on a weight; give it one"
        )
    budget, kept_s = _for_search(graph, machine, costs, options)
    report = search_named(options.search)(graph, machine, costs, replace(options, budget=budget), show)
    if kept_s > 0 and options.search not in AS_THEY_ARE:
        report = _gone_on(report, machine, costs, replace(options, budget=replace(budget, seconds=kept_s)))
    # What bounds strategies of whole batches does not bound those of micro-batches.
    if report.lower_bound_s is None and report.strategy.pipeline is None:
        report = replace(report, lower_bound_s=lower_bound(report.strategy.graph, machine, costs).seconds)
    is_asked_for = options.search in AS_THEY_ARE or options.slack > 0
    return report if is_asked_for else _or_the_best_of_all(report, machine, costs, options.optimizer)


def _or_the_best_of_all(
    report: SearchReport, machine: Machine, costs: AnalyticCosts, optimizer: str
) -> SearchReport:
    """What was found, or what is faster and fits in memory, where there are so few strategies that all can be
    tried."""
    found = report.strategy
    if found.pipeline is not None or report.stop is StopReason.INTERRUPTED:
        return report
    spaces = spaces_of(found.graph, machine, FEW_STRATEGIES)
    if spaces is None:
        return report
    judge = Judge(found.graph, machine, costs, optimizer)
    best = fastest_of_all(judge, spaces, report.makespan_s)
    if best is None:
        return report
    return replace(report, strategy=judge.strategy(best), makespan_s=judge.judged(best).makespan_s)


def _gone_on(
    report: SearchReport,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None = None,
) -> SearchReport:
    """What was found or, where it fits, what chains make of it in the time of the options, of which seeing
    whether things fit is a part."""
    found, budget = report.strategy, options.budget
    if report.stop is StopReason.INTERRUPTED or found.pipeline is not None:
        return report
    began = budget.clock()
    if not predicted(found, machine, costs, options.optimizer).fits(machine):
        return report
    if budget.seconds is not None:
        left_s = budget.seconds - 2 * (budget.clock() - began)
        if left_s <= 0:
            return report
        options = replace(options, budget=replace(budget, seconds=left_s))
    more = _from_known({"found": found}, machine, costs, options, show)
    more = replace(more, method=report.method, rewrites=report.rewrites)
    is_better = more.makespan_s <= report.makespan_s * (1 + options.slack)
    fits = is_better and predicted(more.strategy, machine, costs, options.optimizer).fits(machine)
    return replace(joined(report, replace(more, fits=fits)), stop=report.stop)


def _for_search(
    graph: Graph, machine: Machine, costs: AnalyticCosts, options: Options
) -> tuple[Budget, float]:
    """The budget, less what is kept for what comes after the search, and how much of that is kept in case
    what is found does not fit."""
    budget, shards = options.budget, len(blocks(graph)) * len(machine.devices)
    if budget.seconds is None:
        return budget, 0.0
    began = budget.clock()
    share = BUCKETS_SHARE if options.search == DEFAULT_SEARCH and shards <= LARGE else 0.0
    kept = max(share, SPARING_SHARE) if is_short(graph, machine, costs, options.optimizer) else share
    gone_s = _settling_s(budget.seconds, shards) + budget.clock() - began
    left_s = max(0.0, budget.seconds - gone_s)
    return replace(budget, seconds=left_s * (1 - kept)), left_s * (kept - share)


def _settling_s(seconds: float, shards: int) -> float:
    """What is kept of the seconds to make a plan of what was found."""
    return min(SETTLING_S_PER_SHARD * shards, MOST_SETTLING * seconds)


def search_named(name: str) -> Search:
    """The search of that name; an error says what there is."""
    if name not in SEARCHES:
        raise SearchError(f"there is no search {name!r}{did_you_mean(name, SEARCHES)}")
    return SEARCHES[name]


class WhyInstead(StrEnum):
    """Why something else takes the place of what a search has found."""

    MEMORY = "memory"
    BUCKETS = "buckets"


@dataclass(frozen=True)
class Settled:
    """A plan, and the report of the search with what was taken of it. `instead` names what took the place of
    what the search had found, a baseline, `SPARING` or `OF_ALL`, and `why` says why."""

    plan: Plan
    report: SearchReport
    instead: str | None = None
    why: WhyInstead | None = None


def settled(
    report: SearchReport, machine: Machine, costs: AnalyticCosts, model: str, options: Options
) -> Settled:
    """The plan that a search leads to. One that does not fit is never preferred to one that does. Only what
    `auto` found is held against buckets: who asks for another search is to have what it finds."""
    began = options.budget.clock()
    prediction = predicted(report.strategy, machine, costs, options.optimizer)
    fits = prediction.fits(machine)
    chosen, instead, why = report.strategy, None, None
    if fits and options.search == DEFAULT_SEARCH:
        faster = _faster_in_buckets(report, prediction, machine, costs, options)
        if faster is not None:
            (instead, chosen, prediction), why = faster, WhyInstead.BUCKETS
    if not fits:
        others = _resorts(report.strategy.graph, machine, costs, options.seed)
        others += _spared(report, others, began, machine, costs, options)
        for name, strategy in _fastest_first(others, machine, costs, options.search == DEFAULT_SEARCH):
            other = predicted(strategy, machine, costs, options.optimizer)
            if other.fits(machine):
                prediction, chosen, instead, fits = other, strategy, name, True
                why = WhyInstead.MEMORY
                break
    taken = replace(report, strategy=chosen, makespan_s=prediction.makespan_s, fits=fits)
    if why is WhyInstead.MEMORY and report.stop in PROOFS:
        taken = replace(taken, stop=StopReason.TOO_LARGE)  # the proof is about another strategy
    if chosen.pipeline is not None:
        taken = replace(taken, lower_bound_s=None)
    document = {**taken.document(), "instead": instead, "why_instead": why}
    plan = planned(
        chosen, machine, prediction, costs, model=model, optimizer=options.optimizer, search=document
    )
    return Settled(plan, taken, instead, why)


def _faster_in_buckets(
    report: SearchReport,
    prediction: Prediction,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
) -> tuple[str, Strategy, Prediction] | None:
    """What is faster than what was found, with gradients in buckets, by more than the slack that a user
    allows, and fits in memory: data parallelism, an expert's strategy, or what chains in buckets find. Of a
    large problem only data parallelism is looked at."""
    found = report.strategy
    is_large = len(found.blocks) * len(machine.devices) > LARGE
    names = {each.name for each in applicable(found.graph, machine)}
    others = {
        name: baseline(name, found.graph, machine, costs, options.seed)
        for name in ("data_parallel", *(() if is_large else EXPERTS))
        if name in names
    }
    found_s, *others_s = bucketed_times([found, *others.values()], machine, costs)
    seconds = dict(zip(others, others_s, strict=True))
    matters = abs(found_s - prediction.makespan_s) > WORTH_A_SEARCH * found_s
    if matters and not is_large:
        again = _searched_in_buckets(report, others, machine, costs, options)
        if again is not None:
            others[BUCKETED], seconds[BUCKETED] = again.strategy, again.makespan_s
    for name in sorted(seconds, key=lambda name: seconds[name]):
        if seconds[name] * (1 + options.slack) >= found_s * (1 - LEAST_GAIN):
            return None
        taken = predicted(others[name], machine, costs, options.optimizer)
        if taken.fits(machine):
            return name, others[name], taken
    return None


def _searched_in_buckets(
    report: SearchReport,
    others: Mapping[str, Strategy],
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
) -> SearchReport | None:
    """What chains in buckets find that start from what was found, unless it is a pipeline, and from the
    others; None if there is no time for them."""
    if report.stop is StopReason.INTERRUPTED:
        return None
    found = {} if report.strategy.pipeline is not None else {"found": report.strategy}
    own = replace(options, budget=part_of(options.budget, BUCKETS_SHARE))
    try:
        return _from_known({**found, **others}, machine, costs, own, in_buckets=True)
    except KeyboardInterrupt:  # before anything was found
        return None


def _from_known(
    known: Mapping[str, Strategy],
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None = None,
    *,
    in_buckets: bool = False,
) -> SearchReport:
    """What chains find that start from strategies of one graph."""
    return mcmc(
        next(iter(known.values())).graph,
        machine,
        costs,
        method=replace(RULES["mcmc"], starts=()),
        budget=options.budget,
        seed=options.seed,
        threads=options.threads,
        optimizer=options.optimizer,
        slack=options.slack,
        known=known,
        in_buckets=in_buckets,
        show=show,
    )


def _spared(
    report: SearchReport,
    others: Sequence[tuple[str, Strategy]],
    began: float,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
) -> list[tuple[str, Strategy]]:
    """What a search by exact peaks finds, from what was found and from others, in what is left of the time
    since settling `began`."""
    if report.stop is StopReason.INTERRUPTED:
        return []
    found, budget = report.strategy, options.budget
    judge = Judge(found.graph, machine, costs, options.optimizer)
    starts = [each for each in (found, *(strategy for _, strategy in others)) if judge.knows(each)]
    if budget.seconds is not None:
        over_s = report.elapsed_s + budget.clock() - began
        left_s = (
            budget.seconds - over_s - _settling_s(budget.seconds, len(found.blocks) * len(machine.devices))
        )
        budget = replace(budget, seconds=max(LEAST_SPARING * budget.seconds, left_s))
    taken = spared(judge, starts, budget, options.seed, options.threads)
    return [] if taken is None else [(OF_ALL if taken[1] else SPARING, taken[0])]


def _resorts(graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int) -> list[tuple[str, Strategy]]:
    """The baselines to fall back on, by name."""
    names = {each.name for each in applicable(graph, machine)}
    return [(name, baseline(name, graph, machine, costs, seed)) for name in RESORTS if name in names]


def _fastest_first(
    found: Iterable[tuple[str, Strategy]], machine: Machine, costs: AnalyticCosts, in_buckets: bool
) -> Iterator[tuple[str, Strategy]]:
    """Named strategies, the fastest first: with gradients in buckets, or with each summed by itself."""
    seconds = bucketed_s if in_buckets else _seconds
    return iter(sorted(found, key=lambda item: seconds(item[1], machine, costs)))


def _seconds(strategy: Strategy, machine: Machine, costs: AnalyticCosts) -> float:
    return native_tasks(strategy, machine, costs).simulated()[2]
