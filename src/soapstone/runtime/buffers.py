"""Buffers that a step changes: who makes their new values, and who must be told.

Running statistics of a batch norm are read only where they are made. Any other buffer that a step changes
may be read by a rank that did not make its new value; such a buffer is shared at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ops.box import Box, contains, slices
from soapstone.runtime.inputs import FreeValues
from soapstone.runtime.linking import Links
from soapstone.runtime.wire import Wire


def owners(links: Links, name: str) -> list[tuple[Box, int]]:
    """The boxes of a buffer that a step changes, each with the device whose word counts: the first."""
    made = links.graph.updates.get(name)
    if made is None or made not in links.home:
        return []
    found: dict[Box, int] = {}
    for box, device in _made(links, made):
        found.setdefault(box, device)
    return sorted(found.items())


def _made(links: Links, value: str) -> list[tuple[Box, int]]:
    """The boxes of a value that shards write, each with the device."""
    writer = links.home[value]
    node = next(n for n, each in enumerate(writer.block.nodes) if value in each.outputs)
    boxes = writer.layout.writes(node, writer.block.nodes[node].outputs.index(value))
    return [(boxes[shard], device) for shard, _, device in writer.shards()]


class Buffers:
    """The changing buffers of one rank."""

    def __init__(self, links: Links, free: FreeValues) -> None:
        self.links, self.free = links, free
        self.to_share = [name for name in links.graph.updates if self._is_read_elsewhere(name)]

    def _is_read_elsewhere(self, name: str) -> bool:
        """Whether a device reads a part of a buffer whose new value it does not make."""
        value = self.links.graph.updates[name]
        if value not in self.links.home:
            return False
        made = _made(self.links, value)
        in_blocks = {node.name for placed in self.links.blocks for node in placed.block.nodes}
        if any(node.name not in in_blocks for node in self.links.graph.consumers[name]):
            return True  # what all ranks compute for themselves
        return any(
            not any(device == maker and contains(own, box) for own, maker in made)
            for placed in self.links.blocks
            for n, node in enumerate(placed.block.nodes)
            for i, operand in enumerate(node.operands)
            if operand == name
            for shard, box in enumerate(placed.layout.reads(n, i))
            if box is not None
            for device in placed.placement.devices_of(shard)
        )

    def update(self, wire: Wire) -> None:
        """Take the values that shards made, tell those who need them, and count the step."""
        graph, buffers = self.links.graph, self.free.buffers
        for name, value in graph.updates.items():
            if value not in self.links.home:
                buffers[name].copy_(self.free[value])
                continue
            for where in reversed(self.links.local_of[self.links.home[value].number]):
                outlet = self.links.made[where, value].outlet
                if outlet.tensor is not None:
                    buffers[name][slices(outlet.box)] = outlet.tensor.detach()
        self.share(self.to_share, wire)
        for name, count in graph.counters.items():
            buffers[name] += count

    def share(self, names: Sequence[str], wire: Wire) -> None:
        """Give all ranks the values that count."""
        for name in names:
            buffer = self.free.buffers[name]
            for box, owner in owners(self.links, name):
                own = buffer[slices(box)]
                given = own if owner == wire.rank else None
                buffer[slices(box)] = wire.shared(given, own.shape, buffer.dtype, owner, name)
