"""`soapstone plan MODEL`: search for a fast way to split a model over a machine, and say what was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from soapstone.machine import Device, Machine
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import Plan, Prediction, write_plan
from soapstone.report.decisions import Row, foremost, pipeline_document, pipeline_text, rows
from soapstone.report.figures import ALIKE, Figures, as_trained, figures, is_alike, reasons
from soapstone.search.baselines import applicable, baseline
from soapstone.search.baselines.simple import uneven
from soapstone.search.find import OF_ALL, Options, Settled, WhyInstead, settled
from soapstone.search.mcmc import EXPERTS, QUIETER
from soapstone.search.report import SearchReport, StartReport, StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.sim.outcome import outcome
from soapstone.strategy.strategy import Strategy

MOST_ROWS = 24
"""[choice] The most rows of decisions that are printed without being asked for."""

PAPERS = "mcmc-paper"
"""The search whose chains end when half of their proposals brought nothing better (FlexFlow 6.2)."""

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
        rivals = {rival.name: rival for rival in _rivals(given, options)}
        found = _Found(taken, report, own, rivals)
    if as_json:
        print_json(_document(found, output))
    else:
        _print(found, output, None if every_layer else MOST_ROWS)


@dataclass(frozen=True)
class _Rival:
    """Data parallelism or an expert's strategy, with its figures and its exact prediction."""

    name: str
    strategy: Strategy
    figures: Figures
    prediction: Prediction


@dataclass(frozen=True)
class _Found:
    """A plan, how it was found, its figures, and data parallelism and the experts' strategies beside it."""

    outcome: Settled
    report: SearchReport
    figures: Figures
    rivals: Mapping[str, _Rival]

    @property
    def plan(self) -> Plan:
        return self.outcome.plan

    @property
    def shared(self) -> _Rival:
        """Data parallelism."""
        return self.rivals["data_parallel"]

    @property
    def expert(self) -> _Rival | None:
        """The fastest of the experts' strategies that apply; one that fits before any that does not."""
        experts = [rival for rival in self.rivals.values() if rival.name in EXPERTS]
        machine = self.plan.machine
        return min(
            experts,
            key=lambda each: (not each.prediction.fits(machine), each.figures.bucketed_s),
            default=None,
        )

    @property
    def samples_per_s(self) -> float | None:
        """Training throughput, as trained; None for a model without samples."""
        count = self.plan.graph.sample_count
        return count / self.figures.bucketed_s if count and self.figures.bucketed_s else None

    @property
    def notes(self) -> list[str]:
        """What a reader should know of what the plan is compared with."""
        note = uneven(self.shared.strategy, self.plan.machine)
        return [] if note is None else [note]


def speedup(own: Figures, other: Figures) -> float:
    """How many times as fast as another strategy one is; 1 where neither takes any time."""
    return other.makespan_s / own.makespan_s if own.makespan_s else 1.0


def _rivals(given: Problem, options: Options) -> Iterator[_Rival]:
    """Data parallelism and the experts' strategies that apply."""
    graph, machine, costs = given.graph, given.machine, given.costs
    for each in applicable(graph, machine):
        if each.name in ("data_parallel", *EXPERTS):
            strategy = baseline(each.name, graph, machine, costs, options.seed)
            taken = outcome(strategy, machine, costs, STATES_PER_WEIGHT[options.optimizer])
            peaks = tuple(memory.peak_bytes for memory in taken.memory)
            prediction = Prediction(taken.makespan_s, taken.moved_bytes, peaks)
            yield _Rival(each.name, strategy, figures(taken), prediction)


# -- for programs -----------------------------------------------------------------------------------


def _document(found: _Found, output: Path | None) -> dict[str, Any]:
    plan = found.plan
    return {
        "model": plan.model,
        "machine": plan.machine.name,
        "samples": plan.graph.sample_count,
        "samples_per_s": plan.samples_per_s,
        "bucketed_samples_per_s": found.samples_per_s,
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
                **figures_document(rival.figures),
                **speedups_document(found.figures, rival.figures),
                "seems_to_fit": rival.prediction.fits(plan.machine),
                "fits": rival.prediction.fits(plan.machine),
                "peak_bytes": max(rival.prediction.memory_bytes),
            }
            for name, rival in found.rivals.items()
        },
        "notes": found.notes,
        "decisions": [_row_document(row) for row in rows(plan.strategy)],
        "reasons": list(reasons(as_trained(found.figures), as_trained(found.shared.figures))),
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


