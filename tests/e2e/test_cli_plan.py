"""`soapstone plan`, from arguments to exit code, output and files."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracles.shell import Soapstone

from soapstone.cli.searching import seconds_of
from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine, preset, write_machine
from soapstone.machine.units import SECONDS
from soapstone.plans import read_plan
from soapstone.search.find import SEARCHES
from soapstone.search.report import SearchReport, StartReport, StopReason
from soapstone.sim.outcome import bucketed_s

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
    assert lines[4].startswith(
        "small gradients are summed together, as `soapstone train` does; with each summed "
    )
    assert lines[5] == "compute times: analytic, none was measured on a device"
    assert " 12 GiB on node0/gpu" in lines[3]
    assert "Why it is faster than data parallelism:" in lines
    assert any(line.startswith("  It moves ") for line in lines)
    assert any(" waits " in line for line in lines)
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
        assert rival["bucketed_speedup"] == rival["bucketed_s"] / found["bucketed_s"]
        assert rival["seems_to_fit"] is rival["fits"] is True
    assert found["samples_per_s"] == 16 / found["makespan_s"]
    assert found["bucketed_samples_per_s"] == 16 / found["bucketed_s"]
    assert found["notes"] == []
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


PROVED = (
    "  Proved: none is faster of the strategies of whole batches and whole blocks that give each device at "
    "most one shard of a block, and each shard to one device"
)


@pytest.mark.parametrize(
    ("stop", "bound_share", "said"),
    [
        (StopReason.OPTIMAL, 1.0, f"{PROVED}; each gradient is summed by itself."),
        (StopReason.OPTIMAL_OF_RANGES, 0.8, f"{PROVED}, devices that follow each other by number; "),
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
    def other(graph: Graph, machine: Machine, costs: AnalyticCosts, *arguments: Any) -> SearchReport:
        report = SEARCHES["mcmc"](graph, machine, costs, *arguments)
        bound_s = bucketed_s(report.strategy, machine, costs) * bound_share
        return replace(report, method="other", stop=stop, lower_bound_s=bound_s)

    monkeypatch.setattr("soapstone.search.find.SEARCHES", {"other": other})
    code, out, err = soapstone("plan", *LENET, *QUICK, "--search", "other")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert any(line.startswith("  other, seed 0: ") and line.endswith(stop) for line in lines)
    told = [line for line in lines if "optimum" in line or "Proved" in line]
    assert [line[: len(said)] for line in told] == [said]


ODD = """
from torch import nn, randn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(729, 729, bias=False)

    def forward(self, x):
        return self.dense(x).sum()

def odd(batch=2187):
    return Odd(), (randn(batch, 729),)
"""

THIRDS = """
placements:
  linear: {degrees: {b: 3}, devices: [0, 1, 0]}
  sum_1: {degrees: {a: 3}, devices: [0, 1, 0]}
"""


def test_a_proof_says_among_which_strategies(soapstone: Soapstone, tmp_path: Path) -> None:
    """Nothing here divides by two: on two devices, thirds are faster than what is proved to be the best with
    one shard on each device."""
    model, strategy = tmp_path / "odd.py", tmp_path / "thirds.yaml"
    model.write_text(ODD, encoding="utf-8")
    strategy.write_text(THIRDS, encoding="utf-8")
    options = ("--machine", "p100:1x2")
    exact = ("--search", "exact", "--threads", 1)
    found = json.loads(soapstone("plan", f"{model}:odd", *options, *exact, "--json").out)
    by_hand = ("simulate", "--model", f"{model}:odd", *options, "--strategy", strategy, "--json")
    assert found["search"]["is_optimal"] is True
    assert json.loads(soapstone(*by_hand).out)["makespan_s"] < found["makespan_s"]
    for said in ("at most one shard of a block", "whole batches", "each gradient is summed by itself"):
        assert said in found["search"]["proved_among"]
    chains = json.loads(soapstone("plan", f"{model}:odd", *options, *QUICK, "--json").out)["search"]
    assert chains["proved_among"] is None
    assert "no more shards of a block than devices" in chains["bounded_among"]


@pytest.mark.parametrize("search", ["exact", "exact-ranges"])
def test_proposals_of_a_search_that_makes_none_are_refused(soapstone: Soapstone, search: str) -> None:
    code, out, err = soapstone("plan", *LENET, "--search", search, "--proposals", 50)
    assert (code, out) == (2, "")
    assert f"--proposals limits chains, and '--search {search}' is no chain" in err
    assert err.endswith("give --budget instead\n")


def test_one_device_is_not_said_to_be_several(soapstone: Soapstone) -> None:
    options = ("lenet", "--tiny", "--machine", "k80:1x1", "--batch", 16)
    code, _, err = soapstone("plan", *options, "--stages", 3, "--proposals", 5)
    assert code == 2
    assert "no pipeline of 3 stages for 16 samples on 1 device: " in err


def test_starts_that_do_not_fit_and_why_a_search_ended_are_told(
    soapstone: Soapstone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chain may take longer to move less, and only the paper's chains end by a rule of their own."""
    starts = tuple(
        StartReport(name, first_s, 0.002, 10, 5, StopReason.BUDGET)
        for name, first_s in (("large", 0.001), ("small", 0.003), ("moving less", 0.001))
    )

    def other(method: str, *arguments: Any) -> SearchReport:
        report = SEARCHES["mcmc"](*arguments)
        return replace(report, method=method, starts=starts, stop=StopReason.CONVERGED)

    searches = {name: partial(other, name) for name in ("mcmc", "mcmc-paper")}
    monkeypatch.setattr("soapstone.search.find.SEARCHES", searches)
    ends = {
        "mcmc": "it came to its end within the budget",
        "mcmc-paper": "half of each chain brought nothing",
    }
    for name, end in ends.items():
        lines = soapstone("plan", *LENET, *QUICK, "--search", name).out.splitlines()
        assert any(line.startswith(f"  {name}, seed 0: ") and f"; {end}" in line for line in lines)
        assert [("1 ms, seems not to fit" in line) for line in lines if " 2 ms " in line] == [
            True,
            False,
            False,
        ]


