"""Messages and sums in memory that ranks share: what comes is what was sent, in any order of waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import mailcases
from oracles.mailcases import GROUPS, payload
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly

from soapstone.strategy.space import random_strategy

SIZE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(SIZE)
    yield started
    started.close()


COUNTS = st.sampled_from([0, 1, 3, 17, 1000, 5000])
MESSAGES = st.tuples(
    st.just("message"), st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), st.integers(0, 2), COUNTS
).filter(lambda act: act[1] != act[2])
SUMS = st.tuples(st.just("sum"), st.sampled_from(GROUPS), COUNTS)


FULL_RINGS = [
    ("message", 2, 1, 0, 1000),
    ("message", 1, 0, 2, 1),
    ("message", 2, 1, 0, 17),
    ("sum", (0, 1), 5000),
    ("message", 1, 0, 0, 1),
    ("sum", (0, 1), 17),
    ("sum", (1, 2), 1),
    ("sum", (0, 2), 1),
]
"""A sum takes the place that a message waits for."""


@settings(max_examples=15, deadline=None)
@example(FULL_RINGS, 53, 2, 2**16)
@example(FULL_RINGS, 54, 2, 2**16)
@example(FULL_RINGS, 55, 2, 2**16)
@given(
    st.lists(MESSAGES | SUMS, max_size=12),
    st.integers(0, 99),
    st.sampled_from([2, 2**15]),
    st.sampled_from([0, 2**16]),
)
def test_everything_arrives(ranks: Ranks, acts: list[Any], seed: int, places: int, parts_bytes: int) -> None:
    """Also where a ring has two places only, and with sums in one round or in two. Sums are compared with
    those in the order of the ranks, to the bit, so all ranks have the same."""
    answers = ranks.run(mailcases.talking, SIZE, acts, seed, places, parts_bytes)
    for rank, rounds in enumerate(answers):
        for again, found in enumerate(rounds):
            for number, got in found.items():
                act, name = acts[number], number + 100 * again
                if act[0] == "message":
                    assert act[2] == rank
                    assert got == payload(act[1], name, act[4]).tolist()
                else:
                    total = payload(act[1][0], name, act[2])
                    for other in act[1][1:]:
                        total = total + payload(other, name, act[2])
                    assert got == total.tolist()
            expected = {i for i, act in enumerate(acts) if rank in (act[1] if act[0] == "sum" else act[2:3])}
            assert set(found) == expected


@pytest.mark.parametrize("count", [1, 100_000])
def test_memory_is_used_again(count: int, ranks: Ranks) -> None:
    for held in ranks.run(mailcases.held, 2, count):
        assert held <= 2 * (4 * count + 4096)


@pytest.mark.parametrize("name", ["lenet", "rnnlm"])
def test_ranks_of_two_computers_train_as_one_process(name: str, tmp_path: Path) -> None:
    """Messages within a computer go by its memory, those between them by gloo, in one step."""
    module, batches, captured = tiny(name, 3)
    recipe = Recipe()
    strategy = random_strategy(captured.graph, 4, Random(5), most_copies=2)
    started = Ranks(4, computers=2)
    try:
        ours = trained_by_ranks(started, strategy, 4, captured, module, batches, recipe, tmp_path)
    finally:
        started.close()
    assert_same(ours, trained_plainly(module, batches, recipe))


@pytest.mark.parametrize(
    ("way", "told"),
    [("message", "rank 1 is gone"), ("sum", "rank 1 is gone"), ("nothing", "timed out after 0.3 s")],
)
def test_what_cannot_come_is_not_waited_for(way: str, told: str) -> None:
    started = Ranks(SIZE)
    try:
        assert started.run(mailcases.left_alone, SIZE, way, leaving=[1]) == [told, told]
    finally:
        started.close(leaving=[1])
