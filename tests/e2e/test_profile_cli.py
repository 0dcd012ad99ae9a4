"""`soapstone profile` and `simulate --costs`, from arguments to exit code, output and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soapstone.cli.main import main

LENET = ("lenet", "--tiny", "--degrees", "1,2", "--budget", "1s")
SIMULATED = ("simulate", "--model", "lenet", "--tiny", "--machine", "cpu:1x2", "--json")


@pytest.fixture(autouse=True)
def _empty_cache_and_short_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("soapstone.cost.runs.BATCHES", 2)
    monkeypatch.setattr("soapstone.cost.runs.BATCH_S", 1e-5)
    monkeypatch.setattr("soapstone.cost.profiler.UPDATE_SIZES", (256, 4096))


def test_from_measuring_to_a_plan_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measure, simulate, export; import where nothing is known; the prediction is the same there."""
    exported = str(tmp_path / "cpu.json")
    assert main(["profile", *LENET, "--json", "--export", exported]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shards"] == told["known"] + told["measured"] + told["left"]
    assert told["measured"] > 0
    assert told["failed"] == {}
    plan = str(tmp_path / "plan.json")
    assert main([*SIMULATED, "--costs", "measured", "-o", plan]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["costs"] == "measured"
    assert here["costs_basis"].get("measured", 0) > 0
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path / "other"))
    assert main([*SIMULATED]) == 0
    assert json.loads(capsys.readouterr().out)["costs"] == "analytic"
    assert main(["simulate", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == here["makespan_s"]
    assert main(["profile", "--import", exported]) == 0
    capsys.readouterr()
    assert main([*SIMULATED, "--costs", "auto"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == here["makespan_s"]


def test_what_is_known_is_not_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("lenet", "--tiny", "--degrees", "1", "--budget", "1h", "--json")
    assert main(["profile", *options]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["profile", *options]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (first["known"], first["left"]) == (0, 0)
    assert (second["measured"], second["known"]) == (0, second["shards"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("profile", "lenet", "--device", "tpu"), "no device 'tpu'"),
        (("profile", "lenet", "--degrees", "1,x"), "no list of numbers"),
        (("profile", "lenet", "--degrees", "0"), "below 1"),
        (("profile", "lenet", "--budget", "soon"), "is no time"),
        (("profile", "--import", "missing.json"), "no such profile"),
        (("profile", "--export", "x.json", "--kind", "h200"), "no times of 'h200'"),
        ((*SIMULATED, "--costs", "measured"), "no costs of 'cpu' were measured"),
        ((*SIMULATED, "--costs", "guessed"), "no costs 'guessed'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_a_damaged_cache_is_told_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "costs.sqlite").write_text("something else entirely, and long enough " * 9)
    assert main(["profile"]) == 0
    assert "it is kept as" in caplog.text
    assert any(".set-aside-" in path.name for path in (tmp_path / "cache").iterdir())
