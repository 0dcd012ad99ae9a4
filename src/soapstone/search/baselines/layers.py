"""Layers: the blocks of a graph, put together where they are steps of one unrolled layer.

FlexFlow 8.1.3 lets OptCNN handle recurrent networks by fusing all nodes that share their parameters
into one; Wu et al. 2016 place layers, and not steps, on devices. Both need to know which blocks are the
same layer:

- blocks led by the same operator with the same sizes and the same weights are one layer;
- blocks without weights are one layer when they are alike and lie between the same layers with
  weights, at least one of which has several steps: the attention that every step has of its own.

So a network without unrolled steps has one layer for each block.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from soapstone.search.baselines.anatomy import Anatomy
from soapstone.strategy.blocks import Block


@dataclass(frozen=True)
class Layer:
    """Blocks that are one layer, in the order of the graph; `weights` are those of their leaders."""

    blocks: tuple[Block, ...]
    weights: frozenset[str]


def layers(anatomy: Anatomy) -> tuple[Layer, ...]:
    """The layers, in the order of their first blocks."""
    weights = {block.name: frozenset(anatomy.weights_of(block.leader)) for block in anatomy.blocks}
    keys: dict[str, Hashable] = {}
    for block in anatomy.blocks:
        alike = (block.leader.op_name, tuple(anatomy.graph.signature(block.leader).sizes.items()))
        keys[block.name] = (*alike, weights[block.name]) if weights[block.name] else block.name
    members = _grouped(keys)
    between = _between(anatomy, {name: keys[name] if weights[name] else None for name in keys})
    for block in anatomy.blocks:
        around = between[block.name]
        if not weights[block.name] and any(len(members[key]) > 1 for side in around for key in side):
            sizes = tuple(anatomy.graph.signature(block.leader).sizes.items())
            attrs = tuple(sorted(block.leader.attrs.items()))
            keys[block.name] = (block.leader.op_name, attrs, sizes, *around)
    by_name = {block.name: block for block in anatomy.blocks}
    return tuple(
        Layer(tuple(by_name[name] for name in names), weights[names[0]]) for names in _grouped(keys).values()
    )


def _grouped(keys: dict[str, Hashable]) -> dict[Hashable, list[str]]:
    found: dict[Hashable, list[str]] = {}
    for name, key in keys.items():
        found.setdefault(key, []).append(name)
    return found


def _between(
    anatomy: Anatomy, weighted: dict[str, Hashable | None]
) -> dict[str, tuple[frozenset[Hashable], frozenset[Hashable]]]:
    """For each block the nearest layers with weights that it depends on, and that depend on it."""
    after: dict[str, list[str]] = {name: [] for name in weighted}
    for name, sources in anatomy.before.items():
        for source in sources:
            after[source].append(name)

    def nearest(order: list[str], neighbours: dict[str, list[str]]) -> dict[str, frozenset[Hashable]]:
        found: dict[str, frozenset[Hashable]] = {}
        for name in order:
            reached = set[Hashable]()
            for other in neighbours[name]:
                key = weighted[other]
                reached |= found.get(other, frozenset()) if key is None else {key}
            found[name] = frozenset(reached)
        return found

    order = _topological(anatomy)
    above = nearest(order, {name: list(sources) for name, sources in anatomy.before.items()})
    below = nearest(order[::-1], after)
    return {name: (above[name], below[name]) for name in weighted}


def _topological(anatomy: Anatomy) -> list[str]:
    """Blocks after all that they read from. The order of leaders is not always that: a follower may
    read what a block with a later leader wrote."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        pending = [name]
        while pending:
            top = pending[-1]
            missing = [other for other in anatomy.before[top] if other not in order]
            if missing and top not in order:
                pending.extend(missing)
            else:
                order.setdefault(pending.pop())

    for block in anatomy.blocks:
        visit(block.name)
    return list(order)
