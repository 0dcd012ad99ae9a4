"""Training on a GPU: the same as on a CPU, recorded or not, alone or on slices of one GPU.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from oracles.gpucases import carried_case, replayed_case, shared_case, summed_case, trainer_on_gpu
from oracles.ranks import Ranks
from oracles.training import (
    Recipe,
    Tensors,
    assert_same,
    named_tensors,
    plain,
    planned,
    tiny,
    trained_plainly,
)

from soapstone.machine import preset
from soapstone.runtime.replay import WARM_UP, Replay
from soapstone.runtime.slices import CONTROL, sliced
from soapstone.runtime.trainer import Trainer
from soapstone.strategy.space import random_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

STEPS = WARM_UP + 4
PATIENCE_S = 300


def trained_on_gpu(name: str, *, replay: bool) -> tuple[Trainer, list[float], Tensors]:
    _, batches, _ = tiny(name, STEPS)
    trainer = trainer_on_gpu(name, replay=replay)
    losses = [trainer.step(batch) for batch in batches]
    return trainer, losses, {key: tensor.cpu() for key, tensor in trainer.state_dict().items()}


@pytest.mark.parametrize("name", ["lenet", "resnet101", "rnnlm", "bert_large", "nmt"])
@pytest.mark.parametrize("replay", [False, True], ids=["launched", "replayed"])
def test_a_gpu_trains_as_plain_pytorch_does(name: str, replay: bool) -> None:
    """Double precision; running statistics and momentum included, whose steps a recording must not
    take twice."""
    module, batches, _ = tiny(name, STEPS)
    trainer, losses, state = trained_on_gpu(name, replay=replay)
    made = trainer.run.executor.replay
    if replay:
        assert made is not None
        assert made.is_recorded, made.refusal
    else:
        assert made is None
    assert_same((losses, state), trained_plainly(module, batches, Recipe()), rtol=1e-7, atol=1e-8)


def test_what_cannot_be_recorded_goes_on_unrecorded() -> None:
    """Reading a number back from the GPU breaks a recording; the step is done all the same."""
    _, batches, _ = tiny("lenet", STEPS)
    trainer, _, _ = trained_on_gpu("lenet", replay=True)
    launched, _, _ = trained_on_gpu("lenet", replay=False)
    replay = trainer.run.executor.replay
    assert replay is not None
    walk = replay._walk

    def reading() -> None:
        walk()
        torch.zeros(1, device="cuda").item()

    replay._walk, replay._graph, replay._walked = reading, None, WARM_UP
    after = [trainer.step(batch) for batch in batches]
    assert after == pytest.approx([launched.step(batch) for batch in batches], rel=1e-6)
    assert replay.refusal is not None
    assert not replay.is_recorded


def test_random_numbers_go_on_after_what_cannot_be_recorded() -> None:
    """From where they were: what a recording that fails would have drawn was never drawn."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cuda"))

    def drawing() -> None:
        torch.rand(3, device="cuda").sum().item()

    replay = Replay(drawing, lambda: None, [parameter], torch.device("cuda"))
    for _ in range(WARM_UP):
        replay()
    torch.cuda.manual_seed(7)
    replay()
    assert replay.refusal is not None
    drawn = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    assert torch.equal(drawn, torch.rand(4, device="cuda"))


