"""How long the proof of an optimum takes, and how far from optimal large plans can be at most.

Sections (all, unless some are named):

    small   LeNet and RNNLM with two unrolled steps on 4 P100, the problems of FlexFlow 8.3, which took the
            authors 0.8 and 18 hours: for each tolerance asked for, the search until it is proved that nothing
            better by more than that exists, or the budget is used up. CPU seconds beside seconds: other
            processes of the machine disturb them less. With --ranges, among strategies whose shards are on
            devices that follow each other, the space of FlexFlow's own code.
    chains  for the same problems, how soon `mcmc` finds a strategy that is no slower than the optimum among
            ranges, and the best that it finds, for several seeds: CPU seconds of one thread.
    large   for models and numbers of devices, the lower bound and its reason, and the gap of the best of
            data parallelism and the other baselines given.

    python bench/exact.py
    python bench/exact.py small chains --ranges --tolerances 1e-9
    python bench/exact.py small --models lenet --tolerances 0.1 0.05 --budget 600
    python bench/exact.py large --models alexnet nmt --devices 16 64
"""

from __future__ import annotations

import argparse
import time

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.frontends.source import load
from soapstone.machine import resolve
from soapstone.search.baselines import baseline
from soapstone.search.baselines.scoring import Scorer
from soapstone.search.exact import PROPOSALS, ROUNDING, exact_search, lower_bound
from soapstone.search.mcmc import Budget, mcmc
from soapstone.search.proofs import RANGES_PROPOSALS

SMALL = {"lenet": 0.8, "rnnlm:steps=2": 18.0}  # [paper] FlexFlow 8.3: hours
LARGE = ("alexnet", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt")
BASELINES = ("data_parallel", "krizhevsky", "wu")
COSTS = AnalyticCosts()


def small(models: list[str], tolerances: list[float], budget_s: float, threads: int, ranges: bool) -> None:
    """Prints a row for each problem and tolerance."""
    print(
        "| model | strategies | tolerance | best, ms | bound, ms | proved | bounds | s | CPU s | paper, h |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in models:
        graph, machine = load(model, devices=4).captured().graph, resolve("p100:1x4")
        for tolerance in tolerances:
            began_s = time.process_time()
            found = exact_search(
                graph,
                machine,
                COSTS,
                tolerance=tolerance,
                budget_s=budget_s,
                has_ranges=ranges,
                proposals=RANGES_PROPOSALS if ranges else PROPOSALS,
                threads=threads,
            )
            print(
                f"| {model} | {found.space:.1e} | {tolerance:g} | {found.makespan_s * 1e3:.6f}"
                f" | {found.lower_bound_s * 1e3:.6f} | {'yes' if found.is_optimal else 'no'}"
                f" | {found.bounded:,} | {found.elapsed_s:.0f} | {time.process_time() - began_s:.0f}"
                f" | {SMALL.get(model, '')} |",
                flush=True,
            )


def chains(models: list[str], seeds: int, budget_s: float) -> None:
    """Prints a row for each problem and seed."""
    print(
        "| model | seed | optimum among ranges, ms | found, ms | as fast as that after, CPU s | proposals |"
    )
    print("|---|---|---|---|---|---|")
    for model in models:
        graph, machine = load(model, devices=4).captured().graph, resolve("p100:1x4")
        optimum = exact_search(graph, machine, COSTS, has_ranges=True, proposals=RANGES_PROPOSALS)
        if not optimum.is_optimal:
            raise SystemExit(f"the optimum of {model} was not proved")
        for seed in range(seeds):
            budget = Budget(budget_s, None, time.process_time)
            found = mcmc(graph, machine, COSTS, budget=budget, seed=seed, threads=1)
            wanted_s = optimum.makespan_s * (1 + ROUNDING)
            reached = [point.elapsed_s for point in found.curve if point.best_s <= wanted_s]
            print(
                f"| {model} | {seed} | {optimum.makespan_s * 1e3:.6f} | {found.makespan_s * 1e3:.6f}"
                f" | {f'{reached[0]:.2f}' if reached else '-'} | {found.proposals:,} |",
                flush=True,
            )


def large(models: list[str], devices: list[int]) -> None:
    """Prints a row for each model and number of devices."""
    print(
        "| model | devices | bound, ms | reason | best baseline, ms | which | gap at most | bound took, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in models:
        for count in devices:
            graph, machine = load(model, devices=count).captured().graph, resolve(f"p100:{count // 4}x4")
            began_s = time.monotonic()
            bound = lower_bound(graph, machine, COSTS)
            took_s = time.monotonic() - began_s
            best_s, name = min(_scores(Scorer(graph, machine, COSTS)))
            print(
                f"| {model} | {count} | {bound.seconds * 1e3:.2f} | {bound.reason} | {best_s * 1e3:.2f}"
                f" | {name} | {bound.gap(best_s):.1%} | {took_s:.1f} |",
                flush=True,
            )


def _scores(scorer: Scorer) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for name in BASELINES:
        try:
            strategy = baseline(name, scorer.problem.graph, scorer.problem.machine, COSTS)
        except StrategyError:  # it does not apply to this model
            continue
        found.append((scorer.makespan_s(strategy), name))
    return found


def main() -> None:
    """Runs the sections that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=["small", "chains", "large", []], default=[])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--tolerances", nargs="+", type=float, default=[0.1, 0.05])
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for each search")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranges", action="store_true", help="only devices that follow each other")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--chain-budget", type=float, default=1.0, help="CPU seconds of each chain search")
    parser.add_argument("--devices", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args()
    sections = options.sections or ["small", "chains", "large"]
    problems = options.models or list(SMALL)
    if "small" in sections:
        small(problems, options.tolerances, options.budget, options.threads, options.ranges)
    if "chains" in sections:
        chains(problems, options.seeds, options.chain_budget)
    if "large" in sections:
        large(options.models or list(LARGE), options.devices)


if __name__ == "__main__":
    main()
