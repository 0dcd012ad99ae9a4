"""Which dim of each node counts samples, found by following the inputs' sample axes.

A node's sample dim is the dim that indexes the sample axis of one of its operands; of a factored
axis `(b s)` it is the outermost dim. The value it writes has its sample axis where that dim is
the outermost of an axis. So the sample axis survives transposes, reshapes and reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from soapstone.ops.signature import Access

if TYPE_CHECKING:
    from soapstone.graph.graph import Graph


def sample_dims(graph: Graph) -> Mapping[str, str]:
    """The sample dim of every node that has one, by the node's name."""
    axes = {v.name: v.samples for v in graph.values.values() if v.samples is not None}
    dims: dict[str, str] = {}
    for node in graph.nodes:
        signature = graph.signature(node)
        for access, operand in zip(signature.operands, node.operands, strict=True):
            if access is None or not isinstance(operand, str) or operand not in axes:
                continue
            found = _outermost(access, axes[operand])
            if found is not None:
                dims.setdefault(node.name, found)
        for name, written in zip(node.outputs, signature.outputs, strict=True):
            for axis in range(len(written)):
                if node.name in dims and _outermost(written, axis) == dims[node.name]:
                    axes.setdefault(name, axis)
    return dims


def _outermost(access: Access, axis: int) -> str | None:
    """The dim with the largest stride in an axis."""
    terms = access[axis].terms
    return max(terms, key=lambda term: abs(term[1]))[0] if terms else None
