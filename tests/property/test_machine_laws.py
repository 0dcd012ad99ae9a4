"""Laws of machines: routes against an oracle that tries every path, and files against what wrote them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soapstone.errors import MachineError
from soapstone.machine import (
    KINDS,
    PRESETS,
    Device,
    DeviceKind,
    Link,
    Machine,
    document_of,
    full_duplex,
    machine_from,
    read_machine,
    write_machine,
    yaml_text,
)
from soapstone.machine.machine import SUMS
from soapstone.machine.routes import FEMTOSECONDS_PER_S
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, Quantity

# Few values, so that ties are common; and any values, so that none is special.
bandwidths = st.sampled_from([1e9, 10e9, 15.75e9]) | st.floats(1e-3, 1e18)
latencies = st.sampled_from([0.0, 1e-6, 2e-6, 2.85e-6]) | st.floats(0, 10)
plain_names = st.sampled_from(
    ["n0/a", "n0/b", "n0/gpu0", "n0/gpu1", "n1/gpu0", "n1/gpu1", "n1/a", "hub", "n0", "x"]
)
odd_names = st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=6)
names = plain_names | plain_names | odd_names.filter(str.isprintable)

kinds = st.sampled_from(list(KINDS.values())) | st.builds(
    DeviceKind,
    st.sampled_from(["mine", "yours"]) | odd_names.filter(str.isprintable),
    st.integers(1, 2**60),
    st.dictionaries(st.sampled_from(["f64", "tf32", "f16"]), st.floats(1, 1e18)).map(
        lambda r: {**r, "f32": 1e12}
    ),
    bandwidths,
    latencies,
    latencies,
)


@st.composite
def links_between(draw: st.DrawFn, vertices: list[str], *, two_way: bool) -> list[Link]:
    """A few links of every sort; only those that carry both ways alike when `two_way`."""
    found: list[Link] = []
    for number in range(draw(st.integers(0, 7))):
        a, b = draw(st.permutations(vertices))[:2]
        name = draw(
            st.sampled_from([f"l{number}", f"{a}-{number}", f"n0/l{number}", f"n1/l{number}", f"l{number}>"])
        )
        figures = (a, b, draw(bandwidths), draw(latencies))
        match draw(st.sampled_from(["full", "half"] if two_way else ["full", "half", "one way"])):
            case "full":
                found += full_duplex(name, *figures)
            case "half":
                found.append(Link(name, *figures, both_ways=True))
            case _:
                found.append(Link(name, *figures))
    return found


@st.composite
def machines(draw: st.DrawFn, *, two_way: bool = False) -> Machine:
    """Up to 5 devices and 4 switches in any shape in which every device reaches every other."""
    vertices = draw(st.lists(names, min_size=3, max_size=9, unique=True))
    count = draw(st.sampled_from([count for count in (3, 4, 2, 5, 1) if count < len(vertices)]))
    switches = vertices[count:]
    placed = tuple(
        Device(
            index,
            name,
            draw(kinds),
            name[:2] if name[:2] in {"n0", "n1"} else draw(st.sampled_from(["n0", "n1"])),
        )
        for index, name in enumerate(vertices[:count])
    )
    links = draw(links_between(vertices, two_way=two_way))
    if draw(st.booleans()):  # else the links above must connect everything, or the machine is refused
        ends = [(device.name, draw(st.sampled_from(switches))) for device in placed]
        ends += list(itertools.pairwise(switches))
        for a, b in ends:
            links += full_duplex(f"{a}.{b}", a, b, draw(bandwidths), draw(latencies))
    try:
        return Machine(draw(st.sampled_from(["m", "a machine: 2x2"])), placed, tuple(links), tuple(switches))
    except MachineError:
        assume(False)
        raise


def hops(links: tuple[Link, ...]) -> Iterator[tuple[str, str, Link]]:
    for link in links:
        yield link.a, link.b, link
        if link.both_ways:
            yield link.b, link.a, link


def every_path(machine: Machine, a: int, b: int) -> Iterator[tuple[Link, ...]]:
    """Every path from device to device through switches that meets no vertex twice."""
    start, goal = machine.devices[a].name, machine.devices[b].name
    steps = list(hops(machine.links))

    def onwards(at: str, seen: frozenset[str], path: tuple[Link, ...]) -> Iterator[tuple[Link, ...]]:
        for tail, head, link in steps:
            if tail == at and head == goal:
                yield (*path, link)
            elif tail == at and head in machine.switches and head not in seen:
                yield from onwards(head, seen | {head}, (*path, link))

    return onwards(start, frozenset({start}), ())


def merit(path: tuple[Link, ...]) -> tuple[float, int, int]:
    """What makes a route good, best first: narrowest link, latency, number of links."""
    latency_fs = sum(round(link.latency_s * FEMTOSECONDS_PER_S) for link in path)
    return (-min(link.bandwidth_bytes_per_s for link in path), latency_fs, len(path))


def pairs(machine: Machine) -> Iterator[tuple[int, int]]:
    count = len(machine.devices)
    return ((a, b) for a in range(count) for b in range(count) if a != b)


@given(machines())
def test_a_route_is_a_path_of_links_through_switches(machine: Machine) -> None:
    for a, b in pairs(machine):
        at = machine.devices[a].name
        route = machine.route(a, b)
        for position, link in enumerate(route):
            assert at == link.a or (link.both_ways and at == link.b)
            at = link.b if at == link.a else link.a
            assert at in machine.switches or position == len(route) - 1
        assert at == machine.devices[b].name


@given(machines())
def test_no_path_is_better_than_the_route(machine: Machine) -> None:
    for a, b in pairs(machine):
        assert merit(machine.route(a, b)) == min(merit(path) for path in every_path(machine, a, b))


@given(machines())
def test_figures_of_a_pair_are_those_of_its_route(machine: Machine) -> None:
    for a, b in pairs(machine):
        route = machine.route(a, b)
        narrowest = machine.narrowest_link(a, b)
        assert machine.bandwidth(a, b) == min(link.bandwidth_bytes_per_s for link in route)
        assert narrowest == next(
            link for link in route if link.bandwidth_bytes_per_s == machine.bandwidth(a, b)
        )
        total_s = math.fsum(link.latency_s for link in route)
        assert machine.latency(a, b) == pytest.approx(total_s, rel=1e-12, abs=len(route) / FEMTOSECONDS_PER_S)


@given(machines())
def test_what_is_said_of_all_pairs_is_said_of_each(machine: Machine) -> None:
    count, table = len(machine.devices), machine.pairs
    assert [len(figures) for figures in table] == [count**2] * 3
    for a, b in pairs(machine):
        assert machine.links[table.link[a * count + b]] == machine.narrowest_link(a, b)
        assert table.bandwidth_bytes_per_s[a * count + b] == machine.bandwidth(a, b)
        assert table.latency_s[a * count + b] == machine.latency(a, b)


@given(machines(two_way=True))
def test_links_that_carry_both_ways_alike_make_pairs_symmetric(machine: Machine) -> None:
    for a, b in pairs(machine):
        assert machine.bandwidth(a, b) == machine.bandwidth(b, a)
        assert machine.latency(a, b) == machine.latency(b, a)


@given(machines(), st.randoms(use_true_random=False))
def test_the_order_of_declaration_changes_nothing(machine: Machine, random: Random) -> None:
    """Shuffled declarations give an equal machine; renumbered devices give the same routes by name."""
    devices, links, switches = list(machine.devices), list(machine.links), list(machine.switches)
    for declared in (devices, links, switches):
        random.shuffle(declared)
    assert Machine(machine.name, tuple(devices), tuple(links), tuple(switches)) == machine
    renumbered = tuple(replace(device, index=index) for index, device in enumerate(devices))
    other = Machine(machine.name, renumbered, tuple(links), tuple(switches))
    index = {device.name: device.index for device in renumbered}
    for a, b in pairs(machine):
        there, back = index[machine.devices[a].name], index[machine.devices[b].name]
        assert other.route(there, back) == machine.route(a, b)


@given(st.data())
def test_a_machine_is_refused_exactly_when_some_pair_has_no_path(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    vertices = [f"v{i}" for i in range(count + data.draw(st.integers(0, 3)))]
    placed = tuple(Device(i, f"v{i}", KINDS["cpu"], "n") for i in range(count))
    found = {link.name: link for link in data.draw(links_between(vertices, two_way=False))}
    connected = True
    for a in vertices[:count]:
        reached, frontier = {a}, [a]
        while frontier:
            at = frontier.pop()
            for tail, head, _ in hops(tuple(found.values())):
                if tail == at and head not in reached:
                    reached.add(head)
                    frontier += [head] * (head not in vertices[:count])
        connected &= set(vertices[:count]) <= reached
    if connected:
        Machine("m", placed, tuple(found.values()), tuple(vertices[count:]))
    else:
        with pytest.raises(MachineError, match="there is no route from device"):
            Machine("m", placed, tuple(found.values()), tuple(vertices[count:]))


@given(machines(), st.sampled_from(SUMS))
def test_reading_what_was_written_gives_the_same_machine(machine: Machine, sums: str) -> None:
    machine = replace(machine, sums=sums)
    document = document_of(machine)
    assert machine_from(document, "document") == machine
    assert machine_from(json.loads(json.dumps(document)), "json") == machine
    assert machine_from(yaml.safe_load(yaml_text(machine)), "yaml") == machine


@given(machines())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_round_trip(tmp_path: Path, machine: Machine) -> None:
    write_machine(machine, tmp_path / "m.yaml")
    assert read_machine(tmp_path / "m.yaml") == machine


@given(st.sampled_from(list(PRESETS)), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=30)
def test_presets_round_trip_and_are_symmetric(name: str, nodes: int, devices: int) -> None:
    machine = PRESETS[name].machine(nodes, devices)
    assert machine_from(document_of(machine), "document") == machine
    for a, b in pairs(machine):
        assert machine.bandwidth(a, b) == machine.bandwidth(b, a)
        assert machine.latency(a, b) == machine.latency(b, a)


@given(st.sampled_from([BYTES_PER_S, SECONDS, FLOPS_PER_S]), st.floats(0, 1e300))
def test_a_quantity_reads_back_as_it_was_written(quantity: Quantity, value: float) -> None:
    assert quantity.parse(quantity.exact_text(value)) == value


@given(st.integers(1, 2**70))
def test_memory_reads_back_to_the_byte(value: int) -> None:
    assert BYTES.exactly(BYTES.exact_text(value)) == value


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["gpu0", "1 GB/s"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield value, key
        yield from places(inner)


@given(st.sampled_from(["k80:2x3", "summit:1x6", "a100:2x2"]), st.data())
def test_a_damaged_document_is_read_or_refused_but_never_breaks(text: str, data: st.DataObject) -> None:
    name, _, size = text.partition(":")
    document = document_of(PRESETS[name].machine(*map(int, size.split("x"))))
    container, key = data.draw(st.sampled_from(list(places(document))))
    container[key] = data.draw(junk)
    refusal = ""
    try:
        machine_from(document, "damaged.yaml")
    except MachineError as error:
        refusal = str(error)
    assert refusal == "" or refusal.startswith("damaged.yaml: ")
    assert "\n" not in refusal


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    with pytest.raises(MachineError) as refusal:
        read_machine(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
