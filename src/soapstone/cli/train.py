"""`soapstone train PLAN`: train a plan's model on this computer's devices, or as a rank of torchrun."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from soapstone.cli.output import check_places, console, print_json, progress
from soapstone.cli.ranks import GpuSlices, check_not_a_rank, run_ranks
from soapstone.cli.replan import machine_now, replanned
from soapstone.errors import CheckpointError, SoapstoneError, TrainingError
from soapstone.machine.checks import did_you_mean
from soapstone.machine.heap import settled_objects
from soapstone.machine.units import SECONDS
from soapstone.plans import Plan, read_plan, write_plan, write_text
from soapstone.plans.document import document_of, plan_from
from soapstone.report.trace import trace_document

if TYPE_CHECKING:
    from soapstone.runtime.sources import Source
    from soapstone.runtime.trainer import Trainer
    from soapstone.runtime.wire import Wire


def register(app: typer.Typer) -> None:
    """Add `train` to the command line."""
    app.command("train")(train)


@dataclass(frozen=True)
class _Request:
    """What is to be done, as a user says it."""

    plan: Path
    steps: int
    optimizer: str
    lr: float
    data: str | None
    checkpoint: Path | None
    every: int
    resume: Path | None
    export: Path | None
    trace: Path | None
    seed: int
    device: str
    timeout_s: float
    gpu_slices: int | None
    replay: bool
    weights: str
    whole_batches: bool
    replan: bool
    machine: str | None
    strategy: str | None
    as_json: bool


def train(  # noqa: PLR0913, PLR0917, a command has a parameter for each option
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `plan -o` writes it.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Train until so many steps are done.")] = 10,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="sgd, momentum, adam or adamw (default: the plan's).")
    ] = None,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate.")] = 0.01,
    data: Annotated[
        str | None,
        typer.Option("--data", help="path/to/file.py:function that gives batches (default: example inputs)."),
    ] = None,
    whole_batches: Annotated[
        bool, typer.Option("--whole-batches", help="Let every rank load all samples, not only its own.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Write checkpoints into this folder.")
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between checkpoints.")] = 100,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on from the last checkpoint of this folder.")
    ] = None,
    replan: Annotated[
        bool, typer.Option("--replan", help="Plan the model anew for the devices there are now.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option("--machine", help="With --replan: the machine to plan for.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", help="With --replan: a strategy by name (default: the fastest found)."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the trained weights here, as safetensors.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's real timeline, for ui.perfetto.dev.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first weights and of dropout.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    gpu_slices: GpuSlices = None,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Record a step on a lone GPU and replay it.")
    ] = True,
    weights: Annotated[
        str,
        typer.Option("--weights", help="flush, or 2bw: gradients are taken at the weights one update older."),
    ] = "flush",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds a rank waits for another.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train a plan's model: one process for each device of the plan, started here or by torchrun.

    Examples:

        soapstone train plan.json --steps 100 --lr 0.01 --checkpoint out
        soapstone train plan.json --steps 200 --checkpoint out --resume out
        soapstone train plan.json --steps 200 --resume out --replan --machine cpu:1x2
        torchrun --nnodes 2 --nproc-per-node 4 -m soapstone train plan.json --data mine.py:batches
    """
    found = read_plan(plan)
    chosen = optimizer or found.optimizer
    request = _Request(
        plan,
        steps,
        chosen,
        lr,
        data,
        checkpoint,
        every,
        resume,
        export,
        trace,
        seed,
        device if gpu_slices is None else "cuda",
        timeout,
        gpu_slices,
        replay,
        weights,
        whole_batches,
        replan,
        machine,
        strategy,
        as_json,
    )
    _check(request, found)
    if "RANK" in os.environ:
        _train_as_rank(request, found)
        return
    with tempfile.TemporaryDirectory(prefix="soapstone-") as folder:
        if request.replan:
            found = _planned_anew(request, found, None)
            request = _with_plan(request, found, Path(folder))
        if len(found.machine.devices) == 1 and request.gpu_slices is None:
            _train_as_rank(request, found)
            return
        run_ranks(len(found.machine.devices), _arguments(request), request.gpu_slices)


