"""What is to be planned, as a user says it: a model captured, and the machine it is to run on."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from soapstone.cli.output import progress
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.choice import costs_for
from soapstone.graph import Graph
from soapstone.machine import Machine, resolve

COSTS_HELP = "measured, analytic, or auto (default): measured where a profile of the device is known."


@dataclass(frozen=True)
class Problem:
    """A graph, a machine, and what compute takes on it. `model` is how a plan names the model, so that it can
    be captured again."""

    graph: Graph
    machine: Machine
    model: str
    costs: AnalyticCosts


def problem(model: str, machine: str, *, tiny: bool, batch: int | None, costs: str = "auto") -> Problem:
    """The problem; what is to be said about the capture goes to standard error."""
    found = resolve(machine)
    # Standard output is for results: what a person's own code prints while it is traced goes elsewhere.
    with progress(f"capturing {model}"), redirect_stdout(sys.stderr):
        from soapstone.frontends.source import load

        captured = load(model, tiny=tiny, batch=batch, devices=len(found.devices)).captured()
    for note in captured.notes:
        print(f"soapstone: note: {note}", file=sys.stderr)
    named = f"{model}{',' if ':' in model else ':'}tiny" if tiny else model
    return Problem(captured.graph, found, named, costs_for(found, costs, graph=captured.graph))