def speedups_document(own: Figures, other: Figures) -> dict[str, float]:
    """How many times as fast as another strategy one is, each gradient summed by itself and as trained."""
    return {
        "speedup": speedup(own, other),
        "bucketed_speedup": speedup(as_trained(own), as_trained(other)),
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
    samples_per_s = found.samples_per_s
    samples = f", {rate(samples_per_s)} ({plan.graph.sample_count} a step)" if samples_per_s else ""
    time = f"{SECONDS.short_text(found.figures.bucketed_s)} per iteration{samples}"
    screen.print(Text(f"{plan.graph.name} on {plan.machine.name}: {time}", style="bold"))
    if plan.strategy.pipeline is not None:
        screen.print(Text(pipeline_text(plan.strategy)))
    screen.print(Text(_compared(found, found.shared, "data parallelism")))
    for note in found.notes:
        screen.print(Text(note))
    if found.expert is not None:
        screen.print(Text(_compared(found, found.expert, f"{found.expert.name}, the best expert's strategy")))
    screen.print(_memory(found))
    screen.print(Text(_one_by_one(found)))
    screen.print(Text(f"compute times: {basis_text(plan)}"))


def _compared(found: _Found, rival: _Rival, what: str) -> str:
    """The plan against a rival, as trained, in a sentence."""
    own, other, machine = as_trained(found.figures), as_trained(rival.figures), found.plan.machine
    times, what = speedup(own, other), f"{what} ({SECONDS.short_text(other.makespan_s)})"
    if not rival.prediction.fits(machine):
        what = f"{what}, which does not fit in memory: {_needs(machine, rival.prediction.memory_bytes)}"
    if is_alike(own.makespan_s, other.makespan_s):
        return f"as fast as {what}"
    return f"{times:.3g} times as fast as {what}" if times > 1 else f"{1 / times:.3g} times as slow as {what}"


def _one_by_one(found: _Found) -> str:
    """The time as the search counts it, beside data parallelism's."""
    own_s, shared_s = found.figures.makespan_s, found.shared.figures.makespan_s
    told = (
        "small gradients are summed together, as `soapstone train` does; with each summed by itself, as "
        f"searches count, it takes {SECONDS.short_text(own_s)} (data parallelism "
        f"{SECONDS.short_text(shared_s)})"
    )
    if found.outcome.why is WhyInstead.BUCKETS:
        searched_s = SECONDS.short_text(found.report.makespan_s)
        told += f"; the search found {searched_s} so, which trains slower: this is {found.outcome.instead}"
    return told


def _memory(found: _Found) -> Text:
    """Whether it fits, and how nearly."""
    plan = found.plan
    needs = _needs(plan.machine, plan.prediction.memory_bytes)
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


def _needs(machine: Machine, peaks: Sequence[int]) -> str:
    """The peak of the device that has the least room for it."""

    def share(pair: tuple[Device, int]) -> float:
        return pair[1] / pair[0].kind.memory_bytes

    device, peak = max(zip(machine.devices, peaks, strict=True), key=share)
    return f"{BYTES.short_text(peak)} of {BYTES.short_text(device.kind.memory_bytes)} on {device.name}"


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
    own, rival = as_trained(found.figures), as_trained(found.shared.figures)
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
    screen.print(
        _indented(f"{report.method}, seed {report.seed}: {_counted(report)}, {took}; {_end(report)}")
    )
    if report.rewrites:
        used = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in Counter(report.rewrites).items())
        screen.print(
            _indented(f"The graph was rewritten by {used}; `soapstone rules show NAME` shows a rule.")
        )
    if report.proved_among is not None:
        screen.print(_indented(f"Proved: none is faster of the {report.proved_among}."))
    elif report.lower_bound_s:
        screen.print(_indented(_gap(found, report.lower_bound_s)))
    if report.starts:
        screen.print(_starts_table(report.starts))


def _end(report: SearchReport) -> str:
    """Why the search ended. Only the paper's chains end by a rule of their own."""
    is_by_rule = report.method == PAPERS and report.stop is StopReason.CONVERGED
    return "half of each chain brought nothing better" if is_by_rule else report.stop


def _gap(found: _Found, bound_s: float) -> str:
    """How far the plan may be from the optimum, as trained; by an exact search's bound, as that counts."""
    report, own = found.outcome.report, found.figures
    gap = (own.makespan_s if report.has_bound_of_proof else own.bucketed_s) / bound_s - 1
    more = f"{gap:.1%} above" if gap < 1 else f"{gap + 1:.1f} times"
    bound = SECONDS.short_text(bound_s)
    return f"It is at most {more} the optimum (lower bound {bound}) of {report.bounded_among}."


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
        best = SECONDS.short_text(min(chain.best_s for chain in chains))
        count = sum(chain.proposals for chain in chains)
        table.add_row(Text(name), _first(chains[0]), best, f"{count:,}")
    return table


def _first(start: StartReport) -> str:
    """What a start takes. Chains keep the best that seems to fit: only one that does not is faster than
    what came of it, but for the last, which may take longer to move less."""
    is_too_large = start.best_s > start.first_s and start.name != QUIETER
    return f"{SECONDS.short_text(start.first_s)}{', seems not to fit' if is_too_large else ''}"


def _sort(name: str) -> str:
    """What starts of this name are called together; others have names of their own."""
    if name.startswith("round "):
        return "chains (rounds)"
    return "pipelines" if " stages, " in name else name
