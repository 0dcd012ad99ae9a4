"""Commands that run as several ranks: what they do as one of them, and how one that fails ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from soapstone.errors import SoapstoneError, TrainingError

if TYPE_CHECKING:
    from soapstone.runtime.wire import Wire


GpuSlices = Annotated[
    int | None, typer.Option("--gpu-slices", min=1, help="Let so many ranks share each GPU, through MPS.")
]


def run_ranks(count: int, arguments: Sequence[str], gpu_slices: int | None = None) -> None:
    """Run `soapstone ARGUMENTS` as so many ranks of this computer, on slices of its GPUs if asked to, and
    end as they do."""
    from soapstone.runtime.slices import check_slices, sliced
    from soapstone.runtime.workers import run_workers

    if gpu_slices is None:
        code = run_workers(count, arguments)
    else:
        check_slices(gpu_slices, count)
        with sliced(gpu_slices) as told:
            code = run_workers(count, arguments, told)
    if code:
        raise typer.Exit(code)


def check_not_a_rank(gpu_slices: int | None) -> None:
    """Refuse to slice GPUs for ranks that someone else has started."""
    if gpu_slices is not None and "RANK" in os.environ:
        raise TrainingError("--gpu-slices starts the ranks itself: leave torchrun out")


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
