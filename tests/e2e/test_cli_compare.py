"""`soapstone compare`, from arguments to exit code and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.shell import Soapstone

from soapstone.search.baselines import BASELINES

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
        for figure in ("makespan_s", "moved_bytes", "samples_per_s", "fits"):
            assert strategies[name][figure] == alone[figure]
        assert strategies[name]["peak_bytes"] == max(each["peak_bytes"] for each in alone["memory"])
        devices = [each["busy_s"] for each in alone["resources"] if "gpu" in each["name"]][:4]
        assert strategies[name]["compute_s"] == pytest.approx(sum(devices))
    reference_s = strategies["data_parallel"]["makespan_s"]
    for each in strategies.values():
        assert each["speedup"] == reference_s / each["makespan_s"]
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
