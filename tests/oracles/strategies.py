"""Random strategies for random graphs on machines of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import reject
from hypothesis import strategies as st

from oracles.graphs import graphs
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine, preset
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.layout import layout
from soapstone.strategy.pipeline import Pipeline, Schedule, repeated
from soapstone.strategy.placement import Placement
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy

MACHINES = (
    "cpu:1x1",
    "cpu:1x3",
    "cpu:2x2",
    "p100:1x4",
    "p100:2x2",
    "k80:1x2",
    "k80:1x4",
    "k80:2x2",
    "summit:1x6",
    "a100:1x4",
    "a100:2x2",
    "h100:1x8",
)


OVERHEAD_S = 3e-5
"""What a message may take of the device that it comes to."""


@st.composite
def machines(draw: st.DrawFn, names: Sequence[str] = MACHINES) -> Machine:
    """A preset, all or every second of whose devices may have something to do for every message."""
    machine = preset(draw(st.sampled_from(names)))
    match draw(st.sampled_from(["none", "none", "all", "some"])):
        case "all":
            return machine.with_message_overhead(OVERHEAD_S)
        case "some":
            devices = [
                replace(each, kind=replace(each.kind, name="taking", message_overhead_s=OVERHEAD_S))
                if each.index % 2
                else each
                for each in machine.devices
            ]
            return replace(machine, devices=tuple(devices))
        case _:
            return machine


@st.composite
def planned(draw: st.DrawFn, most_copies: int = 2) -> tuple[Strategy, Machine]:
    """A graph with a strategy, and the machine it is for."""
    graph, machine = draw(graphs()), draw(machines())
    return draw(strategies(graph, machine, most_copies)), machine


@st.composite
def strategies(draw: st.DrawFn, graph: Graph, machine: Machine, most_copies: int = 2) -> Strategy:
    """A random strategy: some nodes stand apart, and some blocks have several shards on one device."""
    followers = [node.name for block in blocks(graph) for node in block.followers]
    apart = draw(st.sets(st.sampled_from(followers), max_size=2)) if followers else set()
    random, is_stacked = Random(draw(st.integers(0, 2**16))), draw(st.booleans())
    count = len(machine.devices)
    placements = {
        block.name: _stacked(graph, block, count, random)
        if is_stacked and random.random() < 0.5
        else Space(graph, block, count, most_copies).drawn(random)
        for block in blocks(graph, frozenset(apart))
    }
    return Strategy(graph, placements, frozenset(apart))


@st.composite
def pipelined(draw: st.DrawFn, most_copies: int = 2) -> tuple[Strategy, Machine]:
    """A strategy of micro-batches, one forward, one backward where the graph allows it, and its machine."""
    graph, machine = draw(graphs()), draw(machines())
    count = draw(
        st.sampled_from([n for n in (2, 4, 3, 1) if graph.sample_count and graph.sample_count % n == 0])
    )
    random = Random(draw(st.integers(0, 2**16)))
    one = Strategy(
        graph,
        {b.name: _of_one(graph, b, len(machine.devices), random, count, most_copies) for b in blocks(graph)},
    )
    for schedule in (draw(st.sampled_from(Schedule)), Schedule.GPIPE):
        try:
            return one.pipelined(Pipeline(count, schedule)).checked(machine), machine
        except StrategyError:
            continue
    return reject()


def _of_one(
    graph: Graph, block: Block, device_count: int, random: Random, count: int, most_copies: int
) -> Placement:
    """The placement of one micro-batch, of which so many are possible; on few devices, so that there are
    stages."""
    while True:
        found = Space(graph, block, random.randint(1, device_count), most_copies).drawn(random)
        first = random.randrange(device_count)
        found = replace(found, devices=tuple((device + first) % device_count for device in found.devices))
        try:
            layout(graph, block, repeated(graph, block, found, count).degree_of)
        except StrategyError:
            if random.random() < 0.1:
                return Placement((), (first,))
            continue
        return found


def _stacked(graph: Graph, block: Block, device_count: int, random: Random) -> Placement:
    """A placement by hand: up to four shards on devices that may repeat."""
    shape = Space(graph, block, 4).drawn(random)
    return Placement(shape.degrees, tuple(random.randrange(device_count) for _ in shape.devices))
