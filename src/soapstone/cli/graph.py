"""`soapstone graph MODEL`: what was captured of a model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import check_place, console, scaled
from soapstone.cli.problem import JsonOption, ModelArgument, Variant, captured_of, tell
from soapstone.cli.spread import spread
from soapstone.graph import printed, to_document
from soapstone.plans import write_text

if TYPE_CHECKING:
    from soapstone.frontends.capture import Captured


def register(app: typer.Typer) -> None:
    """Add `graph` to the command line."""
    app.command("graph")(spread(graph))


def graph(
    model: ModelArgument,
    variant: Variant,
    summary: Annotated[bool, typer.Option("--summary", help="Count operators, list no nodes.")] = False,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the graph to a file instead; .json makes it JSON."),
    ] = None,
) -> None:
    """Print the graph of a model: inputs, weights, and every operator with its shapes.

    Nothing is trained and no weight is loaded; the zoo's and Hugging Face's models are captured
    without memory for their weights. What you should know about how a model was captured, such as
    operators that Soapstone does not know and keeps whole, is said on standard error.

    A file of your own defines a function that returns (module, example_inputs), where the module
    returns its loss; or (module, example_inputs, loss), where the loss is one of the names below or
    a function of (output, target). An argument `batch` of the function is what --batch says.

    Examples:

        soapstone graph lenet
        soapstone graph rnnlm:steps=2 --summary
        soapstone graph hf:./my-model --batch 4 --length 512 --json
        soapstone graph train.py:make_model --loss cross_entropy -o graph.json
    """
    if summary and (as_json or output is not None):
        raise typer.BadParameter("--summary is for reading: leave out --json and --output.")
    if output is not None:
        check_place(output)
    captured = captured_of(model, variant)
    tell(captured.notes)
    if summary:
        _print_summary(captured)
        return
    wants_json = as_json or (output is not None and output.suffix == ".json")
    text = _as_json(captured) if wants_json else f"# {_described(captured)}\n{printed(captured.graph)}"
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(text, output)


def _as_json(captured: Captured) -> str:
    document = {**to_document(captured.graph), "notes": list(captured.notes)}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _described(captured: Captured) -> str:
    graph, notes = captured.graph, len(captured.notes)
    samples = f", {graph.sample_count} samples a step" if graph.sample_count else ""
    said = f", {notes} note{'s' if notes > 1 else ''}" if notes else ""
    return (
        f"{graph.name}: {scaled(graph.parameter_count)} parameters, {len(graph.nodes)} nodes, "
        f"{scaled(graph.forward_flops)}flop forward{samples}{said}"
    )


def _print_summary(captured: Captured) -> None:
    screen, graph = console(), captured.graph
    screen.print(Text(_described(captured)))
    counts = Counter(node.op_name for node in graph.nodes)
    table = Table("operator", box=SIMPLE_HEAD)
    table.add_column("nodes", justify="right")
    table.add_column("flops", justify="right")
    table.add_column("splits (of the first such node)")
    for name, count in counts.most_common():
        nodes = [node for node in graph.nodes if node.op_name == name]
        flops = sum(node.op.flop_count(graph.signature(node)) for node in nodes)
        kinds = ", ".join(f"{dim}: {kind}" for dim, kind in graph.kinds(nodes[0]).items())
        table.add_row(Text(name), str(count), scaled(flops), kinds or "runs whole")
    screen.print(table)
