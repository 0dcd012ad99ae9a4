"""`soapstone validate MODEL`: run strategies for real, and hold their predictions against it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import check_places, console, print_json, progress
from soapstone.cli.problem import JsonOption, ModelArgument, Variant, tell
from soapstone.cli.profile import seconds
from soapstone.cli.ranks import GpuSlices, as_rank, check_not_a_rank, run_ranks
from soapstone.cli.spread import spread
from soapstone.cost.choice import CHOICES
from soapstone.errors import TrainingError
from soapstone.machine import Machine, resolve
from soapstone.machine.checks import did_you_mean
from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import write_plan
from soapstone.validation.accounts import Accounts
from soapstone.validation.comparing import STATISTICS, Compared, Summary, choice

if TYPE_CHECKING:
    from soapstone.runtime.wire import Wire
    from soapstone.validation.validating import Outcome

WORST_SHOWN = 3
"""[choice] How many of the worst predictions are explained."""


def register(app: typer.Typer) -> None:
    """Add `validate` to the command line."""
    app.command("validate")(spread(validate))


@dataclass(frozen=True)
class _Request:
    """What is to be run, as a user says it."""

    model: str
    machine: str
    strategies: int
    steps: int
    variant: Variant
    seed: int
    device: str
    costs: str
    budget: str
    timeout_s: float
    statistic: str
    output: Path | None
    as_json: bool


def validate(  # noqa: PLR0913, a command has a parameter for each option
    model: ModelArgument,
    machine: Annotated[
        str, typer.Option("--machine", help="NAME:1xDEVICES, or the file that `machine detect` writes.")
    ],
    strategies: Annotated[int, typer.Option("--strategies", min=2, help="How many to run.")] = 20,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=2,
            help="Counted steps of each; up to 16 times as many, within a minute, if they differ much.",
        ),
    ] = 10,
    *,
    variant: Variant,
    seed: Annotated[int, typer.Option("--seed", help="Of the strategies that are drawn.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    gpu_slices: GpuSlices = None,
    costs: Annotated[
        str,
        typer.Option(
            "--costs", help="measured (now, by all ranks at once; default), auto (as planned), or analytic."
        ),
    ] = "measured",
    budget: Annotated[str, typer.Option("--budget", help="Most time for measuring operators.")] = "2m",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds a rank waits for another.")
    ] = 300.0,
    statistic: Annotated[
        str,
        typer.Option(
            "--statistic",
            help="Of a strategy's steps: the faster quartile, which other work disturbs least; median, or"
            " fastest.",
        ),
    ] = "quartile",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan of the fastest here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run strategies on this computer, one process for each device, and compare with the prediction.

    Baselines, a found plan, random strategies and baselines with random changes take turns. Every second one
    serves to fit the few factors that nothing else tells (`docs/guide/costs.md`); the figures that count
    are those of the other half, which the fit has not seen. With -o the fastest of all that ran, whatever was
    predicted, becomes a plan to train by.

    Examples:

        soapstone machine detect --ranks 2 -o here.yaml
        soapstone validate lenet --tiny --machine here.yaml --strategies 20
        soapstone validate rnnlm --machine slices.yaml --gpu-slices 4
        soapstone validate gpt2 --machine here.yaml -o fastest.json; soapstone train fastest.json
    """
    check_not_a_rank(gpu_slices)
    device = device if gpu_slices is None else "cuda"
    if costs not in CHOICES:
        raise typer.BadParameter(f"there are no costs '{costs}'{did_you_mean(costs, CHOICES)}")
    if statistic not in STATISTICS:
        raise typer.BadParameter(f"there is no statistic '{statistic}'{did_you_mean(statistic, STATISTICS)}")
    seconds(budget)
    check_places([output], (machine, model.partition(":")[0]))
    found = resolve(machine)
    request = _Request(
        model,
        machine,
        strategies,
        steps,
        variant,
        seed,
        device,
        costs,
        budget,
        timeout,
        statistic,
        output,
        as_json,
    )
    if len(found.nodes) > 1:
        raise TrainingError(
            f"machine '{found.name}' has {len(found.nodes)} nodes: strategies run on one computer here"
        )
    if "RANK" not in os.environ and len(found.devices) > 1:
        run_ranks(len(found.devices), _arguments(request), gpu_slices)
        return
    with as_rank(device, timeout) as wire:
        outcome = _validated(request, found, wire)
    if wire.rank == 0:
        tell(outcome.notes)
        if output is not None:
            write_plan(replace(outcome.fastest, model=variant.named(model)), output)
    if wire.rank == 0 and as_json:
        print_json(_document(request, found, outcome))
    elif wire.rank == 0:
        _print(request, found, outcome)


def _arguments(request: _Request) -> list[str]:
    """The command again, for a rank."""
    given = {
        "--machine": request.machine,
        "--strategies": request.strategies,
        "--steps": request.steps,
        "--seed": request.seed,
        "--device": request.device,
        "--costs": request.costs,
        "--budget": request.budget,
        "--timeout": request.timeout_s,
        "--statistic": request.statistic,
        "--output": request.output,
    }
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    options += request.variant.given
    return ["validate", request.model, *options, *(["--json"] if request.as_json else [])]


