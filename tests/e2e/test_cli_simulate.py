"""`soapstone simulate`, from arguments to exit code, output and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.shell import Soapstone

from soapstone.cli.main import main
from soapstone.plans import read_plan

LENET = ("--model", "lenet", "--tiny", "--machine", "k80:1x4")


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["simulate", *LENET, "-o", str(path), "--json"]) == 0
    return path


def test_a_model_is_simulated_for_people(soapstone: Soapstone) -> None:
    code, out, err = soapstone("simulate", *LENET)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "lenet on k80:1x4, strategy data_parallel"
    assert "per iteration" in lines[1]
    assert "samples/s (16 a step)" in lines[1]  # four samples for each of four devices
    assert "with small gradients summed together" in lines[2]
    assert "all_reduce" in lines[3]
    assert "moved over links" in lines[4]
    assert "analytic" in lines[5]
    cells = [line.split() for line in lines]
    assert ["node0/gpu0"] in [row[:1] for row in cells]
    assert any(row[:1] == ["node0/pcie-shared"] and row[-2:-1] != [] for row in cells)
    memory = [line for line in lines if "12 GiB" in line]
    assert len(memory) == 4
    assert all("optimizer state" in line for line in memory)


def test_a_model_is_simulated_for_programs(soapstone: Soapstone) -> None:
    code, out, err = soapstone("simulate", *LENET, "--batch", 32, "--optimizer", "sgd", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["machine"], found["strategy"], found["samples"]) == ("k80:1x4", "data_parallel", 32)
    assert found["samples_per_s"] == pytest.approx(32 / found["makespan_s"])
    assert found["costs"] == "analytic"
    assert found["tasks"]["forward"] == found["tasks"]["backward"]
    assert found["fits"] is True
    assert all(0 <= resource["utilisation"] <= 1 for resource in found["resources"])
    assert sum(resource["bytes"] for resource in found["resources"]) == found["moved_bytes"]
    assert [memory["device"] for memory in found["memory"]] == [f"node0/gpu{i}" for i in range(4)]
    for memory in found["memory"]:
        assert memory["peak_bytes"] == sum(memory["parts_bytes"].values()) < memory["capacity_bytes"]
        assert "optimizer state" not in memory["parts_bytes"]


def test_a_plan_is_simulated_as_it_was(soapstone: Soapstone, plan_path: Path) -> None:
    plan = read_plan(plan_path)
    assert plan.model == "lenet:tiny"
    code, out, err = soapstone("simulate", plan_path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan_s"] == plan.prediction.makespan_s


def test_a_prediction_that_no_longer_holds_is_noted(
    soapstone: Soapstone, plan_path: Path, tmp_path: Path
) -> None:
    document = json.loads(plan_path.read_text(encoding="utf-8"))
    document["prediction"]["makespan_s"] *= 2
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document), encoding="utf-8")
    code, _, err = soapstone("simulate", changed, "--json")
    assert code == 0
    assert err.startswith(f"soapstone: note: {changed} says ")
    document["prediction"]["makespan_s"] /= 2
    document["prediction"]["moved_bytes"] += 1
    changed.write_text(json.dumps(document), encoding="utf-8")
    code, _, err = soapstone("simulate", changed, "--json")
    assert code == 0
    moved = document["prediction"]["moved_bytes"]
    assert f"says {moved:,} bytes over links, and simulating it gives {moved - 1:,}: " in err


def test_tasks_and_trace_are_written(soapstone: Soapstone, plan_path: Path, tmp_path: Path) -> None:
    tasks, trace = tmp_path / "tasks.json", tmp_path / "trace.json"
    code, out, _ = soapstone("simulate", plan_path, "--tasks", tasks, "--trace", trace, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(tasks.read_text(encoding="utf-8"))
    assert found["makespan_s"] == json.loads(out)["makespan_s"]
    assert set(found["tasks"][0]) == {
        "id", "kind", "name", "resource", "duration_s", "after", "start_s", "end_s", "bytes"
    }  # fmt: skip
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(found["tasks"])


def test_tasks_in_buckets_are_simulated_and_written(soapstone: Soapstone, tmp_path: Path) -> None:
    apart, together = tmp_path / "apart.json", tmp_path / "together.json"
    given = ("simulate", "--model", "lenet", "--tiny", "--machine", "p100:4x4", "--json", "--tasks")
    found = [
        json.loads(soapstone(*given, path, *more).out)
        for path, more in ((apart, ()), (together, ("--buckets",)))
    ]
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in (apart, together)]
    assert [document["makespan_s"] for document in documents] == [each["makespan_s"] for each in found]
    assert found[0]["bucketed_s"] == found[1]["bucketed_s"] == found[1]["makespan_s"] < found[0]["makespan_s"]
    assert found[1]["tasks"]["all_reduce"] == 16  # one ring
    assert any(task["name"].startswith("conv1.bias gradient and 9 more") for task in documents[1]["tasks"])


def test_a_strategy_by_hand(soapstone: Soapstone, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("default: single_device\n", encoding="utf-8")
    code, out, err = soapstone("simulate", *LENET, "--strategy", mine, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["moved_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give a plan file, or both --model and --machine."),
        (("--model", "lenet"), "give a plan file, or both --model and --machine."),
        (("plan.json", "--model", "lenet"), "--model does not go with a plan file"),
        (("plan.json", "--tiny"), "--tiny does not go with a plan file"),
        (("missing.json",), "missing.json: there is no such plan; check the path."),
        (("--model", "lenett", "--machine", "cpu:1x2"), "lenett"),
        (("--model", "lenet", "--machine", "cpu:0x2"), "0 nodes is outside 1 to"),
        ((*LENET, "--batch", "0"), "at least one sample"),
        ((*LENET, "--strategy", "data_paralel"), "there is no strategy 'data_paralel'"),
        ((*LENET, "--strategy", "missing.yaml"), "missing.yaml: the strategy file cannot be read"),
        ((*LENET, "--optimizer", "lion"), "there is no optimizer 'lion'"),
        ((*LENET, "-o", "no/such/folder/plan.json"), "no/such/folder/plan.json is not a place for a file"),
        ((*LENET, "--strategy", ""), "--strategy is empty"),
        ((*LENET, "-o", "same.json", "--tasks", "./same.json"), "same.json is named twice"),
        ((*LENET, "--strategy", "far.yaml"), "far.yaml: block 'conv2d_1' is placed on device 99"),
        ((*LENET, "--strategy", "twice.yaml"), "is given twice"),
        ((*LENET, "--strategy", "far.yaml", "-o", "far.yaml"), "far.yaml is what this command reads"),
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
    far = "default: single_device\nplacements: {conv2d_1: {devices: [99]}}\n"
    (tmp_path / "far.yaml").write_text(far, encoding="utf-8")
    (tmp_path / "twice.yaml").write_text("default: single_device\n" * 2, encoding="utf-8")
    code, out, err = soapstone("simulate", *arguments)
    assert (tmp_path / "far.yaml").read_text(encoding="utf-8") == far
    assert (code, out) == (2, "")
    assert err.startswith("soapstone: ")
    assert sentence in err
    assert err.count("\n") == 1
