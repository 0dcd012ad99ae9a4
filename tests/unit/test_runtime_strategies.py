"""Strategies that a person may write and the search never draws: shards that share a device, nodes apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import simulation
from soapstone.runtime.linking import Links
from soapstone.runtime.order import execution_order
from soapstone.search.baselines import baseline
from soapstone.strategy.space import Space, random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.task import TaskKind

RECIPE = Recipe("SGD", {"lr": 0.01, "momentum": 0.9})
STEPS = 3
MODELS = ("lenet", "resnet101", "rnnlm", "gpt2", "dlrm", "moe")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3, computers=None)
    yield started
    started.close()


@pytest.mark.parametrize("name", MODELS)
def test_shards_that_share_a_device_train_the_same(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Six virtual devices on three: copies, partial sums and statistics meet on one rank."""
    module, batches, captured = tiny(name, STEPS)
    spread = random_strategy(captured.graph, 6, Random(4), most_copies=3)
    folded = Strategy(
        captured.graph,
        {
            block: replace(placement, devices=tuple(device % 3 for device in placement.devices))
            for block, placement in spread.placements.items()
        },
    )
    ours = trained_by_ranks(ranks, folded, 3, captured, module, batches, RECIPE, tmp_path)
    assert_same(ours, trained_plainly(module, batches, RECIPE))


@pytest.mark.parametrize("name", MODELS)
def test_every_node_placed_by_itself_trains_the_same(name: str, ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny(name, STEPS)
    joined = Strategy(captured.graph, {}).blocks
    apart = frozenset(node.name for block in joined for node in block.followers)
    blocks = Strategy(captured.graph, {}, apart).blocks
    random = Random(6)
    placements = {block.name: Space(captured.graph, block, 3, 2).drawn(random) for block in blocks}
    strategy = Strategy(captured.graph, placements, apart)
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, RECIPE, tmp_path)
    assert_same(ours, trained_plainly(module, batches, RECIPE))


@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_one_in_which_tasks_can_run(name: str) -> None:
    _, _, captured = tiny(name, STEPS)
    strategy = random_strategy(captured.graph, 4, Random(1), most_copies=2)
    simulated = simulation(strategy, preset("p100:1x4"))
    order = execution_order(simulated.tasks, simulated.timeline)
    place = {task: i for i, task in enumerate(order)}
    assert sorted(order) == list(range(len(simulated.tasks.tasks)))
    assert all(
        place[before] < place[task] for task, after in enumerate(simulated.tasks.after) for before in after
    )


@pytest.mark.parametrize("steps", [3, 6])
def test_terms_of_a_loss_go_back_as_autograd_takes_them(steps: int) -> None:
    """An RNN with a layer on each device: the last step first, for which all before it wait, although the
    first could have gone back long before."""
    graph = load(f"rnnlm:steps={steps},hidden=512", batch=64, devices=4).captured().graph
    machine = preset("p100:1x4")
    strategy = baseline("wu", graph, machine, AnalyticCosts(), 0)
    simulated = simulation(strategy, machine)
    tasks = simulated.tasks
    order = execution_order(tasks, simulated.timeline)
    back = [tasks.tasks[i] for i in order if tasks.tasks[i].kind is TaskKind.BACKWARD]
    losses = [task.key[1] for task in back if task.name.startswith("linear")]
    assert len(losses) == steps
    assert losses == sorted(losses)  # blocks are counted from the last one
    by_time = sorted(back, key=lambda task: simulated.timeline.start_s[tasks.ids[task.key]])
    assert [task.key[1] for task in by_time if task.name.startswith("linear")] != losses


@pytest.mark.parametrize("name", MODELS)
def test_what_one_rank_sends_another_receives(name: str) -> None:
    """Every message has two ends: the same tag, box and peer, and no tag is used twice."""
    _, _, captured = tiny(name, STEPS)
    strategy = random_strategy(captured.graph, 4, Random(2), most_copies=2)
    tasks = simulation(strategy, preset("p100:1x4")).tasks
    sent, received = set(), set()
    for rank in range(4):
        links = Links(strategy, tasks, rank, torch.device("cpu"))
        for ports in links.moves.values():
            sent |= {(rank, d.peer, d.tag, d.box, d.dtype) for d in ports.departures}
            received |= {(a.peer, rank, a.tag, a.box, a.dtype) for a in ports.arrivals}
    assert sent == received
    assert len({tag for _, _, tag, _, _ in sent}) == len(sent) > 0
