"""Pipelines on the command line: found or written by hand, simulated and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles.shell import Soapstone

MLP = ("mlp", "--tiny", "--batch", 8, "--machine", "cpu:1x2")
BY_HAND = """
default: model_parallel
pipeline: {micro_batches: 4}
"""


def test_a_pipeline_is_found_and_shown(soapstone: Soapstone, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    options = ("--micro-batches", 4, "--proposals", 20)
    code, out, err = soapstone("plan", *MLP, *options, "-o", plan, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["pipeline"]["micro_batches"] == 4
    assert len(found["pipeline"]["stages"]) == 2
    assert found["search"]["method"] == "pipeline"
    assert found["search"]["lower_bound_s"] is None
    simulated = json.loads(soapstone("simulate", plan, "--json").out)
    assert simulated["makespan_s"] == found["makespan_s"]
    assert simulated["pipeline"] == found["pipeline"]
    assert soapstone("explain", plan).code == 0
    assert soapstone("report", plan, "-o", tmp_path / "report.html").code == 0
    assert soapstone("export", plan, "--to", "dot", "-o", tmp_path / "plan.dot").code == 0
    assert soapstone("export", plan, "--to", "dtensor") == (
        2,
        "",
        "soapstone: the plan is a pipeline of micro-batches, which DTensor layouts cannot say.\n",
    )


def test_a_pipeline_by_hand(soapstone: Soapstone, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(BY_HAND)
    model, *rest = MLP
    options = ("--model", model, *rest, "--strategy", file)
    code, out, err = soapstone("simulate", *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "a pipeline of 2 stages, 4 micro-batches of 2 samples, 1f1b"
    file.write_text(BY_HAND.replace("4", "3"))
    code, out, err = soapstone("simulate", *options)
    assert (code, out) == (2, "")
    assert err == (
        f"soapstone: {file}: pipeline.micro_batches is 3, which does not divide the 8 samples of a step.\n"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--stages", 3), "there is no pipeline of 3 stages for 8 samples on 2 devices"),
        (("--stages", 2, "--search", "mcmc"), "--stages and --micro-batches search for a pipeline, and '--s"),
        (("--micro-batches", 3), "there is no pipeline of any number of stages with 3 micro-batches for 8"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(
    options: tuple[object, ...], sentence: str, soapstone: Soapstone
) -> None:
    code, out, err = soapstone("plan", *MLP, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"soapstone: {sentence}")
    assert err.count("\n") == 1
