"""The task graphs of small cases, worked out by hand. All tensors are f32: 4 bytes an element."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.search.baselines import data_parallel
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import COMPUTE_KINDS, Task, TaskGraph, TaskKind

P100 = preset("p100:1x4")
K80 = preset("k80:1x4")
WHOLE = Placement((), (0,))

FORWARD, BACKWARD, SEAM, WEIGHT = 0, 1, 1, 3
"""Numbers in the keys of tasks: the pass, and what a task belongs to."""


def built(graph: Graph, placements: dict[str, Placement], machine: Machine = P100) -> TaskGraph:
    return task_graph(Strategy(graph, placements), machine, AnalyticCosts())


def moves(tasks: TaskGraph, direction: int | None = None) -> Counter[tuple[str, int]]:
    """Communication tasks by kind and bytes; of weights, too, unless a direction is given."""
    return Counter(
        (t.kind.value, t.size_bytes)
        for t in tasks.tasks
        if t.kind not in COMPUTE_KINDS
        and (direction is None or (t.key[0] == direction and t.key[2] != WEIGHT))
    )


def of_weights(tasks: TaskGraph) -> list[Task]:
    return [t for t in tasks.tasks if t.kind not in COMPUTE_KINDS and t.key[2] == WEIGHT]


def counts(tasks: TaskGraph) -> Counter[str]:
    return Counter(t.kind.value for t in tasks.tasks)


def two_layers(batch: int = 8) -> Graph:
    """x (batch, 16) -> fc1 (batch, 32) -> fc2 (batch, 64) -> loss."""
    build = GraphBuilder("two")
    x = build.input("x", (batch, 16))
    (h,) = build.add("linear", [x, build.weight("w1", (32, 16)), None], name="fc1")
    (y,) = build.add("linear", [h, build.weight("w2", (64, 32)), None], name="fc2")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def two_convolutions() -> Graph:
    """x (2, 3, 8, 8) -> c1 (2, 4, 8, 8) -> c2 (2, 4, 8, 8) -> loss; windows of 3 x 3, padded by 1."""
    build = GraphBuilder("convolutions")
    pads = {"ph": 1, "pw": 1}
    x = build.input("x", (2, 3, 8, 8))
    (h,) = build.add("conv2d", [x, build.weight("w1", (4, 3, 3, 3)), None], pads, name="c1")
    (y,) = build.add("conv2d", [h, build.weight("w2", (4, 4, 3, 3)), None], pads, name="c2")
    (loss,) = build.add("sum", [y], {"dim": (0, 1, 2, 3)}, name="loss")
    return build.graph(loss=loss)


def test_data_parallel_lenet_reduces_its_parameters_over_every_link() -> None:
    graph = load("lenet", devices=4).captured().graph
    tasks = task_graph(data_parallel(graph, P100), P100, AnalyticCosts())
    # 61,706 parameters of 4 bytes; a ring of n devices passes 2(n-1)/n of them over each of its links.
    assert graph.parameter_count == 61_706
    per_link = Counter[str]()
    for task in of_weights(tasks):
        assert task.kind is TaskKind.ALL_REDUCE
        per_link[task.resource] += task.size_bytes
    assert set(per_link.values()) == {61_706 * 4 * 2 * 3 // 4}
    assert len(per_link) == 4
    # 10 weights and biases in 4 devices' rings; each device updates its copy of each.
    assert counts(tasks)["update"] == 40
    # Nothing else moves: the loss is a sum that is divided, and each device divides its part.
    assert not [t for t in tasks.tasks if t.kind not in COMPUTE_KINDS and t.key[2] != WEIGHT]


def test_two_spatial_halves_swap_one_row() -> None:
    split = placed({"h": 2}, (0, 1))
    tasks = built(two_convolutions(), {"c1": split, "c2": split, "loss": WHOLE})
    # A row of c1's output: 2 samples x 4 channels x 8 columns x 4 bytes = 256 bytes, each way.
    # Two devices that give each other a piece are an all-gather; going back, a reduce-scatter.
    halo = [t for t in tasks.tasks if t.name.startswith("c1 ") and t.kind not in COMPUTE_KINDS]
    assert Counter((t.kind.value, t.size_bytes) for t in halo) == {
        ("all_gather", 256): 2,
        ("reduce_scatter", 256): 2,
    }


def test_four_spatial_parts_swap_rows_with_their_neighbours() -> None:
    split = placed({"h": 4}, (0, 1, 2, 3))
    tasks = built(two_convolutions(), {"c1": split, "c2": split, "loss": WHOLE})
    halo = [t for t in tasks.tasks if t.name.startswith("c1 ") and t.kind is TaskKind.TRANSFER]
    # Three borders, crossed in both directions, forward and backward: 12 transfers of one row.
    assert [t.size_bytes for t in halo] == [256] * 12
    pairs = {tuple(t.name.rsplit(" ", 3)[1::2]) for t in halo}
    assert pairs == {
        (f"node0/gpu{a}", f"node0/gpu{b}") for a in range(4) for b in range(4) if abs(a - b) == 1
    }


def test_a_channel_split_gathers_the_batch_split_before_it() -> None:
    graph = two_layers()
    split = {"fc1": placed({"b": 2}, (0, 1)), "fc2": placed({"o": 2}, (0, 1)), "loss": WHOLE}
    tasks = built(graph, split)
    # fc1 leaves 4 rows of 32 on each device: 512 bytes, which the other one needs.
    # fc2 leaves 32 columns of 8 rows on device 1 that the loss reads on device 0: 1024 bytes.
    assert moves(tasks, FORWARD) == {("all_gather", 512): 2, ("transfer", 1024): 1}
    # Both halves of fc2 give a gradient of all of fc1's output, of which each half is summed.
    assert moves(tasks, BACKWARD) == {("reduce_scatter", 512): 2, ("transfer", 1024): 1}
    # w1 (2048 bytes) is on both devices; each half of w2 on one of them.
    assert [(t.kind.value, t.size_bytes) for t in of_weights(tasks)] == [("all_reduce", 2048)] * 2


def test_a_reduction_split_adds_partial_sums_before_the_follower() -> None:
    build = GraphBuilder("partial")
    x = build.input("x", (8, 16))
    (y,) = build.add("linear", [x, build.weight("w", (32, 16)), None], name="fc")
    (z,) = build.add("relu", [y], name="relu")
    (scaled,) = build.add("mul", [z, build.weight("scale", (32,))], name="scaled")
    (loss,) = build.add("sum", [scaled], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    both = placed({"i": 2}, (0, 1))
    tasks = built(graph, {"fc": both, "loss": WHOLE})
    # Each device has a partial sum of all 8 x 32 outputs: 1024 bytes, of which a ring of two passes
    # 2 (2-1)/2 over each link. The block is cut there: two forward tasks on each device, two backward.
    assert moves(tasks, FORWARD) == {("all_reduce", 1024): 2}
    forward = [t for t in tasks.tasks if t.kind is TaskKind.FORWARD and t.name.startswith("fc")]
    assert [t.name for t in forward] == [
        "fc [1/2] part 1 forward",
        "fc [2/2] part 1 forward",
        "fc [1/2] part 2 forward",
        "fc [2/2] part 2 forward",
    ]
    # Both devices compute the followers, so both need the loss's gradient: device 1 has it sent.
    assert moves(tasks, BACKWARD) == {("transfer", 1024): 1}
    # Each device has its half of w; and both compute the whole gradient of `scale`, which is not doubled.
    assert of_weights(tasks) == []
    assert counts(tasks)["update"] == 4


def test_a_reduction_split_without_follower_sums_where_it_is_read() -> None:
    graph = two_layers()
    both = placed({"i": 2}, (0, 1))
    tasks = built(graph, {"fc1": both, "fc2": placed({"b": 2}, (0, 1)), "loss": WHOLE})
    # Partial sums of 8 x 32; each device reads 4 rows: 512 bytes are sent to each and added.
    fc1 = [t for t in tasks.tasks if t.name.startswith("fc1 ") and t.kind not in COMPUTE_KINDS]
    assert Counter((t.kind.value, t.size_bytes) for t in fc1) == {
        ("reduce_scatter", 512): 2,
        ("all_gather", 512): 2,
    }
    whole = built(graph, {"fc1": both, "fc2": Placement((), (2,)), "loss": Placement((), (2,))})
    # One reader elsewhere: both partial sums go there, and the gradient comes back to both.
    assert moves(whole, FORWARD) == moves(whole, BACKWARD) == {("transfer", 1024): 2}


def test_figure_3_a_matrix_multiplication_in_four() -> None:
    """FlexFlow, Figure 3: U = V W with two parts of V's rows and two of W's columns."""
    build = GraphBuilder("figure 3")
    v, w = build.input("V", (4, 6)), build.weight("W", (6, 8))
    (u,) = build.add("matmul", [v, w], name="U")
    graph = build.graph(outputs=[u])
    tasks = built(graph, {"U": placed({"m": 2, "n": 2}, (0, 1, 2, 3))})
    assert counts(tasks) == {"forward": 4, "backward": 4, "all_reduce": 4, "update": 4}
    # Half of W's columns, 6 x 4 x 4 = 96 bytes, is on devices 0 and 2, the other on 1 and 3.
    reduced = of_weights(tasks)
    assert [t.size_bytes for t in reduced] == [96] * 4
    assert [t.resource for t in reduced] == [
        "node0/nvlink-0-2>",
        "node0/nvlink-0-2<",
        "node0/nvlink-1-3>",
        "node0/nvlink-1-3<",
    ]


def recurrent(steps: int) -> Graph:
    """FlexFlow, Figure 4: an embedding, a recurrent and a linear layer, unrolled."""
    build = GraphBuilder("figure 4")
    table, out = build.weight("table", (100, 16)), build.weight("out", (10, 32))
    into, over = build.weight("into", (32, 16)), build.weight("over", (32, 32))
    hidden = build.input("h0", (8, 32))
    total: str | None = None
    for step in range(steps):
        ids = build.input(f"ids{step}", (8,), "i64")
        (e,) = build.add("embedding", [ids, table], name=f"embed{step}", dtypes=["f32"])
        (hidden,) = build.add("rnn_tanh_cell", [e, hidden, into, over, None, None], name=f"cell{step}")
        (y,) = build.add("linear", [hidden, out, None], name=f"linear{step}")
        (part,) = build.add("sum", [y], {"dim": (0, 1)}, name=f"loss{step}")
        total = part if total is None else build.add("add", [total, part], name=f"total{step}")[0]
    return build.graph(loss=total)


@pytest.mark.parametrize("steps", [2, 3])
def test_figure_4_layers_on_devices_of_their_own(steps: int) -> None:
    graph = recurrent(steps)
    homes = {"embed": 0, "cell": 1, "linear": 2, "loss": 2, "total": 2}
    strategy = Strategy(graph, {})
    placements = {b.name: Placement((), (homes[b.name.rstrip("0123456789")],)) for b in strategy.blocks}
    tasks = built(graph, placements)
    # Each step sends 8 x 16 embeddings (512 bytes) to the cell and 8 x 32 states (1024) to the linear
    # layer; the state for the next step stays. The same comes back as gradients.
    assert moves(tasks, FORWARD) == {("transfer", 512): steps, ("transfer", 1024): steps}
    assert moves(tasks, BACKWARD) == moves(tasks, FORWARD)
    # A weight is one weight in all steps, on one device: four updates, and no gradient travels.
    assert of_weights(tasks) == []
    assert counts(tasks)["update"] == 4


def test_a_weight_shared_by_steps_is_reduced_once() -> None:
    graph = recurrent(3)
    machine = preset("p100:1x2")
    tasks = task_graph(data_parallel(graph, machine), machine, AnalyticCosts())
    # table 6400, into 2048, over 4096 and out 1280 bytes, each in one ring of two, for all steps together.
    assert Counter(t.size_bytes for t in of_weights(tasks)) == {6400: 2, 2048: 2, 4096: 2, 1280: 2}
    for update in (t for t in tasks.tasks if t.kind is TaskKind.UPDATE):
        waits_for = Counter(tasks.tasks[tasks.ids[key]].kind for key in update.after)
        assert waits_for == {TaskKind.ALL_REDUCE: 2, TaskKind.BACKWARD: 3}


def test_a_copy_at_hand_is_taken() -> None:
    graph = two_layers()
    copied = Placement((), (0, 1), copies=2)
    beside = built(graph, {"fc1": copied, "fc2": Placement((), (1,)), "loss": Placement((), (1,))})
    # Device 1 has a copy of fc1's output, so nothing moves forward. Both copies need the gradient
    # (8 x 32 x 4 bytes): device 0 has it sent. Each then has the whole gradient of its copy of w1.
    assert moves(beside, FORWARD) == {}
    assert moves(beside, BACKWARD) == {("transfer", 1024): 1}
    assert of_weights(beside) == []
    assert counts(beside)["update"] == 3


def test_copies_take_turns_where_none_is_near() -> None:
    graph = two_layers()
    fc1 = Placement((), (0, 1), copies=2)
    tasks = built(graph, {"fc1": fc1, "fc2": placed({"o": 2}, (2, 3)), "loss": Placement((), (2,))}, K80)
    # Devices 2 and 3 are equally far from both copies of fc1's output: one each.
    names = [t.name for t in tasks.tasks if t.name.startswith("fc1 ") and t.kind is TaskKind.TRANSFER]
    assert names[:2] == ["fc1 node0/gpu0 to node0/gpu2", "fc1 node0/gpu1 to node0/gpu3"]


def test_what_a_device_reads_twice_moves_once() -> None:
    build = GraphBuilder("twice")
    x = build.input("x", (8, 16))
    (h,) = build.add("linear", [x, build.weight("w0", (32, 16)), None], name="fc0")
    (a,) = build.add("linear", [h, build.weight("w1", (4, 32)), None], name="fc1")
    (b,) = build.add("linear", [h, build.weight("w2", (4, 32)), None], name="fc2")
    (c,) = build.add("add", [a, b], name="both")
    (loss,) = build.add("sum", [c], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    there = Placement((), (1,))
    tasks = built(graph, {"fc0": WHOLE, "fc1": there, "fc2": there, "loss": there})
    # fc0's output, 8 x 32 x 4 bytes, is sent once; its two gradients are added before they are sent.
    assert moves(tasks) == {("transfer", 1024): 2}


def normalised(degrees: dict[str, int], sync: bool = True) -> TaskGraph:
    build = GraphBuilder("normalised")
    x = build.input("x", (8, 2, 6, 6))
    (y,) = build.add("conv2d", [x, build.weight("w", (4, 2, 1, 1)), None], name="conv")
    weights = [build.weight("scale", (4,)), build.weight("shift", (4,))]
    (z,) = build.add("batch_norm", [y, *weights, None, None], {"sync": sync}, name="bn")
    (loss,) = build.add("sum", [z], {"dim": (0, 1, 2, 3)}, name="loss")
    graph = build.graph(loss=loss)
    return built(graph, {"conv": placed(degrees, range(prod(degrees.values()))), "loss": WHOLE})


def test_batch_norm_exchanges_statistics_over_a_split_batch() -> None:
    tasks = normalised({"b": 2})
    # Count, mean and M2 of 4 channels: 48 bytes, there and their gradients back, in a ring of two.
    seams = [t for t in tasks.tasks if t.kind is TaskKind.ALL_REDUCE and t.key[2] == SEAM]
    assert [(t.key[0], t.size_bytes) for t in seams] == [(FORWARD, 48)] * 2 + [(BACKWARD, 48)] * 2
    # The block is cut in two there.
    assert sum(t.kind is TaskKind.FORWARD and t.name.startswith("conv") for t in tasks.tasks) == 4


def test_batch_norm_needs_no_exchange_over_split_channels_or_out_of_sync() -> None:
    for tasks in (normalised({"o": 2}), normalised({"b": 2}, sync=False)):
        assert [t for t in tasks.tasks if t.kind not in COMPUTE_KINDS and t.key[2] == SEAM] == []
        assert sum(t.kind is TaskKind.FORWARD and t.name.startswith("conv") for t in tasks.tasks) == 2


def test_followers_of_a_partial_sum_are_copies_of_each_other() -> None:
    tasks = normalised({"b": 2, "c": 2})
    # Shards 0 and 1 have the same samples and half of the input channels each, on devices 0 and 1:
    # they add up 4 x 4 x 6 x 6 x 4 = 2304 bytes. So do 2 and 3.
    # Then 0 and 1 both know the statistics of the first samples, 2 and 3 those of the others: 0 hears
    # from 2 and 1 from 3. The gradients of `scale` and `shift` (16 bytes) are summed in the same pairs;
    # those of w (4 x 1 x 4 = 16 bytes a half) between 0 and 2, which have one half, and 1 and 3.
    forward = [t for t in tasks.tasks if t.key[0] == FORWARD and t.kind is TaskKind.ALL_REDUCE]
    assert Counter(t.size_bytes for t in forward) == {2304: 4, 48: 4}
    assert Counter((t.kind.value, t.size_bytes) for t in of_weights(tasks)) == {("all_reduce", 16): 12}
    back = [t for t in tasks.tasks if t.key[0] == BACKWARD and t.key[2] == SEAM]
    assert Counter(t.size_bytes for t in back) == {48: 4}


@pytest.mark.parametrize(
    ("device", "link", "duration_s"),
    [
        # 1024 bytes at 15.75 GB/s over a private switch: two hops of 2.85 us
        (1, "node0/pcie-0>", 1024 / 15.75e9 + 5.7e-6),
        # the same at half of that through the switch that all share: three more hops of 0.1 us
        (2, "node0/pcie-shared", 1024 / 7.875e9 + 6.0e-6),
        (3, "node0/pcie-shared", 1024 / 7.875e9 + 6.0e-6),
    ],
)
def test_k80_neighbours_have_a_switch_of_their_own(device: int, link: str, duration_s: float) -> None:
    there = Placement((), (device,))
    tasks = built(two_layers(), {"fc1": WHOLE, "fc2": there, "loss": there}, K80)
    (transfer,) = (t for t in tasks.tasks if t.kind is TaskKind.TRANSFER and t.key[0] == FORWARD)
    assert transfer.resource == link
    assert transfer.duration_s == pytest.approx(duration_s, rel=1e-12)


def test_what_follows_from_inputs_alone_has_no_task() -> None:
    build = GraphBuilder("free")
    x = build.input("x", (8, 16))
    (half,) = build.add("mul", [x, 0.5], name="half")
    (y,) = build.add("linear", [half, build.weight("w", (4, 16)), None], name="fc")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    tasks = built(build.graph(loss=loss), {"fc": placed({"b": 2}, (0, 1)), "loss": WHOLE})
    assert not any("half" in task.name for task in tasks.tasks)


def test_an_operator_that_stops_gradients_gives_none() -> None:
    build = GraphBuilder("stopped")
    x = build.input("x", (8, 16))
    (h,) = build.add("linear", [x, build.weight("w1", (4, 16)), None], name="fc1")
    (sign,) = build.add("sign", [h], name="sign")
    (y,) = build.add("linear", [sign, build.weight("w2", (4, 4)), None], name="fc2")
    (z,) = build.add("mul", [y, h], name="product")
    (loss,) = build.add("sum", [z], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    there = Placement((), (1,))
    strategy = Strategy(graph, {}, frozenset({"sign"}))
    places = {b.name: WHOLE if b.name == "fc1" else there for b in strategy.blocks}
    tasks = task_graph(Strategy(graph, places, strategy.apart), P100, AnalyticCosts())
    assert not any("sign" in t.name and t.kind is TaskKind.BACKWARD for t in tasks.tasks)
    # h goes to device 1 once; only the product sends a gradient of it back.
    assert moves(tasks) == {("transfer", 8 * 4 * 4): 2}
