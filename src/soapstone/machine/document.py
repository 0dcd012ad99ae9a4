"""Machines as documents: plain mappings, lists, numbers and text that YAML and JSON can both hold.

    soapstone_machine: 1                # the version of this form
    name: lab
    kinds:                              # device kinds that are not built in
      mine: {memory: 24 GiB, memory_bandwidth: 900 GB/s, launch_overhead: 5 us, peak: {f32: 30 TFLOP/s}}
    nodes:                              # computers; names inside are local
    - name: node
      count: 4                          # node0 to node3, all equal; without it, one node called `node`
      devices: [{name: gpu, kind: mine, count: 2}]      # gpu0 and gpu1
      switches: [host]
      links:
      - {name: pcie, between: [gpu0, host], bandwidth: 16 GB/s, latency: 3 us}
      - {name: bus, between: [gpu1, host], bandwidth: 16 GB/s, latency: 3 us, duplex: half}
      - {name: eth, between: [host, hub], bandwidth: 10 Gb/s, latency: 25 us}
    switches: [hub]                     # switches of the whole machine
    links: [{name: spare, from: node0/host, to: node1/host, bandwidth: 1 GB/s, latency: 9 us}]    # one way
    devices: [...]                      # devices that belong to no template: {name, kind, node}

The law is `machine_from(document_of(m)) == m`. `docs/guide/machine-files.md` is the user's page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from soapstone.errors import MachineError
from soapstone.machine.checks import did_you_mean, shown
from soapstone.machine.cursor import Cursor
from soapstone.machine.device import DTYPES, KINDS, DeviceKind
from soapstone.machine.machine import RING, Link, Machine, full_duplex
from soapstone.machine.node import NodeTemplate, assembled, disassembled
from soapstone.machine.units import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS

VERSION = 1
MAX_COUNT = 65_536
"""[choice] The most nodes, or devices, one `count` may ask for: beyond any machine, so a slip of the hand."""

Payload = TypeVar("Payload")


def machine_from(document: object, source: str) -> Machine:
    """The machine `document` describes; `source` is what errors call it, usually the file's name."""
    fields = Cursor(document, source).fields(
        required=("soapstone_machine", "name"),
        optional=("kinds", "nodes", "switches", "devices", "links", "sums"),
    )
    _check_version(fields["soapstone_machine"])
    kinds = _kinds_from(fields.get("kinds"))
    taken: dict[str, str] = {}
    taken_nodes: dict[str, str] = {}
    switches = _claimed_names(_items(fields, "switches"), taken)
    groups = [_group_from(item, kinds, taken, taken_nodes) for item in _items(fields, "nodes")]
    singles = [
        device for item in _items(fields, "devices") for device in _single_devices_from(item, kinds, taken)
    ]
    vertices = {*switches, *(name for name, _, _ in singles)}
    vertices.update(f"{node}/{local}" for group in groups for node in group.names for local in group.vertices)
    nodes = [node for group in groups for node in group.nodes(vertices)]
    links = _links_from(_items(fields, "links"), vertices)
    sums = fields["sums"].text() if "sums" in fields else RING
    try:
        machine = assembled(fields["name"].text(), nodes, switches, links, singles)
        return replace(machine, sums=sums)
    except MachineError as error:  # what no single place is to blame for, such as a missing route
        raise MachineError(f"{source}: {error}") from None


def document_of(machine: Machine) -> dict[str, object]:
    """The document of `machine`: by nodes where its names allow it, else device by device."""
    templates, switches, links = disassembled(machine)
    try:
        plainly = assembled(machine.name, templates.items(), switches, links)
        follows_convention = replace(plainly, sums=machine.sums) == machine
    except MachineError:
        follows_convention = False
    if follows_convention:
        nodes = [_group_document(*folded) for folded in _folded(list(templates.items()))]
        parts = {"nodes": nodes, "switches": switches, "links": _link_documents(links)}
    else:
        singles = [(device.name, (device.kind, device.node)) for device in machine.devices]
        devices = [
            _counted(name, count, kind=kind.name) | {"node": node}
            for name, count, (kind, node) in _folded(singles)
        ]
        parts = {
            "devices": devices,
            "switches": list(machine.switches),
            "links": _link_documents(machine.links),
        }
    kinds = {device.kind for device in machine.devices}
    own_kinds = {
        kind.name: _kind_document(kind)
        for kind in sorted(kinds, key=lambda kind: kind.name)
        if KINDS.get(kind.name) != kind
    }
    head: dict[str, object] = {"soapstone_machine": VERSION, "name": machine.name}
    if machine.sums != RING:
        head["sums"] = machine.sums
    return head | {field: part for field, part in ({"kinds": own_kinds} | parts).items() if part}


@dataclass(frozen=True)
class _Group:
    """An item of `nodes` before its links are read: they may end at vertices declared further down."""

    names: tuple[str, ...]
    devices: tuple[tuple[str, DeviceKind], ...]
    switches: tuple[str, ...]
    links: Sequence[Cursor]

    @property
    def vertices(self) -> frozenset[str]:
        return NodeTemplate(self.devices, self.switches).vertices

    def nodes(self, machine_wide: set[str]) -> list[tuple[str, NodeTemplate]]:
        links = _links_from(self.links, self.vertices | machine_wide)
        template = NodeTemplate(self.devices, self.switches, tuple(links))
        return [(name, template) for name in self.names]


