"""Strategies that people use today, to be compared with what the search finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layouts
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

Baseline = Callable[[Graph, Machine], Strategy]


def data_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Every block split along samples over all devices; what has no samples runs on each of them."""
    count = len(machine.devices)

    def split(block: Block) -> Placement:
        dim = graph.sample_dims.get(block.name, "")
        for layout in layouts(graph, block, count):
            if layout.degrees.get(dim, 1) == count:
                return placed(layout.degrees, range(count))
        return Placement((), tuple(range(count)), count)

    return _each(graph, split)


def single_device(graph: Graph, machine: Machine) -> Strategy:
    """Everything on the first device."""
    del machine
    return _each(graph, lambda _: Placement((), (0,)))


def model_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Blocks in the order of the graph, in as many runs as there are devices, alike in flops."""
    blocks = Strategy(graph, {}).blocks
    flops = [sum(node.op.flop_count(graph.signature(node)) for node in block.nodes) for block in blocks]
    total, done, count = sum(flops), 0.0, len(machine.devices)
    devices: dict[str, Placement] = {}
    for block, own in zip(blocks, flops, strict=True):
        middle = (done + own / 2) / total if total else 0.0
        devices[block.name] = Placement((), (min(int(middle * count), count - 1),))
        done += own
    return Strategy(graph, devices)


def _each(graph: Graph, place: Callable[[Block], Placement]) -> Strategy:
    return Strategy(graph, {block.name: place(block) for block in Strategy(graph, {}).blocks})


BASELINES: Mapping[str, Baseline] = {
    "data_parallel": data_parallel,
    "model_parallel": model_parallel,
    "single_device": single_device,
}


def baseline(name: str, graph: Graph, machine: Machine) -> Strategy:
    """The baseline of that name."""
    if name not in BASELINES:
        raise StrategyError(f"there is no strategy '{name}': choose one of {', '.join(BASELINES)}")
    return BASELINES[name](graph, machine)
