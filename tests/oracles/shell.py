"""What the command line said, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str


Soapstone = Callable[..., Outcome]
"""Runs `soapstone ARGUMENTS` in this process."""
