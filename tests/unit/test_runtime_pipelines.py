"""Pipelines train as one process does: stages, micro-batches, and other splits inside a stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly

from soapstone.graph import Graph
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy

RECIPE = Recipe("SGD", {"lr": 0.01, "momentum": 0.9})
STEPS = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def halves(graph: Graph) -> Strategy:
    """The first half of the blocks on one device, the second on the other."""
    blocks = Strategy(graph, {}).blocks
    return Strategy(graph, {b.name: placed({}, [2 * i // len(blocks)]) for i, b in enumerate(blocks)})


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("mlp", Schedule.ONE_F_ONE_B),
        ("gpt2", Schedule.ONE_F_ONE_B),
        ("bert_large", Schedule.ONE_F_ONE_B),
        ("rnnlm", Schedule.ONE_F_ONE_B),
        ("moe", Schedule.ONE_F_ONE_B),
        ("resnet101", Schedule.GPIPE),
    ],
)
def test_a_pipeline_trains_the_same(name: str, schedule: Schedule, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny(name, STEPS)
    strategy = halves(captured.graph).pipelined(Pipeline(2, schedule))
    assert len(strategy.stages) == 2
    ours = trained_by_ranks(ranks, strategy, 2, captured, module, batches, RECIPE, tmp_path)
    assert_same(ours, trained_plainly(module, batches, RECIPE))