def _check_version(version: Cursor) -> None:
    if version.value != VERSION or isinstance(version.value, bool):
        raise version.refused(
            f"is {shown(version.value)}, but this Soapstone reads version {VERSION}; rewrite the file."
        )


def _items(fields: Mapping[str, Cursor], field: str) -> list[Cursor]:
    return fields[field].items() if field in fields else []


def _kinds_from(kinds: Cursor | None) -> dict[str, DeviceKind]:
    """The built-in kinds and those the document defines, which come first where names are equal."""
    defined = kinds.entries() if kinds else {}
    return {**KINDS, **{name: _kind_from(name, kind) for name, kind in defined.items()}}


def _kind_from(name: str, kind: Cursor) -> DeviceKind:
    fields = kind.fields(
        required=("memory", "memory_bandwidth", "launch_overhead", "peak"), optional=("message_overhead",)
    )
    peak = fields["peak"].fields(required=("f32",), optional=[dtype for dtype in DTYPES if dtype != "f32"])
    memory = fields["memory"]
    memory_bytes = round(memory.amount(BYTES))
    if memory_bytes == 0:
        raise memory.refused(f"is {shown(memory.value)}, less than a byte; write {BYTES.example}.")
    return DeviceKind(
        name=Cursor(name, kind.source, kind.place).name(),
        memory_bytes=memory_bytes,
        peak_flops_per_s={dtype: float(rate.amount(FLOPS_PER_S)) for dtype, rate in peak.items()},
        memory_bandwidth_bytes_per_s=float(fields["memory_bandwidth"].amount(BYTES_PER_S)),
        launch_overhead_s=float(fields["launch_overhead"].amount(SECONDS, above_zero=False)),
        message_overhead_s=float(fields["message_overhead"].amount(SECONDS, above_zero=False))
        if "message_overhead" in fields
        else 0.0,
    )


def _group_from(
    item: Cursor, kinds: Mapping[str, DeviceKind], taken: dict[str, str], taken_nodes: dict[str, str]
) -> _Group:
    fields = item.fields(required=("name", "devices"), optional=("count", "switches", "links"))
    nodes = _claimed(fields["name"], fields.get("count"), taken_nodes)
    taken_here: dict[str, str] = {}
    devices: list[tuple[str, DeviceKind]] = []
    for device in fields["devices"].items():
        device_fields = device.fields(required=("name", "kind"), optional=("count",))
        kind = _kind_named(device_fields["kind"], kinds)
        named = _claimed(device_fields["name"], device_fields.get("count"), taken_here)
        devices.extend((name, kind) for name in named)
    switches = _claimed_names(_items(fields, "switches"), taken_here)
    for node in nodes:
        for local in taken_here:
            _claim(f"{node}/{local}", item, taken)
    return _Group(tuple(nodes), tuple(devices), tuple(switches), _items(fields, "links"))


def _single_devices_from(
    item: Cursor, kinds: Mapping[str, DeviceKind], taken: dict[str, str]
) -> list[tuple[str, DeviceKind, str]]:
    fields = item.fields(required=("name", "kind", "node"), optional=("count",))
    kind = _kind_named(fields["kind"], kinds)
    node = fields["node"].name()
    return [(name, kind, node) for name in _claimed(fields["name"], fields.get("count"), taken)]


def _kind_named(cursor: Cursor, kinds: Mapping[str, DeviceKind]) -> DeviceKind:
    name = cursor.name()
    if name not in kinds:
        raise cursor.refused(f"is the unknown device kind {name!r}{did_you_mean(name, kinds)}")
    return kinds[name]


def _claimed_names(items: Iterable[Cursor], taken: dict[str, str]) -> list[str]:
    return [name for item in items for name in _claimed(item, None, taken)]


def _claimed(cursor: Cursor, count: Cursor | None, taken: dict[str, str]) -> list[str]:
    """The name at `cursor`, or with a count `name0`, `name1`, ..., noted as taken."""
    name = cursor.name()
    names = [name] if count is None else [f"{name}{i}" for i in range(count.whole_number(1, MAX_COUNT))]
    for claimed in names:
        _claim(claimed, cursor, taken)
    return names


def _claim(name: str, cursor: Cursor, taken: dict[str, str]) -> None:
    """Note in `taken` (name to place) that `cursor` gives `name`, which no other place may have done."""
    if name in taken:
        raise cursor.refused(f"gives the name {name!r}, which {taken[name]} has already; rename one of them.")
    taken[name] = cursor.place


def _links_from(items: Iterable[Cursor], vertices: Iterable[str]) -> list[Link]:
    known = frozenset(vertices)
    taken: dict[str, str] = {}
    return [link for item in items for link in _link_from(item, known, taken)]


