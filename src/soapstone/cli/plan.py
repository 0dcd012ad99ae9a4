"""`soapstone plan MODEL`: search for a fast way to split a model over a machine, and say what was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from soapstone.cli.footprints import footprints
from soapstone.cli.output import check_places, console, print_json, progress, rate
from soapstone.cli.problem import (
    CostsOption,
    JsonOption,
    MachineOption,
    ModelArgument,
    Problem,
    Variant,
    problem,
)
from soapstone.cli.searching import Searching, searched
from soapstone.cli.simulate import basis_text
from soapstone.cli.spread import spread
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import Plan, write_plan
from soapstone.report.decisions import Row, foremost, pipeline_document, pipeline_text, rows
from soapstone.report.figures import ALIKE, Figures, figures, is_alike, reasons
from soapstone.search.baselines import applicable, baseline
from soapstone.search.find import OF_ALL, Options, Settled, WhyInstead, settled
from soapstone.search.mcmc import EXPERTS
from soapstone.search.report import SearchReport, StartReport
from soapstone.sim.outcome import outcome
from soapstone.strategy.strategy import Strategy

MOST_ROWS = 24
"""[choice] The most rows of decisions that are printed without being asked for."""

MOST_WAYS = 2
"""[choice] The most rows of one layer, without being asked for more."""


def register(app: typer.Typer) -> None:
    """Add `plan` to the command line."""
    app.command("plan")(spread(plan))


def plan(
    model: ModelArgument,
    machine: MachineOption,
    variant: Variant,
    searching: Searching,
    costs: CostsOption = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    every_layer: Annotated[
        bool, typer.Option("--all", help="Print every decision, however many there are.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Search for the fastest way to split a model over a machine's devices.

    Ctrl-C ends the search; the best plan so far is printed and written all the same.

    Examples:

        soapstone plan alexnet --machine p100:1x4 -o plan.json
        soapstone plan nmt --machine k80:4x4 --budget 2m --seed 1
        soapstone plan gpt2 --machine p100:1x4 --micro-batches 8 -o plan.json
        soapstone plan train.py:make_model --machine cluster.yaml --proposals 5000 --json
    """
    check_places([output], (machine, model.partition(":")[0]))
    options = searching.options()
    given = problem(model, machine, variant, costs)
    report = searched(given, options)
    with progress(f"simulating {given.graph.name}"):
        taken = settled(report, given.machine, given.costs, given.model, options)
        if output is not None:
            write_plan(taken.plan, output)
        own = figures(outcome(taken.plan.strategy, given.machine, given.costs))
        rivals, too_large = _rivals(given, options, taken.plan.strategy, own)
        found = _Found(taken, report, own, rivals, too_large)
    if as_json:
        print_json(_document(found, output))
    else:
        _print(found, output, None if every_layer else MOST_ROWS)


@dataclass(frozen=True)
class _Found:
    """A plan, how it was found, its figures, and those of data parallelism and of the experts' strategies;
    `too_large` are those of them that would hardly fit in memory."""

    outcome: Settled
    report: SearchReport
    figures: Figures
    rivals: Mapping[str, Figures]
    too_large: frozenset[str]

    @property
    def plan(self) -> Plan:
        return self.outcome.plan

    @property
    def expert(self) -> str | None:
        """The fastest of the experts' strategies that apply."""
        experts = [name for name in self.rivals if name in EXPERTS]
        return min(experts, key=lambda name: self.rivals[name].makespan_s, default=None)

    def speedup(self, name: str) -> float:
        """How many times as fast as a rival the plan is."""
        return speedup(self.figures, self.rivals[name])


def speedup(own: Figures, other: Figures) -> float:
    """How many times as fast as another strategy one is; 1 where neither takes any time."""
    return other.makespan_s / own.makespan_s if own.makespan_s else 1.0


def _rivals(
    given: Problem, options: Options, chosen: Strategy, own: Figures
) -> tuple[dict[str, Figures], frozenset[str]]:
    """Figures of data parallelism and of the experts' strategies, and those that need too much memory. What
    was chosen, and its figures, may be one of them."""
    graph, machine, costs = given.graph, given.machine, given.costs
    names = [each.name for each in applicable(graph, machine) if each.name in ("data_parallel", *EXPERTS)]
    strategies = {name: baseline(name, graph, machine, costs, options.seed) for name in names}
    found = {
        name: own if strategy == chosen else figures(outcome(strategy, machine, costs))
        for name, strategy in strategies.items()
    }
    needs = footprints(strategies, graph, machine, costs, options.optimizer)
    too_large = frozenset(name for name, need in needs.items() if not need.fits)
    return found, too_large


# -- for programs -----------------------------------------------------------------------------------


