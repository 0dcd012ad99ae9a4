"""`soapstone train` with real ranks: it trains, goes on, and when it cannot it says why and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from soapstone.cli.main import main
from soapstone.machine import resolve, write_machine
from soapstone.plans import read_plan

PROGRAM = [sys.executable, "-m", "soapstone"]
PATIENCE_S = 120


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plan1.json and plan2.json: LeNet on one device and on two."""
    folder = tmp_path_factory.mktemp("plans")
    for devices in (1, 2):
        target = folder / f"plan{devices}.json"
        options = ["--model", "lenet", "--tiny", "--batch", "8", "--machine", f"cpu:1x{devices}"]
        assert main(["simulate", *options, "-o", str(target), "--json"]) == 0
    return folder


@pytest.fixture(scope="module")
def one(plans: Path) -> list[float]:
    """The losses of six steps of one process."""
    done = ran("train", plans / "plan1.json", "--steps", 6, "--lr", 0.05, "--json")
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses


def ran(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_two_ranks_train_as_one_and_go_on_from_a_checkpoint(
    plans: Path, one: list[float], tmp_path: Path
) -> None:
    """Single precision: sums over two shards instead of one differ in the last of 24 bits."""
    options = ("--lr", 0.05, "--json", "--checkpoint", tmp_path)
    begun = ran("train", plans / "plan2.json", "--steps", 3, *options, "--trace", tmp_path / "trace.json")
    assert (begun.returncode, begun.stderr) == (0, "")
    # The checkpoint of two ranks is read by one.
    went_on = ran("train", plans / "plan1.json", "--steps", 6, *options, "--resume", tmp_path)
    assert (went_on.returncode, went_on.stderr) == (0, "")
    first, second = json.loads(begun.stdout), json.loads(went_on.stdout)
    assert (first["steps"], second["first_step"], second["steps"]) == (3, 4, 6)
    assert first["losses"] + second["losses"] == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in timed} == {"forward", "backward", "all_reduce", "update"}
    assert all(event["dur"] > 0 for event in timed)


def test_a_trace_has_all_tasks_of_a_plan_whose_messages_take_time(tmp_path: Path) -> None:
    """Taking a message is a task of the plan, and a part of what ranks do anyway when it is run."""
    write_machine(resolve("cpu:1x2").with_message_overhead(5e-5), tmp_path / "here.yaml")
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    options = ["--tiny", "--machine", tmp_path / "here.yaml", "--strategy", "model_parallel", "-o", plan]
    assert ran("simulate", "--model", "mlp", *options).returncode == 0
    begun = ran("train", plan, "--steps", 2, "--trace", trace)
    assert (begun.returncode, begun.stderr) == (0, "")
    tasks = read_plan(plan).simulated().tasks
    timed = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert Counter(event["cat"] for event in timed) == Counter(task.kind.value for task in tasks.tasks)
    taken = [event for event in timed if event["cat"] == "take"]
    assert taken
    assert all(event["dur"] == 0 for event in taken)
    shown = ran("report", plan, "--actual", trace, "-o", tmp_path / "report.html")
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_run_goes_on_with_a_new_plan_on_fewer_and_on_more_devices(
    plans: Path, one: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, then one, then two that torchrun starts with a plan for one: as one process."""
    options = ("--lr", 0.05, "--json", "--checkpoint", tmp_path)
    losses = json.loads(ran("train", plans / "plan2.json", "--steps", 2, *options).stdout)["losses"]
    again = ("--resume", tmp_path, "--replan")
    fewer = ["train", plans / "plan2.json", "--steps", 4, *options, *again, "--machine", "cpu:1x1"]
    capsys.readouterr()
    assert main([str(argument) for argument in fewer]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    assert (found["ranks"], found["first_step"]) == (1, 3)
    losses += found["losses"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "soapstone", "train", plans / "plan1.json", "--steps", 6, *options, *again]
    more = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert more.returncode == 0, more.stderr
    found = json.loads(more.stdout)
    assert (found["ranks"], found["first_step"]) == (2, 5)
    assert losses + found["losses"] == pytest.approx(one, rel=1e-5)
    kept = json.loads((tmp_path / "replanned.json").read_text())
    assert kept["machine"]["name"] == "cpu:1x1"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replan"], "--replan goes on from a checkpoint: say which with --resume DIR"),
        (["--machine", "cpu:1x2"], "--machine is for --replan: a plan has its own"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], sentence: str, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(plans / "plan2.json"), *options]) == 2
    assert capsys.readouterr().err == f"soapstone: {sentence}\n"


def test_torchrun_starts_the_ranks_just_as_well(plans: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "soapstone", "train", str(plans / "plan2.json"), "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


def test_two_nodes_of_torchrun_train_as_one_process(plans: Path, one: list[float]) -> None:
    """Two agents that find each other by themselves, a rank each; rank 0 speaks, on either."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes"]
    torchrun += ["--local-addr", "127.0.0.1"]
    options = ["--steps", "3", "--lr", "0.05", "--json"]
    command = [*torchrun, "-m", "soapstone", "train", str(plans / "plan2.json"), *options]
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    (document,) = [out for out, _ in said if out]
    assert json.loads(document)["losses"] == pytest.approx(one[:3], rel=1e-5)


