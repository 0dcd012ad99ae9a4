"""What the search finds and how fast: the tables and figures of FlexFlow 8, ours beside the paper's.

Sections (all, unless some are named):

    table5   seconds until the paper's search stops by its own rule (half of it brought nothing better), from
             random strategies: with full simulations, and with ours
    figure6  the found plan's speedup over the better of data parallelism and the expert's strategy, and what
             no plan can exceed: that baseline over the lower bound of all strategies
    figure7  bytes moved by NMT on 64 K80: data parallelism, the expert's strategy, the found plan
    figure9  the found plan against ColocRL's placement on 4 K80, and against OptCNN on 16 P100
    figure11 best makespan over time, NMT on 16 P100: the paper's search with full simulations, with its delta
             simulation, with ours; and our search
    slower   figure 6 once more on 16 P100 whose nodes are connected by ever slower networks
    within5  seconds until a plan is within 5 % of the best known: `mcmc` against `mcmc-paper`
    blind    the same without a start from any known strategy: from a random one

Every search runs in a process of its own, on one thread, and its seconds are those that it computes: other
processes of the machine disturb them less. `--jobs` searches run at once. The paper's batch norms take the
statistics of each GPU's own samples: `--batch-norm local` is the same problem. FlexFlow's own simulator has
gradients go to one device and back: `--sums one_device`.

    python bench/search.py
    python bench/search.py table5 --models alexnet --devices 4 16 --starts 10
    python bench/search.py figure6 within5 --seconds 20 --json search.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine, resolve
from soapstone.machine.machine import SUMS
from soapstone.native import Method
from soapstone.search.baselines import applicable, baseline
from soapstone.search.exact import lower_bound
from soapstone.search.mcmc import EXPERTS, RULES, Budget, Rules, mcmc
from soapstone.search.report import SearchReport
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import KINDS, native_tasks
from soapstone.tasks.task import COMPUTE_KINDS

MODELS = ("alexnet", "resnet101", "inception_v3", "rnntc", "rnnlm", "nmt")
DEVICES = (4, 8, 16, 32, 64)
COSTS = AnalyticCosts()

PAPER_DELTA_S = {  # Table 5: seconds with the delta simulation, by devices
    "alexnet": (0.04, 0.13, 0.48, 1.8, 5.9),
    "resnet101": (0.4, 1.4, 7.3, 33, 158),
    "inception_v3": (4.1, 17, 77, 298, 1278),
    "rnntc": (7.5, 39, 170, 516, 1489),
    "rnnlm": (9.2, 31, 121, 342, 969),
    "nmt": (16, 65, 328, 701, 2190),
}
ASKED = 20  # times the paper's delta column
SLOWER_GB_PER_S = (12.5, 3.125, 1.25, 0.3125)  # between nodes: 100, 25, 10 and 2.5 Gb/s

Row = dict[str, Any]

_sums = ["ring"]


def add_up(sums: str) -> None:
    """How sums are made on the machines of this process."""
    _sums[0] = sums


@cache
def captured(model: str, devices: int) -> Graph:
    """The zoo's model with as many samples as suit the devices; captured once in each process."""
    from soapstone.frontends.source import load

    return load(model, devices=devices).captured().graph


def with_batch_norm(models: Sequence[str], batch_norm: str | None) -> list[str]:
    """The models with this option in their names, which rows and other processes then know."""
    from soapstone.frontends.source import with_options

    return [with_options(model, batch_norm=batch_norm) for model in models]


@dataclass(frozen=True)
class Request:
    """One search: a model on a machine."""

    model: str
    machine: str
    seconds: float
    seed: int = 0
    bandwidth: float | None = None  # between nodes, where it is not the preset's

    @property
    def graph(self) -> Graph:
        """What is searched."""
        return captured(self.model, len(resolve(self.machine).devices))

    def on(self) -> Machine:
        """The machine."""
        machine = replace(resolve(self.machine), sums=_sums[0])
        if self.bandwidth is None:
            return machine
        slowest = min(link.bandwidth_bytes_per_s for link in machine.links)
        links = tuple(
            replace(link, bandwidth_bytes_per_s=self.bandwidth)
            if link.bandwidth_bytes_per_s == slowest
            else link
            for link in machine.links
        )
        return replace(machine, links=links)

    def searched(self, method: str | Rules) -> SearchReport:
        """The search, on one thread."""
        graph = self.graph
        budget = Budget(self.seconds, clock=time.process_time)
        return mcmc(graph, self.on(), method=method, budget=budget, seed=self.seed, threads=1)


