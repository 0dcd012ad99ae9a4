"""The machines that come with Soapstone: the papers' clusters, today's, and a plain computer.

`NAME` gives the usual size and `NAME:NODESxDEVICES` another. Bandwidths are nominal, for one direction;
`soapstone machine detect` measures those of a machine at hand.

| preset | source |
|---|---|
| `p100` | FlexFlow 8, Figure 5a: NVLink between all four of a node, 100 Gb/s InfiniBand between nodes |
| `k80` | FlexFlow 8, Figure 5b: a private PCIe switch per pair, one shared by all, 56 Gb/s between nodes |
| `summit` | Unity 7, Figure 7a: two triples on NVLink, X-Bus between them, EDR InfiniBand between nodes |
| `a100`, `h100`, `h200` | NVIDIA's DGX and HGX systems: NVSwitch in a node, a network card for each device |
| `cpu` | processes of one computer that exchange data through the loopback device |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType

from soapstone.errors import MachineError
from soapstone.machine.checks import nearest
from soapstone.machine.device import A100, CPU, H100, H200, K80, P100, V100, DeviceKind
from soapstone.machine.machine import Link, Machine, full_duplex
from soapstone.machine.node import NodeTemplate, assembled

FABRIC = "fabric"
"""The network between nodes: a fat tree that never blocks, so each node's own links are its limit."""

MAX_NODES = 8192
"""[choice] Beyond the papers' clusters (Summit has 4,608 nodes); a larger number is a slip."""

GB_PER_S = 1e9
GBIT_PER_S = 1e9 / 8

PCIE3_X16 = 15.75 * GB_PER_S
"""[standard] 16 lanes of 8 GT/s under 128b/130b coding."""

# [NCCL] Its tuning model (`src/graph/tuning.cc`) gives one ring step under the Simple protocol 3.4 us over
# NVLink, 5.7 us over PCIe and 9.6 us over a network. Each is shared out over the links of such a route.
NVLINK_S = 3.4e-6
NVLINK_TO_SWITCH_S = NVLINK_S / 2
PCIE_TO_SWITCH_S = 2.85e-6
NETWORK_TO_FABRIC_S = 4.8e-6
HOST_TO_FABRIC_S = 1.95e-6
"""What is left of a network step when the two PCIe hops are links of their own."""
PCIE_SWITCH_S = 0.1e-6
"""[datasheet] Port to port through a PEX 8747, the switch on a K80 board."""
XBUS_S = 0.5e-6
"""[estimate] Between the sockets of one computer."""


@dataclass(frozen=True)
class Preset:
    """A family of machines with equal nodes: `node(n)` is a node with `n` devices."""

    name: str
    summary: str
    kind: DeviceKind
    default_nodes: int
    default_devices: int
    max_devices: int
    node: Callable[[int], NodeTemplate]

    def machine(self, nodes: int, devices: int) -> Machine:
        """The machine of `nodes` nodes with `devices` devices each."""
        name = f"{self.name}:{nodes}x{devices}"
        for count, most, what in (
            (nodes, MAX_NODES, "nodes"),
            (devices, self.max_devices, "devices per node"),
        ):
            if not 1 <= count <= most:
                raise MachineError(
                    f"machine {name!r}: {count} {what} is outside 1 to {most}; "
                    f"write {self.name}:NODESxDEVICES, for example {self.default_name}."
                )
        template = self.node(devices)
        if nodes == 1:
            return assembled(name, [("node0", template.alone())])
        return assembled(name, [(f"node{i}", template) for i in range(nodes)], switches=[FABRIC])

    @property
    def default_name(self) -> str:
        """The name in full of the usual size."""
        return f"{self.name}:{self.default_nodes}x{self.default_devices}"


def preset(text: str) -> Machine:
    """The machine called `NAME` or `NAME:NODESxDEVICES`."""
    name, colon, size = text.partition(":")
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        raise MachineError(
            f"there is no machine {text!r}: give {', '.join(PRESETS)}, alone or as NAME:NODESxDEVICES, "
            f"or the path of a .yaml file{f'; did you mean {near!r}?' if near else '.'}"
        )
    found = PRESETS[name]
    if not colon:
        return found.machine(found.default_nodes, found.default_devices)
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", size)
    if match is None:
        raise MachineError(
            f"machine {text!r}: the size {size!r} is not NODESxDEVICES; write e.g. {found.default_name}."
        )
    return found.machine(int(match[1]), int(match[2]))


def _gpus(count: int, kind: DeviceKind) -> tuple[tuple[str, DeviceKind], ...]:
    return tuple((f"gpu{i}", kind) for i in range(count))


def _nvlinks(pairs: list[tuple[int, int]], bandwidth_bytes_per_s: float) -> list[Link]:
    return [
        link
        for i, j in pairs
        for link in full_duplex(f"nvlink-{i}-{j}", f"gpu{i}", f"gpu{j}", bandwidth_bytes_per_s, NVLINK_S)
    ]