def _validated(request: _Request, machine: Machine, wire: Wire) -> Outcome:
    from soapstone.frontends.source import load
    from soapstone.runtime.session import seeded
    from soapstone.validation.validating import Wanted, validated

    with seeded(request.seed):
        source = load(
            request.variant.named(request.model),
            batch=request.variant.batch,
            devices=len(machine.devices),
            weights=True,
        )
    wanted = Wanted(
        machine,
        request.strategies,
        request.steps,
        request.seed,
        request.costs,
        seconds(request.budget),
        request.statistic,
    )
    bar = progress(f"validating {request.model}") if wire.rank == 0 else nullcontext(lambda *_: None)
    with bar as show:
        return validated(source, wanted, wire, WORST_SHOWN, show)


def _compared_document(each: Compared) -> dict[str, Any]:
    return {
        "strategy": each.name,
        "predicted_s": each.predicted_s,
        "actual_s": each.actual_s,
        "error": each.error,
        "spread": each.spread,
        "predicted_bytes": list(each.predicted_bytes),
        "actual_bytes": list(each.actual_bytes),
        "memory_error": each.memory_error,
    }


def _document(request: _Request, machine: Machine, outcome: Outcome) -> dict[str, Any]:
    return {
        "model": request.model,
        "machine": machine.name,
        "costs": outcome.costs_name,
        "steps": outcome.steps,
        "statistic": request.statistic,
        "seed": request.seed,
        "summary": asdict(outcome.reported),
        "summary_fitted": asdict(outcome.seen),
        "summary_unfitted": asdict(outcome.unfitted),
        "fitted": asdict(outcome.calibration),
        "best_predicted": choice(outcome.compared).predicted.name,
        "fastest": choice(outcome.compared).fastest.name,
        "loss": choice(outcome.compared).loss,
        "strategies": [
            {
                **_compared_document(each),
                "unfitted_s": outcome.unfitted_s[i],
                "used_for": "fitting" if i in outcome.fitted_on else "reporting",
            }
            for i, each in enumerate(outcome.compared)
        ],
        "worst": [{"strategy": each.name} | asdict(found) for each, found in outcome.worst],
        "measured": outcome.measured,
        "took_s": dict(outcome.took_s),
        "output": None if request.output is None else str(request.output),
    }


def _print(request: _Request, machine: Machine, outcome: Outcome) -> None:
    screen = console()
    screen.print(
        Text(
            f"{request.model} on {machine.name}: {len(outcome.compared)} strategies, {outcome.steps} steps of"
            f" each (the {request.statistic} counts), costs {outcome.costs_name}"
        )
    )
    screen.print(_table(outcome))
    screen.print(Text(f"fitted on every second strategy: {outcome.calibration.text}"))
    screen.print(Text(_sentence("reported (the fit has not seen them)", outcome.reported)))
    screen.print(Text(_sentence("those fitted", outcome.seen)))
    screen.print(Text(_sentence("reported, without the fit", outcome.unfitted)))
    screen.print(Text(_chosen(outcome.compared)))
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.took_s.items())
    screen.print(Text(f"it took: {took}"))
    for each, found in outcome.worst:
        screen.print(Text(f"{each.name}, off by {each.error:+.0%}: where a recorded step's time went"))
        screen.print(_accounts_table(found))
    if request.output is not None:
        screen.print(
            Text(f"the fastest, {choice(outcome.compared).fastest.name}, is written to {request.output}")
        )


def _sentence(what: str, found: Summary) -> str:
    pairs = f"{found.near_pairs} pair{'s' if found.near_pairs > 1 else ''}"
    clear = (
        f" ({found.clear_tau:.2f} without {pairs} that runs do not tell apart)" if found.near_pairs else ""
    )
    return (
        f"{what}: {found.count} strategies, error {found.median_error:.1%} (median),"
        f" {found.worst_error:.1%} (worst), Kendall tau {found.tau:.2f}{clear}; memory"
        f" {found.median_memory_error:.1%} (median), {found.worst_memory_error:.1%} (worst)"
    )


def _chosen(compared: Sequence[Compared]) -> str:
    best = choice(compared)
    chosen, fastest = (
        f"{each.name} ({SECONDS.short_text(each.actual_s)} a step)" for each in (best.predicted, best.fastest)
    )
    if best.predicted is best.fastest:
        return f"the best by its prediction is the fastest: {chosen}"
    return f"the best by its prediction is {chosen}: {best.loss:.1%} longer than the fastest, {fastest}"


def _table(outcome: Outcome) -> Table:
    table = Table("strategy", "for", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("predicted", "actual", "error", "memory predicted", "actual", "error"):
        table.add_column(heading, justify="right")
    for i, each in enumerate(outcome.compared):
        table.add_row(
            Text(each.name),
            "fitting" if i in outcome.fitted_on else "reporting",
            SECONDS.short_text(each.predicted_s),
            SECONDS.short_text(each.actual_s),
            f"{each.error:+.1%}",
            BYTES.short_text(max(each.predicted_bytes)),
            BYTES.short_text(max(each.actual_bytes)),
            f"{each.memory_error:+.1%}",
        )
    return table


def _accounts_table(found: Accounts) -> Table:
    table = Table("kind", "task", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("number", "predicted", "actual", "difference"):
        table.add_column(heading, justify="right")
    for each in (*found.kinds, *found.tasks):
        sign = "-" if each.difference_s < 0 else "+"
        table.add_row(
            each.kind,
            Text(each.name or "all"),
            str(each.count),
            SECONDS.short_text(each.predicted_s),
            SECONDS.short_text(each.actual_s),
            f"{sign}{SECONDS.short_text(abs(each.difference_s))}",
        )
    return table
