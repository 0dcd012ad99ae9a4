"""`soapstone rules` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soapstone.cli.main import main


def test_show_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "list", "softmax", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["rules"]
    assert listed
    assert all("softmax" in each["rule"] and each["status"] == "proved" for each in listed)
    assert main(["rules", "show", listed[0]["name"], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == listed[0]["name"]
    assert shown["variables"]
    assert main(["rules", "show", listed[0]["name"]]) == 0
    assert f"= {shown['right'][0]}" in capsys.readouterr().out


def test_generate_for_one_operator_and_verify_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rules", "generate", "--op", "matmul", "-o", str(tmp_path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["proved"] == made["found"] == len(made["rules"]) > 10
    assert main(["rules", "verify", "--book", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proved"] == made["proved"]


def test_verify_names_a_wrong_rule_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "mine.rules"
    book.write_text("right | x:[1 1] | relu(relu(x)) | relu(x)\nwrong | x:[1 1] | relu(x) | x\n")
    assert main(["rules", "verify", "--book", str(book), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["proved"], found["refuted"]) == (1, 1)
    assert found["failures"][0]["name"] == "wrong"
    assert "on the left" in found["failures"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "relu-splitt"], "there is no rule 'relu-splitt'; did you mean 'relu-split'?"),
        (["generate", "--op", "matmull"], "there is no operator 'matmull'; did you mean 'matmul'?"),
        (["generate", "--family", "nothing"], "there is no family 'nothing'"),
        (["list", "--book", "no/such.rules"], "cannot read no/such.rules"),
        (["list", "softmaxx"], "no rule has the operator 'softmaxx'; did you mean 'softmax'?"),
        (["verify", "relu-split", "--timeout", "inf"], "--timeout is a number of seconds, not inf"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rules", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_a_damaged_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "mine.rules"
    book.write_text("# mine\nright | x:[1 1] | relu(relu(x)) | relu(x)\nx:[1 1] | relu(x)\n")
    assert main(["rules", "list", "--book", str(book)]) == 2
    assert "line 3" in capsys.readouterr().err


def test_a_book_without_rules_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "mine.rules"
    book.write_text("# none yet\n")
    for command in ("verify", "list"):
        assert main(["rules", command, "--book", str(book)]) == 2
        assert f"{book} has no rules" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "verify", "list", "show"):
        assert main(["rules", command, "--help"]) == 0
        assert f"soapstone rules {command}" in capsys.readouterr().out
