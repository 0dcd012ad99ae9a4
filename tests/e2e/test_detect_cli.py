"""`soapstone machine detect` with real ranks: the file it writes is a machine to plan for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from soapstone.cli.main import main
from soapstone.cli.outcome import CLOSED_PIPE
from soapstone.machine import read_machine

PATIENCE_S = 120


def test_a_detected_machine_can_be_planned_for(tmp_path: Path) -> None:
    target = tmp_path / "here.yaml"
    command = [sys.executable, "-m", "soapstone", "machine", "detect", "--ranks", "2", "-o", str(target)]
    ran = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    machine = read_machine(target)
    assert len(machine.devices) == 2
    assert machine.bandwidth(0, 1) > 0
    assert told["backend"] == "shared memory"
    assert {message["what"] for message in told["messages"]} == {"alone", "at once", "all-reduce"}
    assert all(message["seconds"] > 0 for message in told["messages"])
    assert set(told["fit"]["errors"]) == {"alone", "at once", "all-reduce"}
    assert main(["machine", "show", str(target)]) == 0
    assert main(["simulate", "--model", "lenet", "--tiny", "--machine", str(target)]) == 0


def test_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    """As in `soapstone machine detect -o here.yaml | head -1`: the file is there, and nobody complains."""
    target = tmp_path / "here.yaml"
    with subprocess.Popen(
        [sys.executable, "-m", "soapstone", "machine", "detect", "--ranks", "2", "-o", str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        said = ran.stderr.read()
        assert ran.wait(PATIENCE_S) == CLOSED_PIPE
    assert said == b""
    assert len(read_machine(target).devices) == 2


def test_ranks_end_with_the_command_that_is_killed() -> None:
    """By a signal that it cannot see: nothing is left that computes."""
    command = [sys.executable, "-m", "soapstone", "machine", "detect", "--ranks", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ran:
        children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children")
        ranks: list[str] = []
        until = monotonic() + PATIENCE_S
        while len(ranks) < 2 and monotonic() < until:
            sleep(0.05)
            ranks = children.read_text(encoding="ascii").split()
        assert len(ranks) == 2
        ran.kill()
    while any(map(_is_at_work, ranks)) and monotonic() < until:
        sleep(0.05)
    assert not any(map(_is_at_work, ranks))


def _is_at_work(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_rank_has_no_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "one.yaml"
    assert main(["machine", "detect", "--ranks", "1", "--name", "mine", "-o", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["fit"], told["messages"]) == (None, [])
    machine = read_machine(target)
    assert (machine.name, len(machine.devices), machine.links) == ("mine", 1, ())
    assert machine.devices[0].kind.peak_flops_per_s["f32"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ranks", "0"), "--ranks is from 1"),
        (("--ranks", "1", "--device", "tpu"), "no device 'tpu'"),
        (("--ranks", "1", "-o", "no/such/folder/m.yaml"), "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "detect", *arguments]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1
