"""`soapstone machines` and `soapstone machine show`: the clusters to plan for, and what one looks like.

`machine_app` is the `soapstone machine` group; other commands about one machine join it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import console, print_json
from soapstone.machine import PRESETS, DeviceKind, Link, Machine, resolve, yaml_text
from soapstone.machine.classes import link_classes, pair_classes
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, counted

MATRIX_DEVICES = 16
"""[choice] The most devices whose every pair is printed unasked: a matrix that still fits a terminal."""

machine_app = typer.Typer(no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(app: typer.Typer) -> None:
    """Add `machines` and the group `machine` to the command line."""
    app.command("machines")(machines)
    app.add_typer(machine_app, name="machine", help="Describe one machine.")


def machines(as_json: JsonOption = False) -> None:
    """List the machines that are built in.

    NAME stands for the default size; NAME:NODESxDEVICES for another.

    Examples:

        soapstone machines
        soapstone machines --json
        soapstone machine show summit:2x6
    """
    if as_json:
        print_json({"machines": [_preset_document(name) for name in PRESETS]})
        return
    rows = (
        (
            preset.name,
            preset.default_name,
            f"{preset.default_nodes * preset.default_devices} {preset.kind.name}",
            BYTES.short_text(preset.kind.memory_bytes),
            FLOPS_PER_S.short_text(preset.kind.peak_flops_per_s["f32"]),
            preset.summary,
        )
        for preset in PRESETS.values()
    )
    console().print(_table(("name", "default", "devices", "memory", "peak f32", "links"), rows))


@machine_app.callback()
def _group() -> None:
    """Keep `machine` a group of commands while it has only one."""


@machine_app.command()
def show(
    machine: Annotated[
        str,
        typer.Argument(metavar="MACHINE", help="NAME, NAME:NODESxDEVICES, or the path of a .yaml file."),
    ],
    as_json: JsonOption = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print it as a machine file, to edit.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every link and every pair.")] = False,
) -> None:
    """Show a machine's devices and links, and the bandwidth and latency between its devices.

    Examples:

        soapstone machine show p100:4x4
        soapstone machine show k80:1x4 --all
        soapstone machine show h100:2x8 --yaml > mine.yaml
        soapstone machine show mine.yaml --json
    """
    if as_json and as_yaml:
        raise typer.BadParameter("--json and --yaml exclude each other; give one of them.")
    found = resolve(machine)
    if as_json:
        print_json(_machine_document(found))
    elif as_yaml:
        typer.echo(yaml_text(found), nl=False)
    else:
        _print_machine(found, console(), everything)


def _print_machine(machine: Machine, screen: Console, everything: bool) -> None:
    counts = f"{counted(len(machine.devices), 'device')} on {counted(len(machine.nodes), 'node')}"
    screen.print(Text(f"{machine.name}: {counts}, {counted(len(machine.links), 'link')}"))
    is_small = len(machine.devices) <= MATRIX_DEVICES
    screen.print(_kinds_table(machine))
    screen.print(_devices_table(machine) if everything or is_small else _nodes_table(machine))
    if machine.links:
        screen.print(_links_table(machine) if everything else _link_classes_table(machine))
    if len(machine.devices) == 1:
        return
    bandwidths = (
        _matrix(machine, lambda a, b: machine.bandwidth(a, b) / 1e9) if everything or is_small else ""
    )
    if everything or (is_small and bandwidths.index("\n") <= screen.width):
        latencies = _matrix(machine, lambda a, b: machine.latency(a, b) * 1e6)
        screen.print(Text(f"bandwidth in GB/s, row to column\n{bandwidths}"), soft_wrap=True)
        screen.print(Text(f"latency in us, row to column\n{latencies}"), soft_wrap=True)
    else:
        screen.print(_pair_classes_table(machine))
        screen.print("Pairs with alike routes are counted together; --all prints every pair.")


def _kinds_table(machine: Machine) -> Table:
    rows = (
        (
            kind.name,
            str(sum(device.kind == kind for device in machine.devices)),
            BYTES.short_text(kind.memory_bytes),
            BYTES_PER_S.short_text(kind.memory_bandwidth_bytes_per_s),
            "\n".join(
                f"{dtype} {FLOPS_PER_S.short_text(rate)}" for dtype, rate in kind.peak_flops_per_s.items()
            ),
            SECONDS.short_text(kind.launch_overhead_s),
            SECONDS.short_text(kind.message_overhead_s) if kind.message_overhead_s else "-",
        )
        for kind in _kinds(machine)
    )
    return _table(("kind", "devices", "memory", "memory bandwidth", "peak", "launch", "message"), rows)


def _devices_table(machine: Machine) -> Table:
    rows = ((str(device.index), device.name, device.kind.name, device.node) for device in machine.devices)
    return _table(("device", "name", "kind", "node"), rows)


def _nodes_table(machine: Machine) -> Table:
    """Runs of nodes that hold the same number of each kind of device."""
    runs = groupby(
        machine.nodes, key=lambda node: Counter(device.kind.name for device in machine.devices_on(node))
    )
    rows = []
    for kinds, nodes in runs:
        first, *others = nodes
        last = others[-1] if others else first
        on_each = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        rows.append((first if first == last else f"{first} to {last}", str(1 + len(others)), on_each))
    return _table(("nodes", "number", "devices on each"), rows)


def _link_classes_table(machine: Machine) -> Table:
    rows = (
        (found.label, str(found.count), *_figures(found.example), f"{found.example.a} to {found.example.b}")
        for found in link_classes(machine)
    )
    return _table(("links", "number", "bandwidth", "latency", "carries", "for example"), rows)


def _links_table(machine: Machine) -> Table:
    rows = ((link.name, *_figures(link), f"{link.a} to {link.b}") for link in machine.links)
    return _table(("link", "bandwidth", "latency", "carries", "ends"), rows)


def _figures(link: Link) -> tuple[str, str, str]:
    return (
        BYTES_PER_S.short_text(link.bandwidth_bytes_per_s),
        SECONDS.short_text(link.latency_s),
        "both ways" if link.both_ways else "one way",
    )


def _pair_classes_table(machine: Machine) -> Table:
    rows = (
        (
            str(found.count),
            BYTES_PER_S.short_text(found.bandwidth_bytes_per_s),
            SECONDS.short_text(found.latency_s),
            "in a node" if found.one_node else "between nodes",
            found.narrowest,
            " to ".join(machine.devices[index].name for index in found.example),
        )
        for found in pair_classes(machine)
    )
    return _table(("pairs", "bandwidth", "latency", "where", "narrowest", "for example"), rows)


def _matrix(machine: Machine, value: Callable[[int, int], float]) -> str:
    """A line for each device, with the value from it to every other one."""
    devices = range(len(machine.devices))
    rows = [["", *map(str, devices)]]
    rows += [[str(a), *("-" if a == b else f"{value(a, b):.4g}" for b in devices)] for a in devices]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "\n" for row in rows
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of plain text: brackets in names are not markup."""
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _kinds(machine: Machine) -> Iterable[DeviceKind]:
    return dict.fromkeys(device.kind for device in machine.devices)


