"""Slices of a GPU: ranks that share one through NVIDIA's Multi-Process Service.

Without it the driver gives a GPU to one process at a time, and ranks would only take turns. A control
daemon of our own, with its folders in a temporary one, lets the kernels of all ranks run side by side, each
on its share of the multiprocessors. What ranks say to each other goes through host memory (`belts`), so
a plan for several GPUs can be rehearsed on one: which rank computes what, and what moves, are the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from soapstone.errors import TrainingError

CONTROL = "nvidia-cuda-mps-control"

PATIENCE_S = 30.0
"""[choice] How long the control daemon may take to start or to end."""

QUEUES, ENOUGH = "CUDA_DEVICE_MAX_CONNECTIONS", 16
"""How many queues a process has for what its streams launch. Under the daemon it has two if it does not ask
for more, and a lane that waits (`lanes`) stops what else is in its queue ([measured] AlexNet on four quarters
of an H200: messages of 0.3 MB amid sums waited for up to 9 ms; with 16 queues such strategies are 5 to 7 %
faster on the same machine, none slower; a run with 32 failed, why was not looked into)."""


def check_slices(slices: int, ranks: int) -> None:
    """Refuse what cannot be sliced: no GPU, no daemon, or too few slices for the ranks."""
    if slices < 1:
        raise TrainingError(f"a GPU has at least one slice, not {slices}")
    if not torch.cuda.is_available():
        raise TrainingError("torch finds no GPU here to slice: use --device cpu")
    if slices > 1 and shutil.which(CONTROL) is None:
        raise TrainingError(
            f"'{CONTROL}' is not installed here, and ranks share a GPU through it: it comes with NVIDIA's"
            " driver"
        )
    room = slices * torch.cuda.device_count()
    if ranks > room:
        raise TrainingError(
            f"the plan is for {ranks} devices and there is room for {room} ranks: give --gpu-slices"
            f" {-(-ranks // torch.cuda.device_count())}"
        )


def slice_environment(folder: Path, slices: int) -> dict[str, str]:
    """What a rank on a slice is told: where the daemon is, its share of the multiprocessors, and how many
    queues to have."""
    return {
        **_places(folder),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 / slices:g}",
        QUEUES: os.environ.get(QUEUES, f"{ENOUGH}"),
    }


@contextmanager
def sliced(slices: int) -> Iterator[Mapping[str, str]]:
    """A daemon for as long as the context lasts; what its ranks are told."""
    if slices == 1:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="soapstone-mps-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {**os.environ, **_places(folder)}
        for place in _places(folder).values():
            Path(place).mkdir()
        _control(["-d"], "", environment)
        try:
            yield slice_environment(folder, slices)
        finally:
            with suppress(TrainingError):  # it ends with the last process that uses it all the same
                _control([], "quit\n", environment)


def _places(folder: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def _control(options: list[str], text: str, environment: Mapping[str, str]) -> None:
    """Tell the daemon something. What it prints goes to a file: it would hold a pipe open for ever."""
    with tempfile.TemporaryFile() as said:
        try:
            code = subprocess.run(
                [CONTROL, *options],
                input=text.encode(),
                stdout=said,
                stderr=said,
                env=dict(environment),
                timeout=PATIENCE_S,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TrainingError(f"'{CONTROL}' could not be run: {error}") from None
        said.seek(0)
        lines = said.read().decode(errors="replace").split("\n")
    if code:
        told = next((line.strip() for line in lines if line.strip()), f"exit code {code}")
        raise TrainingError(f"'{CONTROL} {' '.join(options)}' failed: {told}")
