"""What holds for every command: help, versions, exit codes, and where output goes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

from soapstone import __version__
from soapstone.cli import output
from soapstone.cli.main import app, main
from soapstone.cli.outcome import exit_code
from soapstone.errors import MachineError

COMMANDS = ["models", "graph", "machines", "machine"]


def soapstone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "soapstone", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_version() -> None:
    run = soapstone("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"soapstone {__version__}\n", "")
    assert metadata.version("soapstone") == __version__


def test_the_installed_script_is_the_module() -> None:
    script = Path(sys.executable).parent / "soapstone"
    assert subprocess.check_output([script, "--version"], text=True) == f"soapstone {__version__}\n"


def test_help_names_every_command_and_shows_examples() -> None:
    run = soapstone("--help")
    assert run.returncode == 0
    assert all(name in run.stdout for name in COMMANDS)
    assert "Examples:" in run.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    run = soapstone(name, "--help")
    assert run.returncode == 0
    assert f"Usage: soapstone {name}" in run.stdout


def test_no_arguments_show_the_help() -> None:
    run = soapstone()
    assert "Examples:" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("module", ["torch", "z3"])
def test_help_does_not_wait_for(module: str) -> None:
    program = f"import sys, soapstone.cli.main as m; m.main(['--help']); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


LOST = """
import signal, sys, time
from soapstone.cli.outcome import exit_code

class Thing:
    def __del__(self):
        raise KeyboardInterrupt

def command():
    thing = Thing()
    del thing
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.exit(exit_code(command))
"""


def test_an_interrupt_that_python_drops_is_made_again() -> None:
    """What is raised while an object is done away with goes nowhere."""
    ran = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["grahp"], "No such command 'grahp'. Did you mean 'graph'? Try 'soapstone --help'."),
        (["--frobnicate"], "No such option: --frobnicate. Try 'soapstone --help'."),
        (["models", "--frobnicate"], "No such option: --frobnicate. Try 'soapstone models --help'."),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    run = soapstone(*arguments)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"soapstone: {sentence}\n")


def test_completion_offers_the_commands() -> None:
    run = soapstone(_SOAPSTONE_COMPLETE="complete_bash", COMP_WORDS="soapstone mod", COMP_CWORD="1")
    assert run.stdout.split() == ["models"]


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-m", "soapstone", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def raising(error: BaseException) -> typer.Typer:
    """An app of one command that fails with `error`."""
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (MachineError("'p200' is no machine"), 2, "soapstone: 'p200' is no machine\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "plan.json"),
            2,
            "soapstone: plan.json: No such file or directory\n",
        ),
        (typer.BadParameter("must be positive", param_hint="--budget"), 2, None),
        (typer.Exit(0), 0, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_outcomes(
    error: BaseException, code: int, stderr: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = raising(error)
    assert exit_code(lambda: failing([], standalone_mode=False)) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == stderr if stderr is not None else printed.err.startswith("soapstone: ")


@pytest.mark.parametrize("error", [KeyError("a bug"), OSError("no file is to blame")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    failing = raising(error)
    with pytest.raises(type(error)):
        exit_code(lambda: failing([], standalone_mode=False))


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["no-such-command"]) == 2
    assert capsys.readouterr().out == f"soapstone {__version__}\n"


def test_commands_are_registered_once() -> None:
    names = [group.name for group in app.registered_groups]
    names += [
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    ]
    assert sorted(names) == sorted(set(names))
    assert set(COMMANDS) <= set(names)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"name": "µ-batch", "degrees": [1, 2], "time_s": 0.1}
    output.print_json(document)
    assert json.loads(capsys.readouterr().out) == document


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.print_json({"time_s": float("nan")})


def test_a_pipe_gets_no_progress_and_no_wrapped_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("searching", total=10) as show:
        show(3, "1.2 ms")
        output.console().print("row " * 100)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
