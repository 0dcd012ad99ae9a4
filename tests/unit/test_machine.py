"""Devices, links and machines: what they answer, and every way of building one wrong."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import cast

import pytest

from soapstone.errors import MachineError
from soapstone.machine import DTYPES, KINDS, Device, DeviceKind, Link, Machine, full_duplex
from soapstone.machine.classes import link_classes, link_label, pair_classes

V100, CPU = KINDS["v100"], KINDS["cpu"]


def devices(*names: str, kind: DeviceKind = V100) -> tuple[Device, ...]:
    return tuple(Device(index, name, kind, "node0") for index, name in enumerate(names))


def pair_of_switches() -> Machine:
    """Two devices, a wide slow way between them and a narrow quick one."""
    return Machine(
        "two ways",
        devices("a", "b"),
        (
            *full_duplex("wide-in", "a", "s", 40e9, 5e-6),
            *full_duplex("wide-out", "s", "b", 30e9, 5e-6),
            *full_duplex("quick", "a", "b", 10e9, 1e-6),
        ),
        ("s",),
    )


def test_the_widest_route_wins_over_the_quickest() -> None:
    machine = pair_of_switches()
    assert [link.name for link in machine.route(0, 1)] == ["wide-in>", "wide-out>"]
    assert [link.name for link in machine.route(1, 0)] == ["wide-out<", "wide-in<"]
    assert machine.bandwidth(0, 1) == 30e9
    assert machine.latency(0, 1) == 10e-6
    assert machine.narrowest_link(0, 1).name == "wide-out>"


def test_a_quicker_narrow_start_wins_when_a_later_link_is_narrow_anyway() -> None:
    links = (
        *full_duplex("wide", "a", "s", 100e9, 9e-6),
        *full_duplex("narrow", "a", "s", 10e9, 1e-6),
        *full_duplex("tail", "s", "b", 10e9, 1e-6),
    )
    machine = Machine("m", devices("a", "b"), links, ("s",))
    assert [link.name for link in machine.route(0, 1)] == ["narrow>", "tail>"]


def test_of_equally_wide_and_quick_routes_the_one_with_fewest_links_wins_then_the_first_by_name() -> None:
    links = (
        *full_duplex("long-1", "a", "s", 1e9, 1e-6),
        *full_duplex("long-2", "s", "b", 1e9, 1e-6),
        *full_duplex("short-10", "a", "b", 1e9, 2e-6),
        *full_duplex("short-9", "a", "b", 1e9, 2e-6),
    )
    machine = Machine("m", devices("a", "b"), links, ("s",))
    assert [link.name for link in machine.route(0, 1)] == ["short-9>"]


def test_the_first_of_equally_narrow_links_is_the_one_occupied() -> None:
    links = (*full_duplex("x", "a", "s", 1e9, 0), *full_duplex("y", "b", "s", 1e9, 0))
    machine = Machine("m", devices("a", "b"), links, ("s",))
    assert machine.narrowest_link(0, 1).name == "x>"
    assert machine.narrowest_link(1, 0).name == "y>"


def test_a_half_duplex_link_is_one_resource_and_a_full_duplex_one_two() -> None:
    bus = Link("bus", "a", "b", 1e9, 1e-6, both_ways=True)
    shared = Machine("m", devices("a", "b"), (bus,))
    assert shared.narrowest_link(0, 1) == shared.narrowest_link(1, 0) == bus
    separate = Machine("m", devices("a", "b"), full_duplex("wire", "a", "b", 1e9, 1e-6))
    assert separate.narrowest_link(0, 1).name == "wire>"
    assert separate.narrowest_link(1, 0).name == "wire<"


def test_a_device_reaches_itself_at_once() -> None:
    machine = pair_of_switches()
    assert machine.route(0, 0) == ()
    assert machine.bandwidth(0, 0) == math.inf
    assert machine.latency(0, 0) == 0
    with pytest.raises(MachineError, match="to itself needs no link"):
        machine.narrowest_link(1, 1)


def test_a_single_device_needs_no_links() -> None:
    assert Machine("one", devices("a")).links == ()


def test_device_kinds_may_be_mixed() -> None:
    mixed = (Device(0, "g", V100, "n"), Device(1, "c", CPU, "n"))
    machine = Machine("m", mixed, full_duplex("pcie", "g", "c", 16e9, 1e-6))
    assert [device.kind.name for device in machine.devices] == ["v100", "cpu"]


def test_nodes_and_their_devices() -> None:
    placed = (Device(0, "a", V100, "left"), Device(1, "b", V100, "right"), Device(2, "c", V100, "left"))
    links = tuple(link for name in "abc" for link in full_duplex(f"l{name}", name, "s", 1e9, 0))
    machine = Machine("m", placed, links, ("s",))
    assert machine.nodes == ("left", "right")
    assert [device.name for device in machine.devices_on("left")] == ["a", "c"]
    with pytest.raises(MachineError, match="has no node 'middle'; choose one of left, right"):
        machine.devices_on("middle")


def test_links_are_numbered_by_name_and_numbers_in_names_count() -> None:
    links = tuple(Link(f"l{i}", "a", "b", 1e9, 0, both_ways=True) for i in (10, 2, 1))
    machine = Machine("m", devices("a", "b"), links)
    assert [link.name for link in machine.links] == ["l1", "l2", "l10"]
    assert machine.link_numbers == {"l1": 0, "l2": 1, "l10": 2}


def test_copies_and_pickles_are_equal_and_hash_alike() -> None:
    machine = pair_of_switches()
    machine.route(0, 1)
    for twin in (copy.deepcopy(machine), pickle.loads(pickle.dumps(machine))):
        assert twin == machine
        assert hash(twin) == hash(machine)
        assert twin.route(0, 1) == machine.route(0, 1)
    assert len({machine, pair_of_switches()}) == 1


@pytest.mark.parametrize(("a", "b"), [(0, 2), (-1, 0), (5, 0)])
def test_asking_for_a_device_that_is_not_there_is_refused(a: int, b: int) -> None:
    with pytest.raises(MachineError, match=rf"has devices 0 to 1, not {a} and {b}"):
        pair_of_switches().route(a, b)


def test_kinds_have_a_rate_in_every_dtype_and_fall_back_to_f32() -> None:
    for kind in KINDS.values():
        for dtype in DTYPES:
            assert kind.peak_flops_per_s_in(dtype) > 0
    assert V100.peak_flops_per_s_in("f16") == 125e12
    assert V100.peak_flops_per_s_in("bf16") == V100.peak_flops_per_s_in("f32") == 15.7e12
    h100 = KINDS["h100"]
    assert h100.peak_flops_per_s_in("f8e4m3") == h100.peak_flops_per_s_in("f8e5m2") == 1978.9e12
    assert h100.peak_flops_per_s_in("i64") == h100.peak_flops_per_s_in("bool") == 67e12


def test_the_rates_of_a_kind_cannot_be_changed() -> None:
    rates = {"f32": 1e12}
    kind = DeviceKind("mine", 2**30, rates, 1e9, 0)
    rates["f32"] = 0
    assert kind.peak_flops_per_s["f32"] == 1e12
    with pytest.raises(TypeError):
        kind.peak_flops_per_s["f32"] = 0  # type: ignore[index]


def a_kind(**changes: object) -> DeviceKind:
    figures: dict[str, object] = {
        "name": "mine",
        "memory_bytes": 2**30,
        "peak_flops_per_s": {"f32": 1e12},
        "memory_bandwidth_bytes_per_s": 1e9,
        "launch_overhead_s": 0.0,
    }
    return DeviceKind(**{**figures, **changes})  # type: ignore[arg-type]


def a_link(**changes: object) -> Link:
    figures: dict[str, object] = {
        "name": "l",
        "a": "a",
        "b": "b",
        "bandwidth_bytes_per_s": 1e9,
        "latency_s": 0.0,
    }
    return Link(**{**figures, **changes})  # type: ignore[arg-type]


WIRE = full_duplex("wire", "a", "b", 1e9, 0)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: a_kind(name=""), "device kind: the name '' must have 1 to"),
        (lambda: a_kind(name="two words"), "the name 'two words' must have"),
        (lambda: a_kind(name=3), "device kind: a name must be text, not 3; put it in quotes."),
        (lambda: a_kind(memory_bytes=0), "device kind 'mine': memory_bytes must be more than 0, not 0"),
        (lambda: a_kind(memory_bytes=1.5), "memory_bytes must be a whole number, not 1.5"),
        (lambda: a_kind(memory_bytes=True), "memory_bytes must be a whole number, not True"),
        (
            lambda: a_kind(memory_bandwidth_bytes_per_s=-1),
            "bandwidth_bytes_per_s must be more than 0, not -1",
        ),
        (lambda: a_kind(memory_bandwidth_bytes_per_s="fast"), "must be a finite number, not 'fast'"),
        (lambda: a_kind(launch_overhead_s=math.nan), "launch_overhead_s must be a finite number, not nan"),
        (lambda: a_kind(launch_overhead_s=-1e-6), "launch_overhead_s must be 0 or more, not -1e-06"),
        (lambda: a_kind(message_overhead_s=-1e-6), "message_overhead_s must be 0 or more, not -1e-06"),
        (lambda: a_kind(peak_flops_per_s={"f16": 1e12}), "peak_flops_per_s has no 'f32' rate"),
        (lambda: a_kind(peak_flops_per_s={"f32": 0}), "peak_flops_per_s['f32'] must be more than 0, not 0"),
        (lambda: a_kind(peak_flops_per_s={"f32": 1, "fp64": 1}), "unknown dtype 'fp64'; did you mean 'f64'?"),
        (lambda: a_kind(peak_flops_per_s=3), "peak_flops_per_s must map dtypes to rates, not be 3"),
        (lambda: Device(-1, "a", V100, "n"), "device 'a': index must be 0 or more, not -1"),
        (lambda: Device(0, "a b", V100, "n"), "device: the name 'a b' must have"),
        (
            lambda: Device(0, "a", cast("DeviceKind", "v100"), "n"),
            "device 'a': kind must be a DeviceKind, not 'v100'",
        ),
        (lambda: a_link(b="a"), "link 'l': both ends are 'a'; a link joins two different vertices."),
        (
            lambda: a_link(bandwidth_bytes_per_s=0),
            "link 'l': bandwidth_bytes_per_s must be more than 0, not 0",
        ),
        (lambda: a_link(bandwidth_bytes_per_s=10**400), "bandwidth_bytes_per_s must be a finite number"),
        (
            lambda: a_link(bandwidth_bytes_per_s=math.inf),
            "bandwidth_bytes_per_s must be a finite number, not inf",
        ),
        (lambda: a_link(latency_s=-1), "link 'l': latency_s must be 0 or more, not -1"),
        (lambda: a_link(name="x\n"), "link: the name 'x\\n' must have"),
        (lambda: Machine("", devices("a")), "machine: the name '' must be printable text"),
        (lambda: Machine("m", ()), "machine 'm': there are no devices; declare at least one."),
        (
            lambda: Machine("m", devices("a", "a"), WIRE),
            "machine 'm': two vertices are named 'a'; rename one",
        ),
        (lambda: Machine("m", devices("a", "b"), WIRE, ("b",)), "two vertices are named 'b'"),
        (lambda: Machine("m", devices("a", "b"), (*WIRE, *WIRE)), "two links are named 'wire<'"),
        (lambda: Machine("m", devices("a"), WIRE), "link 'wire<' ends at 'b', which is neither a device nor"),
        (lambda: Machine("m", (Device(1, "a", V100, "n"),)), "device 'a' has index 1 where 0 is due"),
        (
            lambda: Machine("m", (Device(0, "a", V100, "n"), Device(1, "b", a_kind(name="v100"), "n")), WIRE),
            "two different device kinds are named 'v100'; rename one of them.",
        ),
        (
            lambda: Machine("m", devices("a", "b", "c"), WIRE),
            "machine 'm': there is no route from device 'a' to device 'c'; join them by links",
        ),
        (lambda: Machine("m", devices("a", "b"), WIRE[:1]), "no route from device 'b' to device 'a'"),
        (
            lambda: Machine("m", devices("a", "b", "c"), (*WIRE, *full_duplex("x", "b", "c", 1e9, 0))),
            "no route from device 'a' to device 'c'; join them by links, directly or through switches "
            "(devices do not forward).",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(MachineError, match=re.escape(sentence)) as refusal:
        build()
    assert "\n" not in str(refusal.value)


def test_classes_count_alike_links_and_pairs() -> None:
    machine = pair_of_switches()
    assert link_label(Link("node0/nvlink-0-1>", "a", "b", 1e9, 0)) == "nvlink"
    assert link_label(Link("7", "a", "b", 1e9, 0)) == "7"
    assert [(found.label, found.count) for found in link_classes(machine)] == [
        ("wide-in", 2),
        ("wide-out", 2),
        ("quick", 2),
    ]
    assert [(found.count, found.labels) for found in pair_classes(machine)] == [
        (1, ("wide-in", "wide-out")),
        (1, ("wide-out", "wide-in")),
    ]
