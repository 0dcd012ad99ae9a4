"""Wu et al. 2016 (Google's translation system): nodes share the samples, devices of a node the layers.

FlexFlow 8.1.1: the network is replicated on each node and trained by data parallelism; within a node,
operators of the same depth are on the same device. The depth of an operator is the number of layers with
weights below it; the steps of an unrolled layer are one layer (`layers`). Where there are more depths
than devices, neighbouring ones share a device, so that devices have about equal flops.
"""

from __future__ import annotations

from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.layers import layers
from soapstone.search.baselines.simple import each_block, equal_runs, over_samples
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy


def objection(graph: Graph, machine: Machine) -> str | None:
    """Why the strategy has no meaning for a model: it is for recurrent networks."""
    del machine
    return None if Anatomy(graph).recurrent_layers else "it has no recurrent layers"


def wu(graph: Graph, machine: Machine) -> Strategy:
    """Samples over nodes, depths over the devices of each node."""
    anatomy = Anatomy(graph)
    nodes = [[device.index for device in machine.devices_on(node)] for node in machine.nodes]
    depth = depths(anatomy)
    by_depth = [0.0] * (1 + max(depth.values(), default=0))
    for block in anatomy.blocks:
        by_depth[depth[block.name]] += anatomy.flops_of((block,))
    places = equal_runs(by_depth, min(len(devices) for devices in nodes))

    def split(block: Block) -> Placement:
        place = places[depth[block.name]]
        return over_samples(graph, block, [devices[place] for devices in nodes])

    return each_block(graph, split)


def depths(anatomy: Anatomy) -> dict[str, int]:
    """For each block, by name, how many layers with weights are below it.

    Only what a step reads of the step itself counts, and not the state that it takes over: where some
    step of a layer reads what the layer made before, there all steps read a state, even if the first one
    takes it from another layer, as a decoder does from its encoder. Layers are taken in the order of
    their first blocks; what a layer reads of later ones does not count either.
    """
    found: dict[str, int] = {}
    for layer in layers(anatomy):
        own = {block.name for block in layer.blocks}
        states = {
            position
            for block in layer.blocks
            for position, operand in enumerate(block.leader.operands)
            if isinstance(operand, str) and anatomy.home.get(operand) in own
        }
        below = [
            found[home]
            for block in layer.blocks
            for node in block.nodes
            for position, operand in enumerate(node.operands)
            if not (node is block.leader and position in states) and isinstance(operand, str)
            for home in [anatomy.home.get(operand, "")]
            if home in found
        ]
        depth = max(below) + bool(layer.weights) if below else 0
        found |= dict.fromkeys(own, depth)
    return found
