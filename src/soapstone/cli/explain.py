"""`soapstone explain PLAN [NODE]` and `soapstone diff PLAN PLAN`: why a plan is as it is, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import console, print_json, progress
from soapstone.cli.report import PlanArgument
from soapstone.machine import Machine
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import Plan, read_plan
from soapstone.report.decisions import devices_text, flops
from soapstone.report.difference import Difference, difference
from soapstone.report.explanation import (
    Alternative,
    Explanation,
    Turning,
    alternatives,
    block_named,
    explained,
    parts_tried,
    split_text,
)
from soapstone.report.resimulation import Resimulation

MOST_SHOWN = 10
"""[choice] The most alternatives, moves and changes that are printed for people."""

MOST_BLOCKS = 12
"""[choice] How many blocks are explained when no node is named: those with the most compute."""


def register(app: typer.Typer) -> None:
    """Add `explain` and `diff` to the command line."""
    app.command("explain")(explain)
    app.command("diff")(diff)


def explain(
    plan: PlanArgument,
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="A node or module of the graph (default: the largest)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say why a node is placed as it is: alternatives, each simulated; what moves; what would change it.

    Without a node, the blocks with the most compute are listed with their best alternatives.

    Examples:

        soapstone explain plan.json
        soapstone explain plan.json classifier.1
        soapstone explain plan.json conv2d --json
    """
    found = read_plan(plan)
    if node is None:
        with progress(f"simulating alternatives of {found.graph.name}"):
            rows = _overview(found)
        if as_json:
            print_json({"plan": str(plan), "blocks": rows})
        else:
            _print_overview(found, rows)
        return
    block = block_named(found.strategy, node)
    with progress(f"simulating alternatives of {block.name}"):
        explanation = explained(found, block, found.simulated().tasks)
    if as_json:
        print_json(_document(found, explanation))
    else:
        _print(found, explanation)


