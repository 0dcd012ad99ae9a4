"""Belts: what comes is what was put on them, in any order of waiting, however small the rings are; and models
are trained by them as by one process. Lanes are threads here; GPUs' own are tested where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import beltcases
from oracles.mailcases import GROUPS, payload
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly

from soapstone.strategy.space import random_strategy

SIZE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


COUNTS = st.sampled_from([0, 1, 3, 17, 64, 65, 1000, 5000, 30_000])
MESSAGES = st.tuples(st.just("message"), st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), COUNTS).filter(
    lambda act: act[1] != act[2]
)
SUMS = st.tuples(st.just("sum"), st.sampled_from(GROUPS), COUNTS)


@settings(max_examples=15, deadline=None)
@given(st.lists(MESSAGES | SUMS, max_size=14), st.integers(0, 99), st.sampled_from([2**15, 2**20]))
def test_everything_arrives(ranks: Ranks, acts: list[Any], seed: int, ring_bytes: int) -> None:
    """Also where a ring is gone round many times, and a piece leaves some of it free at its end."""
    answers = ranks.run(beltcases.talking, SIZE, acts, seed, ring_bytes)
    for rank, rounds in enumerate(answers):
        for again, found in enumerate(rounds):
            for number, got in found.items():
                act, name = acts[number], number + 100 * again
                if act[0] == "message":
                    assert got == payload(act[1], name, act[3]).tolist()
                else:
                    assert got == sum(payload(other, name, act[2]) for other in act[1]).tolist()
            expected = {i for i, act in enumerate(acts) if rank in (act[1] if act[0] == "sum" else act[2:3])}
            assert set(found) == expected


@pytest.mark.parametrize("count", [10, 3_000_000])
def test_what_was_sent_may_change_once_it_is_settled(ranks: Ranks, count: int) -> None:
    _, found = ranks.run(beltcases.sent_weights, 2, count)
    assert found == [float(step) for step in range(20)]


@pytest.mark.parametrize(
    ("way", "told"),
    [("message", "rank 1 is gone"), ("sum", "rank 1 is gone"), ("time", "timed out after 0.3 s")],
)
def test_what_cannot_come_is_not_waited_for(way: str, told: str) -> None:
    started = Ranks(SIZE)
    try:
        answers = started.run(beltcases.left_alone, SIZE, way, leaving=[1])
    finally:
        started.close(leaving=[1])
    assert all(answer in (told, "rank 1 is gone") for answer in answers)


@pytest.mark.parametrize("name", ["lenet", "rnnlm", "nmt", "resnet101", "gpt2"])
def test_belts_train_as_one_process_does(name: str, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny(name, 3)
    strategy = random_strategy(captured.graph, 4, Random(7), most_copies=2)
    recipe = Recipe(by_belts=True)
    ours = trained_by_ranks(ranks, strategy, 4, captured, module, batches, recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches, recipe))
