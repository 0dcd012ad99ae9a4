"""PCGs with machine mappings, and graphs with strategies: the same thing, written in two ways."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs

from soapstone.errors import StrategyError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.plans.mapped import MachineView, MappedPcg, in_order, machine_view, pcg_of, strategy_of
from soapstone.search.baselines.zero import zero
from soapstone.strategy.pipeline import Pipeline
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.space import Space, random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.subst import pcg, rewrites, shipped, without_parallel_nodes

DONE = {"written": 0}


@given(graphs(), st.integers(1, 4), st.integers(0, 2**16), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_strategy_written_as_a_pcg_is_read_back_whole(
    graph: Graph, devices: int, seed: int, are_apart: bool
) -> None:
    """Degrees, devices, blocks; and the PCG without its parallel operators is the graph."""
    random = Random(seed)
    strategy = random_strategy(graph, devices, random)
    if are_apart:
        apart = frozenset(node.name for block in strategy.blocks for node in block.followers)
        found = Strategy(graph, {}, apart).blocks
        strategy = Strategy(graph, {b.name: Space(graph, b, devices).drawn(random) for b in found}, apart)
    try:
        written = pcg_of(strategy)
    except StrategyError as error:
        assert "PCG" in str(error)  # noqa: PT017, most strategies can be written, and DONE counts them
        return
    DONE["written"] += 1
    assert without_parallel_nodes(written.pcg.graph) == graph
    assert strategy_of(written) == strategy


def test_most_strategies_can_be_written() -> None:
    assert DONE["written"] > 20


def layers() -> Graph:
    b = GraphBuilder("layers")
    x = b.input("x", (8, 16), samples=0)
    (y,) = b.add("linear", [x, b.weight("a", (16, 16)), None], name="first")
    (y,) = b.add("relu", [y], name="relu")
    (y,) = b.add("linear", [y, b.weight("b", (16, 16)), None], name="second")
    return b.graph(outputs=[y])


def products() -> Graph:
    """(A B) C, batched over heads: a simplified attention (Unity, Figure 6)."""
    b = GraphBuilder("products")
    x, y, z = b.input("a", (4, 8, 16)), b.weight("b", (4, 16, 8)), b.weight("c", (4, 8, 16))
    (found,) = b.add("matmul", [x, y], name="first")
    return b.graph(outputs=b.add("matmul", [found, z], name="second"))


def played(graph: Graph, names: list[str], wanted: list[str], degree: int = 4) -> Graph:
    """The graph after rules of the book, one after the other; the last use that leads to the wanted operators
    is taken at the end, the first one before."""
    for name in names[:-1]:
        graph = next(rewrites(graph, shipped().entry(name).rule, degree)).graph
    for found in rewrites(graph, shipped().entry(names[-1]).rule, degree):
        if [node.op_name for node in found.graph.nodes] == wanted:
            return found.graph
    raise AssertionError(f"{names} do not lead to {wanted}")


@pytest.mark.parametrize(
    ("rule", "degrees", "layout"),
    [
        ("matmul-split.5", {"m": 4}, "[1 4 1]"),
        ("matmul-split.6", {"n": 4}, "[1 1 4]"),
        ("matmul-split.4", {"0": 4}, "[4 1 1]"),
        ("matmul-split.7", {"k": 4}, "[1 1 1 +4]"),
    ],
)
def test_figure_9_is_reached_by_shipped_rules(rule: str, degrees: dict[str, int], layout: str) -> None:
    """Samples, output channels, heads and reductions of a batched product; each is a strategy, too."""
    b = GraphBuilder("product")
    y = b.add("matmul", [b.input("x", (4, 8, 8)), b.weight("w", (4, 8, 8))], name="product")
    found = next(rewrites(b.graph(outputs=y), shipped().entry(rule).rule, 4)).graph
    at = next(node for node in found.nodes if node.op_name == "matmul")
    assert str(pcg(found).layouts[at.outputs[0]]) == layout
    (placement,) = strategy_of(in_order(found)).placements.values()
    assert list(placement.degree_of.values()) == list(degrees.values())
    assert placement.devices == (0, 1, 2, 3)


def test_figure_9_pipelines_are_reached_but_are_no_strategy() -> None:
    b = GraphBuilder("product")
    y = b.add("matmul", [b.input("x", (4, 8, 8)), b.weight("w", (4, 8, 8))], name="product")
    found = next(rewrites(b.graph(outputs=y), shipped().entry("matmul-pipeline.15").rule, 4)).graph
    with pytest.raises(StrategyError, match="cut in time"):
        in_order(found)


def test_figure_10_is_reached_by_shipped_rules() -> None:
    """Megatron: the columns of the first layer, then the rows of the second; one reduce is left."""
    found = played(
        layers(),
        ["linear-split.4", "relu-pull.2", "linear-meet.3"],
        ["replicate", "partition", "linear", "relu", "partition", "linear", "reduce"],
    )
    strategy = strategy_of(in_order(found))
    split = [dict(strategy.placements[block.name].degrees) for block in strategy.blocks]
    assert split == [{"o": 4}, {"i": 4}]
    assert strategy_of(pcg_of(strategy)) == strategy


def test_figure_10_attention_is_split_by_heads() -> None:
    found = played(
        products(),
        ["matmul-split.4", "matmul-meet.3"],
        ["partition", "partition", "matmul", "partition", "matmul", "combine"],
    )
    strategy = strategy_of(in_order(found))
    assert [sum(p.degree_of.values()) for p in strategy.placements.values()] == [4, 4]


@pytest.mark.parametrize(
    ("rule", "dim"), [("linear-split.3", "b"), ("linear-split.4", "o"), ("linear-split.5", "i")]
)
def test_what_a_parallel_operator_keeps_apart_is_placed_apart(rule: str, dim: str) -> None:
    """The first layer is split, and put together before the relu, which is whole in the strategy, too.
    Without a mapping it would be split as the layer is; behind a split sum it is whole in either case."""
    found = next(rewrites(layers(), shipped().entry(rule).rule, 4)).graph
    strategy = strategy_of(in_order(found))
    assert strategy.apart == {"relu"}
    assert [dict(strategy.placements[b.name].degrees) for b in strategy.blocks] == [{dim: 4}, {}, {}]
    assert strategy_of(pcg_of(strategy)) == strategy
    mapped = in_order(found)
    without = MappedPcg(mapped.pcg, {n: devices for n, devices in mapped.mappings.items() if n != "relu"})
    if dim == "i":
        assert strategy_of(without).apart == frozenset()
        return
    with pytest.raises(StrategyError, match="'relu' is split otherwise than 'linear', which it follows"):
        strategy_of(without)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "a mapping for 'nothing'"), ("x", "a mapping for 'x', which is no operator that has tasks")],
)
def test_mappings_are_of_operators(name: str, message: str) -> None:
    plain = in_order(layers())
    with pytest.raises(StrategyError, match=message):
        strategy_of(MappedPcg(plain.pcg, {**plain.mappings, name: (0,)}))
    with pytest.raises(StrategyError, match="'second' has tasks and no mapping"):
        strategy_of(MappedPcg(plain.pcg, {"first": (0,)}))


def test_parallel_operators_of_the_graph_itself_are_refused() -> None:
    """ZeRO's: left out as the PCG's own are, they would be lost on the way back."""
    machine = preset("p100:1x2")
    with pytest.raises(StrategyError, match=r"'a\.gathered' is a parallel operator of the graph itself"):
        pcg_of(zero(layers(), machine))


def test_a_window_over_what_has_no_equal_parts_is_refused() -> None:
    b = GraphBuilder("image")
    x = b.input("x", (2, 1, 1, 18), samples=0)
    (y,) = b.add("conv2d", [x, b.weight("w", (1, 1, 1, 3)), None], name="conv")
    graph = b.graph(outputs=[y])
    dim = list(graph.signature(graph.node("conv")).sizes)[4]
    with pytest.raises(StrategyError, match=r"'conv' reads 'x' of shape \[2, 1, 1, 18\] in the parts"):
        pcg_of(Strategy(graph, {"conv": placed({dim: 4}, range(4))}))


def test_what_cannot_be_said_is_refused() -> None:
    graph = layers()
    copied = Strategy(graph, {"first": Placement((), (0, 1), 2), "second": placed({"b": 2}, (0, 1))})
    with pytest.raises(StrategyError, match="'first' has copies, which a PCG cannot take away"):
        pcg_of(copied)
    one = Strategy(graph, {"first": placed({}, (0,)), "second": placed({}, (1,))})
    with pytest.raises(StrategyError, match="micro-batches have an order, which a PCG cannot say"):
        pcg_of(one.pipelined(Pipeline(2)))
    plain = in_order(graph)
    with pytest.raises(StrategyError, match="has 1 tasks and a mapping of 2 devices"):
        strategy_of(MappedPcg(plain.pcg, {**plain.mappings, "first": (0, 1)}))


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(1, 3)), min_size=1, max_size=3), st.integers(0, 5))
def test_a_grid_of_devices_is_found_again(axes: list[tuple[int, int]], first: int) -> None:
    """Any grid whose axes do not overlap, each with gaps, in any order of its axes."""
    sizes, strides, reach = [], [], 1
    for size, gap in axes:
        sizes.append(size)
        strides.append(reach * gap)
        reach *= gap * size
    for order in permutations(range(len(sizes))):
        devices = MachineView(first, tuple(sizes[i] for i in order), tuple(strides[i] for i in order)).devices
        found = machine_view(devices)
        assert found is not None
        assert found.devices == devices
        assert len(found.sizes) <= len(sizes)


def test_what_is_no_grid_has_no_view() -> None:
    assert machine_view((0, 1, 3, 2)) is None
    assert machine_view((4,)) == MachineView(4, (), ())


def test_a_three_dimensional_mapping_goes_into_a_pcg_and_back() -> None:
    """Two nodes of two sockets: samples between nodes, sums and outputs between and within sockets."""
    b = GraphBuilder("cube")
    x = b.input("x", (8, 8), samples=0)
    (y,) = b.add("linear", [x, b.weight("w", (8, 8)), None], name="linear")
    (y,) = b.add("sum", [y], {"dim": (0, 1)}, name="sum")
    graph = b.graph(loss=y)
    devices = MachineView(0, (2, 2, 2), (4, 1, 2)).devices
    whole = placed({}, (0,))
    strategy = Strategy(graph, {"linear": placed({"b": 2, "o": 2, "i": 2}, devices), "sum": whole})
    written = pcg_of(strategy)
    assert written.views["linear"] == MachineView(0, (2, 2, 2), (4, 1, 2))
    assert strategy_of(written) == strategy
