"""Commands that run as several ranks: what they do as one of them, and how one that fails ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from soapstone.errors import SoapstoneError

if TYPE_CHECKING:
    from soapstone.runtime.wire import Wire


@contextmanager
def as_rank(device: str, timeout_s: float = 300.0) -> Iterator[Wire]:
    """The wire to the other ranks. If something goes wrong, rank 0 says it for all."""
    from soapstone.runtime.session import session

    try:
        with session(device, timeout_s) as wire:
            try:
                yield wire
            except Exception as error:
                wire.tell(str(error) or type(error).__name__)
                raise
    except SoapstoneError:
        if int(os.environ.get("RANK", "0")) == 0:
            raise
        raise typer.Exit(2) from None
