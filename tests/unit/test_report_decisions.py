"""What a strategy decides, and why it is fast, in the words of a person."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.plans import simulation
from soapstone.report.decisions import devices_text, foremost, rows
from soapstone.report.figures import Figures, as_trained, figures, reasons
from soapstone.search.baselines import data_parallel, single_device
from soapstone.sim.outcome import outcome
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy

MACHINE = preset("p100:2x2")


def network(steps: int = 1) -> Graph:
    """Three dense layers, the second of them used `steps` times with the same weights, and a sum."""
    build = GraphBuilder("net")
    x = build.input("x", (8, 16))
    (x,) = build.add("linear", [x, build.weight("w1", (32, 16)), None], name="first")
    again = build.weight("w2", (32, 32))
    for step in range(steps):
        (x,) = build.add("linear", [x, again, None], name=f"step{step}")
    (x,) = build.add("linear", [x, build.weight("w3", (4, 32)), None], name="last")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def decided(graph: Graph, placements: Mapping[str, Placement]) -> Strategy:
    """Every block whole on device 0 but for those given."""
    whole = single_device(graph, MACHINE)
    return Strategy(graph, {**whole.placements, **placements}).checked(MACHINE)


def text(strategy: Strategy, machine: Machine = MACHINE, most_ways: int | None = None) -> list[str]:
    return [f"{r.name} | {r.split} | {r.devices.text(machine)}" for r in rows(strategy, most_ways)]


def test_layers_that_are_decided_alike_are_one_row() -> None:
    assert text(data_parallel(network(), MACHINE)) == [
        "first … last (3 layers) | sample(b) 4 | all 4 devices",
        "loss | reduction(a) 4 | all 4 devices",
    ]


def test_splits_name_dims_and_kinds_and_copies() -> None:
    strategy = decided(
        network(),
        {
            "first": placed({"b": 2, "o": 2}, (0, 1, 2, 3)),
            "step0": placed({"i": 2}, (2, 3)),
            "last": placed({"b": 2}, (0, 1, 2, 3), 2),
        },
    )
    assert text(strategy) == [
        "first | sample(b) 2 × parameter(o) 2 | all 4 devices",
        "step0 | reduction(i) 2 | node1",
        "last | sample(b) 2 × 2 copies | all 4 devices",
        "loss | whole | device 0 of node0",
    ]


def test_blocks_that_share_weights_are_one_layer() -> None:
    graph = network(steps=6)
    assert text(single_device(graph, MACHINE)) == ["first … loss (4 layers) | whole | device 0 of node0"]
    moved = {f"step{i}": Placement((), (i % 2,)) for i in range(6)}
    assert text(decided(graph, moved)) == [
        "first | whole | device 0 of node0",
        "step0 (6 blocks) | whole | 1 of node0, varying",
        "last … loss (2 layers) | whole | device 0 of node0",
    ]


def test_a_layer_that_is_split_in_several_ways_has_a_row_for_each() -> None:
    graph = network(steps=6)
    strategy = decided(
        graph,
        {
            **{f"step{i}": placed({"b": 2}, (0, 1)) for i in range(4)},
            "step4": placed({"o": 2}, (0, 1)),
            "step5": placed({"o": 4}, (0, 1, 2, 3)),
        },
    )
    assert text(strategy)[1:4] == [
        "step0 (4 of 6 blocks) | sample(b) 2 | node0",
        "step0 (1 of 6 blocks) | parameter(o) 2 | node0",
        "step0 (1 of 6 blocks) | parameter(o) 4 | all 4 devices",
    ]
    assert text(strategy, most_ways=2)[1:3] == [
        "step0 (4 of 6 blocks) | sample(b) 2 | node0",
        "step0 (2 of 6 blocks) | in 2 other ways | some of all 4 devices, varying",
    ]


@pytest.mark.parametrize("most_ways", [None, 1, 2])
def test_every_block_and_every_flop_is_in_one_row(most_ways: int | None) -> None:
    graph = network(steps=5)
    for seed in range(20):
        found = rows(random_strategy(graph, 4, Random(seed)), most_ways)
        assert sum(row.blocks for row in found) == 8
        assert sum(row.flops_share for row in found) == pytest.approx(1)
        assert sum(row.parameters_share for row in found) == pytest.approx(1)
        assert all(row.flops_share >= 0 and 0 <= row.parameters_share <= 1 for row in found)


def test_a_weight_that_several_rows_read_counts_once() -> None:
    build = GraphBuilder("net")
    w = build.weight("w", (16, 16))
    (squared,) = build.add("square", [w], name="squared")
    (scaled,) = build.add("mul", [w, squared], name="scaled")
    (y,) = build.add("linear", [build.input("x", (8, 16)), scaled, None], name="dense")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    dims = list(graph.signature(graph.nodes[0]).sizes)
    split = {"squared": placed({dims[0]: 2}, (0, 1))}
    shares = {row.name: row.parameters_share for row in rows(decided(graph, split))}
    assert shares["squared"] == 1
    assert sum(shares.values()) == 1


def test_the_foremost_rows_keep_their_order() -> None:
    found = rows(random_strategy(network(steps=5), 4, Random(3)))
    shown = foremost(found, 2)
    assert len(shown) == 2 < len(found)
    assert [row for row in found if row in shown] == list(shown)
    least = min(max(row.flops_share, row.parameters_share) for row in shown)
    assert all(max(r.flops_share, r.parameters_share) <= least for r in found if r not in shown)
    assert foremost(found, 100) == found


@pytest.mark.parametrize(
    ("machine", "devices", "said"),
    [
        ("p100:1x1", (0,), "device 0"),
        ("p100:1x4", (0, 1, 2, 3), "all 4 devices"),
        ("p100:1x4", (1,), "device 1"),
        ("p100:1x4", (3, 0, 1), "devices 0-1, 3"),
        ("p100:4x2", (2, 3), "node1"),
        ("p100:4x2", (0, 1, 2, 3, 6, 7), "node0-node1, node3"),
        ("p100:4x2", (1, 2), "devices 1-2"),
        ("p100:4x4", (5, 6), "devices 5-6 of node1"),
        ("p100:4x1", (1, 2), "devices 1-2"),
    ],
)
def test_devices_are_said_shortly(machine: str, devices: tuple[int, ...], said: str) -> None:
    assert devices_text(devices, preset(machine)) == said


def test_figures_are_those_of_the_plain_simulation() -> None:
    """The native core's arrays are summed up as the specification's tasks are, one by one."""
    graph = network(steps=3)
    for seed in range(20):
        strategy = random_strategy(graph, 4, Random(seed))
        found = figures(outcome(strategy, MACHINE, AnalyticCosts()))
        plain = simulation(strategy, MACHINE)
        tasks = plain.tasks.tasks
        sums = [task for task in tasks if task.name.startswith(("w1 gradient", "w2 gradient", "w3 gradient"))]
        assert found.makespan_s == plain.timeline.makespan_s
        assert found.moved_bytes == plain.tasks.moved_bytes
        assert found.gradient_bytes == sum(task.size_bytes for task in sums)
        for device, busy_s in zip(MACHINE.devices, found.busy_s, strict=True):
            own = [task.duration_s for task in tasks if task.resource == device.name]
            assert busy_s == pytest.approx(sum(own))
        assert found.mean_busy_s + found.waiting_s == pytest.approx(found.makespan_s)


def test_data_parallelism_moves_gradients_and_one_device_moves_nothing() -> None:
    graph = network()
    shared = figures(outcome(data_parallel(graph, MACHINE), MACHINE, AnalyticCosts()))
    # A ring all-reduce moves 2 (n - 1) / n of the weights over each of n links.
    assert shared.gradient_bytes == 4 * 2 * 3 * graph.parameter_count * 4 // 4
    assert shared.imbalance == pytest.approx(1)
    alone = figures(outcome(single_device(graph, MACHINE), MACHINE, AnalyticCosts()))
    assert (alone.moved_bytes, alone.gradient_bytes, alone.activation_bytes) == (0, 0, 0)
    assert alone.imbalance == pytest.approx(4)


def test_reasons_are_sentences_with_numbers() -> None:
    own = Figures(0.100, 0.100, 3 * 2**30, 2**30, (0.09, 0.07))
    other = Figures(0.250, 0.250, 6 * 2**30, 6 * 2**30, (0.05, 0.05))
    assert reasons(own, other) == (
        "It moves 3 GiB instead of 6 GiB (2 times less): gradient sums 1 GiB instead of 6 GiB, "
        "activations 2 GiB instead of 0 B.",
        "A device waits 20 ms (20% of the time) on average instead of 200 ms (80% of the time).",
        "But it computes 80 ms on average instead of 50 ms; the busiest device 1.12 times the mean instead "
        "of 1.00.",
    )
    # The same from the other side: what makes it slower comes first, and what does not after a "But".
    assert [sentence[:11] for sentence in reasons(other, own)] == [
        "It moves 6 ",
        "A device wa",
        "But it comp",
    ]
    lone = Figures(0.400, 0.400, 2**10, 0, (0.35, 0.05))
    copied = Figures(0.500, 0.500, 0, 0, (0.5, 0.5))
    assert [sentence[:9] for sentence in reasons(lone, copied)] == ["It comput", "But it mo", "And a dev"]
    still = Figures(0.0, 0.0, 0, 0, (0.0, 0.0))
    assert reasons(still, still)[0] == "It moves 0 B in both."


def test_devices_that_merely_idle_are_no_reason() -> None:
    """One device does all that every one of four copies did: that the mean is less saves no time."""
    lone = Figures(25e-6, 25e-6, 0, 0, (25e-6, 0.0, 0.0, 0.0))
    copied = Figures(38e-6, 38e-6, 1024, 0, (25e-6, 25e-6, 25e-6, 25e-6))
    assert reasons(lone, copied)[1:] == (
        "The busiest device waits 0 ns (0% of the time) instead of 13 us (34% of the time).",
        "The busiest device computes 25 us in both, 4.00 times the mean instead of 1.00.",
    )
    assert [sentence[:11] for sentence in reasons(copied, lone)] == [
        "It moves 1 ",
        "The busiest",
        "The busiest",
    ]


def test_figures_as_trained_have_the_time_in_buckets() -> None:
    plain = Figures(0.3, 0.2, 10, 5, (0.1, 0.1))
    assert as_trained(plain) == Figures(0.2, 0.2, 10, 5, (0.1, 0.1))
    assert as_trained(plain).waiting_s == pytest.approx(0.1)
