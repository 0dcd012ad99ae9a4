"""Steps that a rank does alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import torch

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import planned, predicted
from soapstone.runtime.alone import STILL_AFTER, AloneWire, StepAlone, Stopwatch
from soapstone.runtime.nobody import NobodysWire
from soapstone.runtime.recording import Moment
from soapstone.runtime.wire import Pending
from soapstone.search.baselines import BASELINES, baseline
from soapstone.tasks.task import TaskKind
from soapstone.validation.running import model_of

COSTS = AnalyticCosts()
CPUS = preset("cpu:1x2")


def alone(name: str, rank: int) -> StepAlone:
    source = load("lenet", tiny=True, devices=2, weights=True)
    captured = source.captured()
    strategy = baseline(name, captured.graph, CPUS)
    plan = planned(strategy, CPUS, predicted(strategy, CPUS, COSTS), COSTS)
    place = torch.device("cpu")
    model = model_of(source, captured.graph, captured.constants, place)
    return StepAlone(plan, model.state, model.parameters, model.inputs, NobodysWire(rank, 2, place, "memory"))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_that_a_rank_does_has_its_time(rank: int) -> None:
    """Every call of the clock is a moment later, so that all times are known."""
    step = alone("data_parallel", rank)
    taken = step.timed(map(float, count()).__next__)
    tasks, place = step.tasks.tasks, CPUS.devices[rank].name
    forward = {n for n, task in enumerate(tasks) if task.resource == place and task.kind is TaskKind.FORWARD}
    assert forward <= set(taken.tasks_s)
    assert all(taken.tasks_s[number] == 1.0 for number in forward)
    assert {tasks[n].resource for n in taken.tasks_s} == {place}
    assert len(step.taken_back) == 1
    ((task, weights, size_bytes),) = step.sums
    assert weights == sum(each.kind is TaskKind.UPDATE and each.resource == place for each in tasks)
    module = load("lenet", tiny=True, devices=2, weights=True).module
    assert size_bytes == sum(parameter.nbytes for parameter in module.parameters())
    assert taken.asked_s == {task: 1.0}
    assert taken.update_s == 1.0
    assert taken.whole_s >= sum(taken.tasks_s.values()) + 2.0


@pytest.mark.parametrize("name", ["model_parallel", "zero", "pipeline"])
def test_what_comes_from_nobody_has_memory_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in each step, which nobody writes to: every message is all zeros in the last step, too."""
    came: dict[tuple[int, int], list[torch.Tensor]] = {}

    class Watched(AloneWire):
        def receive(
            self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, what: str
        ) -> Pending:
            found = super().receive(shape, dtype, peer, tag, what)
            came.setdefault((peer, tag), []).append(found.wait())
            return found

    monkeypatch.setattr("soapstone.runtime.alone.AloneWire", Watched)
    step = alone(name, 1)
    for _ in range(3):
        step.run(map(float, count()).__next__)
    assert came
    places = [{tensor.data_ptr() for tensor in own} for own in came.values()]
    assert all(len(own) == 1 for own in places)
    assert len(set.union(*places)) == len(places)
    assert not any(tensor.any() for own in came.values() for tensor in own)


@pytest.mark.parametrize("name", ["model_parallel", "single_device", "zero", "pipeline"])
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_is_waited_for(name: str, rank: int) -> None:
    """Not by strategies either whose ranks need what others have."""
    assert name in BASELINES
    step = alone(name, rank)
    place = CPUS.devices[rank].name
    own = [n for n, t in enumerate(step.tasks.tasks) if t.resource == place and t.kind is TaskKind.FORWARD]
    for _ in range(2):
        taken = step.timed(map(float, count()).__next__)
        assert set(own) <= set(taken.tasks_s)


def test_the_time_of_tasks_stands_still_while_messages_are_asked_for() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    start = watch.computing()
    now[0] = 2.0
    asked = watch.now()
    now[0] = 5.0
    watch.asked(7, asked)
    now[0] = 6.0
    watch.note(3, start, watch.computing())
    assert watch.asked_s == {7: 3.0}
    assert watch.tasks_s == {3: 3.0}
    watch.noting(7, Moment(0.0))()
    assert watch.tasks_s == {3: 3.0}


def test_waiting_for_a_gpu_does_not_count() -> None:
    """It is waited for after so many tasks, and at the start."""
    now, still = [0.0], []

    def be_still() -> None:
        still.append(now[0])
        now[0] += 100.0

    watch = Stopwatch(lambda: now[0], be_still)
    for task in range(2 * STILL_AFTER):
        start = watch.computing()
        now[0] += 1.0
        watch.note(task, start, watch.computing())
    assert still == [0.0, 100.0 + STILL_AFTER]
    assert set(watch.tasks_s.values()) == {1.0}