def _planned_anew(request: _Request, plan: Plan, ranks: int | None) -> Plan:
    with progress(f"planning {plan.graph.name}"):
        return replanned(plan, machine_now(plan, request.machine, ranks), request.strategy)


def _with_plan(request: _Request, plan: Plan, folder: Path) -> _Request:
    """The request with a plan that was made here: in the checkpoints' folder, where a person finds it, or
    in one that lasts as long as the run."""
    if request.checkpoint is not None:
        folder = request.checkpoint
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: the folder cannot be made ({error.strerror}).") from None
    path = folder / "replanned.json"
    write_plan(plan, path)
    return replace(request, plan=path, replan=False, machine=None, strategy=None)


def _check(request: _Request, plan: Plan) -> None:
    """Refuse what no rank could do, before any is started."""
    from soapstone.runtime.checkpoint import latest
    from soapstone.runtime.optimizing import optimizer_named
    from soapstone.runtime.versions import WEIGHTS

    optimizer_named(request.optimizer, request.lr)
    check_places((request.export, request.trace), (request.plan, request.machine))
    if request.weights not in WEIGHTS:
        raise TrainingError(
            f"there are no weights {request.weights!r}{did_you_mean(request.weights, WEIGHTS)}"
        )
    if not plan.model:
        raise TrainingError(f"{request.plan}: the plan does not name its model: train it in a script")
    check_not_a_rank(request.gpu_slices)
    if request.replan and request.resume is None:
        raise TrainingError("--replan goes on from a checkpoint: say which with --resume DIR")
    for option, given in (("--machine", request.machine), ("--strategy", request.strategy)):
        if given is not None and not request.replan:
            raise TrainingError(f"{option} is for --replan: a plan has its own")
    if request.resume is not None:
        latest(request.resume)


def _arguments(request: _Request) -> list[str]:
    """The command again, for a rank."""
    given = {
        "--steps": request.steps,
        "--optimizer": request.optimizer,
        "--lr": request.lr,
        "--data": request.data,
        "--checkpoint": request.checkpoint,
        "--every": request.every,
        "--resume": request.resume,
        "--export": request.export,
        "--trace": request.trace,
        "--seed": request.seed,
        "--device": request.device,
        "--timeout": request.timeout_s,
        "--weights": request.weights,
    }
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    flags = {
        "--whole-batches": request.whole_batches,
        "--no-replay": not request.replay,
        "--json": request.as_json,
    }
    return ["train", str(request.plan), *options, *(flag for flag, given in flags.items() if given)]


def _train_as_rank(request: _Request, plan: Plan) -> None:
    """What each rank does; only rank 0 speaks."""
    from soapstone.runtime.session import session

    rank = int(os.environ.get("RANK", "0"))
    try:
        with session(request.device, request.timeout_s) as wire, wire.telling():
            if request.replan:
                plan = _told_plan(request, plan, wire)
            _run(request, plan, wire)
    except SoapstoneError:
        if rank == 0:
            raise
        raise typer.Exit(2) from None


def _told_plan(request: _Request, plan: Plan, wire: Wire) -> Plan:
    """The new plan for the ranks that torchrun started: rank 0 makes it and tells the others."""
    text = ""
    if wire.rank == 0:
        text = json.dumps(document_of(_planned_anew(request, plan, wire.size)), allow_nan=False)
    return plan_from(json.loads(wire.told_by_all(text, "new plan")[0]), "the new plan")


