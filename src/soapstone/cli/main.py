"""The `soapstone` command: every sub-command registered in one app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from soapstone import __version__
from soapstone.cli import (
    compare,
    detect,
    explain,
    export,
    graph,
    machines,
    models,
    plan,
    profile,
    recommend,
    report,
    rules,
    simulate,
    train,
    validate,
)
from soapstone.cli.outcome import exit_code
from soapstone.machine.heap import tell_allocators

DESCRIPTION = """
Decide how to split a deep-learning model over many devices, and train it that way.

Examples:

    soapstone models                      the models that are built in
    soapstone graph lenet --tiny          what was captured of one of them
    soapstone machine show p100:4x4       a cluster: devices, links, routes
    soapstone machine detect              this computer: what its ranks compute and send
    soapstone profile lenet               measure a model's operators on this computer
    soapstone plan nmt --machine k80:4x4  the fastest way to split it that a search finds
    soapstone compare nmt --machine k80   every baseline beside what is found
    soapstone recommend nmt --machine k80 on how many devices it fits, and how fast
    soapstone simulate plan.json          one training iteration: time, traffic, memory
    soapstone report plan.json            a plan as a page to look at
    soapstone explain plan.json fc1       why a layer is placed as it is
    soapstone diff one.json two.json      what differs, and what it is worth
    soapstone validate lenet --machine M  predictions held against real runs
    soapstone train plan.json             train it, one process for each device
    soapstone rules list                  substitutions, found and proved
"""

app = typer.Typer(
    name="soapstone",
    help=DESCRIPTION,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    models,
    graph,
    machines,
    detect,
    profile,
    plan,
    compare,
    recommend,
    simulate,
    report,
    explain,
    export,
    train,
    validate,
    rules,
):
    command.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soapstone {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (those of the process by default) and return its exit code."""
    tell_allocators()  # before a command loads torch
    return exit_code(lambda: app(arguments, prog_name="soapstone", standalone_mode=False))
