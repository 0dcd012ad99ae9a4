"""When ranks do not meet, rank 0 can say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from oracles.ranks import Ranks
from oracles.wirecases import (
    disagreeing,
    failing,
    left_alone,
    met_after_s,
    summing_aside,
    waiting_for_nothing,
)

from soapstone.graph import GraphBuilder
from soapstone.ops.box import whole
from soapstone.runtime.actions import Action, ReportLoss, SumGradients
from soapstone.runtime.buckets import bucketed
from soapstone.runtime.weights import Piece
from soapstone.runtime.wire import Carried, Slot, Wire
from soapstone.tasks.buckets import FIRST_BYTES


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


def test_ranks_with_different_plans_refuse_to_start(ranks: Ranks) -> None:
    said = ranks.run(disagreeing, 3)
    assert said == ["rank 1 has another plan than rank 0: start all with the same"] * 3


def test_ranks_that_meet_wait_for_the_last(ranks: Ranks) -> None:
    first, late, third = ranks.run(met_after_s, 3)
    assert min(first, third) > 0.2 > late


def test_a_sum_that_is_staged_comes_back_to_what_was_added_up(ranks: Ranks) -> None:
    """However that lies in memory, and whether it goes whole or in parts."""
    expected = torch.arange(12.0).view(3, 4).t() * 6
    for answer in ranks.run(summing_aside, 3):
        assert len(answer) == 6
        for found in answer:
            assert torch.equal(torch.from_numpy(found), expected)


def test_a_wait_without_end_names_what_every_rank_waited_for(ranks: Ranks) -> None:
    sentence = ranks.run(waiting_for_nothing, 3)[0]
    assert sentence.startswith("no rank went on for 2 s: ")
    for rank in range(3):
        assert f"rank {rank} waited for 'box {rank}' from rank {(rank + 1) % 3}" in sentence


def test_rank_0_repeats_why_another_failed(ranks: Ranks) -> None:
    assert ranks.run(failing, 2)[0] == "rank 1: the disk is full"


@pytest.mark.parametrize(
    ("way", "waited"),
    [
        ("meet", "all ranks to come to the start of the recorded step"),
        ("record", "all ranks to come to the start of the recorded step"),
        ("gather", "the recorded times of all ranks"),
        ("agree", "the plan of all ranks"),
        ("group", "'the group of ranks 0, 1'"),
        ("share", "'fc.weight' from rank 1"),
    ],
)
def test_whatever_a_rank_waits_for_when_another_goes_is_named(way: str, waited: str, ranks: Ranks) -> None:
    sentence = ranks.run(left_alone, 2, way)[0]
    assert sentence.startswith("training stopped because rank 1 ")
    assert sentence.count("\n") == 0
    assert waited in sentence


def test_gradients_of_the_same_ranks_share_buckets_in_one_order() -> None:
    build = GraphBuilder("net")
    x = build.input("x", (4, FIRST_BYTES // 8))
    for i in range(6):  # the backward pass comes to the last first
        (x,) = build.add("mul", [x, build.weight(f"w{5 - i}", (4, FIRST_BYTES // 8))], name=f"scaled {i}")
    (loss,) = build.add("sum", [x], {"axes": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    shape = graph.value("w0").shape
    holders = [(0, 1), (0, 1), (0, 2), (0, 1), (0, 1), (0, 2)]
    actions: list[Action] = []
    for i, held in enumerate(holders):
        actions.append(SumGradients(i, [Piece(f"w{i}", whole(shape), held, (1, i), True)]))
    actions.append(ReportLoss())
    found = [a for a in bucketed(actions, graph) if isinstance(a, SumGradients)]
    # The first shelf is full with FIRST_BYTES, which is half a weight; the second holds all others.
    assert [(a.task, [p.weight for p in a.pieces]) for a in found] == [
        (0, ["w0"]),
        (4, ["w1", "w3", "w4"]),
        (5, ["w2", "w5"]),
    ]


@pytest.mark.parametrize("is_asked", [True, False])
def test_parts_of_what_gpus_carry_are_reached_where_somebody_wants_to_know(is_asked: bool) -> None:
    """A thread that only launches what comes after them does not wait; a recorded step does."""
    told: list[str] = []

    class Lanes:
        def reach(self, mark: object, timeout_s: float) -> None:
            del mark, timeout_s
            told.append("reached")

        def hold_back(self) -> None:
            told.append("held back")

    def noted(name: str) -> Callable[[], None]:
        return lambda: told.append(name)

    lanes = cast(Any, Lanes())
    shared = Carried(Wire(), lanes, lanes, torch.arange(4.0), "a sum")
    slots = [Slot(shared, slice(0, 2), (2,)), Slot(shared, slice(2, 4), (2,))]
    for number, slot in enumerate(slots):
        slot.on_done = noted(f"part {number}") if is_asked else None
    assert [cast(torch.Tensor, slot.wait()).tolist() for slot in slots] == [[0.0, 1.0], [2.0, 3.0]]
    assert told == (["reached", "held back", "part 0", "part 1"] if is_asked else ["held back"])
