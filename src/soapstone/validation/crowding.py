"""What ranks of one computer take from each other while they compute: caches, memory, cores.

Operators are measured by all ranks at once, as in a data-parallel step. Where few ranks compute, each is
faster; where there are more ranks than cores, they wait for each other, which a rank's own clock does not
see. So the model's longest operators are timed with one rank at them, with two, and so on. A task then takes
the time that belongs to the number of ranks that compute while it runs, which the simulated timeline tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.candidates import Candidate
from soapstone.cost.profiler import Device, Profiler
from soapstone.machine import DeviceKind
from soapstone.runtime.wire import Wire

Floats = NDArray[np.float64]

REPEATS = 12
ROWS = {"cpu": 320, "cuda": 2048}
STREAM_BYTES = 4 * 2**20
"""[choice] A product and a pass over memory, where there is no operator of the model to be had."""

MOST_WORKS = 8
LONGEST_S = 0.1
"""[choice] So many operators stand for all, the longest first; one run of all of them takes about this long
at most."""

ROUNDS = 4
"""[choice] How often times and numbers of busy ranks are worked out from each other."""

Work = Callable[[], None]


def standing_for_all(
    profiler: Profiler, candidates: Iterable[Candidate], costs: AnalyticCosts, kind: DeviceKind
) -> list[Work]:
    """Runs of the operators that take most of the time; the same on all ranks."""
    lasting = [(sum(costs.compute_s(work, kind) for work in each.works), each) for each in candidates]
    works: list[Work] = []
    left_s = LONGEST_S
    for seconds, candidate in sorted(lasting, key=lambda each: -each[0]):
        if seconds <= left_s and len(works) < MOST_WORKS:
            left_s -= seconds
            work = profiler.runnable(candidate)
            works += [] if work is None else [work]
    return works


def measured_crowding(device: Device, wire: Wire, works: Sequence[Work] = ()) -> tuple[float, ...]:
    """By real time, what a task takes with 1, 2, ... ranks at work, relative to what the profiler's clock
    tells with all of them at work. Numbers of ranks take turns, so that what else the computer does falls on
    all of them alike."""
    if wire.size == 1:
        return (1.0,)
    todo = list(works) or [_made_up(wire.device)]
    ratios: list[list[float]] = [[] for _ in range(wire.size)]
    for number in range(REPEATS + 2):
        taken = [_timed(todo, busy, device.clock, wire) for busy in range(1, wire.size + 1)]
        _, reference_s = taken[-1]
        for found, (real_s, _) in zip(ratios, taken, strict=True):
            if number >= 2:
                found.append(real_s / max(reference_s, 1e-9))
    own = torch.tensor([median(found) for found in ratios], dtype=torch.float64)
    first = wire.shared(own if wire.rank == 0 else None, own.shape, own.dtype, 0, "crowding")
    return tuple(float(f"{number:.3g}") for number in first.tolist())


def _made_up(place: torch.device) -> Work:
    rows = ROWS[place.type]
    a, b = torch.rand(rows, rows, device=place), torch.rand(STREAM_BYTES // 4, device=place)

    def work() -> None:
        torch.mm(a, a)
        b.mul(2.0)
        if place.type == "cuda":
            torch.cuda.synchronize()

    return work


def _timed(works: Sequence[Work], busy: int, clock: Callable[[], float], wire: Wire) -> tuple[float, float]:
    """Real seconds of the works on this rank, and by the clock, while so many ranks are at them; a rank that
    is not goes on at once."""
    wire.meet("crowding")
    real_s, clock_s = perf_counter(), clock()
    if wire.rank < busy:
        for work in works:
            work()
    found = (perf_counter() - real_s, clock() - clock_s)
    wire.meet("crowding")
    return found


def busy_devices(start_s: Floats, end_s: Floats) -> Floats:
    """How many devices compute while each task runs, on average, its own included."""
    return np.clip(under_way(start_s, end_s, start_s, end_s), 1.0, None)


def under_way(start_s: Floats, end_s: Floats, from_s: Floats, to_s: Floats) -> Floats:
    """How many of some tasks run in each of the spans, on average."""
    if not len(start_s):
        return np.zeros_like(from_s)
    moments = np.concatenate([start_s, end_s])
    steps = np.concatenate([np.ones_like(start_s), -np.ones_like(end_s)])
    order = np.argsort(moments, kind="stable")
    at, busy = moments[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(busy[:-1] * np.diff(at))])
    length = np.maximum(to_s - from_s, 1e-30)
    found = (np.interp(to_s, at, area) - np.interp(from_s, at, area)) / length
    return np.asarray(np.nan_to_num(found, nan=1.0), dtype=np.float64)


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