def test_a_wrong_number_of_ranks_is_refused_in_one_sentence(plans: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = ran("train", plans / "plan2.json", **alone)
    assert done.returncode == 2
    assert done.stderr == (
        "soapstone: the plan is for 2 devices and there is one rank: start 2, one for each device\n"
    )


def test_a_loss_that_is_no_number_ends_all_ranks(plans: Path) -> None:
    done = ran("train", plans / "plan2.json", "--steps", 50, "--lr", 1e30)
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "the loss is nan at step" in sentence


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.parametrize(("victim", "every"), [(0, 5), (1, 5), (1, 1)])
def test_a_killed_rank_ends_the_run_in_one_sentence(
    victim: int, every: int, plans: Path, tmp_path: Path
) -> None:
    """Also amid a checkpoint, which is nearly always being written if there is one at every step."""
    command = [*PROGRAM, "train", str(plans / "plan2.json"), "--steps", "1000000"]
    command += ["--checkpoint", str(tmp_path), "--every", str(every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + PATIENCE_S
        while not (tmp_path / "latest").exists() and time.monotonic() < until:
            time.sleep(0.1)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        started = time.monotonic()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert time.monotonic() - started < 30
    (sentence,) = err.splitlines()
    expected = "rank 0 was ended by SIGKILL" if victim == 0 else "training stopped because rank 1 ended"
    assert expected in sentence
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    again = ran("train", plans / "plan2.json", "--steps", 1, "--resume", tmp_path)
    assert again.returncode == 0, again.stderr
    assert "already" in again.stdout


def test_a_batch_of_another_shape_is_refused(plans: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def batches():\n"
        "    yield torch.randn(8, 1, 20, 20), torch.randint(8, (8,))\n"
        "    yield torch.randn(6, 1, 20, 20), torch.randint(8, (6,))\n"
    )
    done = ran("train", plans / "plan2.json", "--data", f"{file}:batches")
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "has shape [6, 1, 20, 20] where the plan is for [8, 1, 20, 20]" in sentence


def test_torchruns_restart_goes_on_from_the_checkpoint(plans: Path, tmp_path: Path) -> None:
    """A rank is killed; torchrun starts all again; the run ends as if nothing had happened."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", "400", "--lr", "0.05", "--checkpoint", str(tmp_path), "--every", "25", "--json"]
    command = [
        *torchrun,
        "--max-restarts",
        "1",
        "-m",
        "soapstone",
        "train",
        str(plans / "plan2.json"),
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + PATIENCE_S
        while not (tmp_path / "latest").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    done = json.loads(out)
    assert done["steps"] == 400
    assert done["first_step"] > 1