def _p100_node(count: int) -> NodeTemplate:
    """Quads with an NVLink between all of them; a second quad is joined as in a DGX-1, one link a device."""
    pairs = [(i, j) for i, j in combinations(range(count), 2) if i // 4 == j // 4 or j - i == 4]
    links = _nvlinks(pairs, 20 * GB_PER_S)  # [datasheet] NVLink 1: one link, one direction
    for i in range(count):
        links += full_duplex(f"pcie-{i}", f"gpu{i}", "host", PCIE3_X16, PCIE_TO_SWITCH_S)
    links += full_duplex("ib", "host", FABRIC, 100 * GBIT_PER_S, HOST_TO_FABRIC_S)  # [paper] FlexFlow 8: EDR
    return NodeTemplate(_gpus(count, P100), ("host",), tuple(links))


def _k80_node(count: int) -> NodeTemplate:
    """Pairs on private switches; all traffic beyond a pair crosses the inside of the one shared switch.

    That inside is the one-way link `pcie-shared` between two vertices, so it is a single resource. Its
    bandwidth [estimate] is half a slot's: peer traffic between pairs is staged through the host, where
    each byte passes the switch twice.
    """
    switches = ["host", "shared-in", "shared-out"]
    links = [
        Link("pcie-shared", "shared-in", "shared-out", PCIE3_X16 / 2, PCIE_SWITCH_S),
        Link("host-up", "shared-out", "host", PCIE3_X16, PCIE_SWITCH_S),
        Link("host-down", "host", "shared-in", PCIE3_X16, PCIE_SWITCH_S),
        *full_duplex("ib", "host", FABRIC, 56 * GBIT_PER_S, HOST_TO_FABRIC_S),  # [paper] FlexFlow 8
    ]
    for pair in range((count + 1) // 2):
        switches.append(f"plx{pair}")
        links.append(Link(f"plx{pair}-up", f"plx{pair}", "shared-in", PCIE3_X16, PCIE_SWITCH_S))
        links.append(Link(f"plx{pair}-down", "shared-out", f"plx{pair}", PCIE3_X16, PCIE_SWITCH_S))
    for i in range(count):
        links += full_duplex(f"pcie-{i}", f"gpu{i}", f"plx{i // 2}", PCIE3_X16, PCIE_TO_SWITCH_S)
    return NodeTemplate(_gpus(count, K80), tuple(switches), tuple(links))


def _summit_node(count: int) -> NodeTemplate:
    """Two sockets with up to three devices each; NVLink 2 in pairs of links; one network rail per socket."""
    nvlink = 50 * GB_PER_S  # [datasheet] two NVLink 2 links of 25 GB/s, one direction
    links = _nvlinks([(i, j) for i, j in combinations(range(count), 2) if i // 3 == j // 3], nvlink)
    for i in range(count):
        links += full_duplex(f"nvlink-cpu-{i}", f"gpu{i}", f"cpu{i // 3}", nvlink, NVLINK_TO_SWITCH_S)
    xbus = 32 * GB_PER_S  # [datasheet] 64 GB/s for both directions
    links += full_duplex("xbus", "cpu0", "cpu1", xbus, XBUS_S)
    for socket in range(2):  # [paper] Unity 7: EDR, 100 Gb/s; the adapter gives each socket a port
        links += full_duplex(f"ib-{socket}", f"cpu{socket}", FABRIC, 100 * GBIT_PER_S, HOST_TO_FABRIC_S)
    return NodeTemplate(_gpus(count, V100), ("cpu0", "cpu1"), tuple(links))


def _switched(kind: DeviceKind, nvlink_gb_per_s: int, network_gbit_per_s: int) -> Preset:
    """Devices on one NVSwitch, each with a network card of its own, which is part of its `ib` link."""
    nvlink, network = nvlink_gb_per_s * GB_PER_S, network_gbit_per_s * GBIT_PER_S

    def node(count: int) -> NodeTemplate:
        links: list[Link] = []
        for i in range(count):
            links += full_duplex(f"nvlink-{i}", f"gpu{i}", "nvswitch", nvlink, NVLINK_TO_SWITCH_S)
            links += full_duplex(f"ib-{i}", f"gpu{i}", FABRIC, network, NETWORK_TO_FABRIC_S)
        return NodeTemplate(_gpus(count, kind), ("nvswitch",), tuple(links))

    summary = f"NVSwitch, {nvlink_gb_per_s} GB/s each way; {network_gbit_per_s} Gb/s InfiniBand per device"
    return Preset(kind.name, summary, kind, 1, 8, 8, node)


def _cpu_node(count: int) -> NodeTemplate:
    """Processes that meet in the loopback device; between computers, 10 Gb/s Ethernet."""
    links: list[Link] = []
    for i in range(count):
        # [measured] gloo between 2 processes on one computer: 75 us + size / 3.0 GB/s
        links += full_duplex(f"lo-{i}", f"cpu{i}", "loopback", 3 * GB_PER_S, 37.5e-6)
    links += full_duplex("eth", "loopback", FABRIC, 10 * GBIT_PER_S, 25e-6)  # [typical] TCP round trip 100 us
    return NodeTemplate(tuple((f"cpu{i}", CPU) for i in range(count)), ("loopback",), tuple(links))


_ALL = (
    Preset("p100", "NVLink all to all in a node, 100 Gb/s InfiniBand", P100, 4, 4, 8, _p100_node),
    Preset("k80", "PCIe pairs under one shared switch, 56 Gb/s InfiniBand", K80, 16, 4, 8, _k80_node),
    Preset("summit", "NVLink triples, X-Bus, dual-rail 100 Gb/s InfiniBand", V100, 32, 6, 6, _summit_node),
    _switched(A100, 300, 200),  # [datasheet] DGX A100: NVLink 3, HDR
    _switched(H100, 450, 400),  # [datasheet] DGX H100: NVLink 4, NDR
    _switched(H200, 450, 400),  # [datasheet] DGX H200: NVLink 4, NDR
    Preset("cpu", "processes over loopback; 10 Gb/s Ethernet", CPU, 1, 4, 256, _cpu_node),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({found.name: found for found in _ALL})
"""Every preset by name."""
