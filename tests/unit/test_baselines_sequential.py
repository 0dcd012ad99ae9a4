"""ZeRO and sequential optimization: what they promise. `test_runtime_rewritten` trains with ZeRO."""

from __future__ import annotations

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.ops import Kind
from soapstone.plans import simulation
from soapstone.search.baselines import data_parallel
from soapstone.search.baselines.taso_then_flexflow import fastest_on_one_device, taso_then_flexflow
from soapstone.search.baselines.zero import zero

COSTS = AnalyticCosts()


def layers(width: int = 64) -> Graph:
    b = GraphBuilder("layers")
    y = b.input("x", (16, width), samples=0)
    for i in range(3):
        (y,) = b.add("linear", [y, b.weight(f"{i}.weight", (width, width)), b.weight(f"{i}.bias", (width,))])
    (loss,) = b.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return b.graph(loss=loss)


def test_zero_moves_what_data_parallelism_moves_and_stores_a_share() -> None:
    """An all-gather and a reduce-scatter of n - 1 shares each move as much as an all-reduce."""
    graph, machine = layers(), preset("p100:1x4")
    plain = simulation(data_parallel(graph, machine), machine, COSTS, "adam")
    ours = simulation(zero(graph, machine), machine, COSTS, "adam")
    assert ours.tasks.moved_bytes == plain.tasks.moved_bytes
    kinds = {str(task.kind) for task in ours.tasks.tasks}
    assert {"all_gather", "reduce_scatter"} <= kinds
    assert "all_reduce" not in kinds
    assert max(ours.prediction.memory_bytes) < max(plain.prediction.memory_bytes)


def test_a_weight_that_cannot_be_cut_by_all_devices_has_copies_of_its_shares() -> None:
    graph, machine = layers(62), preset("p100:1x4")
    strategy = zero(graph, machine).checked(machine)
    assert strategy.placements["0.weight.gathered"].copies == 2


def sums() -> Graph:
    b = GraphBuilder("sums")
    x = b.input("x", (1024, 256), samples=0)
    (one,) = b.add("linear", [x, b.weight("one", (256, 256)), None], name="one")
    (two,) = b.add("linear", [x, b.weight("two", (256, 256)), None], name="two")
    (y,) = b.add("add", [one, two], name="add")
    (loss,) = b.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return b.graph(loss=loss)


def test_sequential_optimization_rewrites_for_one_device_and_splits_no_reduction() -> None:
    graph, machine = sums(), preset("p100:1x4")
    fast = fastest_on_one_device(graph, machine, COSTS)
    assert [node.op_name for node in fast.nodes].count("linear") == 1
    one, two = (taso_then_flexflow(graph, machine, COSTS, 0, 200) for _ in range(2))
    assert one == two
    assert one.graph == fast
    for block in one.blocks:
        kinds, sample = one.graph.kinds(block.leader), one.graph.sample_dims.get(block.name)
        split = [dim for dim, _ in one.placements[block.name].degrees if dim != sample]
        assert all(kinds[dim] is not Kind.REDUCTION for dim in split)
