"""What ranks of one computer take from each other while they compute: caches, memory, cores.

Operators are measured by all ranks at once, as in a data-parallel step. Where few ranks compute, each is
faster; where there are more ranks than cores, they wait for each other, which a rank's own clock does not
see. So the same work is timed with one rank at it, with two, and so on. A task then takes the time that
belongs to the number of ranks that compute while it runs, which the simulated timeline tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from soapstone.cost.profiler import Device
from soapstone.runtime.wire import Wire

Floats = NDArray[np.float64]

REPEATS = 12
ROWS = {"cpu": 320, "cuda": 2048}
STREAM_BYTES = 4 * 2**20
"""[choice] A product and a pass over memory, of some milliseconds: about what tasks are made of."""

ROUNDS = 4
"""[choice] How often times and numbers of busy ranks are worked out from each other."""


def measured_crowding(device: Device, wire: Wire) -> tuple[float, ...]:
    """By real time, what a task takes with 1, 2, ... ranks at work, relative to what the profiler's clock
    tells with all of them at work."""
    if wire.size == 1:
        return (1.0,)
    work = _work(wire.device)
    alone = [_timed(work, count, perf_counter, wire) for count in range(1, wire.size + 1)]
    reference = _timed(work, wire.size, device.clock, wire)
    found = torch.tensor([seconds / reference for seconds in alone], dtype=torch.float64)
    first = wire.shared(found if wire.rank == 0 else None, found.shape, found.dtype, 0, "crowding")
    return tuple(float(f"{number:.3g}") for number in first.tolist())


def _work(place: torch.device) -> Callable[[], None]:
    rows = ROWS[place.type]
    a, b = torch.rand(rows, rows, device=place), torch.rand(STREAM_BYTES // 4, device=place)

    def work() -> None:
        torch.mm(a, a)
        b.mul(2.0)
        if place.type == "cuda":
            torch.cuda.synchronize()

    return work


def _timed(work: Callable[[], None], busy: int, clock: Callable[[], float], wire: Wire) -> float:
    """Median seconds of the work on the first rank, while so many ranks are at it."""
    times = []
    wire.meet("crowding")
    if wire.rank < busy:
        for number in range(REPEATS + 2):
            start = clock()
            for _ in range(4):
                work()
            if number >= 2:
                times.append((clock() - start) / 4)
    wire.meet("crowding")
    return median(times) if times else 1.0


def busy_devices(start_s: Floats, end_s: Floats) -> Floats:
    """How many devices compute while each task runs, on average, its own included."""
    moments = np.concatenate([start_s, end_s])
    steps = np.concatenate([np.ones_like(start_s), -np.ones_like(end_s)])
    order = np.argsort(moments, kind="stable")
    at, busy = moments[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(busy[:-1] * np.diff(at))])
    length = np.maximum(end_s - start_s, 1e-30)
    found = (np.interp(end_s, at, area) - np.interp(start_s, at, area)) / length
    return np.asarray(np.clip(np.nan_to_num(found, nan=1.0), 1.0, None), dtype=np.float64)


def crowded(
    seconds: Floats,
    rest_s: Floats,
    is_compute: NDArray[np.bool_],
    crowding: Sequence[float],
    simulated: Callable[[Floats], tuple[Floats, Floats]],
) -> Floats:
    """The compute times of tasks among others. `seconds` are the profile's, `rest_s` the durations of all
    that is no computing, and `simulated` gives the starts and ends for durations."""
    if len(crowding) == 1:
        return seconds * crowding[0]
    levels = np.arange(1, len(crowding) + 1)
    factor = np.where(is_compute, crowding[-1], 1.0)
    for _ in range(ROUNDS):
        start_s, end_s = simulated(seconds * factor + rest_s)
        busy = busy_devices(start_s[is_compute], end_s[is_compute])
        factor[is_compute] = np.interp(busy, levels, crowding)
    return np.asarray(seconds * factor, dtype=np.float64)
