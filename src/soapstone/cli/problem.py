"""What is to be planned, as a user says it: a model captured, and the machine it is to run on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from soapstone.cli.output import progress
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.choice import costs_for
from soapstone.graph import Graph
from soapstone.machine import Machine, resolve

if TYPE_CHECKING:
    from soapstone.frontends.capture import Captured

MODEL_HELP = "A model of the zoo (NAME or NAME:option=value,...), hf:CONFIG, or path/to/file.py:function."
COSTS_HELP = "measured, analytic, or auto (default): measured where a profile of the device is known."


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
MachineOption = Annotated[
    str, typer.Option("--machine", help="NAME, NAME:NODESxDEVICES, or the path of a .yaml file.")
]
CostsOption = Annotated[str, typer.Option("--costs", help=COSTS_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True)
class Variant:
    """Which variant of a model is meant: the options of every command that captures one."""

    tiny: Annotated[bool, typer.Option("--tiny", help="The zoo's small variant.")] = False
    batch: Annotated[
        int | None,
        typer.Option("--batch", help="Samples of one step (default: the model's own for each device)."),
    ] = None
    length: Annotated[
        int | None, typer.Option("--length", help="Tokens per sample (Hugging Face models).")
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="Add a loss to the output: cross_entropy, nll, mse, l1, smooth_l1 or bce_with_logits.",
        ),
    ] = None
    batch_norm: Annotated[
        str | None,
        typer.Option(
            "--batch-norm",
            help="whole (default): statistics of the whole batch; local: of each shard's own, as DDP does.",
        ),
    ] = None

    def named(self, model: str) -> str:
        """MODEL with all but the batch in it, so that a plan's model can be captured again."""
        from soapstone.frontends.source import with_options

        return with_options(
            model, tiny=self.tiny, length=self.length, loss=self.loss, batch_norm=self.batch_norm
        )

    @property
    def given(self) -> list[str]:
        """The options again, for another process."""
        said = {
            "--batch": self.batch,
            "--length": self.length,
            "--loss": self.loss,
            "--batch-norm": self.batch_norm,
        }
        options = [f"{option}={value}" for option, value in said.items() if value is not None]
        return [*options, *(["--tiny"] if self.tiny else [])]


@dataclass(frozen=True)
class Problem:
    """A graph, a machine, and what compute takes on it. `model` is how a plan names the model, so that it can
    be captured again."""

    graph: Graph
    machine: Machine
    model: str
    costs: AnalyticCosts


def problem(model: str, machine: str, variant: Variant, costs: str = "auto") -> Problem:
    """The problem; what is to be said about the capture goes to standard error."""
    found = resolve(machine)
    captured = captured_of(model, variant, len(found.devices))
    tell(captured.notes)
    named = variant.named(model)
    return Problem(captured.graph, found, named, costs_for(found, costs, graph=captured.graph))


def tell(notes: Iterable[str]) -> None:
    """Say on standard error what a user should know."""
    for note in notes:
        print(f"soapstone: note: {note}", file=sys.stderr)


def captured_of(model: str, variant: Variant, devices: int = 1) -> Captured:
    """The model captured. Standard output is for results: what a person's own code prints while it is traced
    goes elsewhere."""
    with progress(f"capturing {model}"), redirect_stdout(sys.stderr):
        from soapstone.frontends.source import load

        return load(variant.named(model), batch=variant.batch, devices=devices).captured()
