"""Sums that nobody has to wait for: those of a loss that is split over samples.

Every device of a data-parallel plan has a part of the loss, which the task graph adds up between them
before what follows (a mean, a stack of the losses of all steps). Where all that follows is linear, each
device can go on with its own part: gradients do not depend on the sums, and the parts of the loss itself
are added up when it is told. Nothing is sent then, and no device waits for another amid its step.

Where the end of a graph only adds up terms with weights that are numbers, the task graph has none of this
(`graph.losses`); what is left is the rest. The tail of a graph is what stands between such sums and the
loss. It is deferred where each of its blocks has one shard or copy on each of the same devices, so that the
parts stay apart, and its values are read where they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.graph import Graph, Node
from soapstone.ops.linear import is_linear
from soapstone.strategy.blocks import free_values
from soapstone.tasks.exchange import Exchange
from soapstone.tasks.placed import FORWARD, SEAM, VALUE, Placed
from soapstone.tasks.task import Key


def deferred(graph: Graph, blocks: Sequence[Placed], exchanges: Mapping[Key, Exchange]) -> frozenset[Key]:
    """The exchanges of partial sums that are left out; none, or all on the way to the loss."""
    if graph.loss is None:
        return frozenset()
    home = {name: placed for placed in blocks for name in placed.block.writes}
    tail = _tail(graph, home)
    if tail is None:
        return frozenset()
    homes = {home[node.outputs[0]].number for node in tail}
    devices = {_spread(blocks[number]) for number in homes}
    if len(devices) != 1 or None in devices or not _are_read_at_home(graph, tail, home, exchanges):
        return frozenset()
    return frozenset(
        (FORWARD, number, SEAM, segment, seam)
        for number in homes
        if blocks[number].layout.is_partial
        for segment, seams in enumerate(blocks[number].segments.seams)
        for seam in range(len(seams))
    )


def _tail(graph: Graph, home: Mapping[str, Placed]) -> list[Node] | None:
    """The nodes from the partial sums to the loss; None where one is not linear, or where the loss has
    another part that is not a partial sum, or somebody else reads what is on the way."""
    free = free_values(graph)
    assert graph.loss is not None
    wanted, found = {graph.loss}, list[Node]()
    for node in reversed(graph.nodes):
        if not any(name in wanted for name in node.outputs):
            continue
        placed = home.get(node.outputs[0])
        if placed is None or len(node.outputs) > 1 or node.outputs[0] in graph.updates.values():
            return None
        found.append(node)
        if node is placed.block.leader and placed.layout.is_partial:
            continue
        operands = {i: o for i, o in enumerate(node.operands) if isinstance(o, str) and o not in free}
        if not is_linear(node.op, graph.signature(node), node.attrs, set(operands)):
            return None
        wanted.update(operands.values())
    inside = {node.name for node in found}
    if any(reader.name not in inside for name in wanted for reader in graph.consumers[name]):
        return None
    return found


def _spread(placed: Placed) -> frozenset[int] | None:
    """The devices of a block that has one shard, or one copy of its only one, on each of them, and no seam
    but that of its partial sums."""
    devices = placed.placement.devices
    is_apart = len(set(placed.layout.summands)) == placed.layout.parts and placed.placement.copies == 1
    if len(set(devices)) != len(devices) or not (is_apart or placed.layout.parts == 1):
        return None
    if any(seam.is_mutual for seams in placed.segments.seams for seam in seams):
        return None
    return frozenset(devices)


def _are_read_at_home(
    graph: Graph, tail: Sequence[Node], home: Mapping[str, Placed], exchanges: Mapping[Key, Exchange]
) -> bool:
    numbers = {name: number for number, name in enumerate(graph.producers)}
    for node in tail:
        for name in node.outputs:
            exchange = exchanges.get((FORWARD, home[name].number, VALUE, numbers[name]))
            if exchange is not None and exchange.moves:
                return False
    return True
