"""`soapstone report PLAN`: a plan as one HTML page that anyone can open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.output import ShowProgress, check_places, console, print_json, progress
from soapstone.machine import Machine
from soapstone.machine.units import BYTES
from soapstone.plans import Plan, read_plan, write_text
from soapstone.report.figures import Figures, figures
from soapstone.report.page import Rival, page, read_actual
from soapstone.search.baselines import applicable, baseline
from soapstone.search.find import RESORTS
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.sim.outcome import Outcome, outcome
from soapstone.strategy.strategy import Strategy

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as `plan -o` or `simulate -o` writes it.")
]


def register(app: typer.Typer) -> None:
    """Add `report` to the command line."""
    app.command("report")(report)


def report(
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the page here.")] = Path(
        "report.html"
    ),
    actual: Annotated[
        Path | None, typer.Option("--actual", help="A real step's timeline, as `train --trace` writes it.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Compare with the baselines that apply.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a plan on one page: verdict, strategy, timeline, bytes, memory and search.

    The page is a single file that needs no network.

    Examples:

        soapstone report plan.json -o report.html
        soapstone train plan.json --trace actual.json; soapstone report plan.json --actual actual.json
    """
    check_places([output], (plan, actual))
    found = read_plan(plan)
    with progress(f"simulating {found.graph.name}") as show:
        simulated = found.simulated()
        real = None if actual is None else read_actual(actual, simulated.tasks)
        rivals = _rivals(found, show) if baselines else []
        text = page(found, simulated, _figures(found.strategy, found), rivals, real)
    write_text(text, output)
    size_bytes = len(text.encode("utf-8"))
    if as_json:
        print_json(
            {
                "plan": str(plan),
                "output": str(output),
                "size_bytes": size_bytes,
                "tasks": len(simulated.tasks.tasks),
                "makespan_s": simulated.timeline.makespan_s,
                "actual_makespan_s": None if real is None else real.makespan_s,
                "baselines": {rival.name: rival.figures.makespan_s for rival in rivals},
                "baselines_that_do_not_fit": [rival.name for rival in rivals if rival.fits is False],
            }
        )
    else:
        tasks = f"{len(simulated.tasks.tasks):,} tasks"
        console().print(
            f"written to {output} ({BYTES.short_text(size_bytes)}, {tasks}): open it in a browser",
            markup=False,
            soft_wrap=True,
        )


def _rivals(plan: Plan, show: ShowProgress) -> list[Rival]:
    """The baselines that apply, simulated."""
    rivals: list[Rival] = []
    for each in applicable(plan.graph, plan.machine):
        if each.name in RESORTS:
            show(len(rivals), each.name)
            strategy = baseline(each.name, plan.graph, plan.machine, plan.cost_model)
            taken = outcome(strategy, plan.machine, plan.cost_model, STATES_PER_WEIGHT[plan.optimizer])
            rivals.append(_rival(each.name, each.summary, taken, plan.machine))
    return rivals


def _rival(name: str, summary: str, taken: Outcome, machine: Machine) -> Rival:
    """A baseline with the peak of the device that it fills most."""
    pairs = [
        (memory.peak_bytes, device.kind.memory_bytes)
        for memory, device in zip(taken.memory, machine.devices, strict=True)
    ]
    peak, capacity = max(pairs, key=lambda pair: pair[0] / pair[1])
    return Rival(name, summary, figures(taken), peak, peak <= capacity)


def _figures(strategy: Strategy, plan: Plan) -> Figures:
    return figures(outcome(strategy, plan.machine, plan.cost_model))
