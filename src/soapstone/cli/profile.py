"""`soapstone profile MODEL`: measure a model's operators on the device at hand, and keep the times."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import console, print_json, progress
from soapstone.cli.problem import MODEL_HELP, JsonOption, Variant, tell
from soapstone.cli.ranks import GpuSlices, as_rank, check_not_a_rank, run_ranks
from soapstone.cli.spread import spread
from soapstone.cost.cache import Cache
from soapstone.cost.candidates import Candidate, candidates, spread_out
from soapstone.cost.choice import shipped_kinds, threads_of_a_rank
from soapstone.cost.fit import HeldOut, held_out
from soapstone.cost.profile import Profile, flat_shape, key_of, read_profile, write_profile
from soapstone.errors import CostError
from soapstone.machine import resolve
from soapstone.machine.cores import usable_cores
from soapstone.machine.units import SECONDS

if TYPE_CHECKING:
    from soapstone.cost.profiler import Profiler
    from soapstone.runtime.wire import Wire

SAVE_EVERY_S = 10.0
"""[choice] What was measured is saved this often, so that a stop loses little."""


def register(app: typer.Typer) -> None:
    """Add `profile` to the command line."""
    app.command("profile")(spread(profile))


def profile(  # noqa: PLR0913, a command has a parameter for each option
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=MODEL_HELP)] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="Measure the shards that plans for this machine may have."),
    ] = None,
    degrees: Annotated[
        str | None, typer.Option("--degrees", help="Numbers of parts instead of a machine, such as 1,2,4,8.")
    ] = None,
    *,
    variant: Variant,
    budget: Annotated[
        str, typer.Option("--budget", help="Stop measuring after this long, such as 30s or 5m.")
    ] = "10m",
    kind: Annotated[
        str | None, typer.Option("--kind", help="What machines call the device (default: by its name).")
    ] = None,
    gpu_slices: GpuSlices = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes that measure the same at once (default: one).")
    ] = 1,
    anew: Annotated[bool, typer.Option("--anew", help="Measure again what is in the cache.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the device's measured times here, as JSON.")
    ] = None,
    imported: Annotated[
        Path | None, typer.Option("--import", help="Add the times of an exported file to the cache.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure operators at the shapes that shards have, forward and backward, into a cache on disk.

    Examples:

        soapstone profile alexnet --machine cpu:1x2
        soapstone profile gpt2 bert_large --device cuda --degrees 1,2,4,8 --budget 5m --export h200.json
        soapstone profile gpt2 --gpu-slices 4 --degrees 1,2,4 --export quarter.json
        soapstone profile --import h200.json
    """
    check_not_a_rank(gpu_slices)
    device = device if gpu_slices is None else "cuda"
    ranks = ranks if gpu_slices is None else max(ranks, gpu_slices)
    cache = Cache()
    outcome: dict[str, Any] = {"cache": str(cache.path)}
    if imported is not None:
        found = read_profile(imported)
        cache.add(found)
        outcome["imported"] = _profile_document(found)
    if models:
        request = _Request(models, device, machine, degrees, variant, seconds(budget), kind, ranks, anew)
        if ranks > 1 and "RANK" not in os.environ:
            run_ranks(ranks, _arguments(request, export, as_json), gpu_slices)
            return
        with as_rank(device) as wire:
            report = _measured(request, cache, wire)
        if wire.rank:
            return
        outcome |= report.document
        if export is not None:
            write_profile(report.profile, export)
    elif export is not None:
        _export(cache, kind or device, export)
    elif imported is None:
        outcome["profiles"] = [_profile_document(each) for each in cache.profiles()]
        outcome["shipped"] = list(shipped_kinds())
    if export is not None:
        outcome["exported"] = str(export)
    if as_json:
        print_json(outcome)
    else:
        _print(outcome)


