"""What a compute task does, as a cost model sees it: one node's shard, forward or backward.

`Work` is also the key under which a measured time is kept: two shards with the same operator,
attributes, shapes and dtype take the same time on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from soapstone.graph import ITEM_BYTES, Graph, Node
from soapstone.ops import Attr, Shape
from soapstone.ops.box import shape_of, volume
from soapstone.ops.signature import IterationBox, Signature


@dataclass(frozen=True)
class Work:
    """One node's shard. `gradients` counts the operands whose gradient the backward pass computes
    (0 for the forward pass)."""

    op_name: str
    attrs: tuple[tuple[str, Attr], ...]
    operands: tuple[Shape | None, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    gradients: int
    flops: float
    size_bytes: int

    @property
    def is_backward(self) -> bool:
        """Whether it is the backward pass."""
        return self.gradients > 0


def work_of(graph: Graph, node: Node, box: IterationBox, *, backward: bool) -> Work | None:
    """The work of a node's shard; None when there is nothing to do."""
    signature = graph.signature(node)
    values = [graph.value(o) if isinstance(o, str) else None for o in node.operands]
    outputs = [graph.value(name) for name in node.outputs]
    wanted = [i for i, value in enumerate(values) if value is not None and value.name in graph.differentiable]
    if backward and (not wanted or not any(v.name in graph.differentiable for v in outputs)):
        return None
    if is_free(graph, node, backward=backward):
        return None
    items = [0 if value is None else ITEM_BYTES[value.dtype] for value in values]
    moved = node.op.bytes_touched(signature, items, [ITEM_BYTES[v.dtype] for v in outputs], box)
    regions = [signature.read(i, box) for i in range(len(node.operands))]
    if backward:
        moved += sum(volume(regions[i].box) * items[i] for i in wanted)
    count = len(wanted) if backward else 0
    return Work(
        node.op_name,
        tuple(sorted(node.attrs.items())),
        tuple(
            None if value is None or region.is_empty else shape_of(region.box)
            for value, region in zip(values, regions, strict=True)
        ),
        tuple(shape_of(signature.write(i, box)) for i in range(len(outputs))),
        next((v.dtype for v in outputs if v.is_float), outputs[0].dtype),
        count,
        node.op.flop_count(signature) * _fraction(signature, box) * (count if backward else 1),
        moved,
    )


def is_free(graph: Graph, node: Node, *, backward: bool) -> bool:
    """Whether a node takes no time: a view, or the gradient of a view that neither drops nor repeats."""
    if not node.op.is_view:
        return False
    signature = graph.signature(node)
    read = next((shape for shape in signature.shapes if shape is not None), ())
    return not backward or prod(read) == prod(signature.output_shapes[0])


def _fraction(signature: Signature, box: IterationBox) -> float:
    """The part of a node that a shard is: every dim that may be split counts in proportion."""
    own = prod(float(box[dim].length) for dim in signature.sizes)
    return own / prod(float(size) for size in signature.sizes.values())
