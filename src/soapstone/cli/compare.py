"""`soapstone compare MODEL`: every baseline that applies beside the plan that a search finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import ShowProgress, console, print_json, progress, rate
from soapstone.cli.plan import figures_document, speedup
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
from soapstone.cli.spread import spread
from soapstone.machine import Machine
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import Prediction, predicted
from soapstone.report.figures import Figures, figures
from soapstone.search.baselines import BASELINES, baseline
from soapstone.search.find import Options, WhyInstead, settled
from soapstone.search.report import SearchReport
from soapstone.sim.outcome import outcome
from soapstone.strategy.strategy import Strategy

REFERENCE = "data_parallel"
"""What speedups are relative to."""


def register(app: typer.Typer) -> None:
    """Add `compare` to the command line."""
    app.command("compare")(spread(compare))


def compare(
    model: ModelArgument,
    machine: MachineOption,
    variant: Variant,
    searching: Searching,
    costs: CostsOption = "auto",
    memory: Annotated[
        bool,
        typer.Option(
            "--memory/--no-memory", help="Work out peak memory, which takes longest for many devices."
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Set every baseline that applies to a model beside the plan that a search finds.

    Examples:

        soapstone compare alexnet --machine p100:1x4
        soapstone compare nmt --machine k80:16x4 --budget 1m --no-memory
        soapstone compare gpt2 --machine h100:1x8 --batch 64 --json
    """
    options = searching.options()
    given = problem(model, machine, variant, costs)
    report = searched(given, options)
    with progress(f"comparing on {given.machine.name}", total=len(BASELINES) + 1) as show:
        contest = _contest(given, options, report, memory, show)
    if as_json:
        print_json(_document(contest))
    else:
        _print(contest)


@dataclass(frozen=True)
class _Entry:
    """One strategy of the contest; without a prediction if memory was not asked for."""

    name: str
    summary: str
    figures: Figures
    prediction: Prediction | None

    def fits(self, machine: Machine) -> bool | None:
        """Whether it fits in memory, as far as that is known."""
        return None if self.prediction is None else self.prediction.fits(machine)


@dataclass(frozen=True)
class _Contest:
    """All that is compared, the found plan last; and the baselines that do not apply, with their reasons."""

    given: Problem
    entries: tuple[_Entry, ...]
    refused: dict[str, str]
    report: SearchReport
    instead: str | None
    why: WhyInstead | None

    @property
    def found(self) -> _Entry:
        return self.entries[-1]

    def speedup(self, entry: _Entry) -> float:
        """How many times as fast as the reference."""
        reference = next(each for each in self.entries if each.name == REFERENCE)
        return speedup(entry.figures, reference.figures)

    def samples_per_s(self, entry: _Entry) -> float | None:
        """Training throughput; None for a model without samples."""
        count = self.given.graph.sample_count
        return count / entry.figures.makespan_s if count and entry.figures.makespan_s else None


def _contest(
    given: Problem, options: Options, report: SearchReport, memory: bool, show: ShowProgress
) -> _Contest:
    refused: dict[str, str] = {}
    entries: list[_Entry] = []
    for done, (name, strategy) in enumerate(_strategies(given, options, refused)):
        show(done, name)
        prediction = None
        if memory:
            prediction = predicted(strategy, given.machine, given.costs, options.optimizer)
        entries.append(_Entry(name, BASELINES[name].summary, _figures(strategy, given), prediction))
    show(len(BASELINES), "the found plan")
    strategy, prediction, instead, why = report.strategy, None, None, None
    if memory:
        taken = settled(report, given.machine, given.costs, given.model, options)
        strategy, prediction = taken.plan.strategy, taken.plan.prediction
        instead, why = taken.instead, taken.why
    summary = f"found by {report.method}, seed {report.seed}"
    entries.append(_Entry("found", summary, _figures(strategy, given), prediction))
    return _Contest(given, tuple(entries), refused, report, instead, why)


def _strategies(given: Problem, options: Options, refused: dict[str, str]) -> Iterator[tuple[str, Strategy]]:
    """Every baseline that applies; of the others the reason is noted."""
    for name, each in BASELINES.items():
        objection = each.objection(given.graph, given.machine)
        if objection is None:
            yield name, baseline(name, given.graph, given.machine, given.costs, options.seed)
        else:
            refused[name] = objection


def _figures(strategy: Strategy, given: Problem) -> Figures:
    return figures(outcome(strategy, given.machine, given.costs))


def _document(contest: _Contest) -> dict[str, Any]:
    machine = contest.given.machine
    return {
        "model": contest.given.model,
        "machine": machine.name,
        "samples": contest.given.graph.sample_count,
        "costs": contest.given.costs.name,
        "strategies": [
            {
                "name": entry.name,
                "summary": entry.summary,
                "samples_per_s": contest.samples_per_s(entry),
                "speedup": contest.speedup(entry),
                **figures_document(entry.figures),
                "peak_bytes": None if entry.prediction is None else max(entry.prediction.memory_bytes),
                "fits": entry.fits(machine),
            }
            for entry in contest.entries
        ],
        "not_applicable": contest.refused,
        "search": {**contest.report.document(), "instead": contest.instead, "why_instead": contest.why},
    }


def _print(contest: _Contest) -> None:
    screen, given = console(), contest.given
    samples = f", {given.graph.sample_count} samples a step" if given.graph.sample_count else ""
    screen.print(Text(f"{given.graph.name} on {given.machine.name}{samples}", style="bold"))
    screen.print(_table(contest))
    if contest.instead is not None:
        reason = "does not fit in memory" if contest.why is WhyInstead.MEMORY else "is slower in buckets"
        note = f"what the search found {reason}: 'found' is {contest.instead}"
        screen.print(Text(note, style="bold yellow"))
    if contest.refused:
        screen.print(Text(f"not applicable: {', '.join(contest.refused)} (--json says why)"))
    is_analytic = contest.given.costs.name == "analytic"
    what = (
        "analytic, none was measured on a device" if is_analytic else "measured, or fitted to measured ones"
    )
    screen.print(Text(f"compute times: {what}"))


def _table(contest: _Contest) -> Table:
    table = Table("strategy", box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "per iteration",
        "in buckets",
        "throughput",
        "speedup",
        "moved",
        "compute",
        "peak memory",
    ):
        table.add_column(heading, justify="right")
    for entry in contest.entries:
        samples_per_s = contest.samples_per_s(entry)
        table.add_row(
            Text(entry.name),
            SECONDS.short_text(entry.figures.makespan_s),
            SECONDS.short_text(entry.figures.bucketed_s),
            rate(samples_per_s) if samples_per_s else "",
            f"{contest.speedup(entry):.3g}",
            BYTES.short_text(entry.figures.moved_bytes),
            SECONDS.short_text(entry.figures.compute_s),
            _peak(entry, contest.given.machine),
            style="bold" if entry is contest.found else "",
        )
    return table


def _peak(entry: _Entry, machine: Machine) -> Text:
    if entry.prediction is None:
        return Text("")
    peak = BYTES.short_text(max(entry.prediction.memory_bytes))
    return Text(peak) if entry.fits(machine) else Text(f"{peak}: does not fit", style="bold red")
