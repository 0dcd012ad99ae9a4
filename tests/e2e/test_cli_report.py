"""`soapstone report`, `explain`, `diff`, `recommend` and `export`, from arguments to output and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracles.shell import Soapstone

from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import Plan, simulation, write_plan
from soapstone.report.trace import trace_document
from soapstone.search.baselines import baseline, data_parallel


class Files(NamedTuple):
    """Two plans of a small model, and a trace of the first."""

    first: Path
    second: Path
    trace: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("plans")
    machine = preset("p100:1x2")
    graph = load("lenet", tiny=True, devices=2).captured().graph
    found = Files(folder / "one.json", folder / "two.json", folder / "trace.json")
    for path, strategy in (
        (found.first, data_parallel(graph, machine)),
        (found.second, baseline("krizhevsky", graph, machine)),
    ):
        simulated = simulation(strategy, machine)
        write_plan(Plan(strategy, machine, simulated.prediction, "lenet:tiny"), path)
        if path == found.first:
            trace = trace_document(simulated.tasks, simulated.timeline, machine, "as it ran")
            found.trace.write_text(json.dumps(trace))
    return found


def test_a_report_is_one_file(soapstone: Soapstone, files: Files, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, err = soapstone("report", files.first, "-o", page)
    assert (code, err) == (0, "")
    assert out.startswith(f"written to {page} (")
    text = page.read_text(encoding="utf-8")
    assert "<title>lenet on p100:1x2</title>" in text
    assert '"name":"krizhevsky"' in text
    assert list(tmp_path.iterdir()) == [page]


def test_a_report_for_programs(soapstone: Soapstone, files: Files, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, err = soapstone("report", files.first, "--actual", files.trace, "-o", page, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert found["size_bytes"] == page.stat().st_size
    assert found["actual_makespan_s"] == pytest.approx(found["makespan_s"])
    assert found["baselines"]["data_parallel"] == found["makespan_s"]


def test_a_report_says_by_exact_peaks_which_baselines_do_not_fit(
    soapstone: Soapstone, tmp_path: Path
) -> None:
    """With a byte less than data parallelism needs it does not fit, though by its footprint it would."""
    whole = preset("p100:1x2")
    graph = load("lenet", tiny=True, devices=2).captured().graph
    strategy = data_parallel(graph, whole)
    for spare_bytes, is_told in ((0, False), (-1, True)):
        room = max(simulation(strategy, whole).prediction.memory_bytes) + spare_bytes
        small = replace(whole.devices[0].kind, name="small", memory_bytes=room)
        machine = replace(whole, devices=tuple(replace(device, kind=small) for device in whole.devices))
        path = tmp_path / "plan.json"
        write_plan(Plan(strategy, machine, simulation(strategy, machine).prediction, "lenet:tiny"), path)
        found = json.loads(soapstone("report", path, "-o", tmp_path / "report.html", "--json").out)
        assert ("data_parallel" in found["baselines_that_do_not_fit"]) is is_told


def test_an_explanation(soapstone: Soapstone, files: Files) -> None:
    code, out, err = soapstone("explain", files.first, "fc1")
    assert (code, err) == (0, "")
    assert out.startswith("linear: linear (module fc1)\n")
    assert "decided: sample(b) 2 on all 2 devices; " in out
    assert "fc1.weight's gradient" in out
    document = json.loads(soapstone("explain", files.first, "fc1", "--json").out)
    assert document["alternatives"][0]["makespan_s"] > 0
    assert {move["kind"] for move in document["moves"]} == {"all_reduce"}


def test_an_overview_of_explanations(soapstone: Soapstone, files: Files) -> None:
    code, out, err = soapstone("explain", files.first)
    assert (code, err) == (0, "")
    assert "best alternative" in out
    blocks = json.loads(soapstone("explain", files.first, "--json").out)["blocks"]
    assert {"conv2d", "linear"} <= {block["operator"] for block in blocks}


def test_a_difference(soapstone: Soapstone, files: Files) -> None:
    code, out, err = soapstone("diff", files.first, files.second)
    assert (code, err) == (0, "")
    assert "fc1" in out
    found = json.loads(soapstone("diff", files.first, files.second, "--json").out)
    assert {change["layer"] for change in found["changes"]} >= {"fc1", "fc2"}
    assert "Every block is placed alike." in soapstone("diff", files.first, files.first).out


def test_a_recommendation(soapstone: Soapstone) -> None:
    quick = ("--machine", "p100", "--most", 4, "--tiny", "--proposals", 5, "--threads", 1)
    code, out, err = soapstone("recommend", "lenet", *quick)
    assert (code, err) == (0, "")
    assert out.startswith("lenet fits on 1 device of p100")
    assert "█" in out
    found = json.loads(soapstone("recommend", "lenet", *quick, "--json").out)
    assert [size["devices"] for size in found["sizes"]] == [1, 2, 4]
    assert found["fewest_devices"] == 1
    assert found["sizes"][0]["efficiency"] == 1


@pytest.mark.parametrize(
    ("form", "start"),
    [("dot", "digraph"), ("tasks-dot", "digraph"), ("perfetto", "{"), ("svg", "<svg"), ("dtensor", '"""How')],
)
def test_exports(soapstone: Soapstone, files: Files, tmp_path: Path, form: str, start: str) -> None:
    path = tmp_path / "out"
    code, out, err = soapstone("export", files.first, "--to", form)
    assert (code, err) == (0, "")
    assert out.startswith(start)
    assert soapstone("export", files.first, "--to", form, "-o", path).code == 0
    assert path.read_text(encoding="utf-8") == out


def test_mistakes_are_one_sentence(soapstone: Soapstone, files: Files, tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "page.html"
    for arguments, words in (
        (("report", tmp_path / "none.json"), "there is no such plan"),
        (("report", files.first, "-o", nowhere), "is not a place for a file"),
        (("report", files.first, "--actual", files.first, "-o", tmp_path / "p.html"), "this is no trace"),
        (("report", files.second, "--actual", files.trace, "-o", tmp_path / "p.html"), "another plan"),
        (("explain", files.first, "fcl1"), "did you mean"),
        (("export", files.first, "--to", "dots"), "did you mean 'dot'"),
        (("export", files.first, "--to", "dot", "--json"), "--json needs -o"),
        (("recommend", "lenet", "--machine", "k80:1x4"), "there is no preset"),
    ):
        code, out, err = soapstone(*arguments)
        assert (code, out) == (2, ""), arguments
        assert words in err
        assert len(err.splitlines()) == 1
        assert "Traceback" not in err
    assert not (tmp_path / "p.html").exists()
