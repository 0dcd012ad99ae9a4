"""A large machine on one screen: its links and its pairs of devices, counted by what they have in common.

Links are alike when their names differ only in their node, numbers and direction (`node0/nvlink-0-1>` is
an `nvlink`) and their figures are equal. Pairs are alike when their routes cross alike links.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import permutations

from soapstone.machine.machine import Link, Machine


@dataclass(frozen=True)
class LinkClass:
    """`count` links that are alike, the first of them as an example."""

    label: str
    count: int
    example: Link


@dataclass(frozen=True)
class PairClass:
    """`count` ordered pairs of devices with alike routes, the first as an example (two indices)."""

    count: int
    bandwidth_bytes_per_s: float
    latency_s: float
    labels: tuple[str, ...]
    """The links crossed, in order."""
    narrowest: str
    one_node: bool
    """Whether both devices sit in the same node."""
    example: tuple[int, int]


def link_label(link: Link) -> str:
    """The link's name without node, numbers and direction."""
    local = link.name.rpartition("/")[2].rstrip("<>")
    return re.sub(r"[-_.]?[0-9]+", "", local) or link.name


def link_classes(machine: Machine) -> list[LinkClass]:
    """The classes of the machine's links, widest first."""
    examples: dict[tuple[str, float, float, bool], Link] = {}
    counts: Counter[tuple[str, float, float, bool]] = Counter()
    for link in sorted(machine.links, key=lambda link: link.name.endswith("<")):  # an example points forward
        key = (link_label(link), link.bandwidth_bytes_per_s, link.latency_s, link.both_ways)
        examples.setdefault(key, link)
        counts[key] += 1
    classes = [LinkClass(key[0], counts[key], link) for key, link in examples.items()]
    return sorted(classes, key=lambda found: (-found.example.bandwidth_bytes_per_s, found.label))


def pair_classes(machine: Machine) -> list[PairClass]:
    """The classes of ordered pairs of devices, widest first."""
    labels = {link.name: link_label(link) for link in machine.links}
    nodes = [device.node for device in machine.devices]
    examples: dict[tuple[object, ...], tuple[int, int]] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for a, b in permutations(range(len(nodes)), 2):
        route = tuple(labels[link.name] for link in machine.route(a, b))
        key = (machine.bandwidth(a, b), machine.latency(a, b), route, nodes[a] == nodes[b])
        examples.setdefault(key, (a, b))
        counts[key] += 1
    classes = [_pair_class(machine, counts[key], *example) for key, example in examples.items()]
    return sorted(classes, key=lambda found: (-found.bandwidth_bytes_per_s, found.latency_s, found.example))


def _pair_class(machine: Machine, count: int, a: int, b: int) -> PairClass:
    return PairClass(
        count,
        machine.bandwidth(a, b),
        machine.latency(a, b),
        tuple(link_label(link) for link in machine.route(a, b)),
        link_label(machine.narrowest_link(a, b)),
        machine.devices[a].node == machine.devices[b].node,
        (a, b),
    )
