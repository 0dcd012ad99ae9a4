"""What ranks of one computer take from each other while they compute: caches, memory, cores.

Operators are measured by all ranks at once, as in a data-parallel step. Where few ranks compute, each is
faster, by how much depends on the operator: products of matrices hardly, passes over memory by a quarter to a
half. Where there are more ranks than cores, they wait for each other, which a rank's own clock does not see.
So the model's longest operators are timed with one rank at them, with two, and so on, and on GPUs their
kernels and launching them, each by itself. A task then takes the time that belongs to the number of ranks
that compute while it runs, which the simulated timeline tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.at_hand import Device
from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Profile
from soapstone.cost.profiler import Profiler
from soapstone.cost.runs import BATCH_S, Again
from soapstone.cost.work import Work
from soapstone.machine import DeviceKind
from soapstone.runtime.wire import Wire
from soapstone.validation.adding import Adding
from soapstone.validation.in_step import InStep
from soapstone.validation.unsteady import Unsteady

Floats = NDArray[np.float64]

REPEATS = 12
ROWS = {"cpu": 320, "cuda": 2048}
STREAM_BYTES = 4 * 2**20
"""[choice] A product and a pass over memory, where there is no operator of the model to be had."""

MOST_WORKS = 12
LONGEST_S, LONGEST_OF_ONE_S = 0.1, 0.025
"""[choice] So many operators are timed, the longest first; one run of all of them takes about this long at
most, and of one of them so long, since the longest would leave no time for any other ([measured] GPT-2 on a
quarter of an H200: a product of 50,257 columns, and a softmax over them that takes 0.6 times as long alone
was said to take what the product does)."""

MOST_IN_TURN = 24
"""[choice] So many operators are launched one after the other."""

SHARED = 1.2
"""[choice] Ranks that wait so much longer than they compute, with all at work, share cores."""

ROUNDS = 4
"""[choice] How often times and numbers of busy ranks are worked out from each other."""

_Level = TypeVar("_Level")

Run = Callable[[], Again]
"""Runs an operator a few times."""


@dataclass(frozen=True)
class Crowding:
    """What operators take with 1, 2, ... ranks at work, relative to what the profiler's clock tells with all
    of them at work: in general, and some by name; and the same of launching. `ahead_s` is for how long a
    thread launches before it has to wait until its GPU has done the first of that, if it ever has to.
    `in_step` is what passes take longer in a step, or on GPUs launching them, with 1, 2, ... ranks at work,
    if that was measured, by the profiler's clock, and `stretch` how many seconds pass while that counts one:
    more where ranks wait for cores. `adding` is what it takes to add gradients up, and `unsteady` how
    fast ranks are when strategies run, if that was measured."""

    usual: tuple[float, ...] = (1.0,)
    operators: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    launching: tuple[float, ...] = (1.0,)
    ahead_s: float | None = None
    in_step: tuple[InStep, ...] = ()
    stretch: tuple[float, ...] = (1.0,)
    adding: Adding = field(default_factory=Adding)
    unsteady: Unsteady = field(default_factory=Unsteady)

    def of(self, op_name: str) -> tuple[float, ...]:
        """An operator's."""
        return self.operators.get(op_name, self.usual)

    def seconds(self, work: Work, own_s: float, busy: int) -> float:
        """What a pass, which takes so long by the profiler's clock, takes with so many ranks at work."""
        return own_s * self.of(work.op_name)[busy - 1]

    def in_step_s(self, work: Work, seconds: float, busy: int) -> float:
        """What it takes in a step, where it takes so long over and over again, with so many at work."""
        if not self.in_step:
            return seconds
        stretch = self.stretch[busy - 1]
        return seconds + stretch * self.in_step[busy - 1].of(work, seconds / stretch)

    @property
    def all_at_work(self) -> Crowding:
        """The same, as if all ranks were always at work."""
        return self.at_work(len(self.usual))

    def at_work(self, count: int) -> Crowding:
        """The same, as if so many ranks were always at work."""

        def always(levels: tuple[_Level, ...]) -> tuple[_Level, ...]:
            return levels[: max(1, count)][-1:] * len(levels)

        return replace(
            self,
            usual=always(self.usual),
            operators={name: always(levels) for name, levels in self.operators.items()},
            launching=always(self.launching),
            in_step=always(self.in_step),
            stretch=always(self.stretch),
        )

    def with_kernels(self, times: Sequence[float]) -> Crowding:
        """The same, where kernels take so many times as long with 1, 2, ... ranks at work."""

        def longer(levels: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(float(f"{level * more:.3g}") for level, more in zip(levels, times, strict=True))

        operators = {name: longer(levels) for name, levels in self.operators.items()}
        return replace(self, usual=longer(self.usual), operators=operators)

    @property
    def shares_cores(self) -> bool:
        """Whether there are more ranks than cores."""
        return self.stretch[-1] * self.real[-1] > SHARED

    @property
    def real(self) -> tuple[float, ...]:
        """How much longer steps take in real time than short measurements show, with 1, 2, ... ranks at
        work."""
        return tuple(each.real for each in self.in_step) or (1.0,) * len(self.usual)

    @property
    def beside_s(self) -> float:
        """What a step takes beside tasks and what lies between them."""
        return self.stretch[-1] * self.real[-1] * self.in_step[-1].beside_s if self.in_step else 0.0

    @property
    def adding_up(self) -> tuple[float, ...]:
        """How many times as long as it was measured adding gradients up takes with 1, 2, ... at work."""
        in_step = tuple(each.adding for each in self.in_step) or (1.0,) * len(self.usual)
        return tuple(usual * times for usual, times in zip(self.usual, in_step, strict=True))

    def update_s(self, own_s: float, busy: int) -> float:
        """The same of an update."""
        longer = self.in_step[busy - 1].update if self.in_step else 0.0
        return own_s * self.usual[busy - 1] * (1.0 + longer)


NO_CROWDING = Crowding()


def eased(profile: Profile, crowding: Crowding, busy: int) -> Profile:
    """What operators take with so many ranks at work, where the profile has what they take with all."""

    def shorter(levels: Sequence[float]) -> float:
        return levels[busy - 1] / levels[-1]

    times = {
        key: tuple(replace(each, seconds=each.seconds * shorter(crowding.of(key.op_name))) for each in found)
        for key, found in profile.times.items()
    }
    return replace(profile, times=times)


def standing_for_all(
    profiler: Profiler, candidates: Iterable[Candidate], costs: AnalyticCosts, kind: DeviceKind
) -> dict[str, Run]:
    """Runs of the operators that take longest, each at its longest that there is time for; the same on all
    ranks, but for what one of them cannot run."""
    lasting = [(sum(costs.compute_s(work, kind) for work in each.works), each) for each in candidates]
    runs: dict[str, Run] = {}
    left_s = LONGEST_S
    for seconds, candidate in sorted(lasting, key=lambda each: -each[0]):
        name = candidate.node.op_name
        if name not in runs and seconds <= min(left_s, LONGEST_OF_ONE_S) and len(runs) < MOST_WORKS:
            left_s -= max(seconds, BATCH_S)
            run = profiler.runnable(candidate)
            runs |= {} if run is None else {name: run}
    return runs


def one_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The smallest of each operator, of so many of them."""
    found: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda each: sum(work.size_bytes for work in each.works)):
        found.setdefault(candidate.node.op_name, candidate)
    return [found[name] for name in sorted(found)][:MOST_IN_TURN]


def measured_crowding(
    device: Device, wire: Wire, runs: Mapping[str, Run], in_turn: float = 1.0, ahead_s: float | None = None
) -> Crowding:
    """By real time, what operators take with 1, 2, ... ranks at work. Numbers of ranks take turns, so that
    what else the computer does falls on all of them alike. Launching takes `in_turn` times as long in a step
    as was measured, and is at most `ahead_s` ahead on this rank, if there is a limit."""
    if wire.size == 1:
        return NO_CROWDING
    told = wire.told_by_all(json.dumps(list(runs)), "operators that are timed")
    shared = set(runs).intersection(*map(json.loads, told))
    todo = {name: runs[name] for name in sorted(shared)} or {"": _made_up(wire.device)}
    levels = range(1, wire.size + 1)
    found = np.array(
        [
            [[_timed(run, busy, device.clock, wire) for run in todo.values()] for busy in levels]
            for _ in range(REPEATS + 2)
        ]
    )  # by repeat, ranks at work, operator: real, by the clock, asking for it
    real_s, clock_s, asking_s = np.moveaxis(found[2:], -1, 0)
    everyone_s = np.maximum(clock_s[:, -1:], 1e-9)
    all_asking_s = np.maximum(asking_s.sum(-1)[:, -1:], 1e-9)
    own = np.vstack(
        [
            np.median(real_s.sum(-1) / everyone_s.sum(-1), axis=0),
            np.median(asking_s.sum(-1) / all_asking_s, axis=0) * in_turn,
            np.median(real_s.sum(-1) / np.maximum(clock_s.sum(-1), 1e-9), axis=0),
            np.median(real_s / everyone_s, axis=0).T,
        ]
    )
    at_work = wire.rank < np.array(levels)  # ranks that wait for cores do not all wait for as long
    told = wire.told_by_all(json.dumps((own * at_work).tolist()), "crowding")
    mean = np.sum([json.loads(each) for each in told], axis=0) / np.array(levels)
    rows = [tuple(float(f"{number:.3g}") for number in row) for row in mean.tolist()]
    usual, launching, stretch, *others = rows
    operators = dict(zip(todo, others, strict=True)) if shared else {}
    if not device.is_cuda:
        return Crowding(usual, operators, (1.0,) * wire.size, stretch=stretch)
    told = wire.told_by_all(json.dumps(ahead_s), "how far ahead threads are")
    limits = [json.loads(limit) for limit in told]
    some = [
        each for each in limits if each is not None and each > 0
    ]  # a task waits for no kernels of its own
    return Crowding(usual, operators, launching, min(some, default=None), stretch=(1.0,) * wire.size)


def _made_up(place: torch.device) -> Run:
    rows = ROWS[place.type]
    a, b = torch.rand(rows, rows, device=place), torch.rand(STREAM_BYTES // 4, device=place)

    def run() -> Again:
        start = perf_counter()
        torch.mm(a, a)
        b.mul(2.0)
        asked_s = perf_counter() - start
        if place.type == "cuda":
            torch.cuda.synchronize()
        return Again(asked_s)

    return run


def _timed(run: Run, busy: int, clock: Callable[[], float], wire: Wire) -> tuple[float, float, float]:
    """Real seconds of a run on this rank, by the clock, and of asking for it, while so many ranks are at it;
    a rank that is not goes on at once. On a GPU the first two are those of kernels."""
    wire.meet("crowding")
    real_s, clock_s = perf_counter(), clock()
    again = run() if wire.rank < busy else Again(0.0)
    real_s, clock_s = perf_counter() - real_s, clock() - clock_s
    if again.kernels_s is not None:
        real_s = clock_s = again.kernels_s
    return real_s, clock_s, again.asking_s


def busy_devices(start_s: Floats, end_s: Floats) -> Floats:
    """How many devices compute while each task runs, on average, its own included."""
    return np.clip(under_way(start_s, end_s, start_s, end_s), 1.0, None)


def under_way(
    start_s: Floats, end_s: Floats, from_s: Floats, to_s: Floats, weight: Floats | None = None
) -> Floats:
    """How many of some tasks run in each of the spans, on average; each counts as one, or by its weight."""
    if not len(start_s):
        return np.zeros_like(from_s)
    moments = np.concatenate([start_s, end_s])
    each = np.ones_like(start_s) if weight is None else weight
    steps = np.concatenate([each, -each])
    order = np.argsort(moments, kind="stable")
    at, busy = moments[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(busy[:-1] * np.diff(at))])
    length = np.maximum(to_s - from_s, 1e-30)
    found = (np.interp(to_s, at, area) - np.interp(from_s, at, area)) / length
    return np.asarray(np.nan_to_num(found, nan=1.0), dtype=np.float64)


def crowded(
    levels_s: Floats,
    rest_s: Floats,
    is_compute: NDArray[np.bool_],
    simulated: Callable[[Floats], tuple[Floats, Floats]],
) -> tuple[Floats, Floats]:
    """The compute times of tasks among others, and how many devices are busy meanwhile. `levels_s` has a row
    for 1, 2, ... devices at work, with what each task takes then; `rest_s` are the durations of all that is
    no computing, and `simulated` gives the starts and ends for durations."""
    seconds, busy = levels_s[-1], np.ones_like(rest_s)
    for _ in range(ROUNDS):
        start_s, end_s = simulated(seconds + rest_s)
        busy[is_compute] = busy_devices(start_s[is_compute], end_s[is_compute])
        seconds = at_levels(levels_s, busy)
    return seconds, busy


def at_levels(levels_s: Floats, busy: Floats) -> Floats:
    """What each task takes with so many devices at work, of a row for 1, 2, ... of them."""
    columns, most = np.arange(len(busy)), len(levels_s) - 1
    place = np.clip(busy - 1.0, 0.0, most)
    low = np.floor(place).astype(np.int64)
    high, part = np.minimum(low + 1, most), place - low
    return np.asarray(levels_s[low, columns] * (1.0 - part) + levels_s[high, columns] * part)
