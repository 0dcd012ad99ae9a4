"""Which tasks account for the difference between a predicted step and a recorded one.

Both are traced back from the last task to the first along the time of a device: to what it computed, and,
where it stood still, to the message that its next task came after, and from there to the device that was late
with it. So every moment of a step belongs to one task, and what tasks have more in the recorded step than in
the predicted one adds up to the difference of the two. Time between tasks in which nothing was waited for is
the runtime's own: a kind of its own, under the name of the task that came next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soapstone.sim.previous import previous
from soapstone.sim.reference import Timeline
from soapstone.tasks.task import COMPUTE_KINDS, Task, TaskGraph, TaskKind

BETWEEN = "between tasks"
LAST = "(end of the step)"


@dataclass(frozen=True)
class Account:
    """Tasks of one kind, or of one kind and name: how often the recorded step was traced back to them, and
    the seconds of the two steps that are theirs."""

    kind: str
    name: str
    count: int
    predicted_s: float
    actual_s: float

    @property
    def difference_s(self) -> float:
        """How much longer it took than predicted."""
        return self.actual_s - self.predicted_s


@dataclass(frozen=True)
class Accounts:
    """Where a step's time was expected to go and where it went: by kinds, all of them, and by the tasks with
    the largest differences. The longest difference is the first of each."""

    kinds: tuple[Account, ...]
    tasks: tuple[Account, ...]


def accounts(graph: TaskGraph, predicted: Timeline, recorded: Timeline, most: int = 5) -> Accounts:
    """What accounts for the difference between two timelines of a task graph. Messages to which the graph
    gives no time are carried by others."""
    sums: dict[tuple[str, str], list[float]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for which, timeline in enumerate((predicted, recorded)):
        for kind, name, seconds in _traced_back(graph, timeline):
            if seconds:
                for key in ((kind, ""), (kind, name)):
                    sums.setdefault(key, [0.0, 0.0])[which] += seconds
                    counts[key] += which
    found = [Account(*key, counts[key], *seconds) for key, seconds in sums.items()]
    found.sort(key=lambda each: -abs(each.difference_s))
    kinds = tuple(each for each in found if not each.name)
    return Accounts(kinds, tuple(each for each in found if each.name)[:most])


def _traced_back(graph: TaskGraph, timeline: Timeline) -> Iterator[tuple[str, str, float]]:
    """The kind and name of what each moment of a step belongs to, from its end to its start, with seconds."""
    tasks, (start_s, end_s) = graph.tasks, _spans(graph, timeline)
    before = previous(graph, timeline)
    now_s, next_name = timeline.makespan_s, LAST
    task = max(range(len(tasks)), key=lambda i: (end_s[i], i), default=None)
    busy_with: int | None = None  # what the device that waits for a message did until it began to wait
    seen: set[int] = set()  # what others waited for, once each, whatever the clocks of several devices say
    while task is not None:
        kind, name = tasks[task].kind, _label(tasks[task])
        done_s = min(end_s[task], now_s)
        yield BETWEEN, next_name, now_s - done_s
        began_s = max(start_s[task], end_s[busy_with] if busy_with is not None else 0.0)
        now_s = min(began_s, done_s)
        yield kind, name, done_s - now_s
        next_name = name
        if busy_with is not None and start_s[task] <= end_s[busy_with]:
            task, busy_with = busy_with, None
            continue
        own = before.get(task) if kind in COMPUTE_KINDS else None  # messages wait for what they carry
        resource = tasks[task].resource
        others = [i for i in graph.after[task] if i not in seen and tasks[i].resource != resource]
        come = max(others, key=lambda i: (end_s[i], i), default=None)
        if come is not None and (own is None or end_s[come] > end_s[own]):
            seen.add(come)
            task, busy_with = come, own
        else:
            task, busy_with = own, None
    yield BETWEEN, next_name, now_s


def _label(task: Task) -> str:
    """What tasks are told apart by, beside their kind. A rank's updates are one call."""
    return "(all weights)" if task.kind is TaskKind.UPDATE else task.name.split(" ")[0].partition("[")[0]


def _spans(graph: TaskGraph, timeline: Timeline) -> tuple[Sequence[float], Sequence[float]]:
    """When tasks start and end. A message starts when all that it carries is made, and ends then too if
    another carries it."""
    start_s, end_s = list(timeline.start_s), list(timeline.end_s)
    for number in sorted(range(len(start_s)), key=lambda i: (timeline.end_s[i], timeline.start_s[i], i)):
        task = graph.tasks[number]
        if task.kind not in COMPUTE_KINDS:
            made_s = max((end_s[before] for before in graph.after[number]), default=0.0)
            start_s[number] = min(made_s, end_s[number])
            end_s[number] = end_s[number] if task.duration_s else start_s[number]
    return start_s, end_s