DEEP = """
from torch import nn, randint, randn
from torch.nn.functional import cross_entropy

def deep(batch=32):
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(48, 5)), (randn(batch, 48), randint(5, (batch,))), cross_entropy
"""


def test_the_verdict_is_that_of_the_plan_as_it_is_trained(soapstone: Soapstone, tmp_path: Path) -> None:
    """One by one, the gradients of ten small weights take data parallelism longer than a pipeline takes;
    summed together, as in training, they do not."""
    (tmp_path / "deep.py").write_text(DEEP, encoding="utf-8")
    options = (f"{tmp_path / 'deep.py'}:deep", "--machine", "k80:1x4", "--micro-batches", 4, *QUICK)
    found = json.loads(soapstone("plan", *options, "--json").out)
    rival = found["baselines"]["data_parallel"]
    assert rival["bucketed_speedup"] < 1 < rival["speedup"]
    code, out, _ = soapstone("plan", *options)
    assert code == 0
    lines = out.splitlines()
    assert f": {SECONDS.short_text(found['bucketed_s'])} per iteration" in lines[0]
    assert lines[2].startswith(f"{1 / rival['bucketed_speedup']:.3g} times as slow as data parallelism (")
    assert any(
        f"it takes {SECONDS.short_text(found['makespan_s'])} (data parallelism "
        f"{SECONDS.short_text(rival['makespan_s'])})" in line
        for line in lines
    )
    assert "Why it is slower than data parallelism:" in lines


def test_a_batch_that_does_not_divide_is_told(soapstone: Soapstone) -> None:
    options = ("lenet", "--tiny", "--machine", "k80:1x4", "--batch", 10, *QUICK)
    note = (
        "data parallelism is over 2 of 4 devices: the batch of 10 does not divide by 4; a batch of 12 would"
    )
    assert note in soapstone("plan", *options).out.splitlines()
    assert json.loads(soapstone("plan", *options, "--json").out)["notes"] == [note]


def test_a_rival_that_does_not_fit_is_told_by_its_exact_peak(soapstone: Soapstone, tmp_path: Path) -> None:
    """Estimates of memory are less than peaks under data parallelism: by them it would seem to fit."""
    shared = json.loads(soapstone("simulate", "--model", LENET[0], *LENET[1:], "--json").out)
    peak = max(each["peak_bytes"] for each in shared["memory"])
    machine = with_memory(tmp_path / "small.yaml", peak - 1)
    model, tiny, *_ = LENET
    options = (model, tiny, "--machine", machine, *QUICK)
    rival = json.loads(soapstone("plan", *options, "--json").out)["baselines"]["data_parallel"]
    assert (rival["fits"], rival["seems_to_fit"], rival["peak_bytes"]) == (False, False, peak)
    line = soapstone("plan", *options).out.splitlines()[1]
    assert "data parallelism (" in line
    assert "), which does not fit in memory: " in line


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
    assert "data parallelism (" in lines[1]
    assert "), which does not fit in memory: " in lines[1]
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
