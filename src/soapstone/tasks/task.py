"""Tasks, and the task graph they form: what is simulated, executed and compared.

FlexFlow 5.1, Table 3: exeTime -> `duration_s`, device -> `resource`, I(t) -> `after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from soapstone.tasks.exchange import Exchange


class TaskKind(StrEnum):
    """What a task does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TRANSFER = "transfer"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    UPDATE = "update"
    TAKE = "take"


COMPUTE_KINDS = frozenset({TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.UPDATE, TaskKind.TAKE})
"""What devices do; all else is what links carry."""

Key = tuple[int, ...]
"""A task's place in the task order: it depends on what the task is, not on when it was built."""


@dataclass(frozen=True)
class Task:
    """One thing that one resource does. `size_bytes` is what a communication task moves over its
    link; 0 for compute."""

    key: Key
    kind: TaskKind
    name: str
    resource: str
    duration_s: float
    after: tuple[Key, ...]
    size_bytes: int = 0


class BufferKind(StrEnum):
    """What a device holds in memory."""

    INPUT = "inputs"
    WEIGHT = "weights"
    WEIGHT_GRADIENT = "weight gradients"
    ACTIVATION = "activations"
    RECEIVED = "received"
    GRADIENT = "gradients"
    SENT = "sent"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class Buffer:
    """Memory of one device, from the start of the first task that makes it until the end of the last
    that needs it; for the whole iteration when no task makes it."""

    kind: BufferKind
    device: int
    size_bytes: int
    made_by: tuple[Key, ...] = ()
    needed_by: tuple[Key, ...] = ()
    value: str = ""  # whose gradient it is, where it is one


@dataclass(frozen=True)
class TaskGraph:
    """All tasks of one iteration, in task order: a task's number in `tasks` is its id.

    `exchanges` are what the communication tasks carry: the key of the tasks of move m of an exchange
    is the exchange's own key, followed by m and the hop of the ring.
    """

    tasks: tuple[Task, ...]
    resources: tuple[str, ...]
    buffers: tuple[Buffer, ...] = ()
    exchanges: Mapping[Key, Exchange] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def ids(self) -> Mapping[Key, int]:
        """The number of each task."""
        return {task.key: i for i, task in enumerate(self.tasks)}

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each task, the numbers of the tasks it waits for."""
        return tuple(tuple(sorted(self.ids[key] for key in task.after)) for task in self.tasks)

    def bytes_before(self, number: int) -> int:
        """Bytes of the communication tasks that a task waits for."""
        before = (self.tasks[i] for i in self.after[number])
        return sum(task.size_bytes for task in before if task.kind not in COMPUTE_KINDS)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that communication tasks move over their links."""
        return sum(task.size_bytes for task in self.tasks if task.kind not in COMPUTE_KINDS)
