"""`soapstone plan`, from arguments to exit code, output and files."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles.shell import Soapstone

from soapstone.cli.searching import seconds_of
from soapstone.machine import preset, write_machine
from soapstone.plans import read_plan
from soapstone.search.find import SEARCHES
from soapstone.search.report import SearchReport, StopReason

LENET = ("lenet", "--tiny", "--machine", "k80:1x4")
QUICK = ("--proposals", 40, "--threads", 1)
PROGRAM = [sys.executable, "-m", "soapstone"]
PATIENCE_S = 300


def test_a_plan_for_people(soapstone: Soapstone, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = soapstone("plan", *LENET, *QUICK, "--seed", 3, "-o", path)
    assert (code, err) == (0, "")
    plan = read_plan(path)
    lines = out.splitlines()
    assert lines[0].startswith("lenet on k80:1x4: ")
    assert "samples/s (16 a step)" in lines[0]
    assert " data parallelism (" in lines[1]
    assert " krizhevsky, the best expert's strategy (" in lines[2]
    assert lines[3].startswith("fits in memory: at most ")
    assert " with small gradients summed together, as `soapstone train` does (data parallelism " in lines[4]
    assert lines[5] == "compute times: analytic, none was measured on a device"
    assert " 12 GiB on node0/gpu" in lines[3]
    assert "Why it is faster than data parallelism:" in lines
    assert any(line.startswith("  It moves ") for line in lines)
    assert any(line.startswith("  A device waits ") for line in lines)
    assert any(line.startswith("  auto, seed 3: ") for line in lines)
    for name in ("data_parallel", "optcnn", "krizhevsky", "model_parallel", "random"):
        assert any(line.strip().startswith(name) for line in lines), name
    assert lines[-1] == f"written to {path}"
    assert plan.model == "lenet:tiny"


def test_a_plan_for_programs(soapstone: Soapstone, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = soapstone("plan", *LENET, *QUICK, "--optimizer", "adam", "-o", path, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    plan = read_plan(path)
    assert (found["model"], found["machine"], found["samples"]) == ("lenet:tiny", "k80:1x4", 16)
    assert found["makespan_s"] == plan.prediction.makespan_s == plan.simulated().prediction.makespan_s
    assert found["bucketed_s"] == plan.simulated(in_buckets=True).timeline.makespan_s
    assert found["moved_bytes"] == plan.prediction.moved_bytes
    assert found["moved_bytes"] == found["gradient_bytes"] + found["activation_bytes"]
    assert [each["peak_bytes"] for each in found["memory"]] == list(plan.prediction.memory_bytes)
    assert found["fits"] is True
    assert found["optimizer"] == plan.optimizer == "adam"
    assert set(found["baselines"]) == {"data_parallel", "krizhevsky"}
    for rival in found["baselines"].values():
        assert rival["speedup"] == rival["makespan_s"] / found["makespan_s"] >= 1
        assert rival["seems_to_fit"] is True
    assert sum(row["blocks"] for row in found["decisions"]) == len(plan.strategy.blocks)
    assert len(found["reasons"]) == 3
    assert found["search"] == json.loads(path.read_text(encoding="utf-8"))["search"]
    assert found["search"]["proposals"] == sum(start["proposals"] for start in found["search"]["starts"])
    assert found["output"] == str(path)


def test_baselines_beside_a_plan_are_those_of_simulate(soapstone: Soapstone) -> None:
    beside = json.loads(soapstone("plan", *LENET, *QUICK, "--json").out)["baselines"]
    for name in ("data_parallel", "krizhevsky"):
        model, *rest = LENET
        alone = json.loads(soapstone("simulate", "--model", model, *rest, "--strategy", name, "--json").out)
        assert beside[name]["makespan_s"] == alone["makespan_s"]
        assert beside[name]["moved_bytes"] == alone["moved_bytes"]


def test_the_seed_and_the_proposals_decide_what_is_found(soapstone: Soapstone, tmp_path: Path) -> None:
    def strategy(seed: int) -> object:
        path = tmp_path / "plan.json"
        assert soapstone("plan", *LENET, *QUICK, "--seed", seed, "-o", path, "--json").code == 0
        return json.loads(path.read_text(encoding="utf-8"))["strategy"]

    assert strategy(5) == strategy(5)


def test_a_plan_reloads_and_simulates_to_the_identical_prediction(
    soapstone: Soapstone, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert soapstone("plan", *LENET, *QUICK, "-o", first).code == 0
    plan = read_plan(first)
    assert plan.simulated().prediction == plan.prediction
    code, out, err = soapstone("simulate", first, "-o", second, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan_s"] == plan.prediction.makespan_s
    assert read_plan(second) == plan
    assert second.read_bytes() == first.read_bytes()


def test_a_plan_trains(soapstone: Soapstone, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ("lenet", "--tiny", "--machine", "cpu:1x2", "--batch", 8)
    assert soapstone("plan", *options, *QUICK, "-o", path, "--json").code == 0
    done = subprocess.run(
        [*PROGRAM, "train", str(path), "--steps", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    trained = json.loads(done.stdout)
    assert (trained["ranks"], trained["steps"], len(trained["losses"])) == (2, 2, 2)
    assert trained["predicted_step_s"] == read_plan(path).prediction.makespan_s


def test_slack_is_time_given_for_quieter_links(soapstone: Soapstone) -> None:
    strict = json.loads(soapstone("plan", *LENET, *QUICK, "--json").out)
    slack = json.loads(soapstone("plan", *LENET, *QUICK, "--slack", 0.5, "--json").out)
    assert strict["makespan_s"] <= slack["makespan_s"] <= strict["makespan_s"] * 1.5
    assert slack["moved_bytes"] < strict["moved_bytes"]


def test_the_papers_search_is_another(soapstone: Soapstone) -> None:
    code, out, _ = soapstone("plan", *LENET, *QUICK, "--search", "mcmc-paper", "--json")
    assert code == 0
    search = json.loads(out)["search"]
    assert search["method"] == "mcmc-paper"
    assert {start["name"] for start in search["starts"]} == {"data_parallel", "krizhevsky", "random"}


@pytest.mark.parametrize(
    ("stop", "bound_share", "said"),
    [
        (StopReason.OPTIMAL, 1.0, "  It is proved that nothing faster exists, copies of shards apart."),
        (StopReason.BUDGET, 0.8, "  It is at most 25.0% above the optimum (lower bound "),
        (StopReason.BUDGET, 0.2, "  It is at most 5.0 times the optimum (lower bound "),
    ],
)
def test_another_search_joins_by_one_entry_and_its_proof_is_told(
    soapstone: Soapstone,
    monkeypatch: pytest.MonkeyPatch,
    stop: StopReason,
    bound_share: float,
    said: str,
) -> None:
    def other(*arguments: Any) -> SearchReport:
        report = SEARCHES["mcmc"](*arguments)
        bound_s = report.makespan_s * bound_share
        return replace(report, method="other", stop=stop, lower_bound_s=bound_s)

    monkeypatch.setattr("soapstone.search.find.SEARCHES", {"other": other})
    code, out, err = soapstone("plan", *LENET, *QUICK, "--search", "other")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert any(line.startswith("  other, seed 0: ") and line.endswith(stop) for line in lines)
    told = [line for line in lines if "optimum" in line or "proved" in line]
    assert [line[: len(said)] for line in told] == [said]


def with_memory(path: Path, memory_bytes: int) -> Path:
    """Four K80s with less memory, as a machine file."""
    whole = preset("k80:1x4")
    small = replace(whole.devices[0].kind, name="small", memory_bytes=memory_bytes)
    devices = tuple(replace(device, kind=small) for device in whole.devices)
    write_machine(replace(whole, name="small", devices=devices), path)
    return path


def test_a_plan_that_fits_is_preferred_to_a_faster_one_that_does_not(
    soapstone: Soapstone, tmp_path: Path
) -> None:
    """Unlimited, the best plan holds most of LeNet on one device; here no device has room for that."""
    free = json.loads(soapstone("plan", *LENET, *QUICK, "--json").out)
    most = max(each["peak_bytes"] for each in free["memory"])
    shared = json.loads(
        soapstone("simulate", "--model", LENET[0], *LENET[1:], "--strategy", "krizhevsky", "--json").out
    )
    least = max(each["peak_bytes"] for each in shared["memory"])
    assert least < most
    machine = with_memory(tmp_path / "small.yaml", least)
    model, tiny, *_ = LENET
    code, out, _ = soapstone("plan", model, tiny, "--machine", machine, *QUICK, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is True
    assert all(each["peak_bytes"] <= each["capacity_bytes"] == least for each in found["memory"])
    assert found["makespan_s"] > free["makespan_s"]


def test_a_plan_that_does_not_fit_says_so(soapstone: Soapstone, tmp_path: Path) -> None:
    machine, path = with_memory(tmp_path / "tiny.yaml", 1024), tmp_path / "plan.json"
    model, tiny, *_ = LENET
    code, out, err = soapstone("plan", model, tiny, "--machine", machine, *QUICK, "-o", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].endswith(", but more memory than there is)")  # data parallelism
    assert lines[3].startswith("DOES NOT FIT in memory: ")
    plan = read_plan(path)
    assert not plan.prediction.fits(plan.machine)
    assert plan.search is not None
    assert plan.search["fits"] is False


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    """A real process with a terminal for its progress gets a real SIGINT once it shows a best."""
    path, (ours, theirs) = tmp_path / "plan.json", pty.openpty()
    arguments = [*LENET, "--budget", "1h", "--seed", "1", "-o", str(path), "--json"]
    # Where the tests themselves run in the background, SIGINT is ignored, and children inherit that.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", heeding, *PROGRAM[1:], "plan", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"best " not in seen:
        seen += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            some = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not some:
            break
        seen += some
    out, _ = process.communicate(timeout=PATIENCE_S)
    os.close(ours)
    assert process.returncode == 0
    assert b"soapstone: note: the search was interrupted; this is the best so far" in seen
    assert b"Traceback" not in seen
    found, plan = json.loads(out), read_plan(path)
    assert found["search"]["stop"] == "it was interrupted"
    assert found["makespan_s"] == plan.prediction.makespan_s
    assert plan.simulated().prediction == plan.prediction


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [("30s", 30), ("5m", 300), ("0.5h", 1800), ("90", 90), ("1.5 s", 1.5), ("20ms", 0.02)],
)
def test_budgets(budget: str, seconds: float) -> None:
    assert seconds_of(budget) == seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Missing argument 'MODEL'"),
        (("lenet",), "Missing option '--machine'"),
        (("lenett", "--machine", "cpu:1x2"), "lenett"),
        (("lenet", "--machine", "cpu:0x2"), "0 nodes is outside 1 to"),
        ((*LENET, "--budget", "30x"), "--budget is '30x', which is not a time to search; write seconds"),
        ((*LENET, "--budget", "-5s"), "--budget is '-5s'; it must be above 0"),
        ((*LENET, "--budget", "0"), "--budget is '0'; it must be above 0"),
        ((*LENET, "--budget", "1e999h"), "at most a year"),
        ((*LENET, "--budget", "nan"), "--budget is 'nan'"),
        ((*LENET, "--proposals", "0"), "--proposals"),
        ((*LENET, "--threads", "0"), "--threads"),
        ((*LENET, "--seed", "-1"), "--seed"),
        ((*LENET, "--slack", "nan"), "--slack"),
        ((*LENET, "--slack", "-0.1"), "--slack"),
        ((*LENET, "--search", "mcmcc"), "there is no search 'mcmcc'"),
        ((*LENET, "--optimizer", "lion"), "there is no optimizer 'lion'"),
        ((*LENET, "--batch", "0"), "at least one sample"),
        ((*LENET, "-o", "no/such/folder/plan.json"), "no/such/folder/plan.json is not a place for a file"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    soapstone: Soapstone,
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = soapstone("plan", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("soapstone: ")
    assert sentence in err
    assert err.count("\n") == 1
