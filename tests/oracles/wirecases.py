"""What ranks do in the tests of the wire; each gives the sentence of the error that it met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import torch

from oracles.gpucases import sums_of_slices
from soapstone.cost.among import Turn
from soapstone.cost.candidates import Candidate
from soapstone.cost.profiler import Again, device_at_hand
from soapstone.errors import TrainingError
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.runtime.recording import Recorder, gathered_spans
from soapstone.runtime.staging import Queued
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import data_parallel
from soapstone.validation.crowding import Crowding, measured_crowding
from soapstone.validation.in_step import InStep, Repeated, measured_in_step, operators_in_turn
from soapstone.validation.traffic import Traffic, measured_traffic


class _Aside:
    """What `Staging` does for a GPU, on a CPU: copies that leave from a thread of their own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def out(
        self, tensor: torch.Tensor, post: Callable[[torch.Tensor], Any], ready: object = None
    ) -> tuple[torch.Tensor, Queued]:
        del ready
        staged = tensor.detach().clone(memory_format=torch.contiguous_format)
        return staged, Queued(self._thread.submit(post, staged))

    def into(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.clone()

    def drain(self) -> None:
        self._thread.submit(int).result()


def summing_aside(rank: int, size: int) -> list[Any]:
    """Sums whose tensors are staged."""
    wire = Wire(rank, size)
    wire._staging = _Aside()  # type: ignore[assignment]
    wire.host = torch.device("cpu", 0)  # by name not where tensors are
    return sums_of_slices(wire)


def traffic_seen(rank: int, size: int) -> Traffic:
    """What ranks measure of their messages and sums."""
    return measured_traffic(Wire(rank, size), preset(f"cpu:1x{size}"))


def crowding_seen(rank: int, size: int, folder: str) -> Crowding:
    """What ranks measure of made-up operators: one that takes the same whoever is at it, one that takes
    longer the more ranks are (each leaves a file where the others see it), one whose kernels alone do, as
    they tell themselves, and one that a single rank has."""
    own = Path(folder) / str(rank)

    def steady() -> Again:
        sleep(0.01)
        return Again(0.001)

    def crowded() -> Again:
        own.touch()
        sleep(0.01)
        count = len(list(Path(folder).iterdir()))
        sleep(0.01 * count)
        own.unlink()
        return Again(0.001)

    def launched() -> Again:
        own.touch()
        sleep(0.01)
        count = len(list(Path(folder).iterdir()))
        sleep(0.01)
        own.unlink()
        return Again(0.001, 0.01 * count)

    runs: dict[str, Callable[[], Again]] = {"steady": steady, "crowded": crowded, "launched": launched}
    runs |= {"odd": steady} if rank == 0 else {}
    return measured_crowding(device_at_hand("cpu", threads=2), Wire(rank, size), runs)


class _Turns:
    """Made-up turns of operators, which take longer by a rank's own measure and by who else is at it."""

    weight_bytes = (1000, 2000)

    def __init__(self, todo: Sequence[Candidate], rank: int, folder: Path) -> None:
        self._todo, self._rank, self._own = todo, rank, folder / str(rank)

    def run(self) -> Turn:
        """Whether others are at it shows in the files that each leaves."""
        self._own.touch()
        sleep(0.02)
        alone = len(list(self._own.parent.iterdir())) == 1
        sleep(0.02)
        self._own.unlink()
        longer_s = 5e-5 if alone else 1e-4 + 5e-5 * self._rank
        passes = [PASS_S + longer_s for _ in self._todo]
        return Turn(passes, passes, 3e-3 * (2 if alone else 3))


PASS_S = 1e-4
"""What every pass takes over and over."""


def in_step_seen(rank: int, size: int, folder: str) -> tuple[InStep, ...]:
    """What ranks make of made-up turns."""
    strategy = data_parallel(load("lenet", tiny=True, devices=2).captured().graph, preset("cpu:1x2"))
    todo = operators_in_turn(strategy, lambda _: 0.0)
    turns = _Turns(todo, rank, Path(folder))
    repeated = Repeated(lambda _: PASS_S, lambda size_bytes: 1e-6 * size_bytes)
    return measured_in_step(Wire(rank, size), todo, turns, [repeated] * size)  # type: ignore[arg-type]


def disagreeing(rank: int, size: int) -> str:
    """Rank 1 has another plan."""
    try:
        Wire(rank, size).agree("other" if rank == 1 else "same", "plan")
    except TrainingError as error:
        return str(error)
    return ""


def waiting_for_nothing(rank: int, size: int) -> str:
    """Every rank waits for a message that its neighbour does not send."""
    wire = Wire(rank, size, timeout_s=2.0)
    wire.meet("start of the case")
    try:
        pending = wire.receive((2,), torch.float32, (rank + 1) % size, 7, f"box {rank}")
        pending.work = _Impatient(pending.work)
        pending.wait()
    except TrainingError as error:
        return str(error)
    return ""


def failing(rank: int, size: int) -> str:
    """Rank 1 fails and says why; rank 0 repeats it."""
    wire = Wire(rank, size, timeout_s=2.0)
    if rank == 1:
        wire.tell("the disk is full")
        return ""
    try:  # rank 1 may be gone before the receive is posted, or while it is waited for
        pending = wire.receive((2,), torch.float32, 1, 7, "box")
        pending.work = _Impatient(pending.work)
        pending.wait()
    except TrainingError as error:
        return str(error)
    return ""


def left_alone(rank: int, size: int, way: str) -> str:
    """Rank 1 goes away; rank 0 waits for it in one of the ways there are."""
    if rank == 1:
        return ""
    wire = Wire(rank, size, timeout_s=2.0)
    ways: dict[str, Callable[[], object]] = {
        "meet": lambda: wire.meet("start of the recorded step"),
        "record": lambda: Recorder(wire.device).begin(wire),
        "gather": lambda: gathered_spans({0: (0.0, 1.0)}, wire),
        "agree": lambda: wire.agree("this", "plan"),
        "group": lambda: wire.prepare([(0, 1)]),
        "share": lambda: wire.shared(None, (2,), torch.float32, 1, "fc.weight"),
    }
    try:
        ways[way]()
    except TrainingError as error:
        return str(error)
    return ""


class _Impatient:
    """A work that waits two seconds, whatever its group's timeout is."""

    def __init__(self, work: object) -> None:
        self.work = work

    def wait(self) -> None:
        from datetime import timedelta

        self.work.wait(timedelta(seconds=2))  # type: ignore[attr-defined]
