"""How fast proposals are simulated: ours beside the plain way, FlexFlow's rates and the paper's delta.

Sections (all, unless some are named):

    rates    proposals per second of one chain on one thread, ours against a plain simulation of the same
             task graphs (everything rebuilt, every pair of boxes compared, std::priority_queue), after
             burn-in from data parallelism and from random strategies. Both walk the same chain, which is
             checked; segments of the two take turns, and the best segment of each counts.
    delta    without the threshold: full simulation against the paper's Algorithm 2 and against ours, on the
             same incrementally kept task graph.
    threads  two chains on two threads against one.
    memory   the most memory of a process that searches NMT on 64 devices.
    growth   tasks and seconds per proposal for 1, 2, 4, ... devices and every model of the zoo, with the
             exponent of a fitted power of the number of devices.

Rates are per second of CPU time: other processes of the machine disturb them less. The temperature is one
200th of the average block's share of the data-parallel makespan. FlexFlow's batch norms take statistics of
each GPU's own samples: `--batch-norm local` is the same problem.

    python bench/simulator.py
    python bench/simulator.py rates --models alexnet --devices 4 16 --seconds 5
    python bench/simulator.py rates --models inception_v3 --batch-norm local
    python bench/simulator.py growth --models alexnet lenet --json growth.json
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.batchnorm import LOCAL, WHOLE
from soapstone.frontends.source import load
from soapstone.frontends.zoo import ZOO
from soapstone.graph import Graph
from soapstone.machine import resolve
from soapstone.native import Proposals
from soapstone.search.baselines import baseline
from soapstone.tasks.flat import FlatProblem

MODELS = ("alexnet", "inception_v3", "nmt")
DEVICES = (4, 16, 64)
PER_NODE = 4
BURN_IN = 5000
COLDNESS = 200
SEGMENTS = 5
GROWTH = tuple(2**n for n in range(9))

ASKED = {  # times the plain simulation: after burn-in from data parallelism, and from random strategies
    "alexnet": ((8, 15, 60), (4, 12, 40)),
    "inception_v3": ((25, 100, 400), (6, 8, 25)),
    "nmt": ((5, 15, 80), (3, 7, 10)),
}
FLEXFLOW = {  # the better of its 2018 and r22.07 simulators, proposals per CPU-second
    "alexnet": (30167, 2555, 452),
    "inception_v3": (2612, 303, 27),
}
PAPER_DELTA = (2.2, 6.9)  # times its full simulation


@dataclass(frozen=True)
class Problem:
    """A model on some devices of a cluster of P100s."""

    model: str
    devices: int
    flat: FlatProblem
    graph: Graph

    @classmethod
    def of(cls, graph: Graph, model: str, devices: int) -> Problem:
        machine = resolve(f"p100:{-(-devices // PER_NODE)}x{min(devices, PER_NODE)}")
        return cls(model, devices, FlatProblem(graph, machine, AnalyticCosts()), graph)

    def placed(self, start: str, **options: object) -> Proposals:
        """A chain that starts from data parallelism, or at random."""
        proposals = Proposals(self.flat.native, seed=1, **options)
        if start == "random":
            proposals.place_at_random()
            return proposals
        strategy = baseline(start, self.graph, self.flat.machine)
        for number, block in enumerate(self.flat.blocks):
            placement = strategy.placements[block.name]
            degrees = self.flat.degrees(block, placement)
            proposals.place(number, degrees, placement.copies, list(placement.devices))
        return proposals

    def copied(self, other: Proposals, **options: object) -> Proposals:
        """A chain that stands where another does."""
        proposals = Proposals(self.flat.native, seed=2, **options)
        for number in range(len(self.flat.blocks)):
            proposals.place(number, *other.placed(number))
        proposals.makespan()
        return proposals

    @property
    def temperature_s(self) -> float:
        return self.placed("data_parallel").makespan() / (COLDNESS * len(self.flat.blocks))


def stepped_s(chain: Proposals, count: int, temperature_s: float) -> float:
    """CPU seconds of a proposal, over this many."""
    started = time.process_time()
    chain.step(count, temperature_s)
    return (time.process_time() - started) / count


def enough(chain: Proposals, temperature_s: float, least_s: float) -> int:
    """How many proposals take this long."""
    count = 1
    while (each_s := stepped_s(chain, count, temperature_s)) * count < least_s / 10:
        count *= 4
    return max(1, int(least_s / each_s))


def rate(problem: Problem, start: str, seconds: float) -> dict[str, float]:
    """Ours and the plain way, on one chain."""
    temperature_s = problem.temperature_s
    burnt = problem.placed(start)
    burnt.makespan()
    began = time.process_time()
    steps = 0
    while steps < BURN_IN and time.process_time() - began < 20 * seconds:
        burnt.step(100, temperature_s)
        steps += 100
    ours, plain = problem.copied(burnt), problem.copied(burnt, method="plain")
    few = enough(problem.copied(burnt, method="plain"), temperature_s, seconds / SEGMENTS)
    many = enough(problem.copied(burnt), temperature_s, seconds / SEGMENTS)
    accepted = ours.step(few, temperature_s)
    if (accepted, ours.makespan()) != (plain.step(few, temperature_s), plain.makespan()):
        raise SystemExit(f"{problem.model} on {problem.devices}: the two walk different chains")
    ours_s, plain_s, taken, segments = math.inf, math.inf, 0, 0
    for _ in range(SEGMENTS):
        ours_s = min(ours_s, stepped_s(ours, many, temperature_s))
        plain_s = min(plain_s, stepped_s(plain, few, temperature_s))
        taken, segments = taken + accepted, segments + few
    return {
        "tasks": ours.task_count,
        "burn_in": steps,
        "accepted": taken / segments,
        "ours_per_s": 1 / ours_s,
        "plain_per_s": 1 / plain_s,
        "times": plain_s / ours_s,
    }


def rates(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The table of rates."""
    rows: list[dict[str, object]] = []
    print(
        "| model | devices | from | tasks | accepted | plain /s | ours /s | times | asked | times FlexFlow |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for problem in problems(arguments):
        for which, start in enumerate(("data_parallel", "random")):
            found = rate(problem, start, arguments.seconds)
            asked = flexflow = ""
            if problem.model in ASKED and problem.devices in DEVICES:
                at = DEVICES.index(problem.devices)
                asked = str(ASKED[problem.model][which][at])
                if problem.model in FLEXFLOW and start == "data_parallel":
                    flexflow = f"{found['ours_per_s'] / FLEXFLOW[problem.model][at]:.1f}"
            cells = (
                problem.model,
                problem.devices,
                start,
                f"{found['tasks']:,}",
                f"{found['accepted']:.3f}",
                f"{found['plain_per_s']:,.1f}",
                f"{found['ours_per_s']:,.0f}",
                f"{found['times']:.1f}",
                asked,
                flexflow,
            )
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            rows.append({"model": problem.model, "devices": problem.devices, "start": start, **found})
    return rows


def delta(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Full simulation, the paper's delta and ours, without a threshold."""
    rows: list[dict[str, object]] = []
    low, high = PAPER_DELTA
    print(f"the paper's delta is {low} to {high} times its full simulation")
    print("| model | devices | full /s | Algorithm 2 /s | times full | ours /s | times full |")
    print("|---|---|---|---|---|---|---|")
    for problem in problems(arguments):
        temperature_s = problem.temperature_s
        burnt = problem.placed("data_parallel")
        burnt.makespan()
        burnt.step(BURN_IN if problem.devices <= DEVICES[0] else BURN_IN // 10, temperature_s)
        best = {}
        chains = {
            method: problem.copied(burnt, method=method, uses_threshold=False)
            for method in ("full", "paper_delta", "engine")
        }
        counts = {
            m: enough(chain, temperature_s, arguments.seconds / SEGMENTS) for m, chain in chains.items()
        }
        for _ in range(SEGMENTS):
            for method, chain in chains.items():
                best[method] = min(
                    best.get(method, math.inf), stepped_s(chain, counts[method], temperature_s)
                )
        full, paper, ours = (1 / best[m] for m in ("full", "paper_delta", "engine"))
        print(
            f"| {problem.model} | {problem.devices} | {full:,.1f} | {paper:,.1f} | {paper / full:.2f} "
            f"| {ours:,.1f} | {ours / full:.2f} |",
            flush=True,
        )
        row = {"model": problem.model, "devices": problem.devices}
        rows.append({**row, "full_per_s": full, "paper_delta_per_s": paper, "ours_per_s": ours})
    return rows


def threads(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Two chains on two threads against one, by the clock on the wall."""
    rows: list[dict[str, object]] = []
    for problem in problems(arguments):
        temperature_s = problem.temperature_s
        chains = [problem.placed("data_parallel") for _ in range(2)]
        for chain in chains:
            chain.makespan()
        count = enough(chains[0], temperature_s, arguments.seconds)
        best = 0.0
        for _ in range(SEGMENTS):
            started = time.perf_counter()
            chains[0].step(count, temperature_s)
            one_s = time.perf_counter() - started
            started = time.perf_counter()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(Proposals.step, chains, [count] * 2, [temperature_s] * 2))
            best = max(best, 2 * one_s / (time.perf_counter() - started))
        print(
            f"{problem.model} on {problem.devices}: two chains do {best:.2f} times the work of one",
            flush=True,
        )
        rows.append({"model": problem.model, "devices": problem.devices, "times": best})
    return rows


def memory(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The most memory of a search, in a process of its own."""
    model, devices = "nmt", 64
    if arguments.inside:
        problem = Problem.of(load(model, devices=devices).captured().graph, model, devices)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        chain = problem.placed("data_parallel")
        chain.makespan()
        chain.step(arguments.proposals, problem.temperature_s)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"before_mib": before / 1024, "after_mib": after / 1024, "tasks": chain.task_count}))
        return []
    command = [sys.executable, __file__, "memory", "--inside", "--proposals", str(arguments.proposals)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"{model} on {devices}: {found['after_mib']:,.0f} MiB after {arguments.proposals} proposals "
        f"({found['before_mib']:,.0f} MiB before the search, which is Python, torch and the captured graph)",
        flush=True,
    )
    return [{"model": model, "devices": devices, **found}]


def growth(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Tasks and seconds per proposal against the number of devices."""
    rows: list[dict[str, object]] = []
    print("| model | devices | tasks | full, us | ours, us |")
    print("|---|---|---|---|---|")
    for model in arguments.models or sorted(ZOO):
        graph = captured(arguments, model, max(GROWTH))
        series: list[tuple[int, int, float, float]] = []
        for devices in arguments.devices or GROWTH:
            problem = Problem.of(graph, model, devices)
            temperature_s = problem.temperature_s
            taken = {}
            for method in ("full", "engine"):
                chain = problem.placed("data_parallel", method=method, uses_threshold=method == "engine")
                chain.makespan()
                count = enough(chain, temperature_s, arguments.seconds / SEGMENTS)
                taken[method] = stepped_s(chain, count, temperature_s)
            series.append((devices, chain.task_count, taken["full"], taken["engine"]))
            print(
                f"| {model} | {devices} | {chain.task_count:,} | {taken['full'] * 1e6:,.0f} "
                f"| {taken['engine'] * 1e6:,.1f} |",
                flush=True,
            )
        large = [row for row in series if row[0] >= PER_NODE]
        names = ("tasks", "full", "ours")
        fitted = {name: exponent([(row[0], row[i + 1]) for row in large]) for i, name in enumerate(names)}
        print(
            f"| {model} | exponent | {fitted['tasks']:.2f} | {fitted['full']:.2f} | {fitted['ours']:.2f} |",
            flush=True,
        )
        rows.append({"model": model, "series": series, "exponents": fitted})
    return rows


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms."""
    if len(points) < 2:
        return math.nan
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def problems(arguments: argparse.Namespace) -> Sequence[Problem]:
    """The models asked for, each on all numbers of devices."""
    return [
        Problem.of(captured(arguments, model, devices), model, devices)
        for model in arguments.models or MODELS
        for devices in arguments.devices or DEVICES
    ]


def captured(arguments: argparse.Namespace, model: str, devices: int) -> Graph:
    """The zoo's model with as many samples as suit the devices, and the statistics asked for."""
    return load(model, devices=devices, batch_norm=arguments.batch_norm).captured().graph


SECTIONS = {"rates": rates, "delta": delta, "threads": threads, "memory": memory, "growth": growth}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--models", nargs="+", choices=sorted(ZOO))
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU seconds for each figure")
    parser.add_argument("--proposals", type=int, default=1000, help="of the section memory")
    parser.add_argument("--batch-norm", default=WHOLE, choices=(WHOLE, LOCAL), help="whose statistics")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    results: dict[str, object] = {"batch_norm": arguments.batch_norm}
    for name in arguments.sections or SECTIONS:
        if name not in SECTIONS:
            parser.error(f"there is no section '{name}' (of {', '.join(SECTIONS)})")
        if not arguments.inside:
            print(f"\n== {name}, batch norm {arguments.batch_norm}")
        results[name] = SECTIONS[name](arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
