"""`soapstone models`: a table for people, one JSON document for programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from soapstone.cli.main import main
from soapstone.frontends.zoo import ZOO


def test_every_model_is_listed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = {line.split()[0]: line for line in printed.out.splitlines()[3:] if line.strip()}
    assert list(rows) == list(ZOO)
    for name, model in ZOO.items():
        assert model.description in rows[name]
        assert f" {model.batch_per_device} " in rows[name]
    assert " 61.1M " in rows["alexnet"]


def test_json_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in models] == list(ZOO)
    alexnet = next(model for model in models if model["name"] == "alexnet")
    assert alexnet["parameters"] == 61_100_840
    assert set(alexnet) == {
        "name",
        "description",
        "batch_per_device",
        "parameters",
        "nodes",
        "flops_per_sample",
    }


def test_listing_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from soapstone.cli.main import main; main([]); main(['models']); main(['graph', '-h']);"
        " sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    run = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [["models", "lenet"], ["models", "--yaml"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "Try 'soapstone models --help'" in printed.err