def _document(found: _Found, output: Path | None) -> dict[str, Any]:
    plan = found.plan
    return {
        "model": plan.model,
        "machine": plan.machine.name,
        "samples": plan.graph.sample_count,
        "samples_per_s": plan.samples_per_s,
        **figures_document(found.figures),
        "fits": plan.prediction.fits(plan.machine),
        "memory": [
            {"device": device.name, "peak_bytes": peak, "capacity_bytes": device.kind.memory_bytes}
            for device, peak in zip(plan.machine.devices, plan.prediction.memory_bytes, strict=True)
        ],
        "costs": plan.costs,
        "optimizer": plan.optimizer,
        "pipeline": pipeline_document(plan.strategy),
        "baselines": {
            name: {
                **figures_document(rival),
                "speedup": found.speedup(name),
                "seems_to_fit": name not in found.too_large,
            }
            for name, rival in found.rivals.items()
        },
        "decisions": [_row_document(row) for row in rows(plan.strategy)],
        "reasons": list(reasons(found.figures, found.rivals["data_parallel"])),
        "search": dict(plan.search or {}),
        "output": None if output is None else str(output),
    }


def figures_document(own: Figures) -> dict[str, Any]:
    """The figures of a strategy, as JSON has them."""
    return {
        "makespan_s": own.makespan_s,
        "bucketed_s": own.bucketed_s,
        "moved_bytes": own.moved_bytes,
        "gradient_bytes": own.gradient_bytes,
        "activation_bytes": own.activation_bytes,
        "compute_s": own.compute_s,
        "busiest_device_s": own.busiest_s,
        "waiting_s": own.waiting_s,
    }


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "layers": list(row.layers),
        "operators": list(row.operators),
        "blocks": row.blocks,
        "of_blocks": row.of_blocks,
        "split": [{"kind": cut.kind.value, "dims": list(cut.dims), "degree": cut.degree} for cut in row.cuts],
        "copies": row.copies,
        "devices": list(row.devices.union),
        "devices_each": row.devices.each,
        "flops_share": row.flops_share,
        "parameters_share": row.parameters_share,
    }


# -- for people -------------------------------------------------------------------------------------


def _print(found: _Found, output: Path | None, most_rows: int | None) -> None:
    screen = console()
    _print_verdict(screen, found)
    _print_decisions(screen, found, most_rows)
    _print_reasons(screen, found)
    _print_search(screen, found)
    if output is not None:
        screen.print(Text(f"\nwritten to {output}"))


def _print_verdict(screen: Console, found: _Found) -> None:
    plan = found.plan
    samples_per_s = plan.samples_per_s
    samples = f", {rate(samples_per_s)} ({plan.graph.sample_count} a step)" if samples_per_s else ""
    time = f"{SECONDS.short_text(plan.prediction.makespan_s)} per iteration{samples}"
    screen.print(Text(f"{plan.graph.name} on {plan.machine.name}: {time}", style="bold"))
    if plan.strategy.pipeline is not None:
        screen.print(Text(pipeline_text(plan.strategy)))
    for name in filter(None, ("data_parallel", found.expert)):
        screen.print(Text(_compared(found, name)))
    screen.print(_memory(found))
    screen.print(Text(_in_buckets(found)))
    screen.print(Text(f"compute times: {basis_text(plan)}"))


def _compared(found: _Found, name: str) -> str:
    """The plan against a rival, in a sentence."""
    rival = found.rivals[name]
    what = "data parallelism" if name == "data_parallel" else f"{name}, the best expert's strategy"
    takes = SECONDS.short_text(rival.makespan_s)
    if name in found.too_large:
        takes = f"{takes}, but more memory than there is"
    if is_alike(found.figures.makespan_s, rival.makespan_s):
        return f"as fast as {what} ({takes})"
    if found.speedup(name) < 1:
        return f"{1 / found.speedup(name):.3g} times as slow as {what} ({takes})"
    return f"{found.speedup(name):.3g} times as fast as {what} ({takes})"


def _in_buckets(found: _Found) -> str:
    """The time with small gradients summed together, beside data parallelism's."""
    own_s, rival_s = found.figures.bucketed_s, found.rivals["data_parallel"].bucketed_s
    told = f"{SECONDS.short_text(own_s)} with small gradients summed together, as `soapstone train` does"
    if found.outcome.why is WhyInstead.BUCKETS:
        told += f"; the search, which leaves that out, found a slower one: this is {found.outcome.instead}"
    return f"{told} (data parallelism {SECONDS.short_text(rival_s)})"