def _preset_document(name: str) -> dict[str, object]:
    preset = PRESETS[name]
    return {
        "name": preset.name,
        "default": preset.default_name,
        "devices": preset.default_nodes * preset.default_devices,
        "max_devices_per_node": preset.max_devices,
        "links": preset.summary,
        "kind": _kind_document(preset.kind),
    }


def _kind_document(kind: DeviceKind) -> dict[str, object]:
    return {
        "name": kind.name,
        "memory_bytes": kind.memory_bytes,
        "peak_flops_per_s": dict(kind.peak_flops_per_s),
        "memory_bandwidth_bytes_per_s": kind.memory_bandwidth_bytes_per_s,
        "launch_overhead_s": kind.launch_overhead_s,
        "message_overhead_s": kind.message_overhead_s,
    }


def _machine_document(machine: Machine) -> dict[str, object]:
    """Everything about the machine in base units; the matrices hold null from a device to itself."""
    devices = range(len(machine.devices))
    return {
        "name": machine.name,
        "kinds": [_kind_document(kind) for kind in _kinds(machine)],
        "devices": [
            {"index": device.index, "name": device.name, "kind": device.kind.name, "node": device.node}
            for device in machine.devices
        ],
        "switches": list(machine.switches),
        "links": [
            {
                "name": link.name,
                "a": link.a,
                "b": link.b,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
                "both_ways": link.both_ways,
            }
            for link in machine.links
        ],
        "bandwidth_bytes_per_s": [
            [None if a == b else machine.bandwidth(a, b) for b in devices] for a in devices
        ],
        "latency_s": [[None if a == b else machine.latency(a, b) for b in devices] for a in devices],
        "narrowest_link": [
            [None if a == b else machine.narrowest_link(a, b).name for b in devices] for a in devices
        ],
    }
