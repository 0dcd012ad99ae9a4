"""The space of placements, against brute force over all degrees and all choices of devices."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product
from math import prod
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs

from soapstone.errors import StrategyError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.ops.box import Box, contains
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.layout import Layout, layout
from soapstone.strategy.placement import Placement
from soapstone.strategy.space import Space, random_strategy


def divisors(size: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if size % n == 0]


def legal_degrees(graph: Graph, block: Block, most: int) -> list[dict[str, int]]:
    """Every assignment of degrees to every dim that the block accepts, with at most so many shards."""
    sizes = graph.signature(block.leader).sizes
    found = []
    for degrees in product(*(divisors(size, most) for size in sizes.values())):
        chosen = {dim: n for dim, n in zip(sizes, degrees, strict=True) if n > 1}
        if prod(degrees) <= most and accepted(graph, block, chosen):
            found.append(chosen)
    return found


def accepted(graph: Graph, block: Block, degrees: dict[str, int]) -> bool:
    try:
        layout(graph, block, degrees)
    except StrategyError:
        return False
    return True


@given(graphs(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_space_holds_exactly_the_legal_placements(graph: Graph, devices: int, most_copies: int) -> None:
    for block in blocks(graph):
        space = Space(graph, block, devices, most_copies)
        expected = {
            Placement(tuple(degrees.items()), chosen, copies)
            for degrees in legal_degrees(graph, block, devices)
            for copies in range(1, most_copies + 1)
            if prod(degrees.values()) * copies <= devices
            for chosen in permutations(range(devices), prod(degrees.values()) * copies)
        }
        listed = list(space)
        assert len(listed) == len(set(listed)) == space.count
        assert set(listed) == expected


@given(graphs(), st.integers(1, 8), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_what_is_drawn_is_in_the_space(graph: Graph, devices: int, seed: int) -> None:
    random = Random(seed)
    for block in blocks(graph):
        space = Space(graph, block, devices, most_copies=2)
        drawn = space.drawn(random)
        assert len(set(drawn.devices)) == len(drawn.devices)
        assert set(drawn.devices) <= set(range(devices))
        assert (drawn.degree_of, drawn.copies) in [(found.degrees, copies) for found, copies in space.shapes]


def test_draws_are_uniform_over_shapes_and_then_over_devices() -> None:
    build = GraphBuilder("fc")
    (y,) = build.add("linear", [build.input("x", (4, 4)), build.weight("w", (4, 4)), None], name="fc")
    graph = build.graph(outputs=[y])
    space = Space(graph, blocks(graph)[0], 4)
    # Whole; two parts along b, o or i; four along one of them, or two each along two of them.
    assert len(space.shapes) == 1 + 3 + 6
    random = Random(0)
    drawn = [space.drawn(random) for _ in range(4000)]
    shapes = Counter(placement.degrees for placement in drawn)
    assert len(shapes) == 10
    assert all(abs(count - 400) < 100 for count in shapes.values())  # 5 standard deviations of 19
    firsts = Counter(placement.devices[0] for placement in drawn)
    assert all(abs(count - 1000) < 140 for count in firsts.values())  # 5 of 27


def test_the_same_seed_draws_the_same() -> None:
    build = GraphBuilder("fc")
    (y,) = build.add("linear", [build.input("x", (8, 8)), build.weight("w", (8, 8)), None], name="fc")
    graph = build.graph(outputs=[y])
    first, second = (random_strategy(graph, 4, Random(7), most_copies=2) for _ in range(2))
    assert first == second
    assert first.checked(preset("p100:1x4"))


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_shards_write_everything_once_and_read_their_own(graph: Graph) -> None:
    """In every layout, the shards of a node together write every element of its outputs, those that
    compute different parts different elements (or summands), and inside a block nobody reads what
    another shard wrote."""
    for block in blocks(graph):
        space = Space(graph, block, 4)
        for found, _ in space.shapes:
            written: dict[str, tuple[Box, ...]] = {}
            for number, node in enumerate(block.nodes):
                for i, operand in enumerate(node.operands):
                    for own, read in zip(written.get(str(operand), ()), found.reads(number, i), strict=False):
                        assert read is None or contains(own, read)
                for i, name in enumerate(node.outputs):
                    written[name] = found.writes(number, i)
                    assert_covered(graph, found, number, written[name], name)


def assert_covered(graph: Graph, found: Layout, number: int, boxes: tuple[Box, ...], name: str) -> None:
    summands = set(found.summands) if number == 0 else {0}
    parts = [shards[0] for shards in found.alike(number)]
    seen: Counter[tuple[int, ...]] = Counter()
    for shard in parts:
        seen.update(
            (found.summands[shard] if number == 0 else 0, *element)
            for element in product(*(range(lo, hi) for lo, hi in boxes[shard]))
        )
    everything = product(summands, *(range(size) for size in graph.value(name).shape))
    assert seen == Counter(everything)
