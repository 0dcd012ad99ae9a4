"""A machine: devices, the links between them, and the route every transfer takes.

The device topology D = (D_N, D_E) of FlexFlow 3, with two refinements
(`docs/decisions/0002-machine-model.md` argues for them):

- a `Link` is a resource: it carries one transfer at a time. One that is full-duplex is therefore two
  links, one for each direction (`full_duplex` makes both); a half-duplex one is a single link that
  carries both directions.
- ends of links may be *switches*: vertices that compute nothing and only forward (a PCIe or NVLink
  switch, a host, a network card, a fabric). Devices do not forward: a route passes through switches only.

Everything is checked when it is built and never changes afterwards. Equality does not depend on the
order in which links, switches or devices were declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from soapstone.errors import MachineError
from soapstone.machine.checks import check_name, check_number, did_you_mean, shown
from soapstone.machine.device import DeviceKind
from soapstone.machine.routes import Path, Routes


@dataclass(frozen=True)
class Device:
    """One device of a machine; `index` is its number in placements, `node` the computer it sits in."""

    index: int
    name: str
    kind: DeviceKind
    node: str

    def __post_init__(self) -> None:
        check_name("device", self.name)
        check_name(f"device {self.name!r}: node", self.node)
        if not isinstance(self.kind, DeviceKind):
            raise MachineError(f"device {self.name!r}: kind must be a DeviceKind, not {shown(self.kind)}.")
        if not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            raise MachineError(f"device {self.name!r}: index must be 0 or more, not {shown(self.index)}.")


@dataclass(frozen=True)
class Link:
    """A resource that carries bytes from vertex `a` to vertex `b`, and back too when `both_ways`."""

    name: str
    a: str
    b: str
    bandwidth_bytes_per_s: float
    latency_s: float
    both_ways: bool = False

    def __post_init__(self) -> None:
        check_name("link", self.name)
        where = f"link {self.name!r}:"
        check_name(f"{where} end", self.a)
        check_name(f"{where} end", self.b)
        if self.a == self.b:
            raise MachineError(f"{where} both ends are {self.a!r}; a link joins two different vertices.")
        bandwidth = check_number(
            f"{where} bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_zero=True
        )
        latency = check_number(f"{where} latency_s", self.latency_s, above_zero=False)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)
        object.__setattr__(self, "latency_s", latency)


def full_duplex(
    name: str, a: str, b: str, bandwidth_bytes_per_s: float, latency_s: float
) -> tuple[Link, Link]:
    """The two links of a full-duplex connection: `name>` from `a` to `b`, `name<` from `b` to `a`."""
    return (
        Link(f"{name}>", a, b, bandwidth_bytes_per_s, latency_s),
        Link(f"{name}<", b, a, bandwidth_bytes_per_s, latency_s),
    )


RING, ONE_DEVICE = "ring", "one_device"
SUMS = (RING, ONE_DEVICE)
"""How devices add up what each of them has: by a ring (or a tree, where that is faster), or by giving it to
one of them, which adds it up and gives the sum to all, one after the other, as a parameter server does."""


class Pairs(NamedTuple):
    """What a transfer meets between every two devices, from `a` to `b` at `a * count + b`: the number of
    the link it occupies (0 from a device to itself), that link's bytes per second, and the seconds of
    latency."""

    link: tuple[int, ...]
    bandwidth_bytes_per_s: tuple[float, ...]
    latency_s: tuple[float, ...]


@dataclass(frozen=True)
class Machine:
    """Devices, links and switches, with a route between every two devices.

    `devices` are kept by index, `links` and `switches` by name (numbers in names count as numbers),
    so that resources are numbered the same however the machine was written down. `sums` says how an
    all-reduce is made (`SUMS`).
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()
    sums: str = RING

    def __post_init__(self) -> None:
        if self.sums not in SUMS:
            raise MachineError(
                f"machine {shown(self.name)}: sums are {shown(self.sums)}; choose one of {', '.join(SUMS)}"
            )
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise MachineError(f"machine: the name {shown(self.name)} must be printable text; give it one.")
        where = f"machine {self.name!r}:"
        for switch in self.switches:
            check_name(f"{where} switch", switch)
        object.__setattr__(self, "devices", tuple(sorted(self.devices, key=_by_index)))
        object.__setattr__(self, "links", tuple(sorted(self.links, key=_by_name)))
        object.__setattr__(self, "switches", tuple(sorted(self.switches, key=natural_order)))
        _check_devices(where, self.devices)
        _check_distinct(where, "vertices", [*(device.name for device in self.devices), *self.switches])
        _check_distinct(where, "links", [link.name for link in self.links])
        _check_ends(where, self.links, self._vertices)
        stranded = self._routes.unconnected_pair()
        if stranded is not None:
            a, b = (self.devices[i].name for i in stranded)
            raise MachineError(
                f"{where} there is no route from device {a!r} to device {b!r}; "
                "join them by links, directly or through switches (devices do not forward)."
            )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the caches: hashes of text differ between processes."""
        return (Machine, (self.name, self.devices, self.links, self.switches, self.sums))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that hold devices, in the order of their first device."""
        return tuple(self._devices_by_node)

    def with_message_overhead(self, seconds: float) -> Machine:
        """The same machine, with messages that take this much of the device that they come to."""
        devices = (
            replace(each, kind=replace(each.kind, message_overhead_s=seconds)) for each in self.devices
        )
        return replace(self, devices=tuple(devices))

    def devices_on(self, node: str) -> tuple[Device, ...]:
        """The devices of one node, by index."""
        if node not in self._devices_by_node:
            raise MachineError(f"machine {self.name!r} has no node {node!r}{did_you_mean(node, self.nodes)}")
        return self._devices_by_node[node]

    @cached_property
    def link_numbers(self) -> Mapping[str, int]:
        """The position in `links` of each link name."""
        return {link.name: number for number, link in enumerate(self.links)}

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """The links a transfer from device `a` to device `b` crosses, in order; none when they are one.

        The route is the best for a large transfer: widest at its narrowest link, then of least latency,
        then of fewest links, then (`routes.py`) first by name.
        """
        return tuple(self.links[number] for number in self._path(a, b).links)

    def narrowest_link(self, a: int, b: int) -> Link:
        """The link a transfer from `a` to `b` occupies: the first of least bandwidth along its route."""
        if a == b:
            raise MachineError(
                f"machine {self.name!r}: a transfer from device {a} to itself needs no link; ask two devices."
            )
        return self.links[self._path(a, b).narrowest]

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second of the narrowest link from `a` to `b`; infinite from a device to itself."""
        return self._path(a, b).bandwidth_bytes_per_s

    def latency(self, a: int, b: int) -> float:
        """Seconds of latency summed along the route from `a` to `b`."""
        return self._path(a, b).latency_s

    @cached_property
    def pairs(self) -> Pairs:
        """`narrowest_link`, `bandwidth` and `latency` of all pairs at once."""
        count = range(len(self.devices))
        paths = [self._routes.path(a, b) for a in count for b in count]
        return Pairs(
            tuple(path.narrowest if path.links else 0 for path in paths),
            tuple(path.bandwidth_bytes_per_s for path in paths),
            tuple(path.latency_s for path in paths),
        )

    def _path(self, a: int, b: int) -> Path:
        count = len(self.devices)
        if not (0 <= a < count and 0 <= b < count):
            raise MachineError(
                f"machine {self.name!r} has devices 0 to {count - 1}, not {a} and {b}; check the indices."
            )
        return self._routes.path(a, b)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.devices, self.links, self.switches, self.sums))

    @cached_property
    def _devices_by_node(self) -> Mapping[str, tuple[Device, ...]]:
        grouped: dict[str, list[Device]] = {}
        for device in self.devices:
            grouped.setdefault(device.node, []).append(device)
        return {node: tuple(devices) for node, devices in grouped.items()}

    @cached_property
    def _vertices(self) -> Mapping[str, int]:
        """The number of each vertex: devices by index, then switches."""
        names = [*(device.name for device in self.devices), *self.switches]
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def _routes(self) -> Routes:
        number = self._vertices
        hops = [
            (rank, number[tail], number[head], link.bandwidth_bytes_per_s, link.latency_s)
            for rank, link in enumerate(self.links)
            for tail, head in ((link.a, link.b), (link.b, link.a))[: 2 if link.both_ways else 1]
        ]
        return Routes(len(self.devices), len(number), hops)


def natural_order(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key under which `gpu2` comes before `gpu10`."""
    parts = re.split(r"([0-9]+)", name)
    return (tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name)


def _by_index(device: Device) -> int:
    return device.index


def _by_name(link: Link) -> tuple[tuple[str | int, ...], str]:
    return natural_order(link.name)


def _check_devices(where: str, devices: tuple[Device, ...]) -> None:
    if not devices:
        raise MachineError(f"{where} there are no devices; declare at least one.")
    for position, device in enumerate(devices):
        if device.index != position:
            raise MachineError(
                f"{where} device {device.name!r} has index {device.index} where {position} is due; "
                "number the devices from 0 without gaps."
            )
    kinds: dict[str, DeviceKind] = {}
    for device in devices:
        if kinds.setdefault(device.kind.name, device.kind) != device.kind:
            raise MachineError(
                f"{where} two different device kinds are named {device.kind.name!r}; rename one of them."
            )


def _check_distinct(where: str, what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise MachineError(f"{where} two {what} are named {name!r}; rename one of them.")
        seen.add(name)


def _check_ends(where: str, links: tuple[Link, ...], vertices: Mapping[str, int]) -> None:
    for link in links:
        for end in (link.a, link.b):
            if end not in vertices:
                raise MachineError(
                    f"{where} link {link.name!r} ends at {end!r}, which is neither a device nor a switch; "
                    "declare it, or correct the name."
                )
