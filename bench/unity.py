"""Joint search against sequential optimization, and those of Unity's figures that a simulator can give.

Sections (all, unless one is named):

    rules       the rules that are shipped, and the uses of them that the joint search tries
    figure2     the two-layer MLP of Unity's Figure 2 on two devices: what each strategy moves
    dnns        Unity's seven DNNs (Figure 14): the joint search within its budget, and its predicted speedup
                over the best of data parallelism, the experts' strategies and taso_then_flexflow
    dimensions  Figure 15a: the joint search with more and more kinds of dims, and pipelines
    joint       Figure 15b: joint against sequential optimization, with the same space and the same search
    searches    the searches beside each other at an equal budget of CPU time
    real        two layers on two processes of this computer: the plans of the joint search and of
                taso_then_flexflow, run in turns

The paper's batch norms take statistics of each GPU's own samples: `--batch-norm local` is the same problem.

    python bench/unity.py
    python bench/unity.py dnns --machine summit:32x6 --models dlrm mlp --budget 60
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.batchnorm import LOCAL, WHOLE
from soapstone.frontends.source import load, with_options
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, resolve
from soapstone.ops import Kind
from soapstone.plans import planned, simulation, write_plan
from soapstone.search.baselines import BASELINES, applicable, baseline, data_parallel
from soapstone.search.baselines.taso_then_flexflow import fastest_on_one_device
from soapstone.search.exact import exact_search
from soapstone.search.find import Options, find
from soapstone.search.mcmc import EXPERTS, Budget
from soapstone.search.unity.joint import Setting, unity
from soapstone.search.unity.selecting import directions
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy
from soapstone.subst import shipped
from soapstone.subst.costing import changes_cost
from soapstone.tasks.flat import native_tasks

PAPER = {
    "dlrm": 3.6,
    "mlp": 2.0,
    "xdl": 1.9,
    "candle_uno": 1.6,
    "inception_v3": 1.3,
    "bert_large": 1.0,
    "resnext50": 1.0,
}
"""[paper] Unity 6.2: speedup over the best existing approach; BERT is said to be on par with Megatron."""

BATCH, HIDDEN, INPUTS, OUTPUTS = 64, 512, 28 * 28, 10  # [paper] Unity 1, the MLP for MNIST
COSTS = AnalyticCosts()


def rules() -> None:
    """Prints how many rules there are of each kind."""
    book = shipped()
    count = Counter(entry.status for entry in book.entries.values())
    parallel = sum(rule.is_parallel for rule in book.rules)
    changing = [rule for rule in book.rules if changes_cost(rule)]
    algebraic = [rule for rule in changing if not rule.is_parallel]
    print(f"shipped {len(book.entries)}: {dict(count)}; {parallel} with parallel operators")
    print(f"cost-changing {len(changing)}, {len(algebraic)} of them without parallel operators")
    print(f"uses that the joint search tries: {len(directions())}")


def figure2_graph(*, has_loss: bool) -> Graph:
    """Figure 1 of Unity: two products with a relu between them. Without a loss, gradients arrive at the
    output, and nobody adds up partial sums of it: that is how the paper counts."""
    b = GraphBuilder("figure2")
    x = b.input("x", (BATCH, INPUTS), samples=0)
    (y,) = b.add("linear", [x, b.weight("w1", (HIDDEN, INPUTS)), None], name="first")
    (y,) = b.add("relu", [y], name="relu")
    (y,) = b.add("linear", [y, b.weight("w2", (OUTPUTS, HIDDEN)), None], name="second")
    if not has_loss:
        return b.graph(outputs=[y])
    (y,) = b.add("mse_loss", [y, b.input("wanted", (BATCH, OUTPUTS), samples=0)], name="loss")
    return b.graph(loss=y)


def figure2() -> None:
    """Prints what the paper's two strategies, the joint search's and the proved optimum move, in elements."""
    graph, machine = figure2_graph(has_loss=False), resolve("p100:1x2")
    print("| strategy | elements moved | paper | ms |")
    print("|---|---|---|---|")
    _moved("data parallelism (Figure 2a)", data_parallel(graph, machine), machine, "813,056")
    theirs = {"first": placed({"i": 2}, (0, 1)), "second": placed({"o": 2}, (0, 1))}
    _moved("reduction, then parameters (Figure 2b)", Strategy(graph, theirs), machine, "131,072")
    graph = figure2_graph(has_loss=True)
    _moved("with a loss: data parallelism", data_parallel(graph, machine), machine)
    found = find(graph, machine, COSTS, Options("unity", Budget(None, 200)))
    _moved(f"with a loss: joint search, {_degrees(found.strategy)}", found.strategy, machine)
    best = exact_search(graph, machine, COSTS, proposals=50)
    proved = "proved optimum" if best.is_optimal else "best of the exact search"
    _moved(f"with a loss: {proved}, {_degrees(best.strategy)}", best.strategy, machine)


def _moved(name: str, strategy: Strategy, machine: Machine, paper: str = "") -> None:
    simulated = simulation(strategy, machine, COSTS)
    elements = simulated.tasks.moved_bytes // 4
    print(f"| {name} | {elements:,} | {paper} | {simulated.timeline.makespan_s * 1e3:.4f} |", flush=True)


def _degrees(strategy: Strategy) -> str:
    return ", ".join(f"{name} {dict(p.degrees)}" for name, p in strategy.placements.items())


def dnns(models: list[str], machine: Machine, budget_s: float) -> None:
    """Prints a row for each model."""
    print("| model | nodes | joint, ms | search s | best other, ms | which | speedup | paper | rewrites |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in models:
        graph = load(name, devices=len(machine.devices)).captured().graph
        others = {}
        for each in applicable(graph, machine):
            if each.name in ("data_parallel", *EXPERTS, "taso_then_flexflow"):
                strategy = baseline(each.name, graph, machine, COSTS)
                others[each.name] = native_tasks(strategy, machine, COSTS).simulated()[2]
        began_s = time.monotonic()
        found = find(graph, machine, COSTS, Options("unity", Budget(budget_s)))
        took_s = time.monotonic() - began_s
        best = min(others, key=lambda key: others[key])
        fits = "" if found.fits else " (too large)"
        times = f"{found.makespan_s * 1e3:.3f}{fits} | {took_s:.0f} | {others[best] * 1e3:.3f} | {best}"
        ratios = (
            f"{others[best] / found.makespan_s:.2f} | {PAPER[name.partition(':')[0]]} | {len(found.rewrites)}"
        )
        print(f"| {name} | {len(graph.nodes)} | {times} | {ratios} |", flush=True)


EVERY = frozenset({Kind.ATTRIBUTE, Kind.PARAMETER, Kind.REDUCTION})
SPACES = {
    "samples": EVERY,
    "and parameters": EVERY - {Kind.PARAMETER},
    "and attributes": frozenset({Kind.REDUCTION}),
    "and reductions: all": frozenset[Kind](),
}


def dimensions(models: list[str], machine: Machine, budget_s: float) -> None:
    """Prints a row for each model, a column for each space; pipelines have as long as the largest of them."""
    print(f"| model on {machine.name}, ms | " + " | ".join(SPACES) + " | or a pipeline | all over samples |")
    print("|---|" + "---|" * (len(SPACES) + 2))
    for name in models:
        graph = load(name, devices=len(machine.devices)).captured().graph
        found: list[float] = []
        known: dict[str, Strategy] = {}
        for without in SPACES.values():
            budget = Budget(budget_s, clock=time.process_time)
            setting = Setting(machine, COSTS, budget, 0, 2, "momentum", 0.0, without)
            best = unity(graph, setting, known, rewrites=False)
            known = {"smaller space": best.strategy}
            found.append(best.makespan_s)
        piped = _as_pipeline(graph, machine, budget_s)
        ratio = found[0] / min(found[-1], piped or found[-1])
        times = " | ".join(f"{each * 1e3:.3f}" for each in found)
        shown = f"{piped * 1e3:.3f}" if piped else "none"
        print(f"| {name} | {times} | {shown} | {ratio:.3f} |", flush=True)


def _as_pipeline(graph: Graph, machine: Machine, budget_s: float) -> float | None:
    """The best pipeline's time; None where a model has none."""
    if BASELINES["pipeline"].objection(graph, machine) is not None:
        return None
    options = Options("pipeline", Budget(budget_s, clock=time.process_time))
    return find(graph, machine, COSTS, options).makespan_s


