"""`soapstone models`: what is built in."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from soapstone.cli.output import console, print_json, scaled
from soapstone.frontends.summary import summaries

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(app: typer.Typer) -> None:
    """Add `models` to the command line."""
    app.command("models")(models)


def models(as_json: JsonOption = False) -> None:
    """List the models that are built in, at their published sizes.

    Flops are those of one forward pass for one sample; a training step takes about three times as
    many. Every model has a tiny variant for trying things out: NAME:tiny.

    Examples:

        soapstone models
        soapstone models --json
        soapstone graph nmt:steps=3
    """
    found = summaries()
    if as_json:
        print_json({"models": [asdict(entry) for entry in found]})
        return
    table = Table("model", box=SIMPLE_HEAD)
    for heading in ("parameters", "nodes", "flops/sample", "batch/device"):
        table.add_column(heading, justify="right")
    table.add_column("what it is")
    for entry in found:
        table.add_row(
            entry.name,
            scaled(entry.parameters),
            f"{entry.nodes:,}",
            scaled(entry.flops_per_sample),
            str(entry.batch_per_device),
            entry.description,
        )
    console().print(table)