def diff(
    first: Annotated[Path, typer.Argument(metavar="PLAN1", help="A plan file.")],
    second: Annotated[Path, typer.Argument(metavar="PLAN2", help="Another plan of the same model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what differs between two plans of one model, and what each difference is worth.

    Examples:

        soapstone diff data_parallel.json found.json
    """
    plans = read_plan(first), read_plan(second)
    with progress("simulating each difference"):
        found = difference(*plans)
    if as_json:
        print_json(_difference_document(found))
    else:
        _print_difference(found, (str(first), str(second)), plans)


# -- explain ----------------------------------------------------------------------------------------


def _overview(plan: Plan) -> list[dict[str, Any]]:
    """The blocks with the most compute, and the best that could be done with each instead."""
    strategy, placements = plan.strategy, plan.strategy.of_one().placements
    ranked = sorted(strategy.blocks, key=lambda block: -flops(plan.graph, block))[:MOST_BLOCKS]
    resimulation = Resimulation(strategy, plan.machine, plan.cost_model)
    rows = []
    for block in sorted(ranked, key=strategy.blocks.index):
        best = next(iter(alternatives(resimulation, block)), None)
        rows.append(
            {
                "block": block.name,
                "scope": block.leader.scope,
                "operator": block.leader.op_name,
                "split": split_text(
                    plan.graph, block, strategy.placements[block.name], strategy.micro_batches
                ),
                "devices": list(placements[block.name].devices),
                "flops": flops(plan.graph, block),
                "makespan_s": resimulation.makespan_s,
                "best_alternative": None if best is None else _alternative_document(best),
            }
        )
    return rows


def _alternative_document(each: Alternative) -> dict[str, Any]:
    return {"split": each.split, "devices": list(each.placement.devices), "makespan_s": each.makespan_s}


def _document(plan: Plan, found: Explanation) -> dict[str, Any]:
    return {
        "block": found.block.name,
        "nodes": [node.name for node in found.block.nodes],
        "scope": found.block.leader.scope,
        "operator": found.block.leader.op_name,
        "machine": plan.machine.name,
        "split": found.split,
        "devices": list(found.placement.devices),
        "makespan_s": found.makespan_s,
        "is_beaten": found.is_beaten,
        "alternatives": [_alternative_document(each) for each in found.alternatives],
        "moves": [
            {
                "what": each.what,
                "role": each.role,
                "kind": each.kind,
                "bytes": each.size_bytes,
                "tasks": each.tasks,
            }
            for each in found.caused
        ],
        "turning_points": [
            {
                "part": turning.part,
                "factor": turning.factor,
                "decided_s": turning.decided_s,
                **_alternative_document(turning.alternative),
            }
            for turning in found.turnings
        ],
    }


def _print_overview(plan: Plan, rows: list[dict[str, Any]]) -> None:
    screen = console()
    total = SECONDS.short_text(rows[0]["makespan_s"]) if rows else "no time"
    screen.print(Text(f"{plan.graph.name} on {plan.machine.name}: {total} per iteration", style="bold"))
    table = Table("block", "operator", "split", "on", "best alternative", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("would take", justify="right")
    table.add_column("difference", justify="right")
    for row in rows:
        best = row["best_alternative"]
        table.add_row(
            Text(row["block"]),
            Text(row["operator"]),
            Text(row["split"]),
            Text(devices_text(row["devices"], plan.machine)),
            Text("" if best is None else f"{best['split']} on {devices_text(best['devices'], plan.machine)}"),
            "" if best is None else SECONDS.short_text(best["makespan_s"]),
            "" if best is None else _change(best["makespan_s"], row["makespan_s"]),
        )
    screen.print(table)
    left = len(plan.strategy.blocks) - len(rows)
    rest = f" {left} blocks with less compute are not listed." if left else ""
    screen.print(Text(f"All others stay as decided in each simulation.{rest} Name one to read more."))


def _change(other_s: float, own_s: float) -> str:
    return f"{other_s / own_s - 1:+.2%}" if own_s else ""


def _print(plan: Plan, found: Explanation) -> None:
    screen, machine, leader = console(), plan.machine, found.block.leader
    module = f" (module {leader.scope})" if leader.scope else ""
    screen.print(Text(f"{found.block.name}: {leader.op_name}{module}", style="bold"))
    followers = ", ".join(node.name for node in found.block.followers)
    if followers:
        screen.print(Text(f"together with {followers}"))
    where = devices_text(found.placement.devices, machine)
    screen.print(
        Text(f"decided: {found.split} on {where}; {SECONDS.short_text(found.makespan_s)} per iteration")
    )
    _print_alternatives(screen, found, machine)
    _print_moves(screen, found)
    if found.is_beaten:
        screen.print(Text("The first alternative is faster on the machine as it is.", style="bold"))
        return
    screen.print(Text("What would have to change for another choice to win:", style="bold"))
    for turning in found.turnings:
        screen.print(Text(f"  {_turning(turning, machine)}"))
    tried = {(turning.part, turning.factor > 1) for turning in found.turnings}
    for part in parts_tried(plan):
        for faster, word in ((True, "faster"), (False, "slower")):
            if (part, faster) not in tried:
                screen.print(Text(f"  {part} up to 64 times {word} change nothing"))


def _turning(turning: Turning, machine: Machine) -> str:
    other = turning.alternative
    times = (
        f"{turning.factor:.3g} times as fast"
        if turning.factor > 1
        else f"{1 / turning.factor:.3g} times slower"
    )
    where = devices_text(other.placement.devices, machine)
    return (
        f"with {turning.part} {times}: {other.split} on {where}, "
        f"{SECONDS.short_text(other.makespan_s)} instead of {SECONDS.short_text(turning.decided_s)}"
    )


def _print_alternatives(screen: Console, found: Explanation, machine: Machine) -> None:
    table = Table("alternative", "on", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("would take", "difference"):
        table.add_column(heading, justify="right")
    for each in found.alternatives[:MOST_SHOWN]:
        table.add_row(
            Text(each.split),
            Text(devices_text(each.placement.devices, machine)),
            SECONDS.short_text(each.makespan_s),
            _change(each.makespan_s, found.makespan_s),
        )
    screen.print(table)
    left = len(found.alternatives) - MOST_SHOWN
    if left > 0:
        screen.print(Text(f"{left} slower alternatives were simulated: --json lists them\n"))


def _print_moves(screen: Console, found: Explanation) -> None:
    if not found.caused:
        screen.print(Text("Its placement moves nothing between devices.\n"))
        return
    table = Table("moves because of it", "for", "as", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("bytes", "tasks"):
        table.add_column(heading, justify="right")
    for each in found.caused[:MOST_SHOWN]:
        table.add_row(
            Text(each.what), each.role, each.kind, BYTES.short_text(each.size_bytes), f"{each.tasks:,}"
        )
    screen.print(table)


# -- diff -------------------------------------------------------------------------------------------


def _difference_document(found: Difference) -> dict[str, Any]:
    return {
        "machine": found.machine.name,
        "first_s": found.first_s,
        "second_s": found.second_s,
        "same_blocks": found.same_blocks,
        "changes": [
            {
                "layer": change.layer,
                "blocks": change.blocks,
                "first": {"split": change.first_split, "devices": list(change.first_devices)},
                "second": {"split": change.second_split, "devices": list(change.second_devices)},
                "alone_s": change.alone_s,
                "gain_alone_s": found.first_s - change.alone_s,
                "without_s": change.without_s,
                "loss_without_s": change.without_s - found.second_s,
            }
            for change in found.changes
        ],
    }


def _print_difference(found: Difference, names: tuple[str, str], plans: tuple[Plan, Plan]) -> None:
    screen, machine = console(), found.machine
    for name, seconds in zip(names, (found.first_s, found.second_s), strict=True):
        screen.print(Text(f"{name}: {SECONDS.short_text(seconds)} per iteration on {machine.name}"))
    if plans[0].machine != plans[1].machine:
        screen.print(Text(f"the second is for {plans[1].machine.name}; both are simulated on {machine.name}"))
    if not found.changes:
        screen.print(Text("Every block is placed alike."))
        return
    table = Table("layer", "first plan", "second plan", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("first plan with it", "second plan without it"):
        table.add_column(heading, justify="right")
    for change in found.changes:
        count = f" ({change.blocks} blocks)" if change.blocks > 1 else ""
        table.add_row(
            Text(f"{change.layer}{count}"),
            Text(f"{change.first_split} on {devices_text(change.first_devices, machine)}"),
            Text(f"{change.second_split} on {devices_text(change.second_devices, machine)}"),
            f"{SECONDS.short_text(change.alone_s)} ({_change(change.alone_s, found.first_s)})",
            f"{SECONDS.short_text(change.without_s)} ({_change(change.without_s, found.second_s)})",
        )
    screen.print(table)
    screen.print(Text(f"{found.same_blocks} blocks are placed alike."))
