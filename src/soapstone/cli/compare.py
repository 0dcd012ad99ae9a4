"""`soapstone compare MODEL`: every baseline that applies beside the plan that a search finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import ShowProgress, console, print_json, progress, rate
from soapstone.cli.plan import figures_document, speedup, speedups_document
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
from soapstone.report.figures import Figures, as_trained, figures
from soapstone.search.baselines import BASELINES, baseline
from soapstone.search.baselines.simple import uneven
from soapstone.search.find import DEFAULT_SEARCH, LEAST_GAIN, Options, WhyInstead, settled
from soapstone.search.report import SearchReport
from soapstone.sim.outcome import outcome
from soapstone.strategy.strategy import Strategy

REFERENCE = "data_parallel"
"""What speedups are relative to."""

COUNTED = (
    "per iteration, throughput and speedup are with small gradients summed together, as `soapstone train` "
    "does; one by one: the time with each gradient summed by itself, as searches and `soapstone simulate` "
    "count"
)
"""What the times of the table are."""


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
    strategy: Strategy
    figures: Figures
    prediction: Prediction | None

    def fits(self, machine: Machine) -> bool | None:
        """Whether it fits in memory, as far as that is known."""
        return None if self.prediction is None else self.prediction.fits(machine)


@dataclass(frozen=True)
class _Contest:
    """All that is compared, the found plan last; and the baselines that do not apply, with their reasons."""

    given: Problem
    options: Options
    entries: tuple[_Entry, ...]
    refused: dict[str, str]
    report: SearchReport
    instead: str | None
    why: WhyInstead | None

    @property
    def found(self) -> _Entry:
        return self.entries[-1]

    @property
    def reference(self) -> _Entry:
        return next(each for each in self.entries if each.name == REFERENCE)

    @property
    def faster(self) -> _Entry | None:
        """The fastest baseline, as trained, of those that fit, if what was found is slower than it."""
        machine = self.given.machine
        others = [entry for entry in self.entries[:-1] if entry.fits(machine) is not False]
        best = min(others, key=lambda entry: entry.figures.bucketed_s, default=self.found)
        enough_s = self.found.figures.bucketed_s * (1 - LEAST_GAIN)
        return best if best.figures.bucketed_s < enough_s else None

    def samples_per_s(self, own: Figures) -> float | None:
        """Training throughput; None for a model without samples."""
        count = self.given.graph.sample_count
        return count / own.makespan_s if count and own.makespan_s else None

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the table."""
        found = [_instead(self), _faster(self), uneven(self.reference.strategy, self.given.machine)]
        return [note for note in found if note is not None]


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
        summary = BASELINES[name].summary
        entries.append(_Entry(name, summary, strategy, _figures(strategy, given), prediction))
    show(len(BASELINES), "the found plan")
    taken = settled(report, given.machine, given.costs, given.model, options)
    strategy, prediction = taken.plan.strategy, taken.plan.prediction if memory else None
    summary = f"found by {report.method}, seed {report.seed}"
    entries.append(_Entry("found", summary, strategy, _figures(strategy, given), prediction))
    proved = replace(report, stop=taken.report.stop)  # a proof is about what the search found
    return _Contest(given, options, tuple(entries), refused, proved, taken.instead, taken.why)


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
                "samples_per_s": contest.samples_per_s(entry.figures),
                "bucketed_samples_per_s": contest.samples_per_s(as_trained(entry.figures)),
                **speedups_document(entry.figures, contest.reference.figures),
                **figures_document(entry.figures),
                "peak_bytes": None if entry.prediction is None else max(entry.prediction.memory_bytes),
                "fits": entry.fits(machine),
            }
            for entry in contest.entries
        ],
        "faster_than_found": None if contest.faster is None else contest.faster.name,
        "notes": contest.notes,
        "not_applicable": contest.refused,
        "search": {**contest.report.document(), "instead": contest.instead, "why_instead": contest.why},
    }


def _print(contest: _Contest) -> None:
    screen, given = console(), contest.given
    samples = f", {given.graph.sample_count} samples a step" if given.graph.sample_count else ""
    screen.print(Text(f"{given.graph.name} on {given.machine.name}{samples}", style="bold"))
    screen.print(_table(contest))
    for note in contest.notes:
        screen.print(Text(note, style="bold yellow"))
    screen.print(Text(COUNTED))
    if contest.refused:
        screen.print(Text(f"not applicable: {', '.join(contest.refused)} (--json says why)"))
    is_analytic = contest.given.costs.name == "analytic"
    what = (
        "analytic, none was measured on a device" if is_analytic else "measured, or fitted to measured ones"
    )
    screen.print(Text(f"compute times: {what}"))


def _instead(contest: _Contest) -> str | None:
    """What took the place of what the search found, if something did."""
    if contest.instead is None:
        return None
    reason = "does not fit in memory" if contest.why is WhyInstead.MEMORY else "trains slower"
    return f"what the search found {reason}: 'found' is {contest.instead}"


def _faster(contest: _Contest) -> str | None:
    """Which baseline is faster than what was found, if one is."""
    if contest.faster is None:
        return None
    own, other = contest.found.figures, contest.faster.figures
    times = f"{SECONDS.short_text(other.bucketed_s)} against {SECONDS.short_text(own.bucketed_s)}"
    told = f"a baseline is faster than what was found: {contest.faster.name}, {times}"
    if contest.faster.prediction is None:
        told += ", if it fits in memory"
    options = contest.options
    is_left_out = options.search == DEFAULT_SEARCH and options.budget.seconds is None
    if contest.faster.name == "pipeline" and is_left_out:
        told += "; with --proposals pipelines are not searched, give --budget instead"
    return told


def _table(contest: _Contest) -> Table:
    table = Table("strategy", box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "per iteration",
        "throughput",
        "speedup",
        "one by one",
        "moved",
        "compute",
        "peak memory",
    ):
        table.add_column(heading, justify="right")
    for entry in contest.entries:
        own, reference = as_trained(entry.figures), as_trained(contest.reference.figures)
        samples_per_s = contest.samples_per_s(own)
        table.add_row(
            Text(entry.name),
            SECONDS.short_text(own.makespan_s),
            rate(samples_per_s) if samples_per_s else "",
            f"{speedup(own, reference):.3g}",
            SECONDS.short_text(entry.figures.makespan_s),
            BYTES.short_text(own.moved_bytes),
            SECONDS.short_text(own.compute_s),
            _peak(entry, contest.given.machine),
            style="bold" if entry is contest.found else "",
        )
    return table


def _peak(entry: _Entry, machine: Machine) -> Text:
    if entry.prediction is None:
        return Text("")
    peak = BYTES.short_text(max(entry.prediction.memory_bytes))
    return Text(peak) if entry.fits(machine) else Text(f"{peak}: does not fit", style="bold red")
