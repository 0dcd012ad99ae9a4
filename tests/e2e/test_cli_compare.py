"""`soapstone compare`, from arguments to exit code and output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles.shell import Soapstone

from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.machine.units import SECONDS
from soapstone.search.baselines import BASELINES, baseline
from soapstone.search.find import Options, Settled, WhyInstead, settled
from soapstone.search.report import SearchReport

LENET = ("lenet", "--tiny", "--machine", "k80:1x4")
QUICK = ("--proposals", 40, "--threads", 1)
REFUSED = ["wu", "megatron", "dlrm_expert"]
APPLY = [name for name in BASELINES if name not in REFUSED]


def test_a_table_for_people(soapstone: Soapstone) -> None:
    code, out, err = soapstone("compare", *LENET, *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "lenet on k80:1x4, 16 samples a step"
    first = [line.split()[0] for line in lines if line.strip()]
    assert [name for name in first if name in (*APPLY, "found")] == [*APPLY, "found"]
    assert f"not applicable: {', '.join(REFUSED)} (--json says why)" in lines
    assert lines[-1] == "compute times: analytic, none was measured on a device"


def test_every_strategy_is_what_simulate_says_of_it(soapstone: Soapstone) -> None:
    code, out, err = soapstone("compare", *LENET, *QUICK, "--optimizer", "adam", "--json")
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    strategies = {each["name"]: each for each in document["strategies"]}
    assert list(strategies) == [*APPLY, "found"]
    assert list(document["not_applicable"]) == REFUSED
    assert document["not_applicable"]["wu"] == "it has no recurrent layers"
    model, *rest = LENET
    for name in ("data_parallel", "krizhevsky", "random"):
        options = ("--strategy", name, "--optimizer", "adam", "--json")
        alone = json.loads(soapstone("simulate", "--model", model, *rest, *options).out)
        for figure in ("makespan_s", "bucketed_s", "moved_bytes", "samples_per_s", "fits"):
            assert strategies[name][figure] == alone[figure]
        assert strategies[name]["peak_bytes"] == max(each["peak_bytes"] for each in alone["memory"])
        devices = [each["busy_s"] for each in alone["resources"] if "gpu" in each["name"]][:4]
        assert strategies[name]["compute_s"] == pytest.approx(sum(devices))
    reference = strategies["data_parallel"]
    for each in strategies.values():
        assert each["speedup"] == reference["makespan_s"] / each["makespan_s"]
        assert each["bucketed_speedup"] == reference["bucketed_s"] / each["bucketed_s"]
        assert each["bucketed_samples_per_s"] == 16 / each["bucketed_s"]
    started = {start["name"] for start in document["search"]["starts"]} & set(strategies)
    assert len(started) >= 4
    for name in started - {"random"}:  # a search draws a random start of its own
        assert strategies["found"]["makespan_s"] <= strategies[name]["makespan_s"]


def test_memory_can_be_left_out(soapstone: Soapstone) -> None:
    code, out, err = soapstone("compare", *LENET, *QUICK, "--no-memory", "--json")
    assert (code, err) == (0, "")
    for each in json.loads(out)["strategies"]:
        assert (each["peak_bytes"], each["fits"]) == (None, None)
        assert each["makespan_s"] > 0


def test_times_and_speedups_are_those_of_training(soapstone: Soapstone) -> None:
    """Data parallelism of LeNet takes twice as long where each gradient is summed by itself."""
    found = json.loads(soapstone("compare", *LENET, *QUICK, "--no-memory", "--json").out)
    lines = soapstone("compare", *LENET, *QUICK, "--no-memory").out.splitlines()
    assert any(line.startswith("per iteration, throughput and speedup are with small gr") for line in lines)
    told = {line.split()[0]: line for line in lines if line.strip()}
    for each in found["strategies"]:
        trained, one_by_one = (SECONDS.short_text(each[key]) for key in ("bucketed_s", "makespan_s"))
        line = told[each["name"]]
        assert line.split(None, 1)[1].startswith(f"{trained} ")
        assert f" {each['bucketed_speedup']:.3g} " in line
        assert f" {one_by_one} " in line
    shared = found["strategies"][0]
    assert shared["makespan_s"] > 1.5 * shared["bucketed_s"]


def as_if_found(name: str) -> Callable[..., Settled]:
    """Settling as it is, of a baseline in the place of what was found."""

    def taken(
        report: SearchReport, machine: Machine, costs: AnalyticCosts, model: str, options: Options
    ) -> Settled:
        other = baseline(name, report.strategy.graph, machine, costs, options.seed)
        unchanged = replace(options, search="mcmc")
        done = settled(replace(report, strategy=other), machine, costs, model, unchanged)
        return replace(done, instead=name, why=WhyInstead.BUCKETS)

    return taken


def test_without_memory_the_same_plan_is_found(soapstone: Soapstone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soapstone.cli.compare.settled", as_if_found("model_parallel"))
    documents = [
        json.loads(soapstone("compare", *LENET, *QUICK, *options, "--json").out)
        for options in ((), ("--no-memory",))
    ]
    for document in documents:
        strategies = {each["name"]: each for each in document["strategies"]}
        assert strategies["found"]["makespan_s"] == strategies["model_parallel"]["makespan_s"]
        assert document["search"]["instead"] == "model_parallel"
    assert documents[1]["strategies"][-1]["peak_bytes"] is None


def test_a_baseline_that_is_faster_than_what_was_found_is_named(
    soapstone: Soapstone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soapstone.cli.compare.settled", as_if_found("random"))
    document = json.loads(soapstone("compare", *LENET, *QUICK, "--json").out)
    *others, found = document["strategies"]
    best = min(others, key=lambda each: each["bucketed_s"])
    assert document["faster_than_found"] == best["name"]
    times = [SECONDS.short_text(each["bucketed_s"]) for each in (best, found)]
    note = f"a baseline is faster than what was found: {best['name']}, {times[0]} against {times[1]}"
    assert note in document["notes"]
    assert note in soapstone("compare", *LENET, *QUICK).out.splitlines()


DEEP = """
from torch import nn, randn
from torch.nn.functional import mse_loss

