"""The loss as a sum of terms: what is left of a graph's end when weighted sums of numbers are taken away.

A model's loss is often a weighted sum of losses: those of the steps of a recurrent network averaged, that of
a head added to another's. Such an end needs no tasks. The gradient of each term is a number that is known
beforehand, so every term can start its backward pass by itself, on whatever part of the batch it has seen;
and the loss that is reported is the weighted sum of what the terms came to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soapstone.ops.linear import is_linear
from soapstone.ops.reference import reference

if TYPE_CHECKING:
    from soapstone.graph.graph import Graph, Node

MOST_NUMBERS = 256
"""[choice] The most numbers that a node of the end reads: beyond, it is a computation and not an end."""

Array = NDArray[np.float64]


def tail(graph: Graph) -> frozenset[str]:
    """The names of the nodes that do nothing but add up numbers, weighted, on the way to the loss."""
    linear: set[str] = set()  # values
    found: list[Node] = []
    for node in graph.nodes:
        if len(node.outputs) == 1 and _reads_numbers(graph, node, linear) and _is_linear(graph, node):
            linear.update(node.outputs)
            found.append(node)
    while True:
        names = {node.name for node in found}
        kept = [node for node in found if _is_inside(graph, node, names)]
        if len(kept) == len(found):
            return frozenset(names)
        found = kept


def _is_inside(graph: Graph, node: Node, names: set[str]) -> bool:
    """Whether a node reads only numbers and what others of these write, and only they need it."""
    if node.outputs[0] in graph.updates.values():
        return False
    read = [graph.producers[name].name for name in node.reads if graph.value(name).shape != ()]
    readers = [reader.name for reader in graph.consumers[node.outputs[0]]]
    leads_on = bool(readers) or node.outputs[0] == graph.loss
    return leads_on and names.issuperset(read) and names.issuperset(readers)


def terms(graph: Graph) -> Mapping[str, float]:
    """The numbers of which the loss is the weighted sum, with their weights; in the order of the graph."""
    if graph.loss is None:
        return {}
    weights: dict[str, Array] = {graph.loss: np.ones(())}
    for node in reversed(graph.nodes):
        if node.name not in graph.loss_tail:
            continue
        own = weights.pop(node.outputs[0])
        for i, name in enumerate(node.operands):
            if isinstance(name, str):
                known = weights.get(name, np.zeros(graph.value(name).shape))
                weights[name] = known + _carried(graph, node, i, own)
    return {name: weights[name].item() for name in graph.values if name in weights}


def _reads_numbers(graph: Graph, node: Node, linear: set[str]) -> bool:
    """Whether a node reads a few numbers that a gradient flows through, and nothing else."""
    if not node.reads or node.name in graph.sample_dims:
        return False
    if sum(np.prod(graph.value(name).shape, dtype=int) for name in node.reads) > MOST_NUMBERS:
        return False
    return all(
        name in graph.differentiable
        and name in graph.producers
        and (graph.value(name).shape == () or name in linear)
        for name in node.reads
    )


def _is_linear(graph: Graph, node: Node) -> bool:
    """Whether what a node writes is a weighted sum of the numbers it reads."""
    read = {i for i, operand in enumerate(node.operands) if isinstance(operand, str)}
    return is_linear(node.op, graph.signature(node), node.attrs, read)


def _carried(graph: Graph, node: Node, operand: int, own: Array) -> Array:
    """The weight of each element of an operand, given those of what a linear node writes."""
    name = node.operands[operand]
    assert isinstance(name, str)
    found = np.zeros(graph.value(name).shape)
    zeros = {other: np.zeros(graph.value(other).shape) for other in node.reads}
    for index in np.ndindex(found.shape):
        unit = np.zeros(found.shape)
        unit[index] = 1.0
        found[index] = np.sum(own * _value(graph, node, zeros, {operand: unit}))
    return found


def _value(
    graph: Graph, node: Node, values: Mapping[str, Array], instead: Mapping[int, Array] | None = None
) -> Array:
    operands = [
        (instead or {}).get(i, values[o] if isinstance(o, str) else o) for i, o in enumerate(node.operands)
    ]
    return reference(node.op, graph.signature(node), node.attrs, operands)
