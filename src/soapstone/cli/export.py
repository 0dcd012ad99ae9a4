"""`soapstone export PLAN --to FORM`: a plan in the form of another tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from soapstone.cli.output import check_places, console, print_json, progress
from soapstone.cli.report import PlanArgument
from soapstone.errors import PlanError
from soapstone.machine.checks import did_you_mean
from soapstone.plans import Plan, read_plan, write_text
from soapstone.report.dot import graph_dot, tasks_dot
from soapstone.report.dtensor import script
from soapstone.report.svg import strategy_svg
from soapstone.report.trace import trace_document


def register(app: typer.Typer) -> None:
    """Add `export` to the command line."""
    app.command("export")(export)


def _title(plan: Plan) -> str:
    return f"{plan.graph.name} on {plan.machine.name}"


def _perfetto(plan: Plan) -> str:
    simulated = plan.simulated()
    document = trace_document(simulated.tasks, simulated.timeline, plan.machine, _title(plan))
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


FORMS: Mapping[str, Callable[[Plan], str]] = MappingProxyType(
    {
        "dtensor": script,
        "svg": strategy_svg,
        "dot": graph_dot,
        "tasks-dot": lambda plan: tasks_dot(plan.simulated(), _title(plan)),
        "perfetto": _perfetto,
    }
)
"""What a plan can be written as, by name."""


def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option("--to", help=f"One of {', '.join(FORMS)}.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it here (default: standard output).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document about what was written; needs -o.")
    ] = False,
) -> None:
    """Write a plan as a script for plain PyTorch, as a picture, for Graphviz or for ui.perfetto.dev.

    A plan that DTensor has no layouts for is refused with the nodes that stand in the way.

    Examples:

        soapstone export plan.json --to dtensor -o parallel.py
        soapstone export plan.json --to dot | dot -Tsvg > plan.svg
        soapstone export plan.json --to perfetto -o trace.json
    """
    if to not in FORMS:
        raise PlanError(f"a plan cannot be exported to {to!r}{did_you_mean(to, FORMS)}")
    if as_json and output is None:
        raise typer.BadParameter("--json needs -o: standard output cannot hold both.")
    check_places([output], [plan])
    found = read_plan(plan)
    with progress(f"exporting {found.graph.name}"):
        text = FORMS[to](found)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(text, output)
    if as_json:
        print_json({"plan": str(plan), "to": to, "output": str(output), "size_bytes": len(text.encode())})
    else:
        console().print(f"written to {output}", markup=False, soft_wrap=True)
