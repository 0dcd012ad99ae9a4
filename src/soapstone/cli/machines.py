"""`soapstone machines` and `soapstone machine show`: the clusters to plan for, and what one looks like.

`machine_app` is the `soapstone machine` group; other commands about one machine join it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from soapstone.cli.output import console, print_json
from soapstone.machine import PRESETS, DeviceKind, Machine, resolve, yaml_text
from soapstone.machine.classes import link_classes, pair_classes
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS

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
    table = _table("name", "default", "devices", "memory", "peak f32", "links")
    for preset in PRESETS.values():
        kind = preset.kind
        table.add_row(
            preset.name,
            preset.default_name,
            f"{preset.default_nodes * preset.default_devices} {kind.name}",
            BYTES.short_text(kind.memory_bytes),
            FLOPS_PER_S.short_text(kind.peak_flops_per_s["f32"]),
            preset.summary,
        )
    console().print(table)


@machine_app.callback()
def _group() -> None:
    """Describe one machine."""


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
    counts = f"{_counted(len(machine.devices), 'device')} on {_counted(len(machine.nodes), 'node')}"
    screen.print(f"{machine.name}: {counts}, {_counted(len(machine.links), 'link')}")
    _print_wide(screen, _kinds_table(machine))
    _print_wide(screen, _devices_table(machine, everything))
    if machine.links:
        _print_wide(screen, _links_table(machine) if everything else _link_classes_table(machine))
    if len(machine.devices) == 1:
        return
    bandwidths = _matrix(
        machine, "bandwidth in GB/s, row to column", lambda a, b: machine.bandwidth(a, b) / 1e9
    )
    latencies = _matrix(machine, "latency in us, row to column", lambda a, b: machine.latency(a, b) * 1e6)
    fits = len(machine.devices) <= MATRIX_DEVICES and screen.measure(bandwidths).maximum <= screen.width
    if everything or fits:
        _print_wide(screen, bandwidths)
        _print_wide(screen, latencies)
    else:
        _print_wide(screen, _pair_classes_table(machine))
        screen.print("Pairs with alike routes are counted together; --all prints every pair.")


def _print_wide(screen: Console, table: Table) -> None:
    """Print a table whole, also where it is wider than the screen."""
    screen.print(table, width=max(screen.width, screen.measure(table).maximum), crop=False, soft_wrap=True)


def _kinds_table(machine: Machine) -> Table:
    table = _table("kind", "devices", "memory", "memory bandwidth", "peak", "launch")
    for kind in _kinds(machine):
        peaks = (f"{dtype} {FLOPS_PER_S.short_text(rate)}" for dtype, rate in kind.peak_flops_per_s.items())
        table.add_row(
            kind.name,
            str(sum(device.kind == kind for device in machine.devices)),
            BYTES.short_text(kind.memory_bytes),
            BYTES_PER_S.short_text(kind.memory_bandwidth_bytes_per_s),
            ", ".join(peaks),
            SECONDS.short_text(kind.launch_overhead_s),
        )
    return table


def _devices_table(machine: Machine, everything: bool) -> Table:
    if everything or len(machine.devices) <= MATRIX_DEVICES:
        table = _table("device", "name", "kind", "node")
        for device in machine.devices:
            table.add_row(str(device.index), device.name, device.kind.name, device.node)
        return table
    table = _table("devices", "nodes", "on each")
    for nodes in _alike_nodes(machine):
        first, last = machine.devices_on(nodes[0]), machine.devices_on(nodes[-1])
        on_each = ", ".join(
            f"{device.name.removeprefix(f'{nodes[0]}/')} {device.kind.name}" for device in first
        )
        span = nodes[0] if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
        table.add_row(f"{first[0].index} to {last[-1].index}", span, on_each)
    return table


def _alike_nodes(machine: Machine) -> list[list[str]]:
    """Runs of nodes whose devices have the same kinds in the same order."""
    runs: list[list[str]] = []
    kinds_before: list[DeviceKind] | None = None
    for node in machine.nodes:
        kinds = [device.kind for device in machine.devices_on(node)]
        if kinds == kinds_before:
            runs[-1].append(node)
        else:
            runs.append([node])
        kinds_before = kinds
    return runs


def _link_classes_table(machine: Machine) -> Table:
    table = _table("links", "number", "bandwidth", "latency", "carries", "for example")
    for found in link_classes(machine):
        link = found.example
        table.add_row(
            found.label,
            str(found.count),
            BYTES_PER_S.short_text(link.bandwidth_bytes_per_s),
            SECONDS.short_text(link.latency_s),
            "both ways" if link.both_ways else "one way",
            f"{link.a} to {link.b}",
        )
    return table


def _links_table(machine: Machine) -> Table:
    table = _table("link", "ends", "bandwidth", "latency", "carries")
    for link in machine.links:
        table.add_row(
            link.name,
            f"{link.a} to {link.b}",
            BYTES_PER_S.short_text(link.bandwidth_bytes_per_s),
            SECONDS.short_text(link.latency_s),
            "both ways" if link.both_ways else "one way",
        )
    return table


def _pair_classes_table(machine: Machine) -> Table:
    table = _table("pairs", "bandwidth", "latency", "where", "narrowest", "for example")
    for found in pair_classes(machine):
        a, b = (machine.devices[index].name for index in found.example)
        table.add_row(
            str(found.count),
            BYTES_PER_S.short_text(found.bandwidth_bytes_per_s),
            SECONDS.short_text(found.latency_s),
            "in a node" if found.one_node else "between nodes",
            found.narrowest,
            f"{a} to {b}",
        )
    return table


def _matrix(machine: Machine, title: str, value: Callable[[int, int], float]) -> Table:
    devices = range(len(machine.devices))
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left", pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    for index in devices:
        table.add_column(str(index), justify="right", no_wrap=True)
    for a in devices:
        table.add_row(str(a), *("-" if a == b else f"{value(a, b):.4g}" for b in devices))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
