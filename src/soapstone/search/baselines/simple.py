"""Strategies that look at no operator: all samples, all devices in turn, one device, or chance.

FlexFlow 2: data parallelism splits every operator along samples and keeps a replica of the model on
every device; model parallelism gives each device a part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layout
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy


def data_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Every block split along samples over all devices, or over the most that its samples divide by; what has
    no samples runs on each of them."""
    devices = range(len(machine.devices))
    return each_block(graph, lambda block: over_samples(graph, block, devices))


def uneven(shared: Strategy, machine: Machine) -> str | None:
    """What data parallelism makes of a batch that does not divide by the devices, in words; else None."""
    samples, count = shared.graph.sample_count, len(machine.devices)
    if samples is None or samples % count == 0:
        return None
    why = f"the batch of {samples} does not divide by {count}; a batch of {samples + -samples % count} would"
    widths = sorted({len(each.devices) for each in shared.placements.values() if each.degrees})
    if not widths:
        return f"data parallelism computes the whole batch on every device: {why}"
    width = " to ".join(map(str, dict.fromkeys((widths[0], widths[-1]))))
    return f"data parallelism is over {width} of {count} devices: {why}"


def single_device(graph: Graph, machine: Machine) -> Strategy:
    """Everything on the first device."""
    del machine
    return each_block(graph, lambda _: Placement((), (0,)))


def model_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Blocks in the order of the graph, in as many runs as there are devices, alike in flops."""
    blocks = Strategy(graph, {}).blocks
    runs = equal_runs([flops(graph, block) for block in blocks], len(machine.devices))
    return Strategy(
        graph, {block.name: Placement((), (run,)) for block, run in zip(blocks, runs, strict=True)}
    )


def random(graph: Graph, machine: Machine, seed: int) -> Strategy:
    """Every block under a layout, and on devices, as the seed says.

    The number of shards is drawn first, evenly among those that are possible, then one of the layouts
    with as many, then the devices.
    """
    chance, count = Random(seed), len(machine.devices)

    def drawn(block: Block) -> Placement:
        signature = graph.signature(block.leader)
        for parts in chance.sample(range(1, count + 1), count):
            found = list(signature.legal_degrees(parts))
            for degrees in chance.sample(found, len(found)):
                if can_split(graph, block, degrees):
                    return placed(degrees, chance.sample(range(count), parts))
        raise AssertionError("a block that is not split is always possible")

    return each_block(graph, drawn)


def each_block(graph: Graph, place: Callable[[Block], Placement]) -> Strategy:
    """The strategy that places every block so."""
    return Strategy(graph, {block.name: place(block) for block in Strategy(graph, {}).blocks})


def over_samples(graph: Graph, block: Block, devices: Sequence[int]) -> Placement:
    """The block split along samples over the most devices that these divide by, the first ones; where it
    cannot be, copies on all devices that share the batch."""
    dim = graph.sample_dims.get(block.name)
    size = 1 if dim is None else graph.signature(block.leader).sizes[dim]
    for count in range(len(devices), 1, -1):
        if dim is not None and size % count == 0 and can_split(graph, block, {dim: count}):
            return placed({dim: count}, devices[:count])
    used = devices[: sharing(graph.sample_count, len(devices))]
    return Placement((), tuple(used), len(used))


def sharing(samples: int | None, count: int) -> int:
    """Of so many devices, the most that share a batch evenly; all of them where no two do."""
    fewer = range(count, 1, -1)
    return next((n for n in fewer if samples is not None and samples % n == 0), count)


def can_split(graph: Graph, block: Block, degrees: Mapping[str, int]) -> bool:
    """Whether these degrees are a layout of the block."""
    try:
        layout(graph, block, degrees)
    except StrategyError:
        return False
    return True


def flops(graph: Graph, block: Block) -> float:
    """Floating-point operations of the block's forward pass."""
    return sum(node.op.flop_count(graph.signature(node)) for node in block.nodes)


def equal_runs(weights: Sequence[float], count: int) -> list[int]:
    """Consecutive items in `count` runs of about equal weight: the run that the middle of each is in."""
    total, done, runs = sum(weights), 0.0, list[int]()
    for own in weights:
        middle = (done + own / 2) / total if total else 0.0
        runs.append(min(int(middle * count), count - 1))
        done += own
    return runs
