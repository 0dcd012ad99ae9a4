"""What ranks do in the tests of the wire; each gives the sentence of the error that it met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oracles.gpucases import sums_of_slices
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.at_hand import device_at_hand
from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Measured, OpKey, Profile
from soapstone.cost.runs import Again
from soapstone.errors import TrainingError
from soapstone.frontends.source import load
from soapstone.graph import GraphBuilder
from soapstone.machine import preset
from soapstone.plans import planned, predicted
from soapstone.runtime.alone import StepAlone, Taken
from soapstone.runtime.mailbox import local_mailbox
from soapstone.runtime.profiling import measured_at_once, profile_of_all
from soapstone.runtime.recording import Recorder, gathered_spans
from soapstone.runtime.staging import Queued
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import baseline, data_parallel, single_device
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.passes import passes_in
from soapstone.tasks.task import TaskGraph, TaskKind
from soapstone.validation.adding import Adding, measured_adding
from soapstone.validation.crowding import Crowding, measured_crowding
from soapstone.validation.in_step import Alone, InStep, Repeated, count_of_parts, measured_in_step
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.pieces import Beyond, Said, measured_beyond
from soapstone.validation.running import model_of, step_alone
from soapstone.validation.traffic import Traffic, measured_traffic
from soapstone.validation.unsteady import Pace, Round


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


def adding_seen(rank: int, size: int) -> Adding:
    """What ranks measure of adding gradients up."""
    return measured_adding(Wire(rank, size), perf_counter)


class _Measures:
    """What is measured with a profiler that has made-up times, told better each time."""

    def __init__(self, seconds: float, doubts: Sequence[float]) -> None:
        measured = Measured(((4, 8),), ((4, 2),), seconds, 0.1, 128.0, 224)
        self.profile = Profile("cpu", {}, {OpKey("linear", "{}", "f32", 0): (measured,)})
        self.calls = 0
        self._doubts = doubts

    @property
    def doubt(self) -> float:
        return self._doubts[min(self.calls, len(self._doubts)) - 1]

    def measure(self, candidate: Candidate, *, again: bool = False) -> bool:
        assert again is (self.calls > 0)
        del candidate
        self.calls += 1
        return True


def measuring_seen(rank: int, size: int, doubts: Sequence[float]) -> tuple[int, list[float]]:
    """How often ranks measure an operator that is told so badly each time, and the times they are told; the
    second rank takes twice as long, and knows nothing of doubt."""
    wire, own = Wire(rank, size), _Measures(0.001 * (rank + 1), doubts if rank == 0 else [1.0])
    work = SimpleNamespace(node=SimpleNamespace(op_name="linear"))
    measured_at_once(own, [work], wire, 60.0, lambda _done, _what: None)  # type: ignore[arg-type, list-item]
    times = profile_of_all(own.profile, wire).times
    return own.calls, [each.seconds for found in times.values() for each in found]


def crowding_seen(rank: int, size: int, folder: str) -> Crowding:
    """What ranks measure of made-up operators: one that takes the same whoever is at it, one that takes
    longer the more ranks are (each leaves a file where the others see it), one whose kernels alone do, as
    they tell themselves, one whose kernels take longer on the second of two ranks, and one that a single rank
    has."""
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

    def at_work() -> int:
        own.touch()
        sleep(0.01)
        count = len(list(Path(folder).iterdir()))
        sleep(0.01)
        own.unlink()
        return count

    def launched() -> Again:
        return Again(0.001, 0.01 * at_work())

    def uneven() -> Again:
        return Again(0.001, 0.02 if (rank, at_work()) == (1, 2) else 0.01)

    runs: dict[str, Callable[[], Again]] = {
        "steady": steady,
        "crowded": crowded,
        "launched": launched,
        "uneven": uneven,
    }
    runs |= {"odd": steady} if rank == 0 else {}
    return measured_crowding(device_at_hand("cpu", threads=2), Wire(rank, size), runs)


PIECE_S, BACK_S, ASKING_S = 3e-5, 2e-4, 2e-3
"""What pieces, calls and asking for messages take in made-up steps of a strategy that cuts up much."""

PASS_S, TASK_S, VIEW_S, CALL_S, SUM_S, BETWEEN_S, PART_S = 1e-4, 5e-5, 2e-5, 3e-4, 4e-4, 7e-4, 8e-5
"""What made-up steps take: every pass over and over, and in a step; a task and a view; a call of autograd, of
which there is one; a sum; and what comes after each task. A part of a pass takes longer, on the way back by
twice as much."""


class _Step:
    """Made-up steps of a rank, whose forward tasks and update take longer if others are at it, where it minds
    them. Tasks and views take twice as long in one that is finer, and what needs something of others a
    second more."""

    is_launched = False

    def __init__(
        self,
        tasks: TaskGraph,
        strategy: Strategy,
        rank: int,
        folder: Path,
        *,
        minds: bool = True,
        is_finer: bool = False,
    ) -> None:
        self._place, self._is_finer = preset("cpu:1x2").devices[rank].name, is_finer
        self.tasks, self._rank, self._own, self._minds = tasks, rank, folder / str(rank), minds
        self._passes = {
            number: passes
            for number, passes in passes_in(tasks, strategy).items()
            if tasks.tasks[number].resource == self._place
        }
        sums = [n for n, task in enumerate(tasks.tasks) if task.kind is TaskKind.ALL_REDUCE]
        self.sums = [(sums[0], 4, 4096)] if sums else []
        back = [number for number in self._passes if tasks.tasks[number].kind is TaskKind.BACKWARD]
        self.taken_back = [back[::-1]] if back else []

    def _is_alone(self) -> bool:
        """Whether others are at it shows in the files that each leaves."""
        self._own.touch()
        sleep(0.02)
        alone = len(list(self._own.parent.iterdir())) == 1
        sleep(0.02)
        self._own.unlink()
        return alone

    def timed(self, clock: Callable[[], float]) -> Taken:
        del clock
        if not self._passes:
            return Taken({}, {}, 0.0, 0.0)
        times = 1.0 if not self._minds or self._is_alone() else 2.0 + self._rank
        tasks_s, back_s = {}, CALL_S
        for number, passes in self._passes.items():
            own_s = PASS_S * sum(share for work, share in passes if work is not None)
            if self.tasks.tasks[number].kind is TaskKind.FORWARD:
                views = sum(share for work, share in passes if work is None)
                each_s = (1 + self._is_finer) * (TASK_S + VIEW_S * views)
                before = (self.tasks.tasks[i].resource for i in self.tasks.after[number])
                waits_s = float(self._is_finer and any(place != self._place for place in before))
                tasks_s[number] = own_s + times * each_s + PART_S * count_of_parts(passes) + waits_s
            else:
                back_s += 0.9 * own_s + 2 * PART_S * count_of_parts(passes)
                last = number
        asked_s = {task: SUM_S for task, _, _ in self.sums}
        between_s = BETWEEN_S * len(self._passes)
        return Taken({**tasks_s, last: back_s}, asked_s, times * PASS_S, 0.0, between_s)

    def run(self, clock: Callable[[], float]) -> float:
        taken = self.timed(clock)
        return taken.done_s + taken.between_s


def in_step_seen(rank: int, size: int, folder: str, is_finer_too: bool) -> tuple[InStep, ...]:
    """What ranks make of made-up steps; of those of a pipeline, too."""
    machine = preset("cpu:1x2")
    strategy = data_parallel(load("lenet", tiny=True, devices=2).captured().graph, machine)
    tasks = task_graph(strategy, machine, AnalyticCosts())
    step = _Step(tasks, strategy, rank, Path(folder))
    weights = sum(task.kind is TaskKind.UPDATE for task in tasks.tasks) // size
    repeated = Repeated(lambda _: PASS_S, lambda _: PASS_S / weights, CALL_S)
    alone = Alone(strategy, step)  # type: ignore[arg-type]
    finer = None
    if is_finer_too:
        stages = baseline("pipeline", strategy.graph, machine, AnalyticCosts(), 0)
        finer_tasks = task_graph(stages, machine, AnalyticCosts())
        made_up = _Step(finer_tasks, stages, rank, Path(folder), is_finer=True)
        finer = Alone(stages, made_up)  # type: ignore[arg-type]
    return measured_in_step(Wire(rank, size), alone, lambda: 0.0, [repeated] * size, finer=finer)


LAUNCHED_S, BEFORE_S, KERNELS_S = 2e-3, 3e-4, 0.06
"""What a made-up step on a GPU takes of its thread beside its tasks, and before the first of them, and until
its kernels are done, where a rank is alone; where it is not, twice as long and more."""


class _OnGpu(_Step):
    """A made-up step whose tasks are launched, and done when kernels are."""

    is_launched = True

    def timed(self, clock: Callable[[], float]) -> Taken:
        taken = super().timed(clock)
        return replace(taken, whole_s=taken.done_s + LAUNCHED_S, before_s=BEFORE_S)

    def settled(self, clock: Callable[[], float]) -> tuple[float, float]:
        launched_s = self.timed(clock).whole_s
        return launched_s, KERNELS_S * (1.0 if self._is_alone() else 2.0 + self._rank)


def on_gpus_seen(rank: int, size: int, folder: str) -> tuple[InStep, ...]:
    """What ranks make of made-up steps on GPUs."""
    machine = preset("cpu:1x2")
    strategy = data_parallel(load("lenet", tiny=True, devices=2).captured().graph, machine)
    tasks = task_graph(strategy, machine, AnalyticCosts())
    step = _OnGpu(tasks, strategy, rank, Path(folder))
    alone = Alone(strategy, step)  # type: ignore[arg-type]
    repeated = Repeated(lambda _: PASS_S, lambda _: 0.0, CALL_S)
    return measured_in_step(Wire(rank, size), alone, lambda: 0.0, [repeated] * size)


def in_parts_seen(rank: int, size: int, folder: str) -> tuple[InStep, ...]:
    """What ranks make of made-up steps with passes in parts, and of one on the first rank without."""
    build = GraphBuilder("normalised")
    x = build.input("x", (8, 4, 6, 6))
    for i in range(9):
        (x,) = build.add("conv2d", [x, build.weight(f"w{i}", (4, 4, 1, 1)), None], name=f"conv{i}")
        if i % 3:  # tasks of one pass tell a task's own from its passes'
            weights = [build.weight(f"{name}{i}", (4,)) for name in ("scale", "shift")]
            (x,) = build.add("batch_norm", [x, *weights, None, None], name=f"bn{i}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1, 2, 3)}, name="loss")
    graph, machine = build.graph(loss=loss), preset("cpu:1x2")

    def alone(strategy: Strategy, *, minds: bool) -> Alone:
        tasks = task_graph(strategy, machine, AnalyticCosts())
        step = _Step(tasks, strategy, rank, Path(folder), minds=minds)
        return Alone(strategy, step)  # type: ignore[arg-type]

    divided, whole = alone(data_parallel(graph, machine), minds=True), single_device(graph, machine)
    repeated = Repeated(lambda _: PASS_S, lambda _: PASS_S / 21, CALL_S)
    undivided = alone(whole, minds=False)
    assert (divided.has_parts, undivided.has_parts) == (True, False)
    return measured_in_step(Wire(rank, size), divided, lambda: 0.0, [repeated] * size, undivided)


def step_alone_seen(rank: int, size: int, fails: bool) -> bool:
    """Whether ranks have a step to do alone; that of rank 1 may fail."""
    machine = preset("cpu:1x2")
    source = load("lenet", tiny=True, devices=2, weights=True)
    captured = source.captured()
    strategy = data_parallel(captured.graph, machine)
    plan = planned(strategy, machine, predicted(strategy, machine, AnalyticCosts()), AnalyticCosts())
    wire = Wire(rank, size)
    model = model_of(source, captured.graph, captured.constants, wire.device)
    if fails and rank == 1:
        for tensor in model.state.weights.values():
            tensor.fill_(torch.nan)
    return step_alone(plan, model, wire) is not None


class _CutUp:
    """Made-up times of a real step: as predicted, but for pieces, calls and what is asked for."""

    def __init__(self, step: StepAlone, parts: Parts, times: float) -> None:
        self.tasks, self.taken_back, self.asked = step.tasks, step.taken_back, step.asked
        self._step, self._parts, self._times = step, parts, times

    def timed(self, clock: Callable[[], float]) -> Taken:
        real, times, parts = self._step.timed(clock), self._times, self._parts
        back = {numbers[0]: numbers for numbers in self.taken_back}
        tasks_s = {}
        for number in real.tasks_s:
            own = back.get(number, [number])
            tasks_s[number] = float(parts.seconds[own].sum() + times * PIECE_S * parts.handed.put[own].sum())
            tasks_s[number] += times * BACK_S * (number in back)
        place = self.tasks.tasks[next(iter(tasks_s))].resource
        is_own = np.array([task.resource == place for task in self.tasks.tasks])
        cut = float(parts.handed.cut[is_own].sum())
        each_s = times * (ASKING_S + PIECE_S * cut / sum(count for _, count in self.asked))
        asked_s: dict[int, float] = {}
        for task, count in self.asked:
            asked_s[task] = asked_s.get(task, 0.0) + count * each_s
        return Taken(tasks_s, asked_s, 0.0, 0.0)


def beyond_seen(rank: int, size: int) -> Beyond:
    """What ranks find in made-up times of steps of a strategy that cuts up much."""
    machine, costs = preset("cpu:1x2"), AnalyticCosts()
    source = load("rnnlm", tiny=True, devices=2, weights=True)
    captured = source.captured()
    strategy = random_strategy(captured.graph, 2, Random(3))
    plan = planned(strategy, machine, predicted(strategy, machine, costs), costs)
    wire = Wire(rank, size)
    alone = step_alone(plan, model_of(source, captured.graph, captured.constants, wire.device), wire)
    assert alone is not None
    calls, tasks = alone.step.taken_back, alone.step.tasks.tasks
    assert len(calls) > 1
    own = [n for n, task in enumerate(tasks) if task.resource == machine.devices[rank].name]
    backward = [number for number in own if tasks[number].kind is TaskKind.BACKWARD]
    assert sorted(number for each in calls for number in each) == backward
    asked = {task for task, _ in alone.step.asked}
    assert asked == alone.step.timed(perf_counter).asked_s.keys() - {task for task, *_ in alone.step.sums}
    parts = parts_of(plan, costs, backend=wire.backend)
    made_up = _CutUp(alone.step, parts, 1.0 + rank)
    return measured_beyond(wire, made_up, Said(parts, parts.seconds), perf_counter)  # type: ignore[arg-type]


class _Taking:
    """A step that takes as long as it is told to."""

    is_launched = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def run(self, clock: Callable[[], float]) -> float:
        del clock
        return self._seconds

    def be_still(self) -> None:
        """There is nothing to wait for."""


def rounds_seen(rank: int, size: int) -> tuple[Round, ...]:
    """What ranks hear, after two looks, of steps that take 4 ms on the first of them, and 6 on the second,
    where one by itself had taken 2, and each among all 5."""
    pace = Pace(Wire(rank, size), _Taking(4e-3 + 2e-3 * rank), 2e-3, 5e-3)  # type: ignore[arg-type]
    assert pace.among_all() == (4e-3 + 2e-3 * rank) / 5e-3
    for _ in range(2):
        pace.take()
    return pace.rounds()


def met_after_s(rank: int, size: int) -> float:
    """How long each rank waits for rank 1, which is late, at the second of three meetings."""
    wire = Wire(rank, size, mailbox=local_mailbox(rank, dist.distributed_c10d._get_default_store()))
    wire.meet("start of the case")
    sleep(0.3 if rank == 1 else 0.0)
    start = perf_counter()
    wire.meet("place to come to")
    waited_s = perf_counter() - start
    wire.meet("end")
    assert wire.backend == "memory"
    return waited_s


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
