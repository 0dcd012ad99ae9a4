"""Whether micro-batches can run one forward, one backward: each must need nothing of those after it.

Three things bring micro-batches together: statistics over samples that are to be those of the whole batch;
a sum over samples that something other than a loss goes on with; a block that is not cut along its samples,
or cut elsewhere. Under gpipe they are waited for; under 1f1b they never come, so they are refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.ops.box import Box, Interval, contains, intersection
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import Layout
from soapstone.strategy.pipeline import Turns


def check_lanes(
    graph: Graph, blocks: Sequence[Block], layouts: Mapping[str, Layout], turns: Mapping[str, Turns]
) -> None:
    """Refuse what could never run."""
    if not any(own.in_flight for own in turns.values()):
        return
    trained = [b for b in blocks if any(name in graph.differentiable for name in b.writes)]
    hulls = {
        name: _hulls(layouts[block.name], n, i, turns[block.name])
        for block in trained
        for n, node in enumerate(block.nodes)
        for i, name in enumerate(node.outputs)
        if turns[block.name].count > 1
    }
    for block in trained:
        for reason in _reasons(graph, block, layouts[block.name], turns[block.name], hulls):
            raise StrategyError(
                f"block '{block.name}' needs {reason} before it can go on, so the micro-batches cannot run "
                "one forward, one backward; use the schedule gpipe"
            )


def _reasons(
    graph: Graph, block: Block, layout: Layout, turns: Turns, hulls: Mapping[str, Sequence[Box]]
) -> Iterator[str]:
    if turns.count > 1:
        for node in block.nodes:
            shared = graph.signature(node).shared
            if graph.sample_dims.get(node.name) in shared and node.op.joins_statistics(node.attrs):
                yield "statistics of the whole batch"
        dim = graph.sample_dims.get(block.leader.name)
        if layout.is_partial and not layout.sums_pass and dim in graph.signature(block.leader).summed_dims:
            yield "a sum over the whole batch"
    for n, node in enumerate(block.nodes):
        for i, operand in enumerate(node.operands):
            if not isinstance(operand, str) or operand not in hulls or operand in block.writes:
                continue
            if _crosses(layout.reads(n, i), turns, hulls[operand]):
                yield f"'{operand}' of several micro-batches"


def _hulls(layout: Layout, node: int, output: int, turns: Turns) -> list[Box]:
    """The box around what each micro-batch writes."""
    hulls: dict[int, Box] = {}
    for lane, box in zip(turns.lanes, layout.writes(node, output), strict=True):
        known = hulls.setdefault(lane, box)
        hulls[lane] = tuple(
            Interval(min(a.lo, b.lo), max(a.hi, b.hi)) for a, b in zip(known, box, strict=True)
        )
    return [hulls[lane] for lane in range(turns.count)]


def _crosses(reads: Sequence[Box | None], turns: Turns, hulls: Sequence[Box]) -> bool:
    """Whether a shard reads what another micro-batch than its own writes."""
    own = {(lane, box) for lane, box in zip(turns.lanes, reads, strict=True) if box is not None}
    if (
        turns.count == len(hulls)
        and _are_apart(hulls)
        and all(contains(hulls[lane], box) for lane, box in own)
    ):
        return False
    return any(
        intersection(box, hull) is not None
        for lane, box in own
        for other, hull in enumerate(hulls)
        if turns.count == 1 or lane != other
    )


def _are_apart(hulls: Sequence[Box]) -> bool:
    """Whether each of them ends before the next begins, along some axis."""
    return any(all(a[axis].hi <= b[axis].lo for a, b in pairwise(hulls)) for axis in range(len(hulls[0])))
