"""Peak memory of small cases, worked out by hand. All tensors are f32: 4 bytes an element."""

from __future__ import annotations

import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.sim.memory import DeviceMemory, peak_memory
from soapstone.sim.reference import simulate
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.kept import Kept, kept

MACHINE = preset("p100:1x2")


def memory(
    graph: Graph, placements: dict[str, Placement], states_per_weight: int = 1
) -> tuple[DeviceMemory, ...]:
    tasks = task_graph(Strategy(graph, placements), MACHINE, AnalyticCosts())
    return peak_memory(tasks, simulate(tasks), len(MACHINE.devices), states_per_weight)


def one_layer() -> Graph:
    """x (4, 8) -> fc (4, 16) -> relu -> loss."""
    build = GraphBuilder("one")
    x = build.input("x", (4, 8))
    (y,) = build.add("linear", [x, build.weight("w", (16, 8)), None], name="fc")
    (z,) = build.add("relu", [y], name="relu")
    (loss,) = build.add("sum", [z], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


@pytest.mark.parametrize(("states", "optimizer_bytes"), [(0, 0), (1, 512), (2, 1024)])
def test_one_device(states: int, optimizer_bytes: int) -> None:
    """Throughout: x 128, w 512, the optimizer's state 0, 512 or 1024. On top of that:

    fc, relu forward    fc 256, relu 256 (fc is given up after: relu's gradient needs its output only)
    loss forward        relu 256, loss 4
    loss backward       relu 256, its gradient 256
    fc, relu backward   relu 256, its gradient 256, w's gradient 512     <- the most
    w update            w's gradient 512
    """
    used, unused = memory(
        one_layer(), {"fc": Placement((), (0,)), "loss": Placement((), (0,))}, states_per_weight=states
    )
    parts = {
        "inputs": 128,
        "weights": 512,
        "weight gradients": 512,
        "activations": 256,
        "gradients": 256,
        "optimizer state": optimizer_bytes,
    }
    assert used.parts == {kind: size for kind, size in parts.items() if size}
    assert used.peak_bytes == 128 + 512 + 512 + 256 + 256 + optimizer_bytes
    assert unused == DeviceMemory(0, 0.0, {})


def test_the_peak_is_when_the_backward_pass_starts() -> None:
    places = {"fc": Placement((), (0,)), "loss": Placement((), (0,))}
    tasks = task_graph(Strategy(one_layer(), places), MACHINE, AnalyticCosts())
    timeline = simulate(tasks)
    (backward,) = (i for i, t in enumerate(tasks.tasks) if t.name == "fc backward")
    assert peak_memory(tasks, timeline, 2)[0].at_s == timeline.start_s[backward]


def test_a_layer_on_each_device() -> None:
    """x (4, 8) -> fc1 (4, 16) on device 0 -> fc2 (4, 2) -> loss on device 1.

    Device 0: x 128, w1 512 and its state 512. fc1's output (256) is given up when it is sent: fc2 keeps
    the copy that it received. The most is in the backward pass: the gradient 256 that arrives, and the
    gradient 512 of w1.
    Device 1: w2 128 and its state 128. fc1's output (256) is received and kept for the gradient of w2;
    fc2's output (32) is kept for nothing. The most is in the backward pass of fc2: its gradient 32,
    fc1's output 256 and its gradient 256, and the gradient 128 of w2.
    """
    build = GraphBuilder("two")
    x = build.input("x", (4, 8))
    (h,) = build.add("linear", [x, build.weight("w1", (16, 8)), None], name="fc1")
    (y,) = build.add("linear", [h, build.weight("w2", (2, 16)), None], name="fc2")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    there = Placement((), (1,))
    first, second = memory(build.graph(loss=loss), {"fc1": Placement((), (0,)), "fc2": there, "loss": there})
    assert first.parts == {
        "inputs": 128,
        "weights": 512,
        "weight gradients": 512,
        "gradients": 256,
        "optimizer state": 512,
    }
    assert second.parts == {
        "weights": 128,
        "weight gradients": 128,
        "received": 256,
        "gradients": 32 + 256,
        "optimizer state": 128,
    }


def test_half_of_the_samples_is_half_of_the_activations() -> None:
    """As on one device, with half of x, relu and its gradient; the weight is whole. The loss is split
    too, so that nothing but the gradient of w travels."""
    halves = memory(one_layer(), {"fc": placed({"b": 2}, (0, 1)), "loss": placed({"a": 2}, (0, 1))})
    for half in halves:
        assert half.parts == {
            "inputs": 64,
            "weights": 512,
            "weight gradients": 512,
            "activations": 128,
            "gradients": 128,
            "optimizer state": 512,
        }


def test_views_are_no_memory_and_sums_keep_nothing() -> None:
    """fc (4, 16) -> turned (16, 4) -> add 1 -> loss: of fc and its view there is one buffer, and
    nothing is kept for the backward pass but x, so the most is while `add` runs: 256 + 256."""
    build = GraphBuilder("views")
    x = build.input("x", (4, 8))
    (y,) = build.add("linear", [x, build.weight("w", (16, 8)), None], name="fc")
    (t,) = build.add("permute", [y], {"dims": (1, 0)}, name="turned")
    (u,) = build.add("add", [t, 1.0], name="more")
    (loss,) = build.add("sum", [u], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    tasks = task_graph(
        Strategy(graph, {"fc": Placement((), (0,)), "loss": Placement((), (0,))}), MACHINE, AnalyticCosts()
    )
    activations = [b.size_bytes for b in tasks.buffers if b.kind == "activations"]
    assert sorted(activations) == [4, 256, 256]  # loss, fc and its view, more
    timeline = simulate(tasks)
    peak = peak_memory(tasks, timeline, 2)[0]
    assert peak.parts["weight gradients"] == 512
    assert "activations" not in peak.parts


@pytest.mark.parametrize(
    ("op", "attrs", "operands", "expected"),
    [
        ("linear", {}, [(4, 8), (2, 8), (2,)], Kept(frozenset({0, 1}))),
        ("add", {}, [(4, 8), (4, 8)], Kept()),
        ("mul", {}, [(4, 8), (4, 8)], Kept(frozenset({0, 1}))),
        ("relu", {}, [(4, 8)], Kept(output=True)),
        ("tanh", {}, [(4, 8)], Kept(output=True)),
        ("gelu", {}, [(4, 8)], Kept(frozenset({0}))),
        ("square", {}, [(4, 8)], Kept(frozenset({0}))),
        ("max_pool1d", {}, [(2, 2, 8)], Kept(frozenset({0}))),
        ("avg_pool1d", {}, [(2, 2, 8)], Kept(frozenset({0}))),
        ("softmax", {}, [(4, 8)], Kept(output=True)),
        ("sign", {}, [(4, 8)], Kept()),
    ],
)
def test_what_a_backward_pass_needs(
    op: str, attrs: dict[str, object], operands: list[tuple[int, ...]], expected: Kept
) -> None:
    build = GraphBuilder("kept")
    names = [build.weight(f"w{i}", shape) for i, shape in enumerate(operands)]
    (output, *_) = build.add(op, names, attrs, name="node")  # type: ignore[arg-type]
    graph = build.graph(outputs=[output])
    assert kept(graph, graph.node("node")) == expected
