"""OptCNN: its minimum is one, by exhaustive enumeration, and data parallelism is never below it."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles.graphs import graphs

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.search.baselines import data_parallel, elimination
from soapstone.search.baselines.elimination import Problem, minimum
from soapstone.search.baselines.optcnn import OptCNN
from soapstone.search.baselines.part_costs import PartCosts
from soapstone.strategy.placement import placed

COSTS = AnalyticCosts()
FOUR = preset("p100:1x4")


def chain(*widths: int, batch: int = 8) -> Graph:
    """Dense layers one after another."""
    build = GraphBuilder("chain")
    x = build.input("x", (batch, widths[0]))
    for i, (wide, out) in enumerate(pairwise(widths)):
        (x,) = build.add("linear", [x, build.weight(f"w{i}", (out, wide)), None], name=f"fc{i}")
        (x,) = build.add("relu", [x], name=f"relu{i}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def exhausted(problem: Problem) -> float:
    return min(problem.cost(choices) for choices in product(*(range(len(own)) for own in problem.single)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few variables with a few choices each, and costs of any pairs of them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))

    def table(*shape: int) -> NDArray[np.float64]:
        return random.integers(0, 9, shape).astype(np.float64)

    pairs = [(i, j) for j in range(len(sizes)) for i in range(j)]
    chosen = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return Problem([table(n) for n in sizes], {(i, j): table(sizes[i], sizes[j]) for i, j in sorted(chosen)})


@given(problems())
def test_elimination_finds_the_minimum_of_any_sum(problem: Problem) -> None:
    found = minimum(problem, [0] * len(problem.single))
    assert found.is_exact
    assert found.cost == problem.cost(found.choices) == exhausted(problem)


def test_what_has_one_choice_takes_no_axis_of_a_table() -> None:
    """On one device every layer has, and NMT's attention reads eighty of them."""
    count = 100
    pairs = {(i, count): np.full((1, 2), 1.0) for i in range(count)}
    found = minimum(Problem([*(np.zeros(1) for _ in range(count)), np.array([1.0, 0.5])], pairs), [0] * 101)
    assert found.is_exact
    assert (found.choices[-1], found.cost) == (1, count + 0.5)


@given(problems())
def test_where_tables_are_too_large_what_is_known_is_never_made_worse(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "MOST_ENTRIES", 4)
        found = minimum(problem, [0] * len(problem.single))
    assert found.cost == problem.cost(found.choices)
    assert exhausted(problem) <= found.cost <= problem.cost([0] * len(problem.single))
    assert not found.is_exact or found.cost == exhausted(problem)


@pytest.mark.parametrize("machine", ["p100:1x2", "k80:1x4", "p100:2x2"])
def test_on_linear_graphs_it_equals_exhaustive_enumeration(machine: str) -> None:
    found = OptCNN(chain(64, 512, 32, 256), preset(machine), COSTS)
    assert found.minimum.is_exact
    assert found.minimum.cost == pytest.approx(exhausted(found.problem), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_data_parallelism_never_costs_less(graph: Graph) -> None:
    found = OptCNN(graph, FOUR, COSTS)
    over_samples = [0] * len(found.layers)
    assert found.chosen(over_samples).placements == data_parallel(graph, FOUR).placements
    assert found.minimum.cost <= found.problem.cost(over_samples)
    found.strategy.checked(FOUR)


def test_large_dense_layers_are_split_along_parameters() -> None:
    """A layer of 64 MiB with eight samples: its gradient costs more than its samples."""
    found = OptCNN(chain(4096, 4096, 4096), FOUR, COSTS).strategy
    assert found.placements["fc0"] == found.placements["fc1"] == placed({"o": 4}, range(4))


def test_shards_run_on_the_first_devices_in_order_and_no_sum_is_split() -> None:
    graph = load("nmt", devices=4, tiny=True).captured().graph
    found = OptCNN(graph, FOUR, COSTS)
    for layer, own in zip(found.layers, found.configurations, strict=True):
        leader = layer.blocks[0].leader
        summed = set(graph.signature(leader).summed_dims) - {graph.sample_dims.get(leader.name)}
        for placement in own:
            assert placement.devices == tuple(range(len(placement.devices)))
            assert not summed & placement.degree_of.keys()


def test_steps_of_a_layer_have_one_configuration() -> None:
    graph = load("rnnlm", devices=4, tiny=True).captured().graph
    strategy = OptCNN(graph, FOUR, COSTS).strategy
    cells = [block for block in strategy.blocks if block.leader.scope == "lstm.cells.0"]
    assert len(cells) == 3
    assert len({strategy.placements[block.name] for block in cells}) == 1


def test_an_edge_costs_what_travels_there_and_back() -> None:
    graph = chain(64, 64, 64)
    parts = PartCosts(graph, FOUR, COSTS)
    first, second, *_ = data_parallel(graph, FOUR).blocks
    samples, features = placed({"b": 4}, range(4)), placed({"o": 4}, range(4))
    times = parts.exchange_s(first, second, (samples, features), (samples, features))
    assert times[0, 0] == 0.0
    assert (times[1:, :] > 0).all()
    assert times[0, 1] > 0
    link = FOUR.narrowest_link(0, 1)
    piece_s = 8 * 64 * 4 / 4 / link.bandwidth_bytes_per_s + link.latency_s
    assert times[0, 1] == pytest.approx(2 * 3 * piece_s)  # an all-gather, and a reduce-scatter back


def test_a_block_costs_its_compute_and_the_exchange_of_its_gradients() -> None:
    graph = chain(64, 64)
    parts = PartCosts(graph, FOUR, COSTS)
    (block, *_) = data_parallel(graph, FOUR).blocks
    placements = (placed({}, [0]), placed({"b": 4}, range(4)), placed({"o": 4}, range(4)))
    costs = parts.block(block, placements)
    update_s = FOUR.devices[0].kind.launch_overhead_s
    assert costs.sync_s[0] == pytest.approx(update_s)
    assert costs.sync_s[1] > 2 * update_s
    assert costs.sync_s[2] == pytest.approx(update_s)
