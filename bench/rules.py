"""How many substitutions are found and proved, how long that takes on one core, and in how much memory.

Enumerates every family, emits what the operators' definitions say, runs each rule on random tensors and
proves it; prints the counts for each family, the seconds of CPU time (all threads together) and the peak
memory of the process. The targets are more than the 743 + 651 rules of TASO and Unity, in 3 minutes on one
core, within 4 GiB. Last comes a small set of rules that implies the rest, for each family and for all.

    python bench/rules.py
    python bench/rules.py --json -o src/soapstone/subst/shipped
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from soapstone.subst.basis import basis
from soapstone.subst.census import OPERATORS, Census, take_census
from soapstone.subst.rulebook import SUFFIX, write
from soapstone.subst.verifying import status

TARGET_RULES, TARGET_S, TARGET_BYTES = 743 + 651, 180.0, 4 * 2**30
STATUSES = ("proved", "refuted", "unknown")


@dataclass(frozen=True)
class Figures:
    """What one run gave."""

    families: dict[str, dict[str, int]]
    found: int
    proved: int
    refuted: int
    unknown: int
    cost_changing: int
    parallel: int
    graphs: int
    equal_pairs: int
    cpu_s: float
    wall_s: float
    peak_bytes: int


def measured() -> tuple[Figures, Census]:
    torch.set_num_threads(1)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    census = take_census()
    cpu_s, wall_s = time.process_time() - begun_cpu, time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    families = {
        name: {"found": census.count(None, name), **{s: census.count(s, name) for s in STATUSES}}
        for name in census.judged
    }
    figures = Figures(
        families,
        census.count(),
        *(census.count(wanted) for wanted in STATUSES),
        cost_changing=census.cost_changing,
        parallel=sum(rule.is_parallel for rule in census.proved()),
        graphs=census.graphs,
        equal_pairs=census.pairs,
        cpu_s=cpu_s,
        wall_s=wall_s,
        peak_bytes=peak,
    )
    return figures, census


def print_figures(figures: Figures, census: Census) -> None:
    for name, counts in figures.families.items():
        print(f"{name:20}" + "".join(f"{key} {number:6,}   " for key, number in counts.items()))
    print(f"{figures.graphs:,} graphs, {figures.equal_pairs:,} equal pairs")
    print(f"proved {figures.proved:,} of {figures.found:,} (target: more than {TARGET_RULES:,})")
    print(f"refuted {figures.refuted:,}, unknown {figures.unknown:,}")
    print(f"with parallel operators {figures.parallel:,}, cost-changing {figures.cost_changing:,}")
    print(f"CPU {figures.cpu_s:.0f} s (target {TARGET_S:.0f}), wall {figures.wall_s:.0f} s")
    print(f"peak {figures.peak_bytes / 2**20:.0f} MiB (target {TARGET_BYTES / 2**20:.0f})", flush=True)
    for name, rules in census.judged.items():
        for judged in rules:
            if status(judged.verdict) == "refuted":
                print(f"refuted in {name}: {judged.rule}")


def print_basis(census: Census) -> None:
    for name in census.judged:
        if name != OPERATORS:
            begun, rules = time.process_time(), census.proved(name)
            needed = len(basis(rules))
            print(
                f"basis of {name}: {needed:,} of {len(rules):,}, {time.process_time() - begun:.0f} s of CPU"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Find and prove substitutions.")
    parser.add_argument("-o", "--output", type=Path, help="write the proved rules to this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and no basis")
    options = parser.parse_args()
    figures, census = measured()
    if options.output is not None:
        for name, entries in census.entries().items():
            origin = "from operators' definitions" if name == OPERATORS else "found by enumeration"
            write(options.output / f"{name}{SUFFIX}", entries, f"{name}: {origin}; every line is proved.")
    if options.json:
        print(json.dumps(asdict(figures), indent=2))
        return
    print_figures(figures, census)
    print_basis(census)


if __name__ == "__main__":
    main()
