"""A step alone: what a rank's own part of a step takes of its thread.

The rank's trainer does all that it does in a step, on tensors with elements, but with nobody at the other
end of its wire: what it sends is gone, what it receives are zeros, and it waits for nothing. So the time is
that of operators one after the other and of all that the runtime does around them, and of nothing else.
"""

# ruff: noqa: ARG002, a wire that leads nowhere asks neither whom nor why

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.ops.box import volume
from soapstone.plans import Plan
from soapstone.runtime.actions import Backward, Exchanged, SumGradients
from soapstone.runtime.inputs import Batch
from soapstone.runtime.nobody import NobodysWire
from soapstone.runtime.optimizing import optimizer_named
from soapstone.runtime.recording import Moment, Recorder
from soapstone.runtime.run import State
from soapstone.runtime.trainer import Options, Trainer
from soapstone.runtime.wire import Pending, Wire
from soapstone.tasks.exchange import Pattern
from soapstone.tasks.task import TaskGraph, TaskKind

Clock = Callable[[], float]

NOTED = 500
"""[choice] Tasks that are noted to see what noting one takes."""

STILL_AFTER = 32
"""[choice] So many tasks are launched before their GPU is waited for: few enough that a thread does not have
to wait for it within a task, and many, since it launches more slowly for a GPU that has nothing to do
([measured] 108 forward tasks of ResNet-101 on a quarter of an H200: 24 ms one after the other, 34 when each
was waited for)."""


@dataclass(frozen=True)
class Taken:
    """Seconds of the compute tasks of a step, by their numbers (the first of a region has all of it when it
    is taken back), of asking for each message and sum, of the update, of all of it, of what lies between
    all these, without what watching takes, and of what comes before the first task."""

    tasks_s: Mapping[int, float]
    asked_s: Mapping[int, float]
    update_s: float
    whole_s: float
    between_s: float = 0.0
    before_s: float = 0.0

    @property
    def done_s(self) -> float:
        """Seconds of all but what lies between."""
        return sum(self.tasks_s.values()) + sum(self.asked_s.values()) + self.update_s


class StepAlone:
    """Steps of a plan as one rank does them alone."""

    def __init__(
        self, plan: Plan, state: State, parameters: Mapping[str, nn.Parameter], batch: Batch, wire: Wire
    ) -> None:
        alone = AloneWire(wire)
        optimizer = optimizer_named(plan.optimizer, 1e-6)
        self._trainer = Trainer(plan, state, parameters, optimizer, alone, Options(replay=False))
        self._batch = batch

    @property
    def tasks(self) -> TaskGraph:
        """The task graph of the step."""
        return self._trainer.simulated.tasks

    @property
    def taken_back(self) -> list[list[int]]:
        """The tasks that each call of autograd takes back; the first of them is what it counts for."""
        found: dict[int, list[int]] = {}
        for action in self._trainer.run.executor.program.actions:
            if isinstance(action, Backward):
                found.setdefault(action.region.number, []).append(action.task)
        return list(found.values())

    @property
    def asked(self) -> list[tuple[int, int]]:
        """The tasks of messages, and how often something is asked for in each: once at each end of a message,
        and once for a collective."""
        return [
            (action.task, self._asked_in(action))
            for action in self._trainer.run.executor.program.actions
            if isinstance(action, Exchanged)
        ]

    @staticmethod
    def _asked_in(action: Exchanged) -> int:
        both = len(action.departures) + len(action.arrivals)
        return both if action.pattern is Pattern.TRANSFER else 1

    @property
    def sums(self) -> list[tuple[int, int, int]]:
        """The sums of gradients: the task of each, its weights, and their bytes."""
        held, found = self._trainer.run.held, []
        for action in self._trainer.run.executor.program.actions:
            if isinstance(action, SumGradients):
                own = [(held.holding(piece.weight, piece.box), piece.box) for piece in action.pieces]
                size_bytes = sum(volume(box) * holding.parameter.itemsize for holding, box in own)
                found.append((action.task, len(own), size_bytes))
        return found

    def run(self, clock: Clock) -> float:
        """Seconds of a step; on a GPU, until all of it is launched."""
        self.be_still()
        start = clock()
        self._trainer.step(self._batch)
        return clock() - start

    def settled(self, clock: Clock) -> tuple[float, float]:
        """Seconds of a step on a GPU until all of it is launched, and until all of it is done."""
        self.be_still()
        start = clock()
        self._trainer.step(self._batch)
        launched_s = clock() - start
        self.be_still()
        return launched_s, clock() - start

    def timed(self, clock: Clock) -> Taken:
        """Seconds of all that is done in a step. A GPU is waited for now and then, which does not count."""
        watch = Stopwatch(clock, self.be_still)
        self._trainer.run.executor.recorder = watch
        start = watch.computing()
        try:
            self._trainer.step(self._batch)
        finally:
            self._trainer.run.executor.recorder = None
        whole_s = watch.computing().now_s - start.now_s + sum(watch.asked_s.values())
        updates = {n for n, task in enumerate(self.tasks.tasks) if task.kind is TaskKind.UPDATE}
        update_s = max((seconds for n, seconds in watch.tasks_s.items() if n in updates), default=0.0)
        tasks_s = {n: seconds for n, seconds in watch.tasks_s.items() if n not in updates}
        begun_s = start.now_s if watch.begun_s is None else watch.begun_s
        taken = Taken(tasks_s, watch.asked_s, update_s, whole_s, before_s=begun_s - start.now_s)
        watching_s = watch.count / 2 * watching_s_of(clock)
        return replace(taken, between_s=max(0.0, whole_s - taken.done_s - watching_s))

    @property
    def is_launched(self) -> bool:
        """Whether a GPU computes, and the thread only launches that."""
        return self._trainer.wire.device.type == "cuda"

    def be_still(self) -> None:
        """Let the GPU have nothing to do."""
        if self.is_launched:
            torch.cuda.synchronize()


