"""The command line, run in this process."""

from __future__ import annotations

import pytest
from oracles.shell import Outcome, Soapstone

from soapstone.cli.main import main


@pytest.fixture
def soapstone(capsys: pytest.CaptureFixture[str]) -> Soapstone:
    """Runs the command line and returns how it ended."""

    def run(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run
