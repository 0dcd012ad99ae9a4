"""What a newcomer does in the first hour: a model and a cluster of their own, and mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from oracles.shell import Soapstone
from typer.main import get_command

from soapstone.cli.main import app
from soapstone.cli.outcome import exit_code
from soapstone.errors import CaptureError
from soapstone.files import replace_text
from soapstone.frontends.source import load, with_options

MODEL = """
import torch
from torch import nn

def net(batch=8):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(batch, 6),)
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path / 'mine.py'}:net"


def test_a_model_without_a_loss_is_planned_and_trained_with_one(
    soapstone: Soapstone, model: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    options = ["--loss", "cross_entropy", "--batch", 16, "--machine", "cpu:1x1", "--proposals", 1]
    planned = soapstone("plan", model, *options, "-o", plan)
    assert (planned.code, planned.err) == (0, "")
    assert json.loads(plan.read_text())["model"] == f"{model}:loss=cross_entropy"
    trained = soapstone("train", plan, "--steps", 2, "--json")
    assert trained.code == 0
    losses = json.loads(trained.out)["losses"]
    assert losses[1] < losses[0]


def test_a_plan_remembers_the_length_of_its_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    named = with_options(f"hf:{tmp_path}", length=12)
    assert [tuple(x.shape) for x in load(named, batch=2).inputs] == [(2, 12), (2, 12)]


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("lenet", {"tiny": True}, "lenet:tiny"),
        ("rnnlm:steps=2", {"tiny": True}, "rnnlm:steps=2,tiny"),
        ("a/b.py:f", {"loss": "mse"}, "a/b.py:f:loss=mse"),
        ("hf:c", {"loss": "mse", "length": 3}, "hf:c:length=3,loss=mse"),
        ("hf:c:length=3", {"loss": "mse"}, "hf:c:length=3,loss=mse"),
        ("hf:c", {}, "hf:c"),
        ("unet", {"batch_norm": "local"}, "unet:batch_norm=local"),
        ("unet:width=8", {"batch_norm": "whole", "tiny": True}, "unet:width=8,batch_norm=whole,tiny"),
        ("a.py:f:loss=mse", {"batch_norm": "local"}, "a.py:f:loss=mse,batch_norm=local"),
        ("a.py:f:batch_norm=local", {"loss": "mse"}, "a.py:f:batch_norm=local,loss=mse"),
        ("hf:c", {"batch_norm": "local", "length": 3}, "hf:c:length=3,batch_norm=local"),
    ],
)
def test_options_become_part_of_the_models_name(model: str, options: dict[str, object], text: str) -> None:
    assert with_options(model, **options) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("lenet", {"loss": "mse"}, "brings its own loss"),
        ("lenet", {"length": 3}, "--length is for Hugging Face models"),
        ("a.py:f", {"tiny": True}, "--tiny is for models of the zoo"),
        ("a.py:f:loss=mse,length=3", {"loss": "l1"}, "has no option 'length'"),
        ("a.py:f", {"batch_norm": "global"}, "batch_norm is whole .* or local .*, not 'global'"),
    ],
)
def test_options_of_another_sort_of_model_are_refused(
    model: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(CaptureError, match=words):
        with_options(model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--export", "--trace"])
def test_a_place_that_cannot_be_written_to_is_refused_before_training(
    soapstone: Soapstone, model: str, tmp_path: Path, option: str
) -> None:
    plan = tmp_path / "plan.json"
    soapstone("plan", model, "--loss=mse", "--machine=cpu:1x2", "--proposals=1", "-o", plan)
    outcome = soapstone("train", plan, option, tmp_path / "nowhere" / "file")
    assert outcome.code == 2
    assert "not a place for a file" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("lr", ["inf", "nan", "-1"])
def test_a_learning_rate_is_a_number(soapstone: Soapstone, model: str, tmp_path: Path, lr: str) -> None:
    plan = tmp_path / "plan.json"
    soapstone("plan", model, "--loss=mse", "--machine=cpu:1x1", "--proposals=1", "-o", plan)
    outcome = soapstone("train", plan, f"--lr={lr}")
    assert (outcome.code, "a learning rate is" in outcome.err) == (2, True)


def test_a_stream_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_text(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_without_torch_a_sentence_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    assert exit_code(missing) == 2
    assert capsys.readouterr().err == (
        "soapstone: this needs PyTorch, which is not installed: pip install torch\n"
    )


def test_plans_are_read_simulated_and_shown_without_torch(
    soapstone: Soapstone, model: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    soapstone("plan", model, "--loss=mse", "--machine=cpu:1x2", "--proposals=1", "-o", plan)
    commands = [["simulate", plan], ["report", plan, "-o", tmp_path / "r.html"], ["explain", plan]]
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from soapstone.cli.main import main\n"
        f"sys.exit(max(main(list(map(str, c))) for c in {[[*map(str, c)] for c in commands]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _commands(group: typer.core.TyperGroup, name: str = "soapstone") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            found |= _commands(command, f"{name} {key}")
        else:
            found[f"{name} {key}"] = command.help or ""
    return found


def test_every_command_shows_examples_of_itself() -> None:
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    lacking = [
        name
        for name, text in _commands(group).items()
        if "Examples:" not in text or not re.search(rf"^\s+{name}\b", text, re.MULTILINE)
    ]
    assert lacking == []
