"""`soapstone graph MODEL`: what was captured of a model."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from soapstone.cli.output import console, print_json, progress, scaled
from soapstone.graph import Graph, printed, to_document

if TYPE_CHECKING:
    from soapstone.frontends.capture import Captured

MODEL_HELP = "A model of the zoo (NAME or NAME:option=value,...), hf:CONFIG, or path/to/file.py:function."


def register(app: typer.Typer) -> None:
    """Add `graph` to the command line."""
    app.command("graph")(graph)


def graph(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    tiny: Annotated[bool, typer.Option("--tiny", help="The zoo's small variant.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", help="Samples of one step.")] = None,
    length: Annotated[
        int | None, typer.Option("--length", help="Tokens per sample (Hugging Face models).")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="Add a loss to the output: cross_entropy, nll, mse, l1, smooth_l1 or bce_with_logits.",
        ),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Count operators, list no nodes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the graph of a model: inputs, weights, and every operator with its shapes.

    Nothing is trained and no weight is loaded; the zoo's and Hugging Face's models are captured
    without memory for their weights. Operators that Soapstone does not know are kept whole and
    named on standard error.

    Examples:

        soapstone graph lenet
        soapstone graph rnnlm:steps=2 --summary
        soapstone graph hf:./my-model --batch 4 --length 512 --json
        soapstone graph train.py:make_model --loss cross_entropy
    """
    captured = _captured(model, tiny, batch, length, loss)
    for note in captured.notes:
        print(f"soapstone: note: {note}", file=sys.stderr)
    if as_json:
        print_json(to_document(captured.graph))
    elif summary:
        _print_summary(captured.graph)
    else:
        sys.stdout.write(_header(captured.graph) + printed(captured.graph))


def _captured(model: str, tiny: bool, batch: int | None, length: int | None, loss: str | None) -> Captured:
    with progress(f"capturing {model}"):
        from soapstone.frontends.source import load

        return load(model, tiny=tiny, batch=batch, length=length, loss=loss).captured()


def _header(graph: Graph) -> str:
    samples = f", {graph.sample_count} samples a step" if graph.sample_count else ""
    return (
        f"# {graph.name}: {scaled(graph.parameter_count)} parameters, {len(graph.nodes)} nodes, "
        f"{scaled(graph.forward_flops)}flop forward{samples}\n"
    )


def _print_summary(graph: Graph) -> None:
    screen = console()
    screen.print(_header(graph)[2:].rstrip())
    counts = Counter(node.op_name for node in graph.nodes)
    table = Table("operator", box=SIMPLE_HEAD)
    table.add_column("nodes", justify="right")
    table.add_column("flops", justify="right")
    table.add_column("splits (of the first such node)")
    for name, count in counts.most_common():
        nodes = [node for node in graph.nodes if node.op_name == name]
        flops = sum(node.op.flop_count(graph.signature(node)) for node in nodes)
        kinds = ", ".join(f"{dim}: {kind}" for dim, kind in graph.kinds(nodes[0]).items())
        table.add_row(name, str(count), scaled(flops), kinds or "runs whole")
    screen.print(table)
