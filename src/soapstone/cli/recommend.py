"""`soapstone recommend MODEL`: on how many devices a model fits, and how fast it trains at each size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import console, print_json, rate
from soapstone.cli.problem import CostsOption, JsonOption, ModelArgument, Variant, problem
from soapstone.cli.searching import Searching, searched
from soapstone.cli.spread import spread
from soapstone.errors import MachineError, SoapstoneError
from soapstone.machine.checks import did_you_mean
from soapstone.machine.presets import PRESETS, Preset
from soapstone.machine.units import BYTES, SECONDS, counted
from soapstone.plans import Plan
from soapstone.search.find import Options, settled

DEFAULT_BUDGET = "5s"
"""[choice] How long each size is searched: several sizes together should not take minutes."""

BAR = 40
"""[choice] Columns of the longest bar of the plot."""

ENOUGH = 0.7
"""[choice] A size is said to pay off while it gives this part of a perfect speedup over the smallest."""


def register(app: typer.Typer) -> None:
    """Add `recommend` to the command line."""
    app.command("recommend")(spread(recommend))


@dataclass(frozen=True)
class _Size:
    """A machine that was tried: what was found for it, or why nothing can be."""

    machine: str
    devices: int
    plan: Plan | None
    objection: str | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.prediction.fits(self.plan.machine)

    @property
    def samples_per_s(self) -> float | None:
        return None if self.plan is None else self.plan.samples_per_s


def recommend(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help=f"A preset: {', '.join(PRESETS)}.")],
    most: Annotated[
        int | None,
        typer.Option("--most", min=1, max=4096, help="The most devices (default: the preset's size)."),
    ] = None,
    *,
    variant: Variant,
    searching: Searching,
    costs: CostsOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say on how few devices of a preset a model fits, and how fast it trains on more of them.

    A plan is searched for at each size, for 5 seconds unless --budget or --proposals says otherwise.

    Examples:

        soapstone recommend gpt2 --machine h100 --batch 64
        soapstone recommend nmt --machine k80 --most 16 --proposals 500 --json
    """
    found = _preset(machine)
    options = searching.options(DEFAULT_BUDGET)
    limit = most or found.default_nodes * found.default_devices
    sizes = [_tried(model, name, count, options, variant, costs) for name, count in _names(found, limit)]
    if as_json:
        print_json(_document(model, found, sizes))
    else:
        _print(model, found, sizes)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise MachineError(
            f"there is no preset {name!r}{did_you_mean(name, PRESETS)} A size is not given: all are tried."
        )
    return PRESETS[name]


def _names(preset: Preset, most: int) -> Iterator[tuple[str, int]]:
    """Machines with 1, 2, 4, ... devices on one node, then with 2, 4, ... whole nodes."""
    count = 1
    while count < preset.default_devices and count <= most:
        yield f"{preset.name}:1x{count}", count
        count *= 2
    nodes = 1
    while nodes * preset.default_devices <= most:
        yield f"{preset.name}:{nodes}x{preset.default_devices}", nodes * preset.default_devices
        nodes *= 2


def _tried(model: str, name: str, count: int, options: Options, variant: Variant, costs: str) -> _Size:
    given = problem(model, name, variant, costs)
    try:
        report = searched(given, options)
    except SoapstoneError as error:
        return _Size(name, count, None, str(error))
    return _Size(name, count, settled(report, given.machine, given.costs, given.model, options).plan)


def _smallest(sizes: list[_Size]) -> _Size | None:
    return next((size for size in sizes if size.fits), None)


def _efficiency(size: _Size, smallest: _Size | None) -> float | None:
    """The part of a perfect speedup over the smallest size that fits."""
    if smallest is None or not size.fits or not smallest.samples_per_s or not size.samples_per_s:
        return None
    return size.samples_per_s / smallest.samples_per_s / (size.devices / smallest.devices)


def _document(model: str, preset: Preset, sizes: list[_Size]) -> dict[str, Any]:
    smallest = _smallest(sizes)
    return {
        "model": model,
        "preset": preset.name,
        "fewest_devices": None if smallest is None else smallest.devices,
        "sizes": [
            {
                "machine": size.machine,
                "devices": size.devices,
                "fits": size.fits,
                "samples": None if size.plan is None else size.plan.graph.sample_count,
                "makespan_s": None if size.plan is None else size.plan.prediction.makespan_s,
                "samples_per_s": size.samples_per_s,
                "efficiency": _efficiency(size, smallest),
                "peak_bytes": None if size.plan is None else max(size.plan.prediction.memory_bytes),
                "capacity_bytes": preset.kind.memory_bytes,
                "objection": size.objection,
            }
            for size in sizes
        ],
    }


def _print(model: str, preset: Preset, sizes: list[_Size]) -> None:
    screen, smallest = console(), _smallest(sizes)
    screen.print(Text(_verdict(model, preset, sizes), style="bold"))
    table = Table("machine", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("devices", "samples a step", "per iteration", "throughput", "efficiency", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("")
    most = max((size.samples_per_s or 0.0 for size in sizes if size.fits), default=0.0)
    for size in sizes:
        if size.plan is None:
            table.add_row(
                Text(size.machine), str(size.devices), "", "", "", "", "", Text(size.objection or "")
            )
            continue
        peak = f"{BYTES.short_text(max(size.plan.prediction.memory_bytes))}"
        part = _efficiency(size, smallest)
        throughput = size.samples_per_s or 0.0
        table.add_row(
            Text(size.machine),
            str(size.devices),
            str(size.plan.graph.sample_count or ""),
            SECONDS.short_text(size.plan.prediction.makespan_s),
            rate(throughput) if throughput else "",
            "" if part is None else f"{part:.0%}",
            peak if size.fits else Text(f"{peak}: does not fit", style="bold red"),
            "█" * max(1, round(BAR * throughput / most)) if size.fits and most and throughput else "",
        )
    screen.print(table)
    basis = sorted({size.plan.costs for size in sizes if size.plan is not None})
    if basis:
        screen.print(Text(f"compute times are {' or '.join(basis)}"))


def _verdict(model: str, preset: Preset, sizes: list[_Size]) -> str:
    smallest = _smallest(sizes)
    if smallest is None:
        most = max((size.devices for size in sizes), default=0)
        where = f"up to {counted(most, 'device')} of {preset.name}"
        return f"{model} does not fit on {where}: try --most, or a smaller --batch"
    worth = [size for size in sizes if (_efficiency(size, smallest) or 0.0) >= ENOUGH]
    text = f"{model} fits on {counted(smallest.devices, 'device')} of {preset.name}"
    if worth and worth[-1].devices > smallest.devices:
        text += f"; up to {worth[-1].devices} give at least {ENOUGH:.0%} of a perfect speedup"
    return text
