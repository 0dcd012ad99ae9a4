"""Slices of a GPU, as far as they can be looked at without one: what is refused, and what is said to
NVIDIA's daemon. `tests/gpu/` has the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from soapstone.cli.main import main
from soapstone.errors import TrainingError
from soapstone.runtime.slices import CONTROL, QUEUES, check_slices, slice_environment, sliced


def test_a_rank_has_its_share_of_the_multiprocessors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUEUES, raising=False)
    told = slice_environment(tmp_path, 3)
    assert told == {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33.3333",
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
    }
    assert slice_environment(tmp_path, 4)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    monkeypatch.setenv(QUEUES, "8")
    assert slice_environment(tmp_path, 3)[QUEUES] == "8"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_nothing_to_slice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["simulate", "--model", "mlp", "--tiny", "--machine", "cpu:1x2", "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["train", str(plan), "--gpu-slices", "2"]) == 2
    sentence = "soapstone: torch finds no GPU here to slice: use --device cpu\n"
    assert capsys.readouterr() == ("", sentence)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_without_the_daemon_a_gpu_is_not_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrainingError, match=f"'{CONTROL}' is not installed here"):
        check_slices(2, 2)
    with pytest.raises(TrainingError, match="could not be run"), sliced(2):
        pass


def daemon(folder: Path, code: int = 0) -> Path:
    """A program with the daemon's name, which notes how it was called; the notes."""
    notes = folder / "notes"
    program = folder / CONTROL
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$* $(/bin/cat) $CUDA_MPS_PIPE_DIRECTORY $(/bin/ls $CUDA_MPS_PIPE_DIRECTORY/..)" >> {notes}\n'
        f"echo it says why\nexit {code}\n"
    )
    program.chmod(0o755)
    return notes


def test_ranks_without_room_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, 2)
    daemon(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check_slices(2, 4)
    with pytest.raises(TrainingError, match="5 devices and there is room for 4 ranks: give --gpu-slices 3"):
        check_slices(2, 5)


def test_the_daemon_is_started_in_folders_of_its_own_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = daemon(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with sliced(2) as told:
        pipe = told["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
        assert "-d" in notes.read_text()
    begun, ended, *_ = [line.split() for line in notes.read_text().splitlines() if pipe in line]
    assert begun[:2] == ["-d", pipe]
    assert ended[:2] == ["quit", pipe]
    assert not Path(pipe).exists()


def test_a_daemon_that_will_not_start_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    daemon(tmp_path, code=1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(TrainingError, match=f"'{CONTROL} -d' failed: it says why"), sliced(2):
        pass
