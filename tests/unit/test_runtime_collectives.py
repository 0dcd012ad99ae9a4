"""Moves that are recognised as collectives run as the backend's own, and the training is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly
from torch import Tensor, nn

from soapstone.frontends.capture import capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import simulation
from soapstone.runtime.actions import Exchanged
from soapstone.runtime.collectives import USED, chosen
from soapstone.runtime.linking import Links
from soapstone.runtime.listing import listed
from soapstone.runtime.trainer import Options
from soapstone.runtime.weights import Weights
from soapstone.search.baselines import data_parallel
from soapstone.strategy.layout import layouts
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.exchange import Pattern
from soapstone.tasks.placed import placed_blocks

STEPS = 3
COLLECTIVES = tuple(pattern for pattern in Pattern if pattern is not Pattern.TRANSFER)
SEEDS = {"lenet": 1, "rnntc": 3}
DEVICES = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(DEVICES, computers=None)
    yield started
    started.close()


def everywhere(graph: Graph, devices: int, seed: int) -> Strategy:
    """Every block split over all devices, in one way or another."""
    random = Random(seed)
    placements = {}
    for block in Strategy(graph, {}).blocks:
        found = [found.degrees for found in layouts(graph, block, devices)]
        degrees = random.choice(found) if found else {}
        placements[block.name] = placed(degrees, range(devices if degrees else 1))
    return Strategy(graph, placements)


def patterns(strategy: Strategy, devices: int, used: frozenset[Pattern]) -> list[dict[Pattern, int]]:
    """How often each rank posts each kind of move in a step."""
    simulated = simulation(strategy, preset(f"cpu:1x{devices}"))
    moves, _ = chosen(simulated.tasks, used, [tuple(range(devices))])  # as `run.started` has it
    found = []
    for rank in range(devices):
        links = Links(strategy, simulated.tasks, rank, torch.device("cpu"), moves)
        weights = Weights(strategy.graph, placed_blocks(strategy), simulated.tasks.exchanges)
        posted = [what for _, _, what in listed(links, weights, range(len(simulated.tasks.tasks)))]
        kinds = [what.pattern for what in posted if isinstance(what, Exchanged)]
        found.append({pattern: kinds.count(pattern) for pattern in Pattern})
    return found


@pytest.mark.parametrize("name", SEEDS)
def test_training_by_the_backends_collectives_is_the_same(name: str, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny(name, STEPS)
    strategy = everywhere(captured.graph, DEVICES, SEEDS[name])
    recipe = Recipe(options=Options(collectives=COLLECTIVES))
    ours = trained_by_ranks(ranks, strategy, DEVICES, captured, module, batches, recipe, tmp_path)
    assert_same(ours, trained_plainly(module, batches, recipe))


def test_every_kind_of_collective_is_among_those_trained_with() -> None:
    """Every rank posts as many of each as the others do; gloo's slow ones are made of messages."""
    seen: set[Pattern] = set()
    for name, seed in SEEDS.items():
        _, _, captured = tiny(name, STEPS)
        strategy = everywhere(captured.graph, DEVICES, seed)
        first, *others = patterns(strategy, DEVICES, frozenset(COLLECTIVES))
        for pattern in COLLECTIVES:
            assert all(first[pattern] == other[pattern] for other in others)
            seen |= {pattern} if first[pattern] else set()
        on_gloo = patterns(strategy, DEVICES, USED["gloo"])[0]
        assert on_gloo[Pattern.ALL_REDUCE] == first[Pattern.ALL_REDUCE]
        assert not on_gloo[Pattern.ALL_GATHER]
        assert sum(on_gloo.values()) >= sum(first.values())
    assert seen == set(COLLECTIVES)


def test_ranks_that_rarely_meet_use_messages() -> None:
    """Unless they add up gradients together anyway."""
    _, _, captured = tiny("mlp", 1)
    simulated = simulation(everywhere(captured.graph, 4, 5), preset("cpu:1x4"))
    moves, groups = chosen(simulated.tasks, (Pattern.ALL_GATHER,), [])
    assert (moves, groups) == (frozenset(), set())
    moves, groups = chosen(simulated.tasks, (Pattern.ALL_GATHER,), [(3, 1, 2, 0)])
    assert groups == {(0, 1, 2, 3)}
    assert len(moves) == 2


@pytest.mark.parametrize(("samples", "sharing"), [(8, 4), (6, 3)])
def test_statistics_are_gathered_where_ranks_add_up_anyway(
    samples: int, sharing: int, ranks: Ranks, tmp_path: Path
) -> None:
    """In one collective for all that share them; by gloo here, and in memory that ranks share."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    batches = [(torch.randn(samples, 5).double() + 3.0,) for _ in range(STEPS)]
    captured = capture(Mean(module), batches[0], "net")
    strategy = data_parallel(captured.graph, preset(f"cpu:1x{DEVICES}"))
    posted = patterns(strategy, DEVICES, frozenset(COLLECTIVES))
    assert [each[Pattern.ALL_GATHER] for each in posted] == [2] * sharing + [0] * (DEVICES - sharing)
    assert all(each[Pattern.TRANSFER] == 0 for each in posted)
    recipe = Recipe(options=Options(collectives=COLLECTIVES))
    plainly = trained_plainly(Mean(module), batches, recipe)
    ours = trained_by_ranks(ranks, strategy, DEVICES, captured, Mean(module), batches, recipe, tmp_path)
    assert_same(ours, plainly)
    together = Ranks(DEVICES)
    try:
        shared = tmp_path / "shared"
        shared.mkdir()
        ours = trained_by_ranks(together, strategy, DEVICES, captured, Mean(module), batches, recipe, shared)
    finally:
        together.close()
    assert_same(ours, plainly)


class Mean(nn.Module):
    """The mean square of what a module makes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.module(x)
        return (made - x[:, :4]).square().mean()
