"""Parallel computation graphs (Unity 3): graphs with parallel operators, and the layouts of their values.

A PCG is a plain `Graph` in which Partition, Combine, Replicate, Reduce, Pipeline and Batch may be nodes.
Inputs, weights and constants lie whole on one device; every other layout follows, node by node. The parallel
operators are the identity on values, so a PCG computes what the graph without them computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from soapstone.errors import GraphError
from soapstone.graph import Graph, Node
from soapstone.graph.graph import Role
from soapstone.subst.layout import Layout, Objection, is_parallel, output_layouts, whole
from soapstone.subst.words import Typed


@dataclass(frozen=True)
class Pcg:
    """A graph whose values all have a layout. Built by `pcg`."""

    graph: Graph
    layouts: Mapping[str, Layout]

    def layout(self, name: str) -> Layout:
        """How a value lies over devices."""
        return self.layouts[self.graph.value(name).name]

    @property
    def parallel_nodes(self) -> tuple[Node, ...]:
        """The nodes that only move data."""
        return tuple(node for node in self.graph.nodes if is_parallel(node.op_name))


def pcg(graph: Graph) -> Pcg:
    """The graph with all layouts worked out; an error names the first node that does not fit."""
    layouts = {
        name: whole(len(value.shape))
        for name, value in graph.values.items()
        if value.role is not Role.COMPUTED
    }
    for node in graph.nodes:
        given = [layouts[operand] if isinstance(operand, str) else None for operand in node.operands]
        found = output_layouts(node.op, graph.signature(node), node.attrs, given)
        if isinstance(found, Objection):
            raise GraphError(f"node '{node.name}' ({node.op_name}) of graph '{graph.name}': {found.reason}")
        for name, layout in zip(node.outputs, found, strict=True):
            if Typed(graph.value(name).shape, layout).is_uneven:
                shape = list(graph.value(name).shape)
                raise GraphError(f"value '{name}' of shape {shape} does not divide into the parts {layout}")
            layouts[name] = layout
    return Pcg(graph, layouts)


def without_parallel_nodes(graph: Graph) -> Graph:
    """What a PCG computes: the graph with every parallel operator left out."""
    stands_for: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        operands = tuple(stands_for.get(o, o) if isinstance(o, str) else o for o in node.operands)
        if is_parallel(node.op_name):
            assert isinstance(operands[0], str)
            stands_for[node.outputs[0]] = operands[0]
        else:
            nodes.append(replace(node, operands=operands))
    used = {name for node in nodes for name in node.outputs}
    values = {n: v for n, v in graph.values.items() if v.role is not Role.COMPUTED or n in used}
    return replace(
        graph,
        values=values,
        nodes=tuple(nodes),
        loss=None if graph.loss is None else stands_for.get(graph.loss, graph.loss),
        outputs=tuple(stands_for.get(name, name) for name in graph.outputs),
        updates={buffer: stands_for.get(name, name) for buffer, name in graph.updates.items()},
    )
