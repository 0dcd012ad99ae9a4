"""ZeRO data parallelism (Rajbhandari et al. 2020): samples are split, and so is what belongs to weights.

Every device computes its samples with whole weights, but keeps only its share of each of them, of its
gradient and of the optimizer's state. Within one iteration a weight is gathered on all devices before its
first use, and its gradient is summed into shares: an all-gather and a reduce-scatter in the place of data
parallelism's all-reduce, which moves as much.

A strategy stores a weight where it is read. So the graph is given a node between each weight and its readers
that changes nothing (Combine of a parallel computation graph), split over all devices: it reads shares, its
readers want the whole, and its gradient comes back in shares. The task graph is then ZeRO's, and the runtime
trains it like any other.

Of ZeRO's stages this is the second with parameters stored in shares: what was gathered for the forward pass
is kept for the backward pass, and not gathered again. A weight is cut along its first axis that takes the
most shares; where that are fewer than there are devices, some have the same share.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from soapstone.graph import Graph, Node, Role
from soapstone.graph.graph import Value
from soapstone.graph.verify import verify
from soapstone.machine import Machine
from soapstone.search.baselines.simple import can_split, over_samples
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

GATHERED = "gathered"


def zero(graph: Graph, machine: Machine) -> Strategy:
    """Every block split along samples, every weight stored in shares."""
    devices = tuple(range(len(machine.devices)))
    shared = with_gathered_weights(graph, len(devices))
    blocks = Strategy(shared, {}).blocks

    def place(block: Block) -> Placement:
        if block.leader.scope != GATHERED:
            return over_samples(shared, block, devices)
        axis, degree = block.leader.attrs["dim"], block.leader.attrs["degree"]
        assert isinstance(axis, int)
        assert isinstance(degree, int)
        dim = list(shared.signature(block.leader).sizes)[axis]
        if can_split(shared, block, {dim: degree}):
            return placed({dim: degree}, devices, len(devices) // degree)
        return Placement((), devices, len(devices))

    return Strategy(shared, {block.name: place(block) for block in blocks})


def with_gathered_weights(graph: Graph, count: int) -> Graph:
    """The graph with a node between each trained weight and its readers, for so many shares."""
    values, nodes = dict(graph.values), list[Node]()
    gathered: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.reads:
            value = graph.value(name)
            if value.role is Role.WEIGHT and name in graph.differentiable and name not in gathered:
                degree, axis = _shares(value, count)
                if degree > 1:
                    new = f"{name}.{GATHERED}"
                    gathered[name] = new
                    values[new] = Value(new, value.shape, value.dtype)
                    attrs = {"dim": axis, "degree": degree}
                    nodes.append(Node(new, "combine", (name,), (new,), attrs, GATHERED))
        operands = tuple(gathered.get(o, o) if isinstance(o, str) else o for o in node.operands)
        nodes.append(replace(node, operands=operands))
    return verify(replace(graph, values=values, nodes=tuple(nodes)))


def _shares(value: Value, count: int) -> tuple[int, int]:
    """In how many equal shares a weight is cut, and along which axis."""
    degree, axis = max(((gcd(size, count), -axis) for axis, size in enumerate(value.shape)), default=(1, 0))
    return degree, -axis
