"""What every command prints with: tables for people, one JSON document for programs, and progress.

Standard output holds results only. Progress goes to standard error, and only where a person sees it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

PIPE_WIDTH = 1000
"""Columns on a pipe: wide enough that no table row is wrapped or cut, so that every row is one line."""


class ShowProgress(Protocol):
    """Says how far the work is: the steps done so far, and a few words on what was found."""

    def __call__(self, done: float, note: str = "") -> None:
        """Show `done` steps and the note."""


def console() -> Console:
    """A console on standard output, as wide as the terminal, or `PIPE_WIDTH` where there is none."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_json(document: object) -> None:
    """Print one JSON document and nothing else; NaN and infinity, which JSON lacks, are a ValueError."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_places(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse places that no file can be written to, that are named twice, or that the command reads from,
    before the work rather than after it."""
    read = {Path(given).resolve() for given in inputs if given}
    written: set[Path] = set()
    for output in filter(None, outputs):
        check_place(output)
        place = output.resolve()
        if place in read and place.is_file():
            raise typer.BadParameter(f"{output} is what this command reads; write to another file.")
        if place in written and not _is_stream(output):
            raise typer.BadParameter(f"{output} is named twice; give each output a file of its own.")
        written.add(place)


def check_place(output: Path) -> None:
    """Refuse a place that no file can be written to, before the work rather than after it."""
    if not _is_stream(output) and (
        output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK)
    ):
        raise typer.BadParameter(
            f"{output} is not a place for a file; name one in a directory that exists and can be written to."
        )


def _is_stream(output: Path) -> bool:
    return output.exists() and not output.is_file() and not output.is_dir()


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[ShowProgress]:
    """A progress bar on a terminal, and nothing on a pipe, for as long as the context lasts.

    Without a `total` the bar only shows that work goes on.
    """
    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        work = bar.add_task(description, total=total, note="")

        def show(done: float, note: str = "") -> None:
            bar.update(work, completed=done, note=note)

        yield show


def scaled(number: float) -> str:
    """A count as people write it: 61.1M, 1.24G."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return f"{number:g}"


def rate(samples_per_s: float) -> str:
    """Throughput as people write it: 4,408 samples/s."""
    number = f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"
    return f"{number} samples/s"
