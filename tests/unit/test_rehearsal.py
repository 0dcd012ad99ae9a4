"""Steps in rehearsal: memory counted without computing, by a rank's own program."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.at_hand import device_at_hand
from soapstone.cost.candidates import candidates_of
from soapstone.cost.count import CUDA_BYTES, Count
from soapstone.cost.profiler import Profiler
from soapstone.cost.watch import Watch
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import Plan, planned, simulation
from soapstone.runtime.noderun import NodeRun
from soapstone.runtime.rehearsal import rehearsed
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import baseline
from soapstone.strategy.placement import placed
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.validation import rehearsing
from soapstone.validation.rehearsing import Inside, rehearsed_peaks

MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return load("lenet", tiny=True, devices=2, weights=True).captured()


def plan_of(strategy: Strategy) -> Plan:
    return planned(strategy, MACHINE, simulation(strategy, MACHINE, COSTS), COSTS)


def named(captured: Captured, name: str) -> Plan:
    return plan_of(baseline(name, captured.graph, MACHINE, COSTS, 0))


# -- counting ----------------------------------------------------------------------------------------------


def test_memory_is_counted_once_and_for_as_long_as_something_holds_it() -> None:
    with FakeTensorMode(), Count(is_cuda=False) as count:
        kept = torch.empty(100)
        view = torch.empty(1000)[:1]  # holds all of it
        torch.empty(500)
        assert count.highest_bytes() == 4 * 1600
        kept.add_(view)
        del view
        torch.empty(1400)
        assert count.highest_bytes() == 4 * 1600
        torch.empty(1501)
        assert count.highest_bytes() == 4 * 1601


def test_what_was_there_before_is_not_counted() -> None:
    with FakeTensorMode():
        before, count = torch.empty(100), Count(is_cuda=False)
        assert count.know([before, before[:3]]) == 400
        with count:
            before.mul_(2.0)
            before.view(10, 10)
        assert count.highest_bytes() == 0


def test_what_is_taken_beside_tensors_counts_until_something_else_is_said() -> None:
    with FakeTensorMode(), Count(is_cuda=False) as count:
        count.beside(1000)
        first = torch.empty(10)
        count.beside(0)
        second = torch.empty(100)
        assert count.highest_bytes() == 1040
        assert count.highest_bytes(without=[first]) == 1000
        count.beside(5)
        assert count.highest_bytes(without=[second]) == 1040


def test_some_memory_is_elsewhere_and_a_gpu_gives_out_whole_units() -> None:
    with FakeTensorMode(), Count(is_cuda=True) as count:
        there = count.elsewhere((1000,), torch.float32, torch.device("cpu"))
        assert count.highest_bytes() == 0
        copy = there.clone()
        assert count.highest_bytes() == 4096
        torch.empty(1)
        assert count.highest_bytes() == 4096 + CUDA_BYTES
        del copy


def reads_rows(numbers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(numbers.sum(1).long(), weight)


@pytest.mark.parametrize(
    ("use", "copies"),
    [(reads_rows, 2), (torch.matmul, 2), (nn.functional.linear, 3)],
    ids=["rows", "matmul", "linear"],
)
def test_gradients_are_added_up_in_place_as_autograd_does_it(
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], copies: int
) -> None:
    """Of a weight that is read four times there are two gradients at a time, as autograd adds up tensors that
    have elements; a gradient that is a view, as that of a linear layer, is not added to."""

    def taken(count: Count | Watch) -> int:
        weight = nn.Parameter(torch.zeros(1000, 1000))
        if isinstance(count, Count):
            count.know([weight])
        made = [use(torch.zeros(4, 1000), weight).sum() for _ in range(4)]
        with count:
            torch.stack(made).sum().backward()
        return count.highest_bytes()

    for _ in range(2):  # the first run may make what later ones find
        seen = taken(Watch(is_cuda=False))
    with FakeTensorMode():
        shown = taken(Count(is_cuda=False))
    assert shown == pytest.approx(copies * 4 * 1000 * 1000, rel=0.02)
    assert shown == pytest.approx(seen, rel=0.02)


def test_other_sums_take_memory_of_their_own() -> None:
    with FakeTensorMode(), Count(is_cuda=False) as count:
        one, two = torch.empty(100), torch.empty(100)
        total = one + two
        del one
        assert count.highest_bytes() == 4 * 300
        del two, total


# -- a rank's step -----------------------------------------------------------------------------------------


def test_a_rank_that_does_nothing_holds_the_batch_alone(captured: Captured) -> None:
    plan = named(captured, "single_device")
    batch_bytes = sum(tensor.nbytes for tensor in load("lenet", tiny=True, devices=2).inputs)
    assert rehearsed(plan, 1, captured.constants) == pytest.approx(batch_bytes, rel=0.05)
    assert rehearsed(plan, 0, captured.constants) > 2 * batch_bytes


@pytest.mark.parametrize("is_backward", [False, True])
def test_what_operators_take_inside_counts_while_they_run(captured: Captured, is_backward: bool) -> None:
    """More than all else together, for one operator: the peak is then and there, and nowhere else."""
    plan = named(captured, "single_device")
    usual = [rehearsed(plan, rank, captured.constants) for rank in range(2)]
    node = next(node.name for node in captured.graph.nodes if node.op_name == "conv2d")

    def hidden(run: NodeRun, is_apart: bool) -> tuple[int, int]:
        del is_apart  # both count
        much = 10**9 if run.node.name == node else 0
        return (0, much) if is_backward else (much, 0)

    more = [rehearsed(plan, rank, captured.constants, hidden=hidden) for rank in range(2)]
    assert 10**9 < more[0] <= 10**9 + usual[0]
    assert more[1] == usual[1]


def test_what_operators_take_for_a_part_of_a_larger_tensor_counts_where_they_read_one(
    captured: Captured,
) -> None:
    """Images cut along their width are read as parts; samples are not."""

    def hidden(run: NodeRun, is_apart: bool) -> tuple[int, int]:
        return (10**9 if is_apart and run.node.op_name == "conv2d" else 1), 0

    whole = baseline("single_device", captured.graph, MACHINE, COSTS, 0)
    first = next(block.name for block in whole.blocks if any(n.op_name == "conv2d" for n in block.nodes))
    for dim, is_part in (("w", True), ("b", False)):
        plan = plan_of(
            Strategy(captured.graph, {**whole.placements, first: placed({dim: 2}, (0, 1))}, whole.apart)
        )
        assert (rehearsed(plan, 0, captured.constants, hidden=hidden) > 10**9) == is_part


def test_messages_take_memory_where_it_is_theirs() -> None:
    """A mailbox lends them, a GPU's lanes give each memory of its own when it is asked for, and over sockets
    they are held by their senders, too."""
    captured = load("rnntc", tiny=True, devices=2).captured()
    plans = [plan_of(random_strategy(captured.graph, 2, Random(seed))) for seed in range(4)]
    lent, by_lanes, by_sockets = (
        [rehearsed(plan, rank, captured.constants, backend=backend) for plan in plans for rank in range(2)]
        for backend in ("memory", "belts", "gloo")
    )
    assert all(a <= b <= c for a, b, c in zip(lent, by_lanes, by_sockets, strict=True))
    assert sum(lent) < sum(by_lanes) < sum(by_sockets)


def test_nothing_is_computed_and_nothing_is_changed(captured: Captured) -> None:
    before = {name: tensor.clone() for name, tensor in captured.constants.items()}
    plan = named(captured, "data_parallel")
    peaks = {rehearsed(plan, rank, captured.constants) for _ in range(2) for rank in range(2)}
    assert len(peaks) == 1
    for name, tensor in captured.constants.items():
        assert torch.equal(tensor, before[name])


# -- all of a validation's ---------------------------------------------------------------------------------


def test_a_step_that_cannot_be_rehearsed_has_the_plans_peak(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = preset("cpu:1x1")
    alone = baseline("single_device", captured.graph, machine, COSTS, 0)
    plan = planned(alone, machine, simulation(alone, machine, COSTS), COSTS)
    found, reasons = rehearsed_peaks([plan], captured.constants, Inside(), Wire())
    assert not reasons
    assert found[0] != tuple(plan.prediction.memory_bytes)

    def looks_at_elements(*_: object, **__: object) -> int:
        with FakeTensorMode():
            return int(torch.empty(1).item())

    monkeypatch.setattr(rehearsing, "rehearsed", looks_at_elements)
    found, (reason,) = rehearsed_peaks([plan], captured.constants, Inside(), Wire())
    assert found == [tuple(plan.prediction.memory_bytes)]
    assert "DataDependent" in reason


def test_what_no_tensor_shows_is_measured(captured: Captured) -> None:
    profiler = Profiler(device_at_hand("cpu", "cpu", 1, 1))
    for candidate in candidates_of(
        baseline("single_device", captured.graph, MACHINE, COSTS, 0).layouts.values()
    ):
        profiler.measure_hidden(candidate)
    shown = {work.op_name: size for work, size in profiler.hidden_bytes.items() if not work.is_backward}
    assert shown["relu"] == 0
    assert all(size >= 0 for size in profiler.hidden_bytes.values())


def test_a_module_of_ones_own_is_rehearsed_as_it_is_run() -> None:
    """Two layers on one device: their weights, momentum and gradients, what is kept, and what is made."""
    width, batch = 64, 8

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()).sum()

    given = capture(Two(), (torch.randn(batch, width),))
    machine = preset("cpu:1x1")
    alone = baseline("single_device", given.graph, machine, COSTS, 0)
    plan = planned(alone, machine, simulation(alone, machine, COSTS), COSTS)
    peak = rehearsed(plan, 0, given.constants)
    weight, value = 4 * width * width, 4 * batch * width
    assert 5 * weight + 2 * value < peak < 6 * weight + 6 * value


def test_what_neighbours_are_sent_lies_in_memory_that_is_shared(captured: Captured) -> None:
    """And is not held until the end of the step, as what gloo sends is."""
    machine = preset("cpu:2x2")
    strategy = baseline("model_parallel", captured.graph, machine, COSTS, 0)
    plan = planned(strategy, machine, simulation(strategy, machine, COSTS), COSTS)

    def peaks(backend: str, rooms: list[set[int]]) -> list[int]:
        return [
            rehearsed(plan, rank, captured.constants, backend=backend, neighbours=frozenset(rooms[rank]))
            for rank in range(4)
        ]

    alone, pairs, together = (
        peaks("gloo", [{0}, {1}, {2}, {3}]),
        peaks("gloo", [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        peaks("gloo", [{0, 1, 2, 3}] * 4),
    )
    assert all(a >= b >= c for a, b, c in zip(alone, pairs, together, strict=True))
    assert sum(alone) > sum(pairs) > sum(together)
    assert together == peaks("memory", [set()] * 4)
