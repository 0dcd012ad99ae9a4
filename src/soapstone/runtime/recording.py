"""The real timeline of a step, in the form of the predicted one.

Every rank notes when its compute tasks start and end, and when its messages are posted and taken; rank 0
puts them together. Clocks are set to zero when all ranks have come to the start of the step. A message's
end is when somebody took it, which is at least when it was there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import TaskGraph

Spans = dict[int, tuple[float, float]]
"""By a task's number, when it started and ended."""


class Recorder:
    """What one rank notes in a step."""

    def __init__(self) -> None:
        self.spans: Spans = {}
        self._zero = 0.0

    def begin(self, wire: Wire) -> None:
        """Start the clock, on all ranks at once."""
        self.spans = {}
        wire.meet("start of the recorded step")
        self._zero = perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._zero

    def noting(self, task: int, start_s: float) -> Callable[[], None]:
        """What to call when a message of a task is there."""
        return lambda: self.note(task, start_s, self.now())

    def note(self, task: int, start_s: float, end_s: float) -> None:
        """Note a task; what is done in several goes lasts from the first to the last."""
        before = self.spans.get(task, (start_s, end_s))
        self.spans[task] = (min(start_s, before[0]), max(end_s, before[1]))


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
    """The task graph with real durations, and its real timeline. The hops of a collective are one."""
    start_s, end_s = _filled(graph, spans, 0), _filled(graph, spans, 1)
    tasks = tuple(
        replace(task, duration_s=end - start)
        for task, start, end in zip(graph.tasks, start_s, end_s, strict=True)
    )
    return replace(graph, tasks=tasks), Timeline(start_s, end_s, max(end_s, default=0.0))


def _filled(graph: TaskGraph, spans: Mapping[int, tuple[float, float]], which: int) -> Sequence[float]:
    times: list[float] = []
    for number, task in enumerate(graph.tasks):
        span = spans.get(number)
        if span is None and len(task.key) > 2 and (*task.key[:-1], 0) in graph.ids:
            span = spans.get(graph.ids[*task.key[:-1], 0])
        times.append(span[which] if span is not None else 0.0)
    return times