def p100(devices: int) -> str:
    """That many P100, four in a node."""
    return f"p100:{max(1, devices // 4)}x{min(4, devices)}"


def k80(devices: int) -> str:
    """That many K80, four in a node."""
    return f"k80:{max(1, devices // 4)}x{min(4, devices)}"


# -- what one process does ----------------------------------------------------------------------------------


def makespan_s(strategy: Strategy, machine: Machine) -> float:
    """What one iteration takes."""
    return native_tasks(strategy, machine, COSTS).simulated()[2]


def moved_bytes(strategy: Strategy, machine: Machine) -> int:
    """What moves over links."""
    flat = native_tasks(strategy, machine, COSTS)
    compute = [KINDS.index(kind) for kind in COMPUTE_KINDS]
    return int(
        sum(size for kind, size in zip(flat.kind, flat.size_bytes, strict=True) if kind not in compute)
    )


def compute_s(strategy: Strategy, machine: Machine) -> float:
    """What all devices compute together."""
    flat = native_tasks(strategy, machine, COSTS)
    compute = [KINDS.index(kind) for kind in COMPUTE_KINDS]
    return float(sum(s for kind, s in zip(flat.kind, flat.duration_s, strict=True) if kind in compute))


@dataclass(frozen=True)
class Reading:
    """How the paper's search is read: what it starts from, whether devices follow each other, and whether
    proposals know structure, which are ours and not the paper's."""

    start: str = "random"
    has_ranges: bool = False
    is_structured: bool = False


def stopped(request: Request, simulation: Method, uses_threshold: bool, reading: Reading) -> Row:
    """The paper's search from one strategy, until it stops."""
    rules = replace(
        RULES["mcmc-paper"],
        starts=(reading.start,),
        simulation=simulation,
        uses_threshold=uses_threshold,
        has_ranges=reading.has_ranges,
        is_structured=reading.is_structured,
    )
    report = request.searched(rules)
    return {
        "seconds": report.elapsed_s,
        "proposals": report.proposals,
        "stop": report.stop.name,
        "found": report.makespan_s * 1e3,
    }


def speedup(request: Request) -> Row:
    """The found plan beside data parallelism, the expert's strategy and the lower bound."""
    graph, machine = request.graph, request.on()
    known = {
        each.name: makespan_s(baseline(each.name, graph, machine), machine)
        for each in applicable(graph, machine)
        if each.name in ("data_parallel", *EXPERTS)
    }
    report = request.searched("mcmc")
    best_s = min(known.values())
    bound_s = lower_bound(graph, machine, COSTS).seconds
    return {
        **{name: seconds * 1e3 for name, seconds in known.items()},
        "found": report.makespan_s * 1e3,
        "speedup": best_s / report.makespan_s,
        "at_most": best_s / bound_s,
        "proposals": report.proposals,
    }


def traffic(request: Request) -> Row:
    """Milliseconds, bytes moved and total compute of data parallelism, the expert's strategy and the plan."""
    graph, machine = request.graph, request.on()
    strategies = {name: baseline(name, graph, machine) for name in ("data_parallel", "wu")}
    strategies["found"] = request.searched("mcmc").strategy
    return {
        name: [makespan_s(s, machine) * 1e3, moved_bytes(s, machine), compute_s(s, machine)]
        for name, s in strategies.items()
    }


def against(request: Request, name: str) -> Row:
    """The found plan beside one baseline."""
    graph, machine = request.graph, request.on()
    other_s = makespan_s(baseline(name, graph, machine), machine)
    report = request.searched("mcmc")
    return {
        name: other_s * 1e3,
        "found": report.makespan_s * 1e3,
        "speedup": other_s / report.makespan_s,
        "seconds": report.elapsed_s,
    }