def _memory(found: _Found) -> Text:
    """Whether it fits, and how nearly."""
    plan = found.plan
    pairs = zip(plan.machine.devices, plan.prediction.memory_bytes, strict=True)
    device, peak = max(pairs, key=lambda pair: pair[1] / pair[0].kind.memory_bytes)
    needs = f"{BYTES.short_text(peak)} of {BYTES.short_text(device.kind.memory_bytes)} on {device.name}"
    if not plan.prediction.fits(plan.machine):
        return Text(f"DOES NOT FIT in memory: {needs}; nor does anything else tried", style="bold red")
    if found.outcome.why is WhyInstead.MEMORY:
        slower = SECONDS.short_text(found.report.makespan_s)
        return Text(
            f"fits in memory: at most {needs}. The search found {slower}, which does not fit: this is "
            f"{found.outcome.instead}"
            f"{'' if found.outcome.instead == OF_ALL else ', the fastest tried that does'}",
            style="bold yellow",
        )
    return Text(f"fits in memory: at most {needs}")


def _print_decisions(screen: Console, found: _Found, most_rows: int | None) -> None:
    machine = found.plan.machine
    every = rows(found.plan.strategy, None if most_rows is None else MOST_WAYS)
    shown = every if most_rows is None else foremost(every, most_rows)
    table = Table("layers", "operator", "split", "on", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("parameters", "compute"):
        table.add_column(heading, justify="right")
    for row in shown:
        table.add_row(
            Text(row.name),
            Text(_operators(row)),
            Text(row.split),
            Text(row.devices.text(machine)),
            f"{row.parameters_share:.1%}",
            f"{row.flops_share:.1%}",
        )
    screen.print(table)
    if len(shown) < len(every):
        rest = sum(row.flops_share for row in every) - sum(row.flops_share for row in shown)
        left = len(every) - len(shown)
        screen.print(
            Text(f"{left} further rows with {max(0.0, rest):.1%} of the compute: --all prints them\n")
        )


def _operators(row: Row) -> str:
    if len(row.operators) <= 2:
        return ", ".join(row.operators)
    return f"{row.operators[0]}, … ({len(row.operators)} sorts)"


def _print_reasons(screen: Console, found: _Found) -> None:
    own, rival = found.figures, found.rivals["data_parallel"]
    if is_alike(own.makespan_s, rival.makespan_s):
        screen.print(
            Text(f"Nothing more than {ALIKE:.1%} faster than data parallelism was found.", style="bold")
        )
    else:
        outcome = "slower" if own.makespan_s > rival.makespan_s else "faster"
        screen.print(Text(f"Why it is {outcome} than data parallelism:", style="bold"))
    if own != rival:
        for sentence in reasons(own, rival):
            screen.print(_indented(sentence))


def _print_search(screen: Console, found: _Found) -> None:
    report = found.outcome.report
    screen.print()
    screen.print(Text("How it was found:", style="bold"))
    took = SECONDS.short_text(report.elapsed_s)
    screen.print(_indented(f"{report.method}, seed {report.seed}: {_counted(report)}, {took}; {report.stop}"))
    if report.rewrites:
        used = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in Counter(report.rewrites).items())
        screen.print(
            _indented(f"The graph was rewritten by {used}; `soapstone rules show NAME` shows a rule.")
        )
    if report.is_optimal:
        screen.print(_indented("It is proved that nothing faster exists, copies of shards apart."))
    elif report.gap is not None and report.lower_bound_s is not None:
        bound = SECONDS.short_text(report.lower_bound_s)
        more = f"{report.gap:.1%} above" if report.gap < 1 else f"{report.gap + 1:.1f} times"
        screen.print(_indented(f"It is at most {more} the optimum (lower bound {bound})."))
    if report.starts:
        screen.print(_starts_table(report.starts))


def _counted(report: SearchReport) -> str:
    """How many proposals there were. Of starts that were interrupted only the improvements are known."""
    if not report.starts:
        return f"{report.curve[-1].proposals if report.curve else 0:,} proposals or more"
    return f"{report.proposals:,} proposals, {report.accepted / max(1, report.proposals):.1%} accepted"


def _indented(sentence: str) -> Padding:
    """A line that stays indented where a terminal wraps it."""
    return Padding(Text(sentence), (0, 0, 0, 2), expand=False)


def _starts_table(starts: tuple[StartReport, ...]) -> Table:
    """What came of each start. The rounds of chains that went on from the best so far are one row, and so
    are the pipelines that were tried."""
    table = Table("start", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("at first", "at best", "proposals"):
        table.add_column(heading, justify="right")
    for sort, group in groupby(starts, key=lambda start: _sort(start.name)):
        chains = list(group)
        name = chains[0].name if len(chains) == 1 else f"{len(chains)} {sort}"
        first, best = chains[0].first_s, min(chain.best_s for chain in chains)
        count = sum(chain.proposals for chain in chains)
        table.add_row(Text(name), SECONDS.short_text(first), SECONDS.short_text(best), f"{count:,}")
    return table


def _sort(name: str) -> str:
    """What starts of this name are called together; others have names of their own."""
    if name.startswith("round "):
        return "chains (rounds)"
    return "pipelines" if " stages, " in name else name
