"""The examples run as their first lines say, and do what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from soapstone.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def ran(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lenet_learns_the_digits_on_four_ranks_as_in_one_process(tmp_path: Path) -> None:
    four, one = tmp_path / "four.json", tmp_path / "one.json"
    out = ran([*TORCHRUN, "4", str(EXAMPLES / "digits.py"), "--epochs", "14", "--losses", str(four)])
    assert out.count("accuracy") == 1
    ran([sys.executable, str(EXAMPLES / "digits.py"), "--epochs", "14", "--losses", str(one)])
    ours, alone = json.loads(four.read_text()), json.loads(one.read_text())
    assert ours["accuracy"] > 0.97
    # Single precision: the first epoch runs together step by step; then rounding decides at some relu, and
    # single steps drift apart while the curve stays the same.
    steps = len(alone["losses"]) // 14
    assert ours["losses"][:steps] == pytest.approx(alone["losses"][:steps], rel=1e-5)
    for epoch in range(7):
        part = slice(epoch * steps, (epoch + 1) * steps)
        assert mean(ours["losses"][part]) == pytest.approx(mean(alone["losses"][part]), rel=0.02)
    assert sum(ours["losses"][-20:]) == pytest.approx(sum(alone["losses"][-20:]), rel=0.3, abs=0.05)


def test_a_model_of_one_s_own_is_planned_and_trained(tmp_path: Path) -> None:
    """Two ranks find one plan, share the work, and end where one process does."""
    script = str(EXAMPLES / "own_model.py")
    both = ran([*TORCHRUN, "2", script, "--save", str(tmp_path / "both.safetensors")])
    alone = ran([sys.executable, script, "--save", str(tmp_path / "alone.safetensors")])
    assert both.startswith("2 devices at work")
    assert both.removeprefix("2 devices") == alone.removeprefix("1 device")
    found, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("both", "alone"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_job_for_slurm_trains_a_plan(tmp_path: Path) -> None:
    """With stand-ins for what SLURM brings: one node, one core, and a step that runs here."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    plan = tmp_path / "plan.json"
    assert main(["simulate", "--model", "lenet:tiny", "--machine", "cpu:1x1", "-o", str(plan)]) == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), str(plan), "--steps", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **job, "PATH": path, "PORT": str(port)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