def curve(
    request: Request,
    method: str,
    simulation: Method = "engine",
    uses_threshold: bool = True,
    starts: tuple[str, ...] = (),
) -> Row:
    """Best makespan (ms) over seconds; of all starts of the method, or of those named."""
    rules = replace(RULES[method], simulation=simulation, uses_threshold=uses_threshold)
    rules = replace(rules, starts=starts or rules.starts)
    graph, machine = request.graph, request.on()
    report = request.searched(rules)
    return {
        "curve": [[round(point.elapsed_s, 3), point.best_s * 1e3] for point in report.curve],
        "best": report.makespan_s * 1e3,
        "proposals": report.proposals,
        "data_parallel": makespan_s(baseline("data_parallel", graph, machine), machine) * 1e3,
    }


# -- sections -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """What is asked for, and where it runs."""

    pool: ProcessPoolExecutor
    models: Sequence[str]
    devices: Sequence[int]
    seconds: float
    starts: int
    cut: float
    reading: Reading
    full: bool

    def rows(self, work: Callable[[Request], Row], requests: Iterable[Request]) -> Iterator[Row]:
        """One row for each request, in order, as they are done."""
        asked = list(requests)
        for request, found in zip(asked, self.pool.map(work, asked), strict=True):
            label = {} if request.bandwidth is None else {"Gb/s": request.bandwidth * 8e-9}
            yield {**named(request), **label, **found}


def named(request: Request) -> Row:
    """What a row is about."""
    return {"model": request.model, "machine": request.machine}


def table5(section: Section) -> Iterator[Row]:
    """Means over starts. A search is cut when it has taken a part of the paper's time."""
    waiting = []
    for model in section.models:
        for devices in section.devices:
            paper_s = PAPER_DELTA_S[model.partition(":")[0]][DEVICES.index(devices)]
            request = Request(model, p100(devices), max(1.0, paper_s * section.cut))
            starts = [replace(request, seed=seed) for seed in range(section.starts)]
            ours = [section.pool.submit(stopped, start, "engine", True, section.reading) for start in starts]
            full = (
                section.pool.submit(stopped, request, "full", False, section.reading)
                if section.full
                else None
            )
            waiting.append((request, paper_s, ours, full))
    for request, paper_s, ours, full in waiting:
        whole = full.result() if full is not None else {"seconds": None, "stop": None}
        found = [each.result() for each in ours]
        seconds = mean(each["seconds"] for each in found)
        yield {
            **named(request),
            "paper_delta_s": paper_s,
            "full_s": whole["seconds"],
            "full_is_cut": whole["stop"] == "BUDGET",
            "ours_s": seconds,
            "ours_cut": sum(each["stop"] == "BUDGET" for each in found),
            "proposals": round(mean(each["proposals"] for each in found)),
            "found": mean(each["found"] for each in found),
            "times_faster": paper_s / seconds,
        }


def figure6(section: Section) -> Iterator[Row]:
    """P100 up to 16, as the paper has them, and K80."""
    machines = [p100(n) for n in section.devices if n <= 16] + [k80(n) for n in section.devices]
    requests = (Request(model, machine, section.seconds) for model in section.models for machine in machines)
    return section.rows(speedup, requests)


def figure7(section: Section) -> Iterator[Row]:
    """NMT on 64 K80."""
    return section.rows(traffic, [Request("nmt", k80(64), 2 * section.seconds)])


def figure9(section: Section) -> Iterator[Row]:
    """ColocRL on 4 K80, of the models that its authors placed; OptCNN on 16 P100."""
    placed = [model for model in section.models if model.startswith(("inception_v3", "nmt"))]
    on_k80 = [Request(model, k80(4), section.seconds) for model in placed]
    on_p100 = [Request(model, p100(16), section.seconds) for model in section.models]
    yield from section.rows(partial(against, name="colocrl"), on_k80)
    yield from section.rows(partial(against, name="optcnn"), on_p100)


