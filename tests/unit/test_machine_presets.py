"""The built-in machines, against figures worked out by hand from the papers and the datasheets."""

from __future__ import annotations

import re

import pytest

from soapstone.errors import MachineError
from soapstone.machine import PRESETS, Machine, resolve

GB = 1e9


def route_names(machine: Machine, a: int, b: int) -> list[str]:
    return [link.name for link in machine.route(a, b)]


def test_p100_has_nvlink_in_a_node_and_infiniband_between() -> None:
    machine = resolve("p100:4x4")
    assert len(machine.devices) == 16
    for a in range(4):
        for b in range(4):
            if a != b:
                assert machine.bandwidth(a, b) == 20 * GB
                assert len(machine.route(a, b)) == 1
    assert machine.bandwidth(0, 4) == 12.5 * GB  # 100 Gb/s
    assert machine.latency(0, 4) == pytest.approx(9.6e-6)
    assert route_names(machine, 1, 14) == [
        "node0/pcie-1>",
        "node0/ib>",
        "node3/ib<",
        "node3/pcie-2<",
    ]
    assert machine.narrowest_link(1, 14).name == "node0/ib>"


def test_p100_has_one_network_card_per_node() -> None:
    machine = resolve("p100:4x4")
    assert {machine.narrowest_link(a, b).name for a in range(4) for b in range(4, 16)} == {"node0/ib>"}


def test_eight_p100_are_joined_as_in_a_dgx_1() -> None:
    machine = resolve("p100:1x8")
    assert machine.bandwidth(0, 3) == machine.bandwidth(0, 4) == machine.bandwidth(5, 7) == 20 * GB
    assert machine.bandwidth(0, 5) == 15.75 * GB  # not neighbours: over PCIe, for devices do not forward


def test_k80_pairs_are_quicker_than_nodes_and_nodes_than_the_network() -> None:
    machine = resolve("k80:16x4")
    assert len(machine.devices) == 64
    assert machine.bandwidth(0, 1) == machine.bandwidth(2, 3) == 15.75 * GB
    assert machine.bandwidth(0, 2) == machine.bandwidth(1, 3) == 7.875 * GB
    assert machine.bandwidth(0, 4) == 7 * GB  # 56 Gb/s
    assert machine.latency(0, 1) < machine.latency(0, 2) < machine.latency(0, 4)


def test_k80_pairs_share_one_switch() -> None:
    machine = resolve("k80:16x4")
    across = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert {machine.narrowest_link(a, b).name for a, b in across} == {"node0/pcie-shared"}


def test_summit_has_triples_on_nvlink_and_an_xbus_between_them() -> None:
    machine = resolve("summit:32x6")
    assert len(machine.devices) == 192
    assert len(machine.nodes) == 32
    for triple in ((0, 1, 2), (3, 4, 5)):
        for a in triple:
            for b in triple:
                assert a == b or machine.bandwidth(a, b) == 50 * GB
    assert machine.bandwidth(0, 3) == 32 * GB
    assert machine.narrowest_link(0, 3).name == "node0/xbus>"
    assert machine.narrowest_link(3, 0).name == "node0/xbus<"
    assert machine.bandwidth(0, 6) == machine.bandwidth(0, 191) == 12.5 * GB


def test_each_socket_of_summit_has_a_rail_of_its_own() -> None:
    machine = resolve("summit:2x6")
    assert machine.narrowest_link(0, 6).name == "node0/ib-0>"
    assert machine.narrowest_link(3, 6).name == "node0/ib-1>"
    assert "node1/ib-1<" in route_names(machine, 0, 9)


@pytest.mark.parametrize(
    ("name", "in_node", "between"), [("a100", 300, 25), ("h100", 450, 50), ("h200", 450, 50)]
)
def test_todays_nodes_have_an_nvswitch_and_a_network_card_per_device(
    name: str, in_node: float, between: float
) -> None:
    machine = resolve(f"{name}:2x8")
    assert machine.bandwidth(0, 7) == in_node * GB
    assert machine.bandwidth(0, 8) == between * GB
    assert {machine.narrowest_link(a, 8).name for a in range(8)} == {f"node0/ib-{a}>" for a in range(8)}


def test_cpus_meet_in_the_loopback_device() -> None:
    machine = resolve("cpu:1x4")
    assert machine.bandwidth(0, 3) == 3 * GB
    assert machine.latency(0, 3) == 75e-6
    assert resolve("cpu:2x2").bandwidth(0, 2) == 1.25 * GB


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_every_size(name: str) -> None:
    preset = PRESETS[name]
    assert resolve(name) == resolve(preset.default_name)
    for devices in range(1, min(preset.max_devices, 8) + 1):
        for nodes in (1, 2, 3):
            machine = resolve(f"{name}:{nodes}x{devices}")
            assert machine.name == f"{name}:{nodes}x{devices}"
            assert len(machine.devices) == nodes * devices
            assert [device.index for device in machine.devices] == list(range(nodes * devices))
            assert {device.kind for device in machine.devices} == {preset.kind}


@pytest.mark.parametrize("name", PRESETS)
def test_a_smaller_node_is_a_part_of_a_larger_one(name: str) -> None:
    preset = PRESETS[name]
    full, less = preset.node(preset.default_devices), preset.node(preset.default_devices - 1)
    assert set(less.links) < set(full.links)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h20", "there is no machine 'h20': give p100, k80, summit, a100, h100, h200, cpu, alone or as"),
        ("h20", "or the path of a .yaml file; did you mean 'h200'?"),
        ("sumit:2x6", "did you mean 'summit'?"),
        ("zebra", "or the path of a .yaml file."),
        ("", "there is no machine ''"),
        ("p100:", "machine 'p100:': the size '' is not NODESxDEVICES; write e.g. p100:4x4."),
        ("p100:4", "the size '4' is not NODESxDEVICES"),
        ("p100:4x", "the size '4x' is not NODESxDEVICES"),
        ("p100:4x4x4", "the size '4x4x4' is not NODESxDEVICES"),
        ("p100:-1x4", "the size '-1x4' is not NODESxDEVICES"),
        ("p100:1.5x4", "the size '1.5x4' is not NODESxDEVICES"),
        ("p100:0x4", "machine 'p100:0x4': 0 nodes is outside 1 to 8192"),
        ("p100:4x0", "0 devices per node is outside 1 to 8; write p100:NODESxDEVICES, for example p100:4x4."),
        ("p100:4x9", "9 devices per node is outside 1 to 8"),
        ("summit:1x7", "7 devices per node is outside 1 to 6"),
        ("p100:99999x4", "99999 nodes is outside 1 to 8192"),
        (
            "clusters/mine.json",
            "the machine file 'clusters/mine.json' does not end in .yaml or .yml; rename it.",
        ),
    ],
)
def test_an_unknown_name_or_size_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(MachineError, match=re.escape(sentence)) as refusal:
        resolve(text)
    assert "\n" not in str(refusal.value)
