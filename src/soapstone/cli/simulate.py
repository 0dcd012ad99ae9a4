"""`soapstone simulate`: the task graph of a plan, or of a model under a named strategy, with its times."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import check_places, console, print_json, progress, rate
from soapstone.cli.problem import COSTS_HELP, MODEL_HELP, JsonOption, Variant, problem, tell
from soapstone.cli.spread import spread
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.choice import bases
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import (
    Plan,
    Prediction,
    Simulation,
    planned,
    read_plan,
    simulation,
    write_plan,
    write_text,
)
from soapstone.report.decisions import pipeline_document, pipeline_text
from soapstone.report.trace import trace_document
from soapstone.search.baselines import BASELINES, baseline
from soapstone.sim.document import tasks_document
from soapstone.sim.outcome import bucketed_s
from soapstone.sim.steady import steady_step_s
from soapstone.strategy.document import read_strategy
from soapstone.strategy.strategy import Strategy

BUSIEST = 4
"""[choice] How many devices and how many links the summary names."""

MOST_DEVICES_LISTED = 16
"""[choice] The most devices whose memory is printed one by one."""


def register(app: typer.Typer) -> None:
    """Add `simulate` to the command line."""
    app.command("simulate")(spread(simulate))


def simulate(  # noqa: PLR0913, a command has a parameter for each option
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A plan file; or else give --model and --machine.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help=MODEL_HELP)] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="NAME, NAME:NODESxDEVICES, or the path of a .yaml file.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help=f"A file of your own, or one of {', '.join(BASELINES)} (default: data_parallel).",
        ),
    ] = None,
    *,
    variant: Variant,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", help="sgd, momentum (default) or adam: what it remembers takes memory."),
    ] = None,
    costs: Annotated[str | None, typer.Option("--costs", help=COSTS_HELP)] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    tasks: Annotated[Path | None, typer.Option("--tasks", help="Write every task here, as JSON.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a timeline here, for ui.perfetto.dev.")
    ] = None,
    buckets: Annotated[
        bool,
        typer.Option("--buckets", help="The tasks with small gradients summed together, as train runs them."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict one training iteration: its time, what moves over which link, and the memory it takes.

    Examples:

        soapstone simulate --model alexnet --machine p100:1x4
        soapstone simulate --model lenet --machine k80:1x4 --strategy mine.yaml -o plan.json
        soapstone simulate plan.json --tasks tasks.json --trace trace.json
        soapstone simulate plan.json --buckets --trace trace.json
    """
    if strategy == "":
        raise typer.BadParameter("--strategy is empty; name a baseline or a file, or leave it out.")
    check_places((output, tasks, trace), (plan, machine, strategy))
    if plan is not None:
        given = {"--model": model, "--machine": machine, "--strategy": strategy}
        given |= {option.partition("=")[0]: option for option in variant.given}
        given |= {"--optimizer": optimizer, "--costs": costs}
        _refuse_beside_plan(given)
        found = _from_plan(plan)
    else:
        request = _Request(
            model,
            machine,
            strategy or "data_parallel",
            variant,
            optimizer or "momentum",
            costs or "auto",
        )
        found = _from_request(request)
    if output is not None:
        write_plan(found.plan, output)
    if buckets:
        found = replace(found, simulation=found.plan.simulated(in_buckets=True))
    if tasks is not None:
        write_text(_json(tasks_document(found.simulation.tasks, found.simulation.timeline)), tasks)
    if trace is not None:
        title = f"{found.plan.graph.name} on {found.plan.machine.name}, {found.strategy_name}"
        simulated = found.simulation
        write_text(
            _json(trace_document(simulated.tasks, simulated.timeline, found.plan.machine, title)), trace
        )
    if as_json:
        print_json(_document(found))
    else:
        _print(found)


@dataclass(frozen=True)
class _Request:
    """What is to be simulated, as a user says it."""

    model: str | None
    machine: str | None
    strategy: str
    variant: Variant
    optimizer: str
    costs: str


@dataclass(frozen=True)
class _Found:
    """A plan, its simulation, and what to call its strategy."""

    plan: Plan
    simulation: Simulation
    strategy_name: str


