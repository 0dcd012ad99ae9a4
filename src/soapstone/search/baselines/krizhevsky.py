"""One weird trick (Krizhevsky 2014): samples for convolutions, parameters for dense layers.

Convolutions have most of the compute and few weights, dense layers the other way round. So the former
are split along samples, and the latter along their output features, which leaves no gradient of theirs to
be exchanged. FlexFlow 8.1.1 uses it as the expert's strategy for convolutional networks.
"""

from __future__ import annotations

from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.simple import can_split, each_block, over_samples
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy


def objection(graph: Graph, machine: Machine) -> str | None:
    """Why the strategy has no meaning for a model: it is for convolutional networks with dense layers."""
    del machine
    anatomy = Anatomy(graph)
    if not anatomy.convolutions:
        return "it has no convolutions"
    if not anatomy.dense_layers:
        return "it has no dense layers"
    if anatomy.flops_of(anatomy.convolutions) < anatomy.flops_of(anatomy.dense_layers):
        return "its dense layers compute more than its convolutions"
    return None


def krizhevsky(graph: Graph, machine: Machine) -> Strategy:
    """Dense layers split along output features, all else along samples.

    Features that do not divide by the number of devices are split over the most devices that divide
    both, the first ones.
    """
    anatomy, devices = Anatomy(graph), range(len(machine.devices))
    dense = {block.name for block in anatomy.dense_layers}

    def split(block: Block) -> Placement:
        dim = anatomy.dim_of_kind(block, Kind.PARAMETER) if block.name in dense else None
        if dim is None:
            return over_samples(graph, block, devices)
        divisors = (n for n in range(len(devices), 0, -1) if len(devices) % n == 0)
        degree = next(n for n in divisors if can_split(graph, block, {dim: n}))
        return placed({dim: degree}, devices[:degree])

    return each_block(graph, split)
