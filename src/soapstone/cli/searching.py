"""The options of the commands that search, and the search with a progress bar."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from soapstone.cli.output import progress
from soapstone.cli.problem import Problem
from soapstone.errors import PlanError
from soapstone.machine.checks import did_you_mean
from soapstone.search.find import (
    DEFAULT_BUDGET,
    DEFAULT_SEARCH,
    SEARCHES,
    Options,
    budget_seconds,
    find,
    search_named,
)
from soapstone.search.mcmc import Budget
from soapstone.search.pipelines import Wanted
from soapstone.search.report import SearchReport, StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT

LARGEST_SEED = 2**32 - 1

PROVING = ("exact", "exact-ranges")
"""The searches that no number of proposals limits."""


@dataclass(frozen=True)
class Searching:
    """How to search: the options of every command that does."""

    search: Annotated[str, typer.Option("--search", help=f"How to search: {', '.join(SEARCHES)}.")] = (
        DEFAULT_SEARCH
    )
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help=f"How long to search: 30s, 5m, 0.5h (default: {DEFAULT_BUDGET}; no limit with --proposals).",
        ),
    ] = None
    proposals: Annotated[
        int | None,
        typer.Option(
            "--proposals",
            min=1,
            help="Proposals of each chain: then the clock does not decide what is found.",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="What chance draws from.")] = 0
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=1024, help="Chains at a time (default: one per core)."),
    ] = None
    optimizer: Annotated[
        str,
        typer.Option("--optimizer", help=f"{', '.join(STATES_PER_WEIGHT)}: what it remembers takes memory."),
    ] = "momentum"
    slack: Annotated[
        float,
        typer.Option(
            "--slack",
            min=0.0,
            max=1.0,
            help="The part by which it may take longer if links are less busy then.",
        ),
    ] = 0.0
    stages: Annotated[
        int | None, typer.Option("--stages", min=1, help="Search for a pipeline of so many stages.")
    ] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches", min=1, help="Search for a pipeline that takes the batch in so many parts."
        ),
    ] = None

    def options(self, default_budget: str = DEFAULT_BUDGET) -> Options:
        """The options of the search, checked before anything is done. If something of a pipeline is wanted,
        a pipeline is searched for."""
        search_named(self.search)
        wanted = Wanted(self.stages, self.micro_batches)
        if wanted != Wanted() and self.search not in (DEFAULT_SEARCH, "pipeline"):
            raise PlanError(
                f"--stages and --micro-batches search for a pipeline, and '--search {self.search}' does not:"
                " leave one of them out"
            )
        if self.proposals is not None and self.search in PROVING:
            raise PlanError(
                f"--proposals limits chains, and '--search {self.search}' is no chain but tries strategies in"
                " order: give --budget instead"
            )
        search = self.search if wanted == Wanted() else "pipeline"
        if self.optimizer not in STATES_PER_WEIGHT:
            hint = did_you_mean(self.optimizer, STATES_PER_WEIGHT)
            raise PlanError(f"there is no optimizer {self.optimizer!r}{hint}")
        budget = default_budget if self.budget is None and self.proposals is None else self.budget
        seconds = None if budget is None else seconds_of(budget)
        threads = self.threads or cores()
        budgeted = Budget(seconds, self.proposals)
        return Options(search, budgeted, self.seed, threads, self.optimizer, self.slack, wanted)


def seconds_of(budget: str) -> float:
    """The seconds that the option means."""
    try:
        return budget_seconds(budget)
    except ValueError as error:
        raise typer.BadParameter(f"--budget {error}.") from None


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def searched(problem: Problem, options: Options) -> SearchReport:
    """What the search finds, with its progress on a terminal. Ctrl-C ends it and keeps the best so far."""
    total = None if options.budget.seconds is None else 1.0
    with progress(f"searching ({options.search})", total=total) as show:

        def shown(part: float, note: str) -> None:
            show(part, "" if note.startswith("inf") else f"best {note}")

        report = find(problem.graph, problem.machine, problem.costs, options, shown)
    if report.stop is StopReason.INTERRUPTED:
        print("soapstone: note: the search was interrupted; this is the best so far", file=sys.stderr)
    return report
