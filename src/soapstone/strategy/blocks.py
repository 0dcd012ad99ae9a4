"""Blocks: runs of nodes that always share one Placement, so that nothing moves between them.

A convolution and the batch norm, bias and activation after it are one unit to a planner, as they are
in the papers, and one task to a device. A block is a leader and its followers. A node follows when
it is parallel in all its dims and one of its operands comes from the block: then the box that a
shard of the leader wrote is exactly what a shard of the follower reads, and `follower_box` says
which part of the follower's iteration space that is.

Two things interrupt a block, depending on how it is split (`segments`): a leader split along a sum
writes partial results, which must be added before a follower may use them; and statistics over a
split dim must be joined. `docs/decisions/0004-blocks-and-exchanges.md` gives the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from soapstone.graph import Graph, Node, Role
from soapstone.ops.box import Box, Interval
from soapstone.ops.linear import is_linear
from soapstone.ops.signature import Affine, IterationBox, Signature


@dataclass(frozen=True)
class Block:
    """A leader and its followers, in the order of the graph. `carried[i]` is, for follower i, the
    position of the operand that comes from inside the block."""

    leader: Node
    followers: tuple[Node, ...] = ()
    carried: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A block is called as its leader is."""
        return self.leader.name

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Leader and followers."""
        return (self.leader, *self.followers)

    @cached_property
    def writes(self) -> frozenset[str]:
        """The values that nodes of the block write."""
        return frozenset(name for node in self.nodes for name in node.outputs)


def free_values(graph: Graph) -> frozenset[str]:
    """The values every device can make for itself: inputs, constants, buffers, and what is computed
    from these alone. They are never moved: each device reads or computes the part it needs."""
    free = {
        value.name
        for value in graph.values.values()
        if value.role in (Role.INPUT, Role.CONSTANT, Role.BUFFER)
    }
    for node in graph.nodes:
        if not node.op.random and all(name in free for name in node.reads):
            free.update(node.outputs)
    return frozenset(free)


def blocks(graph: Graph, apart: frozenset[str] = frozenset()) -> tuple[Block, ...]:
    """The graph as blocks, in the order of their leaders; free nodes and the loss's tail belong to none.

    Nodes named in `apart` lead blocks of their own.
    """
    free = free_values(graph)
    home: dict[str, int] = {}  # value -> number of the block that writes it
    members: list[list[Node]] = []
    carried: list[list[int]] = []
    before: list[set[int]] = []  # blocks that a block depends on
    for node in graph.nodes:
        if node.name in graph.loss_tail or all(name in free for name in node.outputs):
            continue
        sources = {i: home[o] for i, o in enumerate(node.operands) if isinstance(o, str) and o in home}
        needed = set(sources.values()).union(*(before[b] for b in sources.values()))
        joined = None if node.name in apart else _joinable(graph, node, sources, before)
        if joined is None:
            number = len(members)
            members.append([node])
            carried.append([])
            before.append(needed)
        else:
            number = sources[joined]
            members[number].append(node)
            carried[number].append(joined)
            _depend(before, number, needed - {number})
        home.update(dict.fromkeys(node.outputs, number))
    return tuple(
        Block(nodes[0], tuple(nodes[1:]), tuple(positions))
        for nodes, positions in zip(members, carried, strict=True)
    )


def _joinable(graph: Graph, node: Node, sources: Mapping[int, int], before: list[set[int]]) -> int | None:
    """The operand through which a node joins a block: the latest that makes no cycle."""
    if not _follows(graph.signature(node)) or node.op.is_opaque:
        return None
    for position, number in sorted(sources.items(), key=lambda item: (-item[1], item[0])):
        others = [b for b in sources.values() if b != number]
        if any(number in before[b] for b in others):
            continue
        if position_fits(graph.signature(node), position):
            return position
    return None


def _follows(signature: Signature) -> bool:
    """Whether a node is parallel in every dim: it sums nothing and keeps nothing whole."""
    return all(size == 1 or dim in signature.output_dims for dim, size in signature.sizes.items()) and all(
        signature.sizes.get(dim, 1) == 1 for dim in signature.whole
    )


def position_fits(signature: Signature, operand: int) -> bool:
    """Whether a box of this operand can be a shard: the axes are dims or products of dims, all of the
    operand is read (a slice or a join reads less, or writes more), and every dim shows in it once."""
    access, shape = signature.operands[operand], signature.shapes[operand]
    if access is None or shape is None:
        return False
    shown = [dim for axis in access for dim in axis.dims]
    if any(shown.count(dim) != 1 for dim, size in signature.sizes.items() if size > 1):
        return False
    return all(_is_plain(axis, size, signature) for axis, size in zip(access, shape, strict=True))


def _is_plain(axis: Affine, size: int, signature: Signature) -> bool:
    """An axis indexed by one dim, or by several with the strides of a factored axis, from end to end."""
    stride = 1
    for dim, coefficient in reversed(axis.terms):
        if coefficient != stride:
            return False
        stride *= signature.sizes[dim]
    return axis.const == 0 and axis.divisor == 1 and stride == size


def _depend(before: list[set[int]], number: int, needed: set[int]) -> None:
    """Let a block depend on more, and so all that depend on it."""
    before[number] |= needed
    for other in before:
        if number in other:
            other |= before[number]


def passes_sums(graph: Graph, block: Block) -> bool:
    """Whether partial sums of the leader may go through the followers and be added in the end: so it is
    with a loss that is divided, as a mean over labels is. Only where all that reads them is the loss."""
    if not any(name in graph.loss_terms for name in block.writes):
        return False
    readers = {reader.name for name in block.writes for reader in graph.consumers[name]}
    if readers - graph.loss_tail - {node.name for node in block.nodes}:
        return False
    return all(
        _takes_summands(graph, block, node, position)
        for node, position in zip(block.followers, block.carried, strict=True)
    )


def _takes_summands(graph: Graph, block: Block, node: Node, position: int) -> bool:
    """Whether a follower adds up in what comes from the block, and nothing else of it is differentiated."""
    others = [o for i, o in enumerate(node.operands) if i != position and isinstance(o, str)]
    if any(o in block.writes or o in graph.differentiable for o in others):
        return False
    signature = graph.signature(node)
    return not signature.summed_dims and is_linear(node.op, signature, node.attrs, {position})


def follower_box(signature: Signature, operand: int, box: Box) -> IterationBox | None:
    """The part of a follower's iteration space that reads exactly this box of an operand; None if
    there is none, or if what it writes were no box (a factored axis cut across its factors)."""
    access = signature.operands[operand]
    assert access is not None
    found: dict[str, Interval] = dict(signature.points)
    for axis, interval in zip(access, box, strict=True):
        lo, hi = interval
        for dim, stride in axis.terms:
            if lo % stride == 0 and hi % stride == 0:
                found[dim] = Interval(lo // stride, hi // stride)
                break
            if lo // stride != (hi - 1) // stride:
                return None
            found[dim] = Interval(lo // stride, lo // stride + 1)
            lo, hi = lo % stride, (hi - 1) % stride + 1
    return found if _cuts_outermost_first(signature, found) else None


def _cuts_outermost_first(signature: Signature, box: IterationBox) -> bool:
    """Whether a dim of a factored axis is cut only where the dims outside of it are cut to the end."""
    return all(
        box[inner] == signature.points[inner] or box[outer].length == 1
        for group in signature.factored
        for outer, inner in pairwise(group)
    )