def _refuse_beside_plan(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(
                f"{option} does not go with a plan file, which has its own; leave it out."
            )


def _from_plan(path: Path) -> _Found:
    plan = read_plan(path)
    with progress(f"simulating {plan.graph.name}"):
        simulated = plan.simulated()
    said, found = _told_apart(plan.prediction, simulated.prediction)
    if said != found:
        why = "it was edited, or another version of Soapstone made it"
        tell([f"{path} says {said}, and simulating it gives {found}: {why}"])
    return _Found(plan, simulated, str(path))


def _told_apart(said: Prediction, found: Prediction) -> tuple[str, str]:
    """The first figure in which two predictions differ; of equal ones, their times."""
    if said.makespan_s == found.makespan_s and said.moved_bytes != found.moved_bytes:
        return (f"{said.moved_bytes:,} bytes over links", f"{found.moved_bytes:,}")
    if said.makespan_s == found.makespan_s and said.memory_bytes != found.memory_bytes:
        return (f"{said.memory_bytes} bytes of memory", f"{found.memory_bytes}")
    times = (said.makespan_s, found.makespan_s)
    short = [SECONDS.short_text(time) for time in times]
    are_apart = times[0] == times[1] or short[0] != short[1]
    first, second = short if are_apart else [f"{time!r} s" for time in times]
    return first, second


def _from_request(request: _Request) -> _Found:
    if request.model is None or request.machine is None:
        raise typer.BadParameter("give a plan file, or both --model and --machine.")
    found = problem(request.model, request.machine, request.variant, request.costs)
    graph, machine, costs = found.graph, found.machine, found.costs
    with progress(f"placing {graph.name}"):
        strategy = _strategy(request.strategy, graph, machine, costs)
    with progress(f"simulating {graph.name}"):
        simulated = simulation(strategy, machine, costs, request.optimizer)
    plan = planned(strategy, machine, simulated, costs, model=found.model, optimizer=request.optimizer)
    return _Found(plan, simulated, request.strategy)


def _strategy(text: str, graph: Graph, machine: Machine, costs: AnalyticCosts) -> Strategy:
    """The strategy of that name, or in that file."""
    if "/" in text or text.lower().endswith((".yaml", ".yml", ".json")):
        read = read_strategy(Path(text), graph, lambda name: baseline(name, graph, machine, costs))
        try:
            return read.checked(machine)
        except StrategyError as error:
            raise StrategyError(f"{text}: {error}") from None
    return baseline(text, graph, machine, costs)


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _document(found: _Found) -> dict[str, Any]:
    plan, simulated = found.plan, found.simulation
    makespan_s = simulated.timeline.makespan_s
    return {
        "model": plan.model,
        "machine": plan.machine.name,
        "strategy": found.strategy_name,
        "pipeline": pipeline_document(found.plan.strategy),
        "samples": plan.graph.sample_count,
        "makespan_s": makespan_s,
        "bucketed_s": bucketed_s(plan.strategy, plan.machine, plan.cost_model),
        "undrained_step_s": steady_step_s(plan.strategy, simulated.tasks),
        "samples_per_s": _samples_per_s(found),
        "tasks": dict(Counter(task.kind.value for task in simulated.tasks.tasks)),
        "moved_bytes": simulated.tasks.moved_bytes,
        "resources": [
            {
                "name": name,
                "busy_s": busy_s,
                "utilisation": busy_s / makespan_s if makespan_s else 0.0,
                "bytes": moved,
            }
            for name, busy_s, moved in _usage(simulated, simulated.tasks.resources)
        ],
        "memory": [
            {
                "device": device.name,
                "peak_bytes": memory.peak_bytes,
                "capacity_bytes": device.kind.memory_bytes,
                "at_s": memory.at_s,
                "parts_bytes": dict(memory.parts),
            }
            for device, memory in zip(plan.machine.devices, simulated.memory, strict=True)
        ],
        "fits": simulated.prediction.fits(plan.machine),
        "costs": plan.costs,
        "costs_basis": _basis(plan),
        "optimizer": plan.optimizer,
    }


def _samples_per_s(found: _Found) -> float | None:
    count, makespan_s = found.plan.graph.sample_count, found.simulation.timeline.makespan_s
    return count / makespan_s if count and makespan_s else None


def _usage(simulated: Simulation, names: Iterable[str]) -> list[tuple[str, float, int]]:
    """For each resource, how long it is busy and how many bytes it moves."""
    busy_s: defaultdict[str, float] = defaultdict(float)
    moved: Counter[str] = Counter()
    for task in simulated.tasks.tasks:
        busy_s[task.resource] += task.duration_s
        moved[task.resource] += task.size_bytes
    return [(name, busy_s[name], moved[name]) for name in names]


def _print(found: _Found) -> None:
    screen = console()
    plan, simulated = found.plan, found.simulation
    screen.print(Text(f"{plan.graph.name} on {plan.machine.name}, strategy {found.strategy_name}"))
    if plan.strategy.pipeline is not None:
        screen.print(Text(pipeline_text(plan.strategy)))
    samples_per_s = _samples_per_s(found)
    samples = f", {rate(samples_per_s)} ({plan.graph.sample_count} a step)" if samples_per_s else ""
    screen.print(Text(f"{SECONDS.short_text(simulated.timeline.makespan_s)} per iteration{samples}"))
    in_buckets_s = bucketed_s(plan.strategy, plan.machine, plan.cost_model)
    screen.print(
        Text(
            f"{SECONDS.short_text(in_buckets_s)} with small gradients summed together, as `soapstone train`"
            " does"
        )
    )
    undrained_s = steady_step_s(plan.strategy, simulated.tasks)
    if undrained_s is not None:
        screen.print(
            Text(
                f"{SECONDS.short_text(undrained_s)} per iteration if steps were not drained, as 2bw's weights"
                " allow; `soapstone train` drains them all the same"
            )
        )
    kinds = Counter(task.kind.value for task in simulated.tasks.tasks)
    counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    screen.print(Text(f"{len(simulated.tasks.tasks):,} tasks: {counted}"))
    screen.print(Text(f"{BYTES.short_text(simulated.tasks.moved_bytes)} moved over links"))
    screen.print(Text(f"compute times: {basis_text(plan)}"))
    screen.print(_usage_table(found))
    screen.print(_memory_table(found))


def _basis(plan: Plan) -> dict[str, int]:
    """How many of the plan's compute times were measured, fitted to measured ones, or are analytic."""
    return {str(basis): count for basis, count in bases(plan.strategy, plan.machine, plan.cost_model).items()}


def basis_text(plan: Plan) -> str:
    """What the plan's compute times rest on, in words."""
    counts = _basis(plan)
    if plan.costs == "analytic":
        return "analytic, none was measured on a device"
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    where = "; ".join(
        f"{kind} with {', '.join(f'{k} {v}' for k, v in profile.software.items())}"
        for kind, profile in plan.profiles.items()
    )
    return f"{told} ({where})"


def _usage_table(found: _Found) -> Table:
    """The busiest devices, and the busiest links."""
    simulated, machine = found.simulation, found.plan.machine
    makespan_s = simulated.timeline.makespan_s
    table = Table("busiest", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("busy", "of the time", "bytes"):
        table.add_column(heading, justify="right")
    for names in ([d.name for d in machine.devices], [link.name for link in machine.links]):
        usage = [row for row in _usage(simulated, names) if row[1] > 0]
        for name, busy_s, moved in sorted(usage, key=lambda row: -row[1])[:BUSIEST]:
            share = f"{busy_s / makespan_s:.1%}"
            table.add_row(
                Text(name), SECONDS.short_text(busy_s), share, BYTES.short_text(moved) if moved else ""
            )
    return table


def _memory_table(found: _Found) -> Table:
    """The peak of every device; of many devices, those that need the most of what they have."""
    table = Table("device", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("peak memory", "of", "full"):
        table.add_column(heading, justify="right")
    table.add_column("made up of")
    pairs = list(zip(found.plan.machine.devices, found.simulation.memory, strict=True))
    if len(pairs) > MOST_DEVICES_LISTED:
        pairs.sort(key=lambda pair: -pair[1].peak_bytes / pair[0].kind.memory_bytes)
    for device, memory in pairs[:MOST_DEVICES_LISTED]:
        full = memory.peak_bytes / device.kind.memory_bytes
        parts = sorted(memory.parts.items(), key=lambda part: -part[1])
        table.add_row(
            Text(device.name),
            BYTES.short_text(memory.peak_bytes),
            BYTES.short_text(device.kind.memory_bytes),
            f"{full:.1%}" if full <= 1 else Text(f"{full:.0%}: does not fit", style="bold red"),
            Text(", ".join(f"{kind} {BYTES.short_text(size)}" for kind, size in parts)),
        )
    return table
