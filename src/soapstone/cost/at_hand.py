"""The device at hand: what measurements are of, and by what clock."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time

from soapstone.errors import CostError
from soapstone.machine.device import KINDS
from soapstone.machine.heap import keep_freed_memory


@dataclass(frozen=True)
class Device:
    """Where to measure: torch's name of it, what machines call such a device, and the software on it."""

    place: str
    kind: str
    software: dict[str, str]

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.place.startswith("cuda")

    @property
    def clock(self) -> Callable[[], float]:
        """What times are taken by."""
        return thread_time if self.software.get("threads") == "1" else perf_counter


SLICES = {50.0: "half", 25.0: "quarter", 12.5: "eighth"}
"""What slices of a GPU are called, by their percentage of its multiprocessors."""


def device_at_hand(place: str, kind: str | None = None, threads: int | None = None, ranks: int = 1) -> Device:
    """The device of this computer: `cpu` (with so many threads for one rank) or `cuda`, which so many
    ranks will use at once."""
    import torch

    software = {"torch": torch.__version__, "python": platform.python_version()}
    if ranks > 1:
        software["ranks"] = str(ranks)
    if place == "cpu":
        software |= {"processor": _processor(), "threads": str(threads or 1)}
        return Device("cpu", kind or "cpu", software)
    if place != "cuda":
        raise CostError(f"there is no device '{place}': choose cpu or cuda")
    if not torch.cuda.is_available():
        raise CostError("torch finds no GPU here: measure with --device cpu, or import a profile")
    name = torch.cuda.get_device_name()
    software |= {"gpu": name, "cuda": str(torch.version.cuda)}
    return Device("cuda", kind or kind_named(name), software)


def kind_named(name: str) -> str:
    """What machines call a GPU that its driver calls `name`, or the slice of it that this process has."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    found = next((kind for kind in KINDS if any(word.startswith(kind) for word in words)), "-".join(words))
    percent = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    return found if percent >= 100 else f"{found}-{SLICES.get(percent, f'{percent:g}-percent')}"


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def prepare(device: Device) -> None:
    """Set this process up as a rank is: its threads, and memory that stays with it."""
    import torch

    if device.is_cuda:
        return
    torch.set_num_threads(int(device.software["threads"]))
    keep_freed_memory()
