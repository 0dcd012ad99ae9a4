"""Buckets: gradients that the same devices add up one after the other are added up together.

Which weights may share a bucket is a fact of the graph: in the order in which the backward pass completes
their gradients, weights fill one shelf after the other. Gradients of one shelf that the same devices hold are
a bucket, whatever else a strategy does. A full shelf is what DDP takes for a bucket: large enough that a
collective's start counts for little, small enough that the first are on their way while the backward pass
goes on.
"""

from __future__ import annotations

from soapstone.graph import ITEM_BYTES, Graph, Role
from soapstone.ops.box import volume, whole

FULL_BYTES = 25 * 2**20
"""[choice] As DistributedDataParallel's default `bucket_cap_mb`."""

FIRST_BYTES = 2**20
"""[choice] Of the first shelf, as DDP has it: the earlier something is under way, the better."""


def shelves(graph: Graph) -> dict[str, int]:
    """The shelf of each weight that gets a gradient; no shelf holds weights of two dtypes."""
    first_read: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for name in node.reads:
            if graph.value(name).role is Role.WEIGHT and name in graph.differentiable:
                first_read.setdefault(name, place)
    # A gradient is whole when the first node that reads the weight has been taken back.
    backward = sorted(first_read, key=lambda name: -first_read[name])
    found: dict[str, int] = {}
    count = 0
    for dtype in dict.fromkeys(graph.value(name).dtype for name in backward):
        held_bytes, full_bytes = 0, FIRST_BYTES
        for name in backward:
            value = graph.value(name)
            if value.dtype != dtype:
                continue
            if held_bytes >= full_bytes:
                count, held_bytes, full_bytes = count + 1, 0, FULL_BYTES
            found[name] = count
            held_bytes += volume(whole(value.shape)) * ITEM_BYTES[dtype]
        count += 1
    return found