def _link_from(item: Cursor, vertices: frozenset[str], taken: dict[str, str]) -> tuple[Link, ...]:
    fields = item.fields(
        required=("bandwidth", "latency"), optional=("name", "between", "from", "to", "duplex")
    )
    a, b = _ends_from(item, fields, vertices)
    name = _claimed(fields.get("name", Cursor(f"{a}-{b}", item.source, item.place)), None, taken)[0]
    bandwidth = float(fields["bandwidth"].amount(BYTES_PER_S))
    latency = float(fields["latency"].amount(SECONDS, above_zero=False))
    if "from" in fields:
        return (Link(name, a, b, bandwidth, latency),)
    duplex = fields.get("duplex")
    match "full" if duplex is None else duplex.value:
        case "full":
            return full_duplex(name, a, b, bandwidth, latency)
        case "half":
            return (Link(name, a, b, bandwidth, latency, both_ways=True),)
        case other:
            raise item.refused(f"has the duplex {shown(other)}; write 'full' or 'half'.")


def _ends_from(item: Cursor, fields: Mapping[str, Cursor], vertices: frozenset[str]) -> tuple[str, str]:
    if "between" in fields and not fields.keys() & {"from", "to"}:
        ends = fields["between"].items()
    elif "between" not in fields and "duplex" not in fields and {"from", "to"} <= fields.keys():
        ends = [fields["from"], fields["to"]]
    else:
        raise item.refused("must have either 'between: [A, B]' or, for one direction, 'from: A' and 'to: B'.")
    if len(ends) != 2:
        raise fields["between"].refused(f"has {len(ends)} ends, but a link has 2; write 'between: [A, B]'.")
    for end in ends:
        if end.name() not in vertices:
            raise end.refused(
                f"is {end.name()!r}, no device and no switch{did_you_mean(end.name(), sorted(vertices))}"
            )
    a, b = (end.name() for end in ends)
    if a == b:
        raise ends[1].refused(f"is {b!r} like the other end; a link joins two different vertices.")
    return a, b


def _folded(entries: list[tuple[str, Payload]]) -> list[tuple[str, int | None, Payload]]:
    """Runs `x0, x1, ...` with equal payloads as (`x`, their number, payload); others with None."""
    folded: list[tuple[str, int | None, Payload]] = []
    position = 0
    while position < len(entries):
        name, payload = entries[position]
        stem, count = name[:-1], 1
        if stem and name.endswith("0"):
            while entries[position + count : position + count + 1] == [(f"{stem}{count}", payload)]:
                count += 1
        folded.append((stem, count, payload) if count > 1 else (name, None, payload))
        position += count
    return folded


def _counted(name: str, count: int | None, kind: str | None = None) -> dict[str, object]:
    fields = {"name": name, "kind": kind, "count": count}
    return {field: value for field, value in fields.items() if value is not None}


def _group_document(name: str, count: int | None, template: NodeTemplate) -> dict[str, object]:
    devices = [
        _counted(device, device_count, kind=kind.name)
        for device, device_count, kind in _folded(list(template.devices))
    ]
    parts = {
        "devices": devices,
        "switches": list(template.switches),
        "links": _link_documents(template.links),
    }
    return _counted(name, count) | {field: part for field, part in parts.items() if part}


def _link_documents(links: Iterable[Link]) -> list[dict[str, object]]:
    """One item per link, and one for the two that `full_duplex` makes."""
    by_name = {link.name: link for link in links}
    documents: list[dict[str, object]] = []
    for link in by_name.values():
        base = link.name[:-1]
        forward, backward = by_name.get(f"{base}>"), by_name.get(f"{base}<")
        if base and base not in by_name and forward and backward and _are_full_duplex(forward, backward):
            if link is forward:
                documents.append(_link_document(base, link, {"between": [link.a, link.b]}))
        elif link.both_ways:
            documents.append(_link_document(link.name, link, {"between": [link.a, link.b], "duplex": "half"}))
        else:
            documents.append(_link_document(link.name, link, {"from": link.a, "to": link.b}))
    return documents


def _are_full_duplex(forward: Link, backward: Link) -> bool:
    figures = (forward.bandwidth_bytes_per_s, forward.latency_s)
    return (forward, backward) == full_duplex(forward.name[:-1], forward.a, forward.b, *figures)


def _link_document(name: str, link: Link, ends: dict[str, object]) -> dict[str, object]:
    bandwidth = BYTES_PER_S.exact_text(link.bandwidth_bytes_per_s)
    return {"name": name, **ends, "bandwidth": bandwidth, "latency": SECONDS.exact_text(link.latency_s)}


def _kind_document(kind: DeviceKind) -> dict[str, object]:
    message_s = kind.message_overhead_s
    return {
        "memory": BYTES.exact_text(kind.memory_bytes),
        "memory_bandwidth": BYTES_PER_S.exact_text(kind.memory_bandwidth_bytes_per_s),
        "launch_overhead": SECONDS.exact_text(kind.launch_overhead_s),
        **({"message_overhead": SECONDS.exact_text(message_s)} if message_s else {}),
        "peak": {dtype: FLOPS_PER_S.exact_text(rate) for dtype, rate in kind.peak_flops_per_s.items()},
    }
