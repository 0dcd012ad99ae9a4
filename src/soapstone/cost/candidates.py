"""What there is to measure for a model: each distinct shard of its search space, once.

Equal blocks are looked at once, and of each block all layouts with given numbers of parts. A candidate is a
node with the part of it that a shard computes; its `Work`, forward and backward, are what it is known by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from soapstone.cost.profile import OpKey, key_of
from soapstone.cost.work import Work, work_of
from soapstone.graph import Graph, Node, Role
from soapstone.ops.box import shape_of
from soapstone.ops.signature import IterationBox
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.layout import Layout, layouts


@dataclass(frozen=True, eq=False)
class Candidate:
    """A node's part, to be measured."""

    graph: Graph
    node: Node
    box: IterationBox

    @cached_property
    def forward(self) -> Work | None:
        """What its forward pass is known by; None when that is free."""
        return work_of(self.graph, self.node, self.box, backward=False)

    @cached_property
    def backward(self) -> Work | None:
        """What its backward pass is known by; None when there is none, or it is free."""
        return work_of(self.graph, self.node, self.box, backward=True)

    @property
    def works(self) -> tuple[Work, ...]:
        """Both, as far as there are any."""
        return tuple(work for work in (self.forward, self.backward) if work is not None)


def candidates(graph: Graph, parts: Iterable[int], apart: frozenset[str] = frozenset()) -> list[Candidate]:
    """The distinct shards of a graph's blocks in these numbers of parts."""
    wanted, seen = sorted(set(parts)), set[Hashable]()
    found: dict[Hashable, Candidate] = {}
    for block in blocks(graph, apart):
        form = _form(graph, block)
        if form not in seen:
            seen.add(form)
            for count in wanted:
                for layout in layouts(graph, block, count):
                    found.update(_distinct(layout, found))
    return list(found.values())


def candidates_of(layouts_used: Iterable[Layout]) -> list[Candidate]:
    """The distinct shards of some layouts."""
    found: dict[Hashable, Candidate] = {}
    for layout in layouts_used:
        found.update(_distinct(layout, found))
    return list(found.values())


def _distinct(layout: Layout, known: Mapping[Hashable, Candidate]) -> Iterator[tuple[Hashable, Candidate]]:
    for candidate, _ in _sized(layout):
        if candidate.works and candidate.works not in known:
            yield candidate.works, candidate


def _sized(layout: Layout) -> Iterator[tuple[Candidate, int]]:
    """The shards of a layout's nodes, each size once, and how many have it."""
    for n, (node, row) in enumerate(zip(layout.block.nodes, layout.boxes, strict=True)):
        reads = [layout.reads(n, i) for i in range(len(node.operands))]
        sizes: dict[Hashable, list[IterationBox]] = {}
        for shard, box in enumerate(row):
            read = tuple(None if own[shard] is None else shape_of(own[shard] or ()) for own in reads)
            sizes.setdefault((tuple(interval.length for interval in box.values()), read), []).append(box)
        for boxes in sizes.values():
            yield Candidate(layout.graph, node, boxes[0]), len(boxes)


def _form(graph: Graph, block: Block) -> Hashable:
    """All of a block that its candidates depend on."""

    def operand(name: object) -> Hashable:
        if not isinstance(name, str):
            return name is None
        value = graph.value(name)
        return value.shape, value.dtype, name in graph.differentiable, value.role is Role.WEIGHT

    return tuple(
        (
            node.op_name,
            repr(sorted(node.attrs.items())),
            tuple(operand(name) for name in node.operands),
            tuple(operand(name) for name in node.outputs),
        )
        for node in block.nodes
    )


def keys_of(graph: Graph) -> set[OpKey]:
    """The operators of a graph, forward and backward."""
    return {
        key_of(work)
        for node in graph.nodes
        for backward in (False, True)
        for work in [work_of(graph, node, graph.signature(node).points, backward=backward)]
        if work is not None
    }


def spread_out(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in an order in which any beginning says much: of every operator first the largest
    and the smallest shard, then those in between, by halves; operators with much work first."""
    groups: dict[OpKey, list[Candidate]] = {}
    for candidate in found:
        groups.setdefault(key_of(candidate.works[0]), []).append(candidate)
    for group in groups.values():
        group.sort(key=_flops)
    rounds: list[tuple[int, float, Candidate]] = []
    for group in groups.values():
        heaviest = _flops(group[-1])[0]
        rounds += [(turn, -heaviest, group[at]) for turn, at in enumerate(_by_halves(len(group)))]
    return [candidate for _, _, candidate in sorted(rounds, key=lambda each: each[:2])]


def weighty_first(
    found: Sequence[Candidate], strategies: Iterable[Iterable[Layout]], seconds_of: Callable[[Work], float]
) -> list[Candidate]:
    """The candidates in an order in which any beginning knows most of what strategies with these layouts
    take: those that make up much of them first, by what they may take, but before that one of every
    operator."""
    weights = defaultdict[Hashable, float](float)
    for used in strategies:
        own = defaultdict[Hashable, float](float)
        for layout in used:
            for candidate, count in _sized(layout):
                own[candidate.works] += count * sum(map(seconds_of, candidate.works))
        total_s = sum(own.values()) or 1.0
        for works, seconds in own.items():
            weights[works] += seconds / total_s
    ordered = sorted(found, key=lambda each: -weights[each.works])
    first = {key_of(each.works[0]): each for each in reversed(ordered)}
    return list(dict.fromkeys([*sorted(first.values(), key=ordered.index), *ordered]))


def _flops(candidate: Candidate) -> tuple[float, int]:
    work = candidate.works[0]
    return work.flops, work.size_bytes


def _by_halves(count: int) -> list[int]:
    """0 to count-1 with the ends first, then middles of ever smaller gaps."""
    order = [count - 1, 0][:count] if count > 1 else list(range(count))
    seen = set(order)
    gaps = [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle not in seen:
            seen.add(middle)
            order.append(middle)
        if high - low > 1:
            gaps += [(low, middle), (middle, high)]
    return order
