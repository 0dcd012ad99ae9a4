"""How long the proof of an optimum takes, and how far from optimal large plans can be at most.

Sections (both, unless one is named):

    small   LeNet and RNNLM with two unrolled steps on 4 P100, the problems of FlexFlow 8.3, which took the
            authors 0.8 and 18 hours: for each tolerance asked for, the search until it is proved that nothing
            better by more than that exists, or the budget is used up. CPU seconds beside seconds: other
            processes of the machine disturb them less.
    large   for models and numbers of devices, the lower bound and its reason, and the gap of the best of
            data parallelism and the other baselines given.

    python bench/exact.py
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
from soapstone.search.exact import exact_search, lower_bound

SMALL = {"lenet": 0.8, "rnnlm:steps=2": 18.0}  # [paper] FlexFlow 8.3: hours
LARGE = ("alexnet", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt")
BASELINES = ("data_parallel", "krizhevsky", "wu")
COSTS = AnalyticCosts()


def small(models: list[str], tolerances: list[float], budget_s: float, threads: int) -> None:
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
                graph, machine, COSTS, tolerance=tolerance, budget_s=budget_s, threads=threads
            )
            print(
                f"| {model} | {found.space:.1e} | {tolerance:g} | {found.makespan_s * 1e3:.4f}"
                f" | {found.lower_bound_s * 1e3:.4f} | {'yes' if found.is_optimal else 'no'}"
                f" | {found.bounded:,} | {found.elapsed_s:.0f} | {time.process_time() - began_s:.0f}"
                f" | {SMALL.get(model, '')} |",
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
    parser.add_argument("sections", nargs="*", choices=["small", "large", []], default=[])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--tolerances", nargs="+", type=float, default=[0.1, 0.05])
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for each search")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--devices", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args()
    sections = options.sections or ["small", "large"]
    if "small" in sections:
        small(options.models or list(SMALL), options.tolerances, options.budget, options.threads)
    if "large" in sections:
        large(options.models or list(LARGE), options.devices)


if __name__ == "__main__":
    main()
