"""`soapstone machine detect`: describe this computer, with links and rates as its ranks measure them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.machines import machine_app
from soapstone.cli.output import console, print_json
from soapstone.cli.ranks import GpuSlices, as_rank, check_not_a_rank, run_ranks
from soapstone.cost.links import LinkFit, Message, fitted, local_machine
from soapstone.machine import Machine, document_of, write_machine
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS

MOST_RANKS = 256


def register(_: typer.Typer) -> None:
    """Add `detect` to the group `machine` of the command line."""
    machine_app.command("detect")(detect)


def detect(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the machine here, as YAML.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks to measure (default: GPUs, or cores up to 8).")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    gpu_slices: GpuSlices = None,
    name: Annotated[str, typer.Option("--name", help="What to call the machine.")] = "here",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Describe this computer: what its devices compute, and what its ranks' messages take.

    Starts one process for each rank; they send each other messages alone, at once and in collectives,
    by size. The file it writes is a machine to plan for.

    Examples:

        soapstone machine detect
        soapstone machine detect --ranks 4 -o machine.yaml
        soapstone machine detect --gpu-slices 4 -o slices.yaml
        soapstone plan lenet --machine machine.yaml
    """
    from soapstone.runtime.detecting import backend_name, measured_kind, measured_messages, usual_ranks
    from soapstone.validation.handing import message_overhead_s

    check_not_a_rank(gpu_slices)
    device = device if gpu_slices is None else "cuda"
    count = usual_ranks(device) * (gpu_slices or 1) if ranks is None else ranks
    if not 1 <= count <= MOST_RANKS:
        raise typer.BadParameter(f"--ranks is from 1 to {MOST_RANKS}, not {count}.")
    if "RANK" not in os.environ and count > 1:
        options = [f"--ranks={count}", f"--device={device}", f"--name={name}"]
        options += [f"--output={output}"] if output else []
        run_ranks(count, ["machine", "detect", *options, *(["--json"] if as_json else [])], gpu_slices)
        return
    with as_rank(device) as wire:
        kind = measured_kind(wire)
        messages = measured_messages(wire) if wire.size > 1 else []
        handled_s = message_overhead_s(wire) if wire.size > 1 else 0.0
        if wire.rank:
            return
        fit = fitted(messages, wire.size) if messages else None
        machine = local_machine(name, kind, wire.size, fit).with_message_overhead(handled_s)
        backend = backend_name(wire) if wire.size > 1 else None
    if output is not None:
        write_machine(machine, output)
    if as_json:
        print_json(_document(machine, fit, messages, backend))
    else:
        _print(machine, fit, messages, backend, output)


def _document(
    machine: Machine, fit: LinkFit | None, messages: list[Message], backend: str | None
) -> dict[str, Any]:
    return {
        "machine": document_of(machine),
        "backend": backend,
        "fit": None if fit is None else {**asdict(fit), "errors": dict(fit.errors)},
        "messages": [asdict(message) for message in messages],
    }


def _print(
    machine: Machine, fit: LinkFit | None, messages: list[Message], backend: str | None, output: Path | None
) -> None:
    screen = console()
    kind = machine.devices[0].kind
    screen.print(Text(f"{machine.name}: {len(machine.devices)} {kind.name}, each as all work at once:"))
    rates = ", ".join(f"{d} {FLOPS_PER_S.short_text(r)}" for d, r in kind.peak_flops_per_s.items())
    screen.print(
        Text(
            f"{rates}; memory {BYTES.short_text(kind.memory_bytes)} at"
            f" {BYTES_PER_S.short_text(kind.memory_bandwidth_bytes_per_s)}; an operator takes at least"
            f" {SECONDS.short_text(kind.launch_overhead_s)}"
        )
    )
    if fit is not None:
        shape = "one link that all share" if fit.is_shared else "a link in each direction for each rank"
        screen.print(
            Text(
                f"{backend}: {shape}, {BYTES_PER_S.short_text(fit.bandwidth_bytes_per_s)},"
                f" {SECONDS.short_text(fit.latency_s)}; a message takes"
                f" {SECONDS.short_text(kind.message_overhead_s)} of its ends' own time"
            )
        )
        errors = ", ".join(f"{what} {error:.0%}" for what, error in fit.errors.items())
        screen.print(Text(f"the fit is off by (median): {errors}"))
        screen.print(_messages_table(messages))
    if output is not None:
        screen.print(Text(f"written to {output}"))


def _messages_table(messages: list[Message]) -> Table:
    table = Table("bytes", box=SIMPLE_HEAD, pad_edge=False)
    kinds = list(dict.fromkeys(message.what for message in messages))
    for what in kinds:
        table.add_column(what, justify="right")
    for size in sorted({message.size_bytes for message in messages}):
        row = []
        for what in kinds:
            times = [m.seconds for m in messages if m.what == what and m.size_bytes == size]
            row.append(SECONDS.short_text(sorted(times)[len(times) // 2]))
        table.add_row(BYTES.short_text(size), *row)
    return table
