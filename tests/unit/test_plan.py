"""Plans: saved, read back to the last bit, and refused in one sentence when damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from soapstone.errors import PlanError, SoapstoneError
from soapstone.graph import GraphBuilder
from soapstone.machine import preset
from soapstone.plans import Plan, Prediction, read_plan, simulation, write_plan, write_text
from soapstone.plans.document import document_of, plan_from
from soapstone.report.trace import trace_document
from soapstone.sim.document import tasks_document
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

MACHINE = preset("k80:1x4")


@pytest.fixture(scope="module")
def plan() -> Plan:
    build = GraphBuilder("net")
    x = build.input("x", (8, 16))
    (h,) = build.add("linear", [x, build.weight("w1", (32, 16)), None], name="fc1")
    (r,) = build.add("relu", [h], name="relu")
    (y,) = build.add("linear", [r, build.weight("w2", (4, 32)), None], name="fc2")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    placements = {
        "fc1": placed({"b": 2, "o": 2}, (3, 1, 0, 2)),
        "relu": Placement((), (0, 1), copies=2),
        "fc2": placed({"i": 2}, (0, 1)),
        "loss": Placement((), (3,)),
    }
    strategy = Strategy(build.graph(loss=loss), placements, frozenset({"relu"}))
    found = simulation(strategy, MACHINE, optimizer="adam")
    search = {"name": "by hand", "curve": [[0.0, 1.5]], "note": None}
    return Plan(strategy, MACHINE, found.prediction, "net:tiny", optimizer="adam", search=search)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_a_plan_reads_back_and_predicts_the_same(plan: Plan, path: Path) -> None:
    write_plan(plan, path)
    found = read_plan(path)
    assert found == plan
    assert found.simulated().prediction == plan.prediction
    first = path.read_bytes()
    write_plan(found, path)
    assert path.read_bytes() == first


def test_what_a_plan_says(plan: Plan) -> None:
    assert plan.samples_per_s == 8 / plan.prediction.makespan_s
    assert plan.prediction.fits(MACHINE)
    assert not Prediction(1.0, 0, (2**60, 0, 0, 0)).fits(MACHINE)
    assert len(plan.prediction.memory_bytes) == 4


def test_writing_replaces_the_file_at_once(plan: Plan, path: Path) -> None:
    path.write_text("old", encoding="utf-8")
    os.link(path, path.with_suffix(".old"))
    write_plan(plan, path)
    # The old file is another one now: nobody who has it open sees half of the new one.
    assert path.with_suffix(".old").read_text(encoding="utf-8") == "old"
    assert sorted(p.name for p in path.parent.iterdir()) == ["plan.json", "plan.old"]


def test_a_failed_write_leaves_the_old_file_and_no_other(plan: Plan, path: Path) -> None:
    path.write_text("old", encoding="utf-8")
    with pytest.raises(PlanError, match="cannot be written as JSON"):
        write_plan(Plan(plan.strategy, plan.machine, plan.prediction, search={"cost": float("nan")}), path)
    with pytest.raises(PlanError, match="cannot be written"):
        write_text("new", path.parent / "missing" / "plan.json")
    (path.parent / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written"):
        write_text("new", path.parent / "folder")
    assert path.read_text(encoding="utf-8") == "old"
    assert sorted(p.name for p in path.parent.iterdir()) == ["folder", "plan.json"]


def changed(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set a field, given by a dotted path."""

    def change(document: dict[str, Any]) -> None:
        *parents, last = key.split(".")
        for parent in parents:
            document = document[parent]
        document[last] = value

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        del document[key]

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed("format", "soapstone-graph"), "this is not a Soapstone plan"),
        (changed("version", 2), "the plan has version 2; this Soapstone reads version 1"),
        (changed("version", "1"), "the plan has version '1'"),
        (without("graph"), "the document lacks the field 'graph'"),
        (changed("extra", 1), "the document has the unknown field 'extra'"),
        (changed("costs", "guessed"), "costs is 'guessed'; this Soapstone knows analytic"),
        (changed("optimizer", "lion"), "optimizer is 'lion'; this Soapstone knows sgd, momentum, adam"),
        (changed("model", 7), "model must be text, not 7"),
        (changed("search", []), "search must be a mapping"),
        (changed("graph", {}), "is not a Soapstone graph"),
        (changed("graph.nodes", None), "damaged"),
        (changed("graph.nodes", [{}]), "damaged"),
        (changed("machine.name", 3), "name must be text, not 3"),
        (changed("machine", None), "must be a mapping of fields, not None"),
        (changed("strategy.placements.fc3", {}), "the graph has no node 'fc3'"),
        (changed("strategy.placements", {}), "has no placement"),
        (changed("strategy.apart", 1), "apart must be a list"),
        (
            changed("strategy.placements.loss", {"devices": [9]}),
            "block 'loss' is placed on device 9; the machine has 0 to 3",
        ),
        (changed("strategy.default", "data_parallel"), "default has no meaning here"),
        (
            changed("prediction.makespan_s", "soon"),
            "prediction.makespan_s must be a time in seconds, not 'soon'",
        ),
        (changed("prediction.makespan_s", -1.0), "must be a time in seconds, not -1.0"),
        (changed("prediction.moved_bytes", 1.5), "must be a whole number"),
        (changed("prediction.memory_bytes", [1, 2]), "speaks of 2 devices where the machine has 4"),
    ],
)
def test_a_wrong_plan_is_refused(
    plan: Plan, path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    document = json.loads(json.dumps(document_of(plan)))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PlanError) as refusal:
        read_plan(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b"{", "line 1, column 2 is not JSON"),
        (b"\x89PNG\r\n", "byte 0 is not UTF-8 text"),
        (b"[]", "this is not a Soapstone plan"),
        (b"null", "this is not a Soapstone plan"),
        (b'{"format": "soapstone-plan", "version": NaN}', "NaN is no number that a plan may hold"),
        (b'{"format": "soapstone-plan", "version": 1e999}', "1e999 is no number that a plan may hold"),
        (b'{"format": "soapstone-plan", "format": 1}', "the field 'format' is given twice"),
        (b"[" * 100_000, "this is not JSON of a plan"),
        (b'{"version": ' + b"9" * 5000 + b"}", "this is not JSON of a plan"),
        (None, "there is no such plan"),
    ],
)
def test_what_is_no_plan_is_refused(path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as refusal:
        read_plan(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_directory_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan cannot be read"):
        read_plan(tmp_path)


def test_a_plan_cut_off_anywhere_is_refused(plan: Plan, path: Path) -> None:
    write_plan(plan, path)
    whole = path.read_text(encoding="utf-8").rstrip()
    for length in range(0, len(whole), 97):
        path.write_text(whole[:length], encoding="utf-8")
        with pytest.raises(PlanError):
            read_plan(path)


def test_a_plan_with_any_value_replaced_is_read_or_refused(plan: Plan) -> None:
    """Whatever stands where, nothing but a SoapstoneError comes out."""
    random, text = Random(0), json.dumps(document_of(plan))
    values: list[object] = [None, -1, 0, 1e300, True, "", "x", [], [[]], {}, {"value": "x"}, 2**70]
    for _ in range(300):
        document = json.loads(text)
        parent: Any = document
        while True:
            key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            inner = parent[key]
            if not isinstance(inner, dict | list) or not inner or random.random() < 0.15:
                break
            parent = inner
        parent[key] = random.choice(values)
        with suppress(SoapstoneError):
            assert isinstance(plan_from(document, "plan"), Plan)


def test_unknown_costs_and_optimizers_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match="there are no costs 'analytics'; did you mean 'analytic'"):
        simulation(plan.strategy, MACHINE, costs="analytics")
    with pytest.raises(PlanError, match="there is no optimizer 'adams'; did you mean 'adam'"):
        simulation(plan.strategy, MACHINE, optimizer="adams")


def test_the_task_document_is_for_anyone_to_check(plan: Plan) -> None:
    """Algorithm 1 on what the document says gives the times that the document says."""
    found = plan.simulated()
    document = json.loads(json.dumps(tasks_document(found.tasks, found.timeline)))
    tasks = document["tasks"]
    assert [task["id"] for task in tasks] == list(range(len(tasks)))
    ready = [max((tasks[a]["end_s"] for a in task["after"]), default=0.0) for task in tasks]
    free = dict.fromkeys(document["resources"], 0.0)
    for task in sorted(tasks, key=lambda task: (ready[task["id"]], task["id"])):
        assert task["start_s"] == max(ready[task["id"]], free[task["resource"]])
        assert task["end_s"] == task["start_s"] + task["duration_s"]
        free[task["resource"]] = task["end_s"]
    assert document["makespan_s"] == max(task["end_s"] for task in tasks)
    assert {task["kind"] for task in tasks} >= {"forward", "backward", "update", "transfer"}
    assert all(
        (task["bytes"] > 0) == (task["kind"] not in ("forward", "backward", "update")) for task in tasks
    )


def test_the_trace_has_a_row_for_each_device_and_link_in_use(plan: Plan) -> None:
    found = plan.simulated()
    trace = json.loads(json.dumps(trace_document(found.tasks, found.timeline, MACHINE, "a title")))
    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    done = [e for e in events if e["ph"] == "X"]
    assert len(done) == len(found.tasks.tasks)
    assert {(e["pid"], e["tid"]) for e in done} <= rows.keys()
    assert [name for (pid, _), name in rows.items() if pid == 1] == [
        f"{i}: node0/gpu{i} (k80)" for i in range(4)
    ]
    assert "node0/pcie-shared" in rows.values()
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "devices of k80:1x4",
        "links of k80:1x4",
    }
    for event in done:
        task = found.tasks.tasks[event["args"]["id"]]
        assert (event["name"], event["cat"]) == (task.name, task.kind.value)
        assert event["dur"] == pytest.approx(task.duration_s * 1e6)
        assert event["args"].get("bytes", 0) == task.size_bytes
    assert [e["ts"] for e in done] == sorted(e["ts"] for e in done)