def _run(request: _Request, plan: Plan, wire: Wire) -> None:
    trainer, batches = _prepared(request, plan, wire)
    first, losses, times = trainer.steps_done, [], []
    with _progress(request, wire.rank) as show, settled_objects():
        for batch in batches:
            if trainer.steps_done >= request.steps:
                break
            start = perf_counter()
            if request.trace is not None and trainer.steps_done == request.steps - 1:
                losses.append(_traced(request, trainer, batch))
            else:
                losses.append(trainer.step(batch))
                times.append(perf_counter() - start)
            show(trainer.steps_done, f"loss {losses[-1]:.4g}")
            if request.checkpoint is not None and trainer.steps_done % request.every == 0:
                trainer.save(request.checkpoint)
    if request.checkpoint is not None and losses and trainer.steps_done % request.every:
        trainer.save(request.checkpoint)
    if request.export is not None:
        trainer.export(request.export)
    if wire.rank == 0:
        _print(request, plan, losses, times, first)


def _prepared(request: _Request, plan: Plan, wire: Wire) -> tuple[Trainer, Iterator[Any]]:
    """A trainer, gone on from a checkpoint where there is one, and the batches."""
    from soapstone.api import parallelize
    from soapstone.frontends.source import load
    from soapstone.runtime.optimizing import optimizer_named
    from soapstone.runtime.session import seeded

    with seeded(request.seed):
        # A function that takes no batch has made the plan's; whether it still does, `parallelize` checks.
        source = load(plan.model, batch=plan.graph.sample_count, weights=True, insist=False)
    trainer = parallelize(
        source.module,
        plan,
        optimizer=optimizer_named(request.optimizer, request.lr),
        seed=request.seed,
        wire=wire,
        fuse=request.trace is None,
        replay=request.replay and request.trace is None,
        weights=request.weights,
    )
    folder = request.resume
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and request.checkpoint is not None:
        folder = request.checkpoint if (request.checkpoint / "latest").exists() else folder
    if folder is not None:
        trainer.load(folder)
    found = trainer.batches(
        _batches(request, source.inputs), whole=request.whole_batches, shuffle_seed=request.seed
    )
    return trainer, found


def _batches(request: _Request, example: Any) -> Source:
    if request.data is None:
        return repeat(example)
    from soapstone.frontends.pyfile import function_of

    path, _, name = request.data.rpartition(":")
    return function_of(Path(path), name)


def _progress(request: _Request, rank: int) -> Any:
    if rank == 0:
        return progress(f"training on {request.plan.name}", total=request.steps)
    return nullcontext(lambda *_: None)


def _traced(request: _Request, trainer: Trainer, batch: Any) -> float:
    loss, graph, timeline = trainer.traced_step(batch)
    if trainer.wire.rank == 0 and request.trace is not None:
        title = f"{trainer.plan.graph.name} on {trainer.plan.machine.name}, as it ran"
        document = trace_document(graph, timeline, trainer.plan.machine, title)
        write_text(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n", request.trace)
    return loss


def _print(request: _Request, plan: Plan, losses: list[float], times: list[float], first: int) -> None:
    step_s = median(times) if times else None
    if request.as_json:
        print_json(
            {
                "model": plan.model,
                "ranks": len(plan.machine.devices),
                "first_step": first + 1,
                "steps": first + len(losses),
                "losses": losses,
                "step_s": step_s,
                "predicted_step_s": plan.prediction.makespan_s,
            }
        )
        return
    screen = console()
    if not losses:
        screen.print(Text(f"{first} steps were done already: nothing to train"))
        return
    screen.print(
        Text(f"{plan.graph.name}: steps {first + 1} to {first + len(losses)} on {plan.machine.name}")
    )
    screen.print(Text(f"loss {losses[0]:.6g} at first, {losses[-1]:.6g} at last"))
    if step_s is not None:
        predicted = SECONDS.short_text(plan.prediction.makespan_s)
        screen.print(
            Text(f"{SECONDS.short_text(step_s)} a step (predicted for {plan.machine.name}: {predicted})")
        )
