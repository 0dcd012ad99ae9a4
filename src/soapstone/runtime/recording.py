"""The real timeline of a step, in the form of the predicted one.

Every rank notes when its compute tasks start and end, and when its messages are posted and taken; rank 0
puts them together. Clocks are set to zero when all ranks have come to the start of the step. A GPU has a
clock of its own: there a task lasts from when the GPU comes to its kernels to when it is done with them, and
begins no sooner than the rank, which may have waited for a message. A message begins when what it carries is
made, and ends when somebody took it, which is at least when it was there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph, TaskKind

Spans = dict[int, tuple[float, float]]
"""By a task's number, when it started and ended."""


@dataclass(frozen=True)
class Moment:
    """A time of a rank's own clock, and the place in its GPU's work, if it has one."""

    now_s: float
    event: torch.cuda.Event | None = None


class Recorder:
    """What one rank notes in a step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._notes: list[tuple[int, Moment, Moment]] = []
        self._zero = 0.0
        self._first: torch.cuda.Event | None = None

    def begin(self, wire: Wire) -> None:
        """Start the clock, on all ranks at once."""
        self._notes = []
        if self._is_cuda:
            torch.cuda.synchronize()
        wire.meet("start of the recorded step")
        self._zero = perf_counter()
        self._first = self._event()

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def now(self) -> Moment:
        """This rank's own time."""
        return Moment(perf_counter() - self._zero)

    def computing(self) -> Moment:
        """The end of what was computed so far, and the start of what comes."""
        return Moment(perf_counter() - self._zero, self._event())

    def asked(self, task: int, start: Moment) -> None:
        """A message of a task was asked for since then; it lasts until it is there (`noting`)."""

    def noting(self, task: int, start: Moment) -> Callable[[], None]:
        """What to call when a message of a task is there."""
        return lambda: self.note(task, start, self.now())

    def note(self, task: int, start: Moment, end: Moment, waited_s: float = 0.0) -> None:
        """Note a task, of which a rank has waited for so long before it began."""
        self._notes.append((task, replace(start, now_s=start.now_s + waited_s), end))

    @property
    def spans(self) -> Spans:
        """The spans of all tasks; what was done in several goes lasts from the first to the last."""
        if self._is_cuda:
            torch.cuda.synchronize()
        found: Spans = {}
        for task, start, end in self._notes:
            start_s, end_s = self._seconds(start), self._seconds(end)
            before = found.get(task, (start_s, end_s))
            found[task] = (min(start_s, before[0]), max(end_s, before[1]))
        return found

    def _seconds(self, moment: Moment) -> float:
        if moment.event is None or self._first is None:
            return moment.now_s
        return max(moment.now_s, float(self._first.elapsed_time(moment.event)) / 1e3)


def gathered_spans(spans: Spans, wire: Wire) -> Spans:
    """The spans of all ranks; a task of several lasts from the first start to the last end."""
    if wire.size == 1:
        return spans
    own = json.dumps([(task, *span) for task, span in spans.items()])
    together: Spans = {}
    for said in wire.told_by_all(own, "recorded times"):
        for task, start_s, end_s in json.loads(said):
            before = together.get(task, (start_s, end_s))
            together[task] = (min(start_s, before[0]), max(end_s, before[1]))
    return together


def recorded(graph: TaskGraph, spans: Mapping[int, tuple[float, float]]) -> tuple[TaskGraph, Timeline]:
    """The task graph with real durations, and its real timeline. The hops of a collective are one. Taking a
    message is a part of what its ends do, and has no time of its own."""
    start_s, end_s = _filled(graph, spans, 0), _filled(graph, spans, 1)
    for number, task in enumerate(graph.tasks):
        if task.kind is TaskKind.TAKE:
            start_s[number] = end_s[number]
        elif task.kind not in COMPUTE_KINDS:  # its receiver asked for it earlier
            made_s = max((end_s[before] for before in graph.after[number]), default=0.0)
            start_s[number] = min(max(start_s[number], made_s), end_s[number])
    tasks = tuple(
        replace(task, duration_s=end - start)
        for task, start, end in zip(graph.tasks, start_s, end_s, strict=True)
    )
    return replace(graph, tasks=tasks), Timeline(start_s, end_s, max(end_s, default=0.0))


def _filled(graph: TaskGraph, spans: Mapping[int, tuple[float, float]], which: int) -> list[float]:
    times: list[float] = []
    for number, task in enumerate(graph.tasks):
        span = spans.get(number)
        if span is None and len(task.key) > 2 and (*task.key[:-1], 0) in graph.ids:
            span = spans.get(graph.ids[*task.key[:-1], 0])
        times.append(span[which] if span is not None else 0.0)
    return times
