"""Exact searches as searches by name: what they find, as a report (FlexFlow 8.3).

exact_report   the optimum among all device lists, after chains that look for a strategy to start from
ranges_report  the optimum among devices that follow each other by number, as FlexFlow's own code has them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.exact import ExactResult, ShowExact, exact_search, is_in_space
from soapstone.search.mcmc import Budget, mcmc
from soapstone.search.report import CurvePoint, SearchReport, ShowSearch, StartReport, StopReason

EXACT_PROPOSALS = 5000
"""[choice] Of each chain that looks for a strategy for the exact search to start from."""

RANGES_PROPOSALS = 1000
"""[choice] Of each step of the chains before the exact search among ranges, which needs no good start."""

Prove = Callable[
    [Graph, Machine, AnalyticCosts, float | None, int, int, str, ShowSearch | None], SearchReport
]
"""Takes the seconds that there are, a seed, the number of threads and the optimizer."""


def exact_report(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    budget_s: float | None,
    seed: int,
    threads: int,
    optimizer: str,
    show: ShowSearch | None,
) -> SearchReport:
    """The optimum of strategies without copies; or what chains found with copies, if that is faster."""
    budget = Budget(budget_s, EXACT_PROPOSALS)
    chains = mcmc(graph, machine, costs, budget=budget, seed=seed, threads=threads, optimizer=optimizer)
    if chains.stop is StopReason.INTERRUPTED:
        return replace(chains, method="exact")
    start = chains.strategy if is_in_space(chains.strategy) else None
    left_s = None if budget_s is None else max(0.0, budget_s - chains.elapsed_s)
    try:
        found = exact_search(
            graph,
            machine,
            costs,
            budget_s=left_s,
            start=start,
            threads=threads,
            optimizer=optimizer,
            progress=_progress(show),
        )
    except KeyboardInterrupt:  # before the tree has a strategy of its own
        return replace(chains, method="exact", stop=StopReason.INTERRUPTED)
    elapsed_s = chains.elapsed_s + found.elapsed_s
    starts = (*chains.starts, _told("exact", found, found.stop))
    if start is None and chains.makespan_s < found.makespan_s and chains.fits:
        # What chains start from may have copies, which are outside the space: then they may be faster.
        stop = StopReason.OPTIMAL_WITHOUT_COPIES if found.is_optimal else found.stop
        return replace(chains, method="exact", starts=starts, elapsed_s=elapsed_s, stop=stop)
    return SearchReport(
        "exact",
        seed,
        found.strategy,
        found.makespan_s,
        found.fits,
        (*chains.curve, CurvePoint(elapsed_s, chains.proposals, found.makespan_s)),
        starts,
        elapsed_s,
        found.stop,
        found.lower_bound_s,
    )


def ranges_report(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    budget_s: float | None,
    seed: int,
    threads: int,
    optimizer: str,
    show: ShowSearch | None,
) -> SearchReport:
    """The optimum of strategies on devices that follow each other. What bounds these bounds no others."""
    found = exact_search(
        graph,
        machine,
        costs,
        budget_s=budget_s,
        has_ranges=True,
        proposals=RANGES_PROPOSALS,
        threads=threads,
        optimizer=optimizer,
        progress=_progress(show),
    )
    stop = StopReason.OPTIMAL_OF_RANGES if found.is_optimal else found.stop
    return SearchReport(
        "exact-ranges",
        seed,
        found.strategy,
        found.makespan_s,
        found.fits,
        (CurvePoint(found.elapsed_s, found.bounded, found.makespan_s),),
        (_told("exact-ranges", found, stop),),
        found.elapsed_s,
        stop,
    )


def _progress(show: ShowSearch | None) -> ShowExact:
    def progress(best_s: float, lower_bound_s: float, _: int) -> None:
        if show is not None:
            show(lower_bound_s / best_s, f"{best_s * 1e3:.4g} ms, at least {lower_bound_s * 1e3:.4g}")

    return progress


def _told(name: str, found: ExactResult, stop: StopReason) -> StartReport:
    return StartReport(name, found.makespan_s, found.makespan_s, found.bounded, found.simulated, stop)