@pytest.fixture(scope="module", params=[1, 2], ids=["in turns", "on slices"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks on one GPU, as the driver lets them or through MPS."""
    if request.param > 1 and shutil.which(CONTROL) is None:
        pytest.skip("NVIDIA's MPS daemon is not installed here")
    with sliced(request.param) as told, pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        started = Ranks(2)
        yield started
        started.close()


@pytest.fixture(scope="module")
def carried() -> Iterator[Ranks]:
    """Two ranks on slices of one GPU that know that they are on one computer."""
    if shutil.which(CONTROL) is None:
        pytest.skip("NVIDIA's MPS daemon is not installed here")
    with sliced(2) as told, pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        started = Ranks(2, computers=1)
        yield started
        started.close()


@pytest.mark.parametrize("name", ["lenet", "resnet101", "rnntc"])
def test_ranks_that_share_a_gpu_train_as_plain_pytorch_does(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Double precision, a random strategy: every message and every sum is staged in host memory."""
    module, batches, captured = tiny(name, STEPS)
    path = planned(random_strategy(captured.graph, 2, Random(3)), 2, tmp_path)
    arrays = [[tensor.numpy() for tensor in batch] for batch in batches]
    answers = ranks.run(shared_case, 2, path, plain(named_tensors(module)), plain(captured.constants), arrays)
    losses, arrays_of = answers[0]
    assert answers[1][0] == losses
    state = {key: torch.from_numpy(array) for key, array in arrays_of.items()}
    assert_same((losses, state), trained_plainly(module, batches, Recipe()), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("lenet", STEPS), ("resnet101", STEPS), ("rnntc", STEPS), ("gpt2", STEPS), ("inception_v3", 3)],
)
def test_ranks_on_slices_that_share_memory_train_as_plain_pytorch_does(
    name: str, steps: int, carried: Ranks, tmp_path: Path
) -> None:
    """Likewise, by belts. Of a tiny Inception a difference in the last bit grows more than tenfold in each
    step ([measured] 2e-14 of the first loss, 8e-7 of the seventh)."""
    module, batches, captured = tiny(name, steps)
    path = planned(random_strategy(captured.graph, 2, Random(3)), 2, tmp_path)
    arrays = [[tensor.numpy() for tensor in batch] for batch in batches]
    answers = carried.run(
        carried_case, 2, path, plain(named_tensors(module)), plain(captured.constants), arrays
    )
    losses, arrays_of = answers[0]
    assert answers[1][0] == losses
    state = {key: torch.from_numpy(array) for key, array in arrays_of.items()}
    assert_same((losses, state), trained_plainly(module, batches, Recipe()), rtol=1e-7, atol=1e-8)


def test_a_sum_comes_back_to_what_was_added_up(ranks: Ranks) -> None:
    expected = torch.arange(12.0).view(3, 4).t() * 3
    for answer in ranks.run(summed_case, 2):
        for found in answer:
            assert torch.equal(torch.from_numpy(found), expected)


@pytest.mark.parametrize("name", ["lenet", "rnnlm"])
def test_a_data_parallel_step_is_replayed(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Gradients leave at their place in a recording, large ones in parts, and nothing changes."""
    pytest.importorskip("soapstone._core", reason="baselines need the native core")
    from soapstone.search.baselines import baseline

    module, batches, captured = tiny(name, STEPS)
    path = planned(baseline("data_parallel", captured.graph, preset("cpu:1x2")), 2, tmp_path)
    arrays = [[tensor.numpy() for tensor in batch] for batch in batches]
    answers = ranks.run(
        replayed_case, 2, path, plain(named_tensors(module)), plain(captured.constants), arrays
    )
    assert [how for _, _, how in answers] == [True, True]
    losses, arrays_of, _ = answers[0]
    state = {key: torch.from_numpy(array) for key, array in arrays_of.items()}
    assert_same((losses, state), trained_plainly(module, batches, Recipe()), rtol=1e-7, atol=1e-8)


def ran(arguments: Sequence[object]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soapstone", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.skipif(shutil.which(CONTROL) is None, reason="NVIDIA's MPS daemon is not installed here")
@pytest.mark.parametrize("strategy", ["data_parallel", "model_parallel"])
def test_the_command_trains_on_slices_as_one_process_does(strategy: str, tmp_path: Path) -> None:
    """Single precision: two orders of one sum differ in the last bits."""
    pytest.importorskip("soapstone._core", reason="the command line needs the native core")
    losses = []
    for devices, options in ((1, ["--device", "cuda"]), (2, ["--gpu-slices", "2"])):
        plan = tmp_path / f"plan{devices}.json"
        chosen = strategy if devices > 1 else "single_device"
        model = ["--model", "lenet", "--tiny", "--batch", "8", "--machine", f"cpu:1x{devices}"]
        made = ran(["simulate", *model, "--strategy", chosen, "-o", plan, "--json"])
        assert made.returncode == 0, made.stderr
        done = ran(["train", plan, "--steps", 6, "--lr", 0.05, "--json", *options])
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