class Stopwatch(Recorder):
    """How long tasks take of the thread. Its time stands still while messages are asked for, and while it
    waits, now and then, for whatever it has to wait for (`be_still`)."""

    def __init__(self, clock: Clock, be_still: Callable[[], None] = lambda: None) -> None:
        super().__init__(torch.device("cpu"))
        self.tasks_s: dict[int, float] = {}
        self.asked_s: dict[int, float] = {}
        self.begun_s: float | None = None
        self._clock, self._be_still = clock, be_still
        self._still_s = 0.0
        self.count = 0

    def now(self) -> Moment:
        """The thread's time."""
        return Moment(self._clock())

    def computing(self) -> Moment:
        """The same without what messages and waiting took."""
        if self.count % (2 * STILL_AFTER) == 0:  # before and after each task
            start_s = self._clock()
            self._be_still()
            self._still_s += self._clock() - start_s
        self.count += 1
        return Moment(self._clock() - self._still_s)

    def asked(self, task: int, start: Moment) -> None:
        """A message or sum was asked for."""
        seconds = self._clock() - start.now_s
        self._still_s += seconds
        self.asked_s[task] = self.asked_s.get(task, 0.0) + seconds

    def noting(self, task: int, start: Moment) -> Callable[[], None]:
        """When it comes tells nothing."""
        return lambda: None

    def note(self, task: int, start: Moment, end: Moment, waited_s: float = 0.0) -> None:
        """Note a task."""
        if self.begun_s is None:
            self.begun_s = start.now_s
        self.tasks_s[task] = self.tasks_s.get(task, 0.0) + end.now_s - start.now_s


@cache
def watching_s_of(clock: Clock) -> float:
    """What noting a task takes that is not in the task's time."""
    watch = Stopwatch(clock)
    start_s = clock()
    for _ in range(NOTED):
        start = watch.computing()
        watch.note(0, start, watch.computing())
    return max(0.0, clock() - start_s - watch.tasks_s[0]) / NOTED


class AloneWire(NobodysWire):
    """A wire with nobody at its other ends, whose tensors have elements."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.rank, wire.size, wire.device, wire.backend, wire.neighbours)
        self._came_in: dict[tuple[int, int], Tensor] = {}

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, what: str) -> Pending:
        """Memory of this message's own, the same each time: nobody who receives one fills its memory, which
        takes longer than asking for it does."""
        found = self._came_in.get((peer, tag))
        if found is None or (found.shape, found.dtype) != (torch.Size(shape), dtype):
            found = self._came_in[peer, tag] = self._room(shape, dtype)
        return self._came(found.detach())

    def report(self, tensor: Tensor, what: str, ready: Any = None) -> Pending:
        """Numbers that the host has without waiting for its GPU, as from belts; not the real ones."""
        is_launched = tensor.device.type == "cuda"
        return self._came(torch.zeros(tensor.shape, dtype=tensor.dtype) if is_launched else tensor)

    def agree(self, text: str, what: str) -> None:
        """There is nobody to agree with."""

    def tell(self, sentence: str) -> None:
        """Nor to be told."""

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