def joint(models: list[str], machine: Machine, budget_s: float, seed: int) -> None:
    """Prints a row for each model: the same search on the graph that is fastest on one device. Finding that
    graph is a part of sequential optimization, and of its time."""
    print(f"| model on {machine.name} | sequential, ms | joint, ms | speedup | rewritten first | jointly |")
    print("|---|---|---|---|---|---|")
    directions()  # the rules are read before the clock starts, for either
    setting = Setting(machine, COSTS, Budget(budget_s, clock=time.process_time), seed, 2, "momentum", 0.0)
    for name in models:
        graph = load(name, devices=len(machine.devices)).captured().graph
        began_s = time.process_time()
        fast = fastest_on_one_device(graph, machine, COSTS)
        left_s = max(0.2 * budget_s, budget_s - (time.process_time() - began_s))
        left = replace(setting, budget=replace(setting.budget, seconds=left_s))
        sequential = unity(fast, left, rewrites=False)
        together = unity(graph, setting)
        print(
            f"| {name} | {sequential.makespan_s * 1e3:.3f} | {together.makespan_s * 1e3:.3f}"
            f" | {sequential.makespan_s / together.makespan_s:.3f} | {'yes' if fast is not graph else 'no'}"
            f" | {len(together.rewrites)} |",
            flush=True,
        )


