"""Finding a plan: a search by its name, and what is taken of what it found.

find      the search itself: one entry of `SEARCHES` for each way to search
settled   the plan: what was found, with its exact prediction; where that does not fit in memory, the
          fastest that does of the baselines and of what a second search finds, which is told to take less;
          of `auto`, where gradients in buckets, which the searches leave out, make something else faster
          than it (data parallelism, an expert's strategy, or what chains in buckets find), that
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial
from itertools import product
from math import prod
from types import MappingProxyType

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import SearchError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.checks import did_you_mean
from soapstone.machine.units import Quantity
from soapstone.plans import Plan, Prediction, planned, predicted
from soapstone.search.baselines import BASELINES, applicable, baseline
from soapstone.search.exact import lower_bound
from soapstone.search.mcmc import EXPERTS, RULES, Budget, mcmc
from soapstone.search.pipelines import Wanted, pipeline_search
from soapstone.search.proofs import Prove, exact_report, ranges_report
from soapstone.search.report import PROOFS, SearchReport, ShowSearch, StopReason
from soapstone.search.unity import Setting, joined, unity
from soapstone.sim.outcome import bucketed_times
from soapstone.strategy.blocks import blocks
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import native_tasks

RESORTS = ("data_parallel", "optcnn", *EXPERTS, "pipeline", "model_parallel", "zero")
"""The baselines that are tried when what was found does not fit in memory."""

FEW_STRATEGIES = 1_000
"""[choice] Where there are no more strategies than this, all of them are tried after a search, and again when
what was found does not fit in memory: well under a second."""

AS_THEY_ARE = ("mcmc-paper", "pipeline", "exact", "exact-ranges")
"""The searches after which that is not done: who asks for one of these asks for it alone. Nor is it where a
slower strategy is wanted for less traffic."""

SPARING = "what a search with less memory found"
"""What the second search is called where its strategy is taken."""

OF_ALL = "the fastest of all that fit"
"""The same of what is found by trying all."""

SECOND_SHARE, SECOND_TRIES = 0.25, 3
"""[choice] The part of the budget that each search with less memory has, and how many there are at most: a
footprint (cpp/footprint.h) is only close to a peak, so the first share may be too large still."""

SPARED = 0.95
"""[choice] A search with less memory is told to keep to this part of what would just be enough if peaks
exceeded footprints as they did in what was found."""


DEFAULT_BUDGET = "30s"

DEFAULT_SEARCH = "auto"

LARGE = 20_000
"""[choice] Blocks times devices above which mappings of the joint search take more time than they are worth
([measured] NMT on 64 K80, 20 s: 931 ms against 854 of the chains alone; Inception-v3 on 64 P100, 8,064 of
these: 438.0 against 438.7)."""

PIPELINE_SHARE = 0.15
"""[choice] The part of the time that is for pipelines."""
"""[measured] bench/unity.py searches: `auto` is better on three of six models and worse on two, by less than
0.1 %; it becomes the default when it is worse on none."""

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
    larger space. `PIPELINE_SHARE` of the time is for pipelines. With proposals, which are for each chain and
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
    has_pipelines = BASELINES["pipeline"].objection(graph, machine) is None
    share = PIPELINE_SHARE if has_pipelines else 0.0
    budget = replace(options.budget, seconds=seconds * (1 - share))
    found = unity(graph, _setting(machine, costs, options, budget), None, show, experts=True)
    if has_pipelines and found.stop is not StopReason.INTERRUPTED:
        rest = replace(options, budget=replace(options.budget, seconds=seconds * share))
        found = joined(found, _as_pipeline(graph, machine, costs, rest, show))
    return replace(found, method="auto")


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
    budget = _for_search(options, len(blocks(graph)) * len(machine.devices))
    report = search_named(options.search)(graph, machine, costs, replace(options, budget=budget), show)
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
    few = None if found.pipeline is not None else _all_strategies(found.graph, machine)
    if few is None or report.stop is StopReason.INTERRUPTED:
        return report
    seconds = [(_seconds(strategy, machine, costs), number) for number, strategy in enumerate(few)]
    for best_s, number in sorted(seconds):
        if best_s >= report.makespan_s:
            break
        if predicted(few[number], machine, costs, optimizer).fits(machine):
            return replace(report, strategy=few[number], makespan_s=best_s)
    return report


def _for_search(options: Options, shards: int) -> Budget:
    budget = options.budget
    if budget.seconds is None:
        return budget
    kept_s = min(SETTLING_S_PER_SHARD * shards, MOST_SETTLING * budget.seconds)
    share = BUCKETS_SHARE if options.search == DEFAULT_SEARCH and shards <= LARGE else 0.0
    return replace(budget, seconds=(budget.seconds - kept_s) * (1 - share))


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
    prediction = predicted(report.strategy, machine, costs, options.optimizer)
    fits = prediction.fits(machine)
    chosen, instead, why = report.strategy, None, None
    if fits and options.search == DEFAULT_SEARCH:
        faster = _faster_in_buckets(report, prediction, machine, costs, options)
        if faster is not None:
            (instead, chosen, prediction), why = faster, WhyInstead.BUCKETS
    if not fits:
        graph = report.strategy.graph
        others = _resorts(graph, machine, costs, options.seed)
        few = _all_strategies(graph, machine)
        if few is None:
            spared = _spared(report, prediction, machine, costs, options)
            others += [] if spared is None else [(SPARING, spared)]
        else:
            others += [(OF_ALL, each) for each in few]
        for name, strategy in _fastest_first(others, machine, costs):
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
    """What chains in buckets find that start from what was found and from the others; None if there is no
    time for them, or for a pipeline, which chains leave as it is."""
    if report.stop is StopReason.INTERRUPTED or report.strategy.pipeline is not None:
        return None
    try:
        return mcmc(
            report.strategy.graph,
            machine,
            costs,
            method=replace(RULES["mcmc"], starts=()),
            budget=_part(options.budget, BUCKETS_SHARE),
            seed=options.seed,
            threads=options.threads,
            optimizer=options.optimizer,
            slack=options.slack,
            known={"found": report.strategy, **others},
            in_buckets=True,
        )
    except KeyboardInterrupt:  # before anything was found
        return None


def _spared(
    report: SearchReport,
    prediction: Prediction,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
) -> Strategy | None:
    """What a shorter search finds that is told to take less memory, if its exact peak fits; else None."""
    if report.stop is StopReason.INTERRUPTED:
        return None
    budget, share = _part(options.budget, SECOND_SHARE), 1.0
    for _ in range(SECOND_TRIES):
        share *= SPARED * _room(prediction, machine)
        found = mcmc(
            report.strategy.graph,
            machine,
            costs,
            budget=budget,
            seed=options.seed,
            threads=options.threads,
            optimizer=options.optimizer,
            memory_share=share,
        )
        prediction = predicted(found.strategy, machine, costs, options.optimizer)
        if prediction.fits(machine):
            return found.strategy
        if not found.fits or found.stop is StopReason.INTERRUPTED:
            return None  # with still less there is still less to be found
    return None


def _part(budget: Budget, part: float) -> Budget:
    seconds = None if budget.seconds is None else budget.seconds * part
    proposals = None if budget.proposals is None else max(1, int(budget.proposals * part))
    return replace(budget, seconds=seconds, proposals=proposals)


def _room(prediction: Prediction, machine: Machine) -> float:
    """By what factor the memory of some device falls short of a peak."""
    peaks = zip(prediction.memory_bytes, machine.devices, strict=True)
    return min(1.0, *(device.kind.memory_bytes / peak for peak, device in peaks if peak > 0))


def _resorts(graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int) -> list[tuple[str, Strategy]]:
    """The baselines to fall back on, by name."""
    names = {each.name for each in applicable(graph, machine)}
    return [(name, baseline(name, graph, machine, costs, seed)) for name in RESORTS if name in names]


def _all_strategies(graph: Graph, machine: Machine) -> list[Strategy] | None:
    """All strategies of the space, if they are few."""
    spaces = {block.name: Space(graph, block, len(machine.devices)) for block in blocks(graph)}
    if prod(space.count for space in spaces.values()) > FEW_STRATEGIES:
        return None
    return [Strategy(graph, dict(zip(spaces, chosen, strict=True))) for chosen in product(*spaces.values())]


def _fastest_first(
    found: Iterable[tuple[str, Strategy]], machine: Machine, costs: AnalyticCosts
) -> Iterator[tuple[str, Strategy]]:
    """Named strategies, the fastest first."""

    return iter(sorted(found, key=lambda item: _seconds(item[1], machine, costs)))


def _seconds(strategy: Strategy, machine: Machine, costs: AnalyticCosts) -> float:
    return native_tasks(strategy, machine, costs).simulated()[2]