def deep(batch=1024):
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), (randn(batch, 512), randn(batch, 512)), mse_loss
"""

SLOW = """
soapstone_machine: 1
name: slow
kinds:
  k: {memory: 16 GiB, memory_bandwidth: 600 GB/s, launch_overhead: 5 us, peak: {f32: 1 TFLOP/s}}
nodes:
- name: n
  devices: [{name: g0, kind: k}, {name: g1, kind: k}, {name: g2, kind: k}, {name: g3, kind: k}]
  switches: [hub]
  links:
  - {name: l0, between: [g0, hub], bandwidth: 0.31 GB/s, latency: 5 us}
  - {name: l1, between: [g1, hub], bandwidth: 0.31 GB/s, latency: 5 us}
  - {name: l2, between: [g2, hub], bandwidth: 0.31 GB/s, latency: 5 us}
  - {name: l3, between: [g3, hub], bandwidth: 0.31 GB/s, latency: 5 us}
"""


def test_proposals_leave_pipelines_out_and_say_so(soapstone: Soapstone, tmp_path: Path) -> None:
    model, machine = tmp_path / "deep.py", tmp_path / "slow.yaml"
    model.write_text(DEEP, encoding="utf-8")
    machine.write_text(SLOW, encoding="utf-8")
    code, out, _ = soapstone(
        "compare", f"{model}:deep", "--machine", machine, "--proposals", 10, "--threads", 1
    )
    assert code == 0
    (line,) = (line for line in out.splitlines() if "is faster than what was found" in line)
    assert line.startswith("a baseline is faster than what was found: pipeline, ")
    assert line.endswith("; with --proposals pipelines are not searched, give --budget instead")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("lenet",), "Missing option '--machine'"),
        (("lenet", "--machine", "gpu:1x4"), "gpu"),
        ((*LENET, "--budget", "soon"), "--budget is 'soon', which is not a time to search"),
        ((*LENET, "--search", "magic"), "there is no search 'magic'"),
        ((*LENET, "--optimizer", "lion"), "there is no optimizer 'lion'"),
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
    code, out, err = soapstone("compare", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("soapstone: ")
    assert sentence in err
    assert err.count("\n") == 1