def figure11(section: Section) -> Iterator[Row]:
    """NMT on 16 P100."""
    variants: dict[str, tuple[str, Method, bool]] = {
        "mcmc-paper, full": ("mcmc-paper", "full", False),
        "mcmc-paper, its delta": ("mcmc-paper", "paper_delta", False),
        "mcmc-paper, ours": ("mcmc-paper", "engine", True),
        "mcmc": ("mcmc", "engine", True),
    }
    request = Request("nmt", p100(16), section.seconds)
    waiting = {name: section.pool.submit(curve, request, *how) for name, how in variants.items()}
    for name, found in waiting.items():
        yield {"search": name, **found.result()}


def slower(section: Section) -> Iterator[Row]:
    """Sixteen P100, networks of 100 down to 2.5 Gb/s."""
    requests = (
        Request(model, p100(16), section.seconds, bandwidth=gb_per_s * 1e9)
        for model in section.models
        for gb_per_s in SLOWER_GB_PER_S
    )
    return section.rows(speedup, requests)


def within5(section: Section) -> Iterator[Row]:
    """The best known is the best that any of these searches found."""
    return _within5(section, ())


def blind(section: Section) -> Iterator[Row]:
    """From random strategies; the best known is that of data parallelism, if no search found better."""
    return _within5(section, ("random",))


def _within5(section: Section, starts: tuple[str, ...]) -> Iterator[Row]:
    requests = [
        Request(model, p100(devices), section.seconds)
        for model in section.models
        for devices in section.devices
        if devices in (16, 64)
    ]
    waiting = [
        (r, {name: section.pool.submit(curve, r, name, starts=starts) for name in RULES}) for r in requests
    ]
    for request, searches in waiting:
        found = {name: search.result() for name, search in searches.items()}
        best = min(known for each in found.values() for known in (each["best"], each["data_parallel"]))
        yield {
            **named(request),
            "best_ms": best,
            **{f"{name}_best_ms": each["best"] for name, each in found.items()},
            **{f"{name}_s": _reached(each["curve"], 1.05 * best) for name, each in found.items()},
        }


def _reached(points: Sequence[Sequence[float]], wanted: float) -> float | None:
    return next((seconds for seconds, best in points if best <= wanted), None)


SECTIONS = {
    each.__name__: each for each in (table5, figure6, figure7, figure9, figure11, slower, within5, blind)
}


def main() -> None:
    """Run the sections that are asked for, and print their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which (default: all)")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--seconds", type=float, default=20.0, help="budget of a search")
    parser.add_argument("--starts", type=int, default=2, help="strategies to start from in table5")
    parser.add_argument("--start", default="random", help="what table5 starts from: random, data_parallel")
    parser.add_argument("--ranges", action="store_true", help="table5 on devices that follow each other")
    parser.add_argument("--structured", action="store_true", help="table5 with our own proposals")
    parser.add_argument("--no-full", action="store_true", help="table5 without full simulations")
    parser.add_argument("--cut", type=float, default=1 / ASKED, help="part of the paper's time for table5")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sums", default="ring", choices=SUMS, help="how gradients are added up")
    parser.add_argument("--batch-norm", choices=("whole", "local"), help="whose statistics (default: whole)")
    parser.add_argument("--json", type=Path, help="write all rows here")
    given = parser.parse_args()
    models = with_batch_norm(given.models, given.batch_norm)
    found: dict[str, list[Row]] = {}
    apart = get_context("spawn")
    with ProcessPoolExecutor(given.jobs, apart, initializer=add_up, initargs=(given.sums,)) as pool:
        section = Section(
            pool,
            models,
            given.devices,
            given.seconds,
            given.starts,
            given.cut,
            Reading(given.start, given.ranges, given.structured),
            not given.no_full,
        )
        for name in given.sections or SECTIONS:
            print(f"\n{name}", flush=True)
            for row in SECTIONS[name](section):
                found.setdefault(name, []).append(row)
                print("  " + "  ".join(f"{key} {_text(value)}" for key, value in row.items()), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 8:
        return f"{_text(value[0])} ... {_text(value[-1])} ({len(value)} points)"
    return "[" + ", ".join(map(_text, value)) + "]" if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
