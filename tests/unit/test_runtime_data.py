"""A rank loads the samples that its shards read, and the training is the same."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from oracles.datacases import Noting, fed_case
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, plain, planned, tiny, trained_plainly
from oracles.training import named_tensors as named_of

from soapstone.errors import TrainingError
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.runtime.rows import rows_of
from soapstone.runtime.run import state_of
from soapstone.runtime.sources import batches_of
from soapstone.runtime.trainer import Trainer
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import data_parallel, single_device
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.placed import placed_blocks

STEPS = 3
SAMPLES = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.mark.parametrize("name", ["lenet", "nmt", "bert_large", "xdl", "candle_uno"])
def test_under_data_parallelism_every_rank_reads_its_own_samples_alone(name: str) -> None:
    _, _, captured = tiny(name, 1)
    strategy = data_parallel(captured.graph, preset("cpu:1x2"))
    rows = rows_of(captured.graph, placed_blocks(strategy), 2)
    assert rows.read == rows.owned == ((0, 1), (2, 3))


def strategies(name: str) -> dict[str, Strategy]:
    _, _, captured = tiny(name, STEPS)
    return {
        "data parallel": data_parallel(captured.graph, preset("cpu:1x2")),
        "random": random_strategy(captured.graph, 2, Random(3)),
    }


@pytest.mark.parametrize(
    ("name", "which", "kind"),
    [
        ("lenet", "data parallel", "function of rows"),
        ("bert_large", "data parallel", "dataset"),
        ("nmt", "data parallel", "dataset"),
        ("dlrm", "random", "dataset"),
    ],
)
def test_a_rank_asks_for_its_samples_alone_and_trains_the_same(
    name: str, which: str, kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    """The whole batch is never there on a data-parallel rank, so nothing can be read that was not
    asked for; the result is plain PyTorch's on whole batches."""
    module, batches, captured = tiny(name, STEPS)
    path = planned(strategies(name)[which], 2, tmp_path)
    arrays = [[tensor.numpy() for tensor in batch] for batch in batches]
    answers = ranks.run(
        fed_case, 2, path, plain(named_of(module)), plain(captured.constants), arrays, kind, False
    )
    for losses, _, asked, rows in answers:
        assert losses == answers[0][0]
        assert asked == [step * SAMPLES + row for step in range(STEPS) for row in rows]
    if which == "data parallel":
        assert [rows for *_, rows in answers] == [(0, 1), (2, 3)]
    state = {key: torch.from_numpy(array) for key, array in answers[0][1].items()}
    assert_same((answers[0][0], state), trained_plainly(module, batches, Recipe()))


def test_a_rank_may_load_whole_batches(ranks: Ranks, tmp_path: Path) -> None:
    module, batches, captured = tiny("lenet", STEPS)
    path = planned(strategies("lenet")["data parallel"], 2, tmp_path)
    arrays = [[tensor.numpy() for tensor in batch] for batch in batches]
    answers = ranks.run(
        fed_case, 2, path, plain(named_of(module)), plain(captured.constants), arrays, "dataset", True
    )
    for _, _, asked, _ in answers:
        assert asked == list(range(STEPS * SAMPLES))
    state = {key: torch.from_numpy(array) for key, array in answers[0][1].items()}
    assert_same((answers[0][0], state), trained_plainly(module, batches, Recipe()))


def test_batches_that_are_copied_to_one_place_train_the_same() -> None:
    """As a recording on a GPU needs them."""
    module, batches, captured = tiny("bert_large", STEPS)
    machine = preset("cpu:1x1")
    strategy = single_device(captured.graph, machine)
    plan = Plan(strategy, machine, simulation(strategy, machine).prediction)
    model = deepcopy(module)
    named = named_of(model)
    state = state_of(captured.graph, named, captured.constants)
    trainer = Trainer(plan, state, dict(model.named_parameters()), Recipe().optimizer_of, Wire())
    trainer.run.free.holds_still = True
    first = trainer.step(batches[0])
    places = [trainer.run.free[value.name].data_ptr() for value in trainer.run.free.inputs]
    losses = [first, *(trainer.step(batch) for batch in batches[1:])]
    assert places == [trainer.run.free[value.name].data_ptr() for value in trainer.run.free.inputs]
    assert_same((losses, trainer.state_dict()), trained_plainly(module, batches, Recipe()))


def test_every_round_of_a_dataset_has_another_order_that_all_ranks_share() -> None:
    _, batches, captured = tiny("lenet", STEPS)
    asked = []
    for rows in ((0, 1), (2, 3)):
        dataset = Noting(batches)
        list(islice(batches_of(dataset, captured.graph, rows, shuffle_seed=7), 2 * STEPS))
        asked.append(dataset.asked)
    rounds = [{*asked[0][at : at + 2 * STEPS], *asked[1][at : at + 2 * STEPS]} for at in (0, 2 * STEPS)]
    assert rounds == [set(range(STEPS * SAMPLES))] * 2
    assert asked[0][: 2 * STEPS] != asked[0][2 * STEPS :]
    again = Noting(batches)
    list(islice(batches_of(again, captured.graph, (0, 1), 2, shuffle_seed=7), 2))
    assert again.asked == asked[0][4:8]  # a run that goes on asks for nothing twice


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    _, batches, captured = tiny("lenet", STEPS)
    dataset = Noting(batches)
    dataset.samples = dataset.samples[:3]
    with pytest.raises(TrainingError, match="has 3 samples and a batch takes 4"):
        next(batches_of(dataset, captured.graph, (0,)))