def searches(models: list[str], machine: Machine, budget_s: float) -> None:
    """Prints a row for each model, a column for each search."""
    names = ("mcmc", "unity", "auto")
    print(f"| model on {machine.name}, {budget_s:g} CPU s | " + " | ".join(f"{n}, ms" for n in names) + " |")
    print("|---|" + "---|" * len(names))
    for name in models:
        graph = load(name, devices=len(machine.devices)).captured().graph
        found = [
            find(graph, machine, COSTS, Options(search, Budget(budget_s, clock=time.process_time)))
            for search in names
        ]
        print(
            f"| {name} | " + " | ".join(f"{each.makespan_s * 1e3:.3f}" for each in found) + " |", flush=True
        )


TWO_LAYERS = "examples/two_layers.py:two_layers"
ROUNDS, STEPS = 5, 14


def real(rounds: int = ROUNDS) -> None:
    """Prints a row for each plan: what it was predicted to take, what it took, and how it splits."""
    machine = resolve("cpu:1x2")
    graph = load(TWO_LAYERS).captured().graph
    strategies = {
        "unity": find(graph, machine, COSTS, Options("unity", Budget(None, 300))).strategy,
        "taso_then_flexflow": baseline("taso_then_flexflow", graph, machine, COSTS),
    }
    print("| plan | predicted, ms | median of runs, ms | fastest run, ms | times unity's | splits |")
    print("|---|---|---|---|---|---|")
    predicted: dict[str, float] = {}
    steps: dict[str, list[float]] = {name: [] for name in strategies}
    with TemporaryDirectory() as folder:
        for name, strategy in strategies.items():
            simulated = simulation(strategy, machine, COSTS)
            predicted[name] = simulated.timeline.makespan_s
            plan = planned(strategy, machine, simulated, COSTS, model=TWO_LAYERS)
            write_plan(plan, Path(folder) / f"{name}.json")
        for _ in range(rounds):
            for name in strategies:
                steps[name].append(_trained_s(Path(folder) / f"{name}.json"))
    typical = {name: statistics.median(own) for name, own in steps.items()}
    for name, strategy in strategies.items():
        measured = f"{typical[name] * 1e3:.1f} | {min(steps[name]) * 1e3:.1f}"
        ratio = typical[name] / typical["unity"]
        splits = _degrees(strategy)
        print(f"| {name} | {predicted[name] * 1e3:.1f} | {measured} | {ratio:.2f} | {splits} |", flush=True)


def _trained_s(plan: Path) -> float:
    """The median of a run's steps."""
    command = [sys.executable, "-m", "soapstone", "train", str(plan), "--steps", str(STEPS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = ("rules", "figure2", "dnns", "dimensions", "joint", "searches", "real")
    parser.add_argument("section", nargs="?", choices=sections)
    parser.add_argument("--models", nargs="+", default=list(PAPER))
    parser.add_argument("--machine", default="summit:32x6")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-norm", choices=(WHOLE, LOCAL), help=f"whose statistics (default: {WHOLE})")
    given = parser.parse_args()
    given.models = [with_options(model, batch_norm=given.batch_norm) for model in given.models]
    machine = resolve(given.machine)
    for section in (given.section,) if given.section else sections:
        print(f"\n{section}\n")
        match section:
            case "rules":
                rules()
            case "figure2":
                figure2()
            case "dnns":
                dnns(given.models, machine, given.budget)
            case "dimensions":
                dimensions(given.models, machine, given.budget)
            case "joint":
                joint(given.models, machine, given.budget, given.seed)
            case "real":
                real()
            case _:
                searches(given.models, machine, given.budget)


if __name__ == "__main__":
    main()
