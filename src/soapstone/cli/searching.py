"""The options of the commands that search, and the search with a progress bar."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from soapstone.cli.output import progress
from soapstone.cli.problem import COSTS_HELP, Problem
from soapstone.errors import PlanError
from soapstone.machine.checks import did_you_mean
from soapstone.search.find import DEFAULT_BUDGET, SEARCHES, Options, budget_seconds, find, search_named
from soapstone.search.mcmc import Budget
from soapstone.search.pipelines import Wanted
from soapstone.search.report import SearchReport, StopReason
from soapstone.sim.memory import STATES_PER_WEIGHT

LARGEST_SEED = 2**32 - 1

MachineOption = Annotated[
    str, typer.Option("--machine", help="NAME, NAME:NODESxDEVICES, or the path of a .yaml file.")
]
SearchOption = Annotated[str, typer.Option("--search", help=f"How to search: {', '.join(SEARCHES)}.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help=f"How long to search: 30s, 5m, 0.5h (default: {DEFAULT_BUDGET}, or no limit with --proposals).",
    ),
]
ProposalsOption = Annotated[
    int | None,
    typer.Option(
        "--proposals", min=1, help="Proposals of each chain: then the clock does not decide what is found."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="What chance draws from.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="Chains at a time (default: one per core).")
]
TinyOption = Annotated[bool, typer.Option("--tiny", help="The zoo's small variant.")]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", help="Samples of one step (default: the model's own for each device)."),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help=f"{', '.join(STATES_PER_WEIGHT)}: what it remembers takes memory.")
]
CostsOption = Annotated[str, typer.Option("--costs", help=COSTS_HELP)]
StagesOption = Annotated[
    int | None, typer.Option("--stages", min=1, help="Search for a pipeline of so many stages.")
]
MicroBatchesOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batches", min=1, help="Search for a pipeline that takes the batch in so many parts."
    ),
]
SlackOption = Annotated[
    float,
    typer.Option(
        "--slack", min=0.0, max=1.0, help="The part by which it may take longer if links are less busy then."
    ),
]


def options_of(
    search: str,
    budget: str | None,
    proposals: int | None,
    seed: int,
    threads: int | None,
    optimizer: str,
    slack: float,
    pipeline: Wanted | None = None,
) -> Options:
    """The options of a search, checked before anything is done. If something of a pipeline is wanted, a
    pipeline is searched for."""
    search_named(search)
    wanted = pipeline or Wanted()
    if wanted != Wanted():
        search = "pipeline"
    if optimizer not in STATES_PER_WEIGHT:
        raise PlanError(f"there is no optimizer {optimizer!r}{did_you_mean(optimizer, STATES_PER_WEIGHT)}")
    if budget is None and proposals is None:
        budget = DEFAULT_BUDGET
    seconds = None if budget is None else seconds_of(budget)
    return Options(search, Budget(seconds, proposals), seed, threads or cores(), optimizer, slack, wanted)


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
