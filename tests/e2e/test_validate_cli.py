"""`soapstone validate` with real ranks: strategies are run, compared, and half of them held out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from soapstone.cli.main import main
from soapstone.machine import resolve, write_machine
from soapstone.machine.cores import usable_cores
from soapstone.plans import read_plan
from soapstone.search.baselines import BASELINES, baseline
from soapstone.validation.running import MOST_TIMES

PATIENCE_S = 180


def test_strategies_are_run_and_compared(tmp_path: Path) -> None:
    """The plan of the fastest is written, for the machine that was asked for."""
    machine = resolve("cpu:1x2").with_message_overhead(2e-5)
    write_machine(machine, tmp_path / "here.yaml")
    here, written = str(tmp_path / "here.yaml"), tmp_path / "fastest.json"
    options = ["--tiny", "--machine", here, "--strategies", "4", "--steps", "2", "--budget", "3s"]
    ran = subprocess.run(
        [sys.executable, "-m", "soapstone", "validate", "lenet", *options, "--json", "-o", str(written)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["costs"] == "measured"
    assert [each["used_for"] for each in told["strategies"]] == ["fitting", "reporting"] * 2
    assert told["summary"]["count"] == 2
    assert told["summary_fitted"]["count"] == 2
    for each in told["strategies"]:
        assert each["predicted_s"] > 0
        assert each["actual_s"] > 0
        assert each["error"] == pytest.approx((each["predicted_s"] - each["actual_s"]) / each["actual_s"])
        assert max(each["actual_bytes"]) > 0
    assert len(told["worst"]) == 2
    assert all(each["tasks"] for each in told["worst"])
    assert told["measured"]["failed"] == {}
    # Of one rank, and of two, where each has a core.
    assert len(told["measured"]["crowding"]["in_step"]) == (2 if usable_cores() > 1 else 0)
    rounds = told["measured"]["crowding"]["unsteady"]["rounds"]
    assert all(len(each[way]) == 2 and min(each[way]) > 0 for each in rounds for way in ("alone", "each"))
    assert bool(rounds) == bool(told["measured"]["crowding"]["in_step"])
    assert told["steps"] in range(2, 2 * MOST_TIMES + 1)
    longer = {"message_s", "piece_s", "call_s", "came_byte_s"}
    assert set(told["measured"]["longer_in_steps"]) == longer
    fastest = min(told["strategies"], key=lambda each: each["actual_s"])["strategy"]
    best = min(told["strategies"], key=lambda each: each["predicted_s"])["strategy"]
    assert (told["fastest"], told["best_predicted"]) == (fastest, best)
    assert told["loss"] >= 0
    assert list(told["took_s"]) == ["drawing", "measuring", "rehearsing", "running", "predicting"]
    assert min(told["took_s"].values()) > 0
    plan = read_plan(written)
    assert plan.machine == machine
    assert (plan.model, plan.costs) == ("lenet:tiny", "measured")
    assert plan.simulated().prediction == plan.prediction
    if fastest in BASELINES:
        assert plan.strategy.placements == baseline(fastest, plan.graph, machine).placements


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("lenet", "--machine", "cpu:2x2"), "has 2 nodes"),
        (("lenet", "--machine", "cpu:1x2", "--costs", "guessed"), "no costs 'guessed'"),
        (("lenet", "--machine", "cpu:1x2", "--statistic", "mean"), "no statistic 'mean'"),
        (("lenet", "--machine", "nowhere:1x2"), "nowhere"),
        (("lenet", "--machine", "cpu:1x2", "--budget", "soon"), "is no time"),
        (("lenet", "--machine", "cpu:1x2", "-o", "no/where/plan.json"), "is not a place for a file"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1
