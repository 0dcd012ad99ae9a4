"""Nodes as templates: what one computer holds, stamped out once for each computer of a cluster.

Presets and the compact form of machine files are both a few templates with counts. Inside a template
names are local (`gpu0`); on node `node3` they become `node3/gpu0`. An end of a link that is no vertex of
the template is a switch of the whole machine, such as the fabric between the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from soapstone.machine.device import DeviceKind
from soapstone.machine.machine import Device, Link, Machine


@dataclass(frozen=True)
class NodeTemplate:
    """One node with local names: its devices with their kinds, its switches and its links."""

    devices: tuple[tuple[str, DeviceKind], ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def vertices(self) -> frozenset[str]:
        """The local names that ends of links may have."""
        return frozenset((*(name for name, _ in self.devices), *self.switches))

    def alone(self) -> NodeTemplate:
        """This node without the links that leave it."""
        inside = self.vertices
        return replace(self, links=tuple(link for link in self.links if {link.a, link.b} <= inside))

    def links_on(self, node: str) -> Iterable[Link]:
        """The links as they are called on `node`."""
        inside = self.vertices
        for link in self.links:
            a, b = (f"{node}/{end}" if end in inside else end for end in (link.a, link.b))
            yield replace(link, name=f"{node}/{link.name}", a=a, b=b)


def assembled(
    name: str,
    nodes: Iterable[tuple[str, NodeTemplate]],
    switches: Iterable[str] = (),
    links: Iterable[Link] = (),
    devices: Iterable[tuple[str, DeviceKind, str]] = (),
) -> Machine:
    """The machine of the given nodes, then of single devices (name, kind, node), under common switches."""
    all_devices: list[Device] = []
    all_switches = list(switches)
    all_links = list(links)
    for node, template in nodes:
        for local, kind in template.devices:
            all_devices.append(Device(len(all_devices), f"{node}/{local}", kind, node))
        all_switches.extend(f"{node}/{switch}" for switch in template.switches)
        all_links.extend(template.links_on(node))
    for device, kind, node in devices:
        all_devices.append(Device(len(all_devices), device, kind, node))
    return Machine(name, tuple(all_devices), tuple(all_links), tuple(all_switches))


def disassembled(machine: Machine) -> tuple[dict[str, NodeTemplate], list[str], list[Link]]:
    """The template of each node, the machine-wide switches and the machine-wide links.

    A switch or link belongs to the node its name starts with, so `assembled` gives the machine back
    when its names follow the convention above.
    """
    switches: dict[str, list[str]] = {node: [] for node in machine.nodes}
    links: dict[str, list[Link]] = {node: [] for node in machine.nodes}
    common_switches: list[str] = []
    common_links: list[Link] = []
    for switch in machine.switches:
        node, _, local = switch.rpartition("/")
        switches.get(node, common_switches).append(local if node in switches else switch)
    for link in machine.links:
        node, _, local = link.name.rpartition("/")
        if node not in links:
            common_links.append(link)
            continue
        a, b = (end.removeprefix(f"{node}/") for end in (link.a, link.b))
        links[node].append(replace(link, name=local, a=a, b=b))
    templates = {
        node: NodeTemplate(
            tuple((device.name.removeprefix(f"{node}/"), device.kind) for device in machine.devices_on(node)),
            tuple(switches[node]),
            tuple(links[node]),
        )
        for node in machine.nodes
    }
    return templates, common_switches, common_links