def seconds(text: str) -> float:
    """A time as a user writes it: 30s, 5m, 1h, or a number of seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?", text.strip())
    if found is None:
        raise typer.BadParameter(f"'{text}' is no time: write 30s, 5m or 1h.")
    return float(found[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[found[2] or "s"]


@dataclass(frozen=True)
class _Request:
    """What is to be measured, as a user says it."""

    models: Sequence[str]
    device: str
    machine: str | None
    degrees: str | None
    variant: Variant
    budget_s: float
    kind: str | None
    ranks: int
    anew: bool


@dataclass(frozen=True)
class _Report:
    """All times of the device, and what this run added to them."""

    profile: Profile
    document: Mapping[str, Any]


def _arguments(request: _Request, export: Path | None, as_json: bool) -> list[str]:
    """The command again, for a rank."""
    given = {
        "--device": request.device,
        "--machine": request.machine,
        "--degrees": request.degrees,
        "--budget": request.budget_s,
        "--kind": request.kind,
        "--ranks": request.ranks,
        "--export": export,
    }
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    flags = {"--anew": request.anew, "--json": as_json}
    options += [*request.variant.given, *(flag for flag, is_set in flags.items() if is_set)]
    return ["profile", *request.models, *options]


def _measured(request: _Request, cache: Cache, wire: Wire) -> _Report:
    from soapstone.cost.at_hand import device_at_hand, prepare
    from soapstone.cost.profiler import Profiler
    from soapstone.runtime.profiling import measured_at_once

    machine = resolve(request.machine) if request.machine else None
    parts = _parts(request.degrees, len(machine.devices) if machine else None)
    threads = threads_of_a_rank(machine) if machine else max(1, usable_cores() // max(parts))
    device = device_at_hand(request.device, request.kind, threads, request.ranks)
    todo = _candidates(request, parts, wire)
    known = cache.profile(device.kind, device.software)
    seen = set() if request.anew else {(k, m.shape) for k, times in known.times.items() for m in times}
    missing = [c for c in todo if any(_name(work) not in seen for work in c.works)]
    prepare(device)
    profiler, start = Profiler(device), monotonic()
    if request.anew or not known.updates:
        profiler.measure_updates()
    keep = _keeping(profiler, cache, wire)
    with _bar(device.kind, len(missing), wire) as show:

        def told(done: int, what: str) -> None:
            show(done, what)
            keep()

        try:
            done = measured_at_once(profiler, spread_out(missing), wire, request.budget_s, told)
        finally:  # Ctrl-C and failures keep what there is
            fresh = profiler.profile
            if fresh.count and wire.rank == 0:
                cache.add(fresh)
    whole = known.merged(fresh) if fresh.count else known
    document = {
        "device": device.kind,
        "software": device.software,
        "models": list(request.models),
        "parts": parts,
        "shards": len(todo),
        "known": len(todo) - len(missing),
        "measured": done - profiler.failures,
        "left": len(missing) - done,
        "failed": profiler.failed,
        "seconds": monotonic() - start,
        "times": whole.count,
        "spread_median": _spread(fresh),
        "held_out": _held_out(held_out(whole.times)),
    }
    return _Report(whole, document)


def _bar(kind: str, total: int, wire: Wire) -> Any:
    return progress(f"measuring on {kind}", total=total) if wire.rank == 0 else nullcontext(lambda *_: None)


def _keeping(profiler: Profiler, cache: Cache, wire: Wire) -> Callable[[], None]:
    """What to call now and then: rank 0 saves what was measured so far."""
    saved = [monotonic()]

    def keep() -> None:
        if wire.rank == 0 and monotonic() - saved[0] > SAVE_EVERY_S:
            cache.add(profiler.profile)
            saved[0] = monotonic()

    return keep


def _name(work: Any) -> tuple[Any, ...]:
    return key_of(work), flat_shape(work.operands, work.outputs)


def _parts(degrees: str | None, device_count: int | None) -> list[int]:
    if degrees is None:
        return list(range(1, (device_count or 1) + 1))
    try:
        found = sorted({int(part) for part in degrees.split(",")})
    except ValueError:
        raise typer.BadParameter(f"'{degrees}' is no list of numbers: write 1,2,4,8.") from None
    if not found or found[0] < 1:
        raise typer.BadParameter(f"'{degrees}' has a number of parts below 1: write 1,2,4,8.")
    return found


def _candidates(request: _Request, parts: Sequence[int], wire: Wire) -> list[Candidate]:
    from soapstone.frontends.source import load

    found: dict[Any, Candidate] = {}
    for model in request.models:
        with progress(f"capturing {model}"):
            source = load(request.variant.named(model), batch=request.variant.batch, devices=max(parts))
            captured = source.captured()
        if wire.rank == 0:
            tell(captured.notes)
        with progress(f"listing the shards of {model}"):
            for candidate in candidates(captured.graph, parts):
                found.setdefault(tuple(map(_name, candidate.works)), candidate)
    return list(found.values())


def _export(cache: Cache, kind: str, path: Path) -> None:
    found = cache.profiles(kind)
    if not found:
        known = ", ".join(sorted({each.kind for each in cache.profiles()})) or "nothing"
        raise CostError(f"the cache has no times of '{kind}' to export; it has {known}")
    write_profile(found[0], path)


def _spread(found: Profile) -> float | None:
    spreads = [m.spread for times in found.times.values() for m in times]
    return median(spreads) if spreads else None


def _held_out(found: HeldOut | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _profile_document(found: Profile) -> dict[str, Any]:
    return {"device": found.kind, "software": dict(found.software), "times": found.count}


def _print(outcome: Mapping[str, Any]) -> None:
    screen = console()
    if "imported" in outcome:
        found = outcome["imported"]
        screen.print(Text(f"{found['times']} times of {found['device']} are in {outcome['cache']}"))
    if "profiles" in outcome:
        table = Table("device", "times", "software", box=SIMPLE_HEAD, pad_edge=False)
        for each in outcome["profiles"]:
            told = ", ".join(f"{name} {version}" for name, version in each["software"].items())
            table.add_row(Text(each["device"]), str(each["times"]), Text(told))
        screen.print(Text(f"measured times in {outcome['cache']}"))
        screen.print(table)
        screen.print(Text(f"shipped with Soapstone: {', '.join(outcome['shipped']) or 'none'}"))
    if "shards" in outcome:
        _print_measured(screen, outcome)
    if "exported" in outcome:
        screen.print(Text(f"written to {outcome['exported']}"))


def _print_measured(screen: Any, outcome: Mapping[str, Any]) -> None:
    software = ", ".join(f"{name} {version}" for name, version in outcome["software"].items())
    screen.print(Text(f"{outcome['device']} ({software})"))
    screen.print(
        Text(
            f"{outcome['shards']} distinct shards: {outcome['known']} were known,"
            f" {outcome['measured']} measured in {SECONDS.short_text(outcome['seconds'])},"
            f" {outcome['left']} left to the fit, {len(outcome['failed'])} operators could not be run"
        )
    )
    for name, reason in outcome["failed"].items():
        screen.print(Text(f"  {name}: {reason}"))
    if outcome["spread_median"] is not None:
        screen.print(Text(f"spread of a time: {outcome['spread_median']:.1%} (median)"))
    fit = outcome["held_out"]
    if fit is not None:
        screen.print(
            Text(
                f"the fit on {fit['count']} held-out shapes is off by {fit['median']:.1%} (median),"
                f" {fit['p90']:.1%} (9 of 10), {fit['worst']:.1%} (worst)"
            )
        )
    screen.print(Text(f"{outcome['times']} times are in {outcome['cache']}"))
