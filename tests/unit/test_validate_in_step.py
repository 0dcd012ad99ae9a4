"""What operators take longer in a step than over and over again, and what a step takes beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.ranks import Ranks
from oracles.wirecases import (
    BEFORE_S,
    BETWEEN_S,
    KERNELS_S,
    LAUNCHED_S,
    PART_S,
    PASS_S,
    SUM_S,
    TASK_S,
    VIEW_S,
    in_parts_seen,
    in_step_seen,
    on_gpus_seen,
    step_alone_seen,
)

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.work import Work
from soapstone.frontends.source import load
from soapstone.graph import GraphBuilder
from soapstone.machine import preset
from soapstone.plans import planned, predicted
from soapstone.search.baselines import data_parallel
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.passes import passes_in
from soapstone.tasks.task import TaskKind
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding
from soapstone.validation.in_step import MOST_ONCE_S, InStep
from soapstone.validation.longer import (
    MOST_ADDING,
    Call,
    Longer,
    Rows,
    beside_tasks,
    less_or_longer,
    longer,
    longer_back,
)
from soapstone.validation.parts import parts_of

COSTS = AnalyticCosts()
CPUS = preset("cpu:1x2")
ALONE = Crowding((1.0, 1.0))


def lenet() -> Strategy:
    return data_parallel(load("lenet", tiny=True, devices=2).captured().graph, CPUS)


def work(*, backward: bool = False) -> Work:
    return Work("relu", (), ((16,),), ((16,),), "f32", int(backward), 1.0, 64)


ROWS = np.array([(1.0, float(n % 3), float(n % 5), 1e-5 * (7 * n % 31 + 1)) for n in range(24)])
"""Tasks: one, views, passes, seconds."""


@given(st.floats(1e-6, 1e-4), st.floats(1e-6, 1e-4), st.floats(1e-6, 1e-4))
def test_what_was_put_in_is_found(task_s: float, view_s: float, pass_s: float) -> None:
    found = longer(ROWS, ROWS @ np.array([task_s, view_s, pass_s, 1.0]))
    assert found.task_s == pytest.approx(task_s, rel=0.02, abs=1e-7)
    assert found.view_s == pytest.approx(view_s, rel=0.02, abs=1e-7)
    assert found.pass_s == pytest.approx(pass_s, rel=0.02, abs=1e-7)
    assert found.share == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("column", [1, 2])
def test_what_no_task_has_leaves_the_rest_as_it_is(column: int) -> None:
    """Models without views, and GPUs, where passes are not told: also where what was seen is not exact."""
    rows, noise = ROWS.copy(), np.random.default_rng(0).normal(0, 1e-6, len(ROWS))
    rows[:, column] = 0.0
    as_seen = np.array([5e-5, 4e-5, 3e-5, 1.0])
    found = longer(rows, rows @ as_seen + noise)
    said = np.array([found.task_s, found.view_s, found.pass_s])
    as_seen[column] = 0.0
    assert said == pytest.approx(as_seen[:3], abs=3e-6)


def test_no_task_is_shorter_for_its_own_sake_or_for_its_views() -> None:
    found = longer(ROWS, 0.9 * ROWS[:, 3])
    assert found.task_s == found.view_s == found.pass_s == 0.0
    assert found.share == pytest.approx(-0.1, abs=1e-3)


@given(st.lists(st.floats(0.5, 2.5), min_size=24, max_size=24))
def test_together_tasks_take_what_they_took(factors: list[float]) -> None:
    """Whatever each of them took."""
    seen_s = np.array(factors) * ROWS[:, 3]
    found = longer(ROWS, seen_s)
    assume(-0.5 < found.share < 1.0)  # its bounds
    said_s = ROWS @ np.array([found.task_s, found.view_s, found.pass_s, 1.0 + found.share])
    assert said_s.sum() == pytest.approx(seen_s.sum(), rel=0.02)


PASSES = st.lists(st.tuples(st.floats(1e-5, 1e-3), st.sampled_from([0.5, 1.0])), min_size=8, max_size=40)


@given(PASSES, st.floats(0.55, 1.95))
def test_together_backward_passes_take_what_they_took(
    passes: list[tuple[float, float]], factor: float
) -> None:
    """Those that take a little less do so each by as much, but for half of the shortest; others by the same
    part."""
    own_s = sum(seconds * share for seconds, share in passes)
    found = less_or_longer(passes, factor * own_s)
    assert found.pass_s == 0 or found.share == 0
    assert -3e-5 <= found.pass_s <= 0
    assert factor > 1 or found.share <= 0
    said_s = sum(share * (seconds + found.of(seconds)) for seconds, share in passes)
    assert said_s == pytest.approx(factor * own_s, rel=0.01)


def test_backward_passes_take_less_by_a_call_or_by_a_part_and_no_less_than_half() -> None:
    assert less_or_longer([(1e-4, 1.0)] * 9, 9 * 8e-5) == Longer(pass_s=-2e-5)
    assert less_or_longer([(1e-3, 1.0)] * 9, 9 * 8e-4) == Longer(share=-0.2)
    assert less_or_longer([(1e-4, 1.0)] * 9, 1e-5) == Longer(share=-0.5)


def calls(
    count: int, each_s: float, longer: Longer, adding_s: float = 0.0, times: float = 1.0, passes: int = 9
) -> list[Call]:
    """So many calls of passes that take so long each, and longer in a step, of which all but the first add
    gradients up."""
    own = [(each_s, 1.0)] * passes
    said_s = sum(seconds + longer.of(seconds) for seconds, _ in own)
    added_s = [0.0, *[adding_s] * (count - 1)]
    return [Call(own, each, said_s + times * each) for each in added_s]


@given(st.floats(-2e-5, 5e-5), st.floats(-0.3, 0.5), st.floats(1.0, MOST_ADDING))
def test_what_is_each_passes_own_is_told_from_time_and_adding_up(
    pass_s: float, share: float, times: float
) -> None:
    """By two steps, of which one has smaller passes and more to add up."""
    as_seen = Longer(pass_s=pass_s, share=share)
    large, small = calls(1, 1e-3, as_seen), calls(4, 2.5e-4, as_seen, 2e-4, times)
    found, adding = longer_back(large, small)
    assert adding == pytest.approx(times, rel=0.05)
    assert found.pass_s == pytest.approx(pass_s, abs=5e-6)
    assert found.share == pytest.approx(share, abs=0.02)


@given(st.lists(st.floats(0.7, 1.5), min_size=5, max_size=5))
def test_together_passes_of_the_first_strategy_take_what_they_took(factors: list[float]) -> None:
    """Whatever the second one says."""
    both = [*calls(1, 1e-3, Longer()), *calls(4, 2.5e-4, Longer(), 2e-4)]
    own, *others = (
        Call(each.passes, each.adding_s, f * each.seen_s) for each, f in zip(both, factors, strict=True)
    )
    found, times = longer_back([own], others)
    assume(-0.5 < found.share < 1.0)  # its bounds
    assert own.said_s(found) + times * own.adding_s == pytest.approx(own.seen_s, rel=0.02)


def test_adding_up_is_as_it_was_measured_where_nothing_tells_it_from_passes() -> None:
    assert longer_back(calls(2, 1e-3, Longer(), 1e-3, 2.0)) == (Longer(share=0.0556), 1.0)  # one strategy
    own = Longer(pass_s=5e-5)
    found, times = longer_back(calls(1, 1e-3, own), calls(4, 2.5e-4, own))  # nothing is added up
    assert (found.pass_s, times) == (pytest.approx(5e-5, abs=5e-6), 1.0)
    assert longer_back(calls(1, 1e-3, Longer()), calls(4, 2.5e-4, Longer(), 2e-4, 9.0))[1] == MOST_ADDING
    assert longer_back(calls(1, 1e-3, Longer()), calls(4, 2.5e-4, Longer(), 2e-4, 0.5))[1] == 1.0


def test_what_passes_have_of_their_own_does_not_save_their_time() -> None:
    """Small passes that take twice as long as they should, beside large ones that take less: that is not
    believed to be a pass's own; and what the large ones took stays what they take."""
    large, small = ROWS, ROWS / np.array([1.0, 1.0, 1.0, 4.0])
    found = longer(large, 0.9 * large[:, 3], small, 2.5 * small[:, 3])
    assert found.share >= -0.2 - 1e-6
    said_s = large @ np.array([found.task_s, found.view_s, found.pass_s, 1.0 + found.share])
    assert said_s.sum() == pytest.approx(0.9 * large[:, 3].sum(), rel=0.01)
    own, others = calls(1, 1e-3, Longer(share=-0.1)), calls(4, 2.5e-4, Longer(share=1.0), 2e-4)
    back, times = longer_back(own, others)
    assert back.share >= -0.2 - 1e-6
    assert own[0].said_s(back) + times * own[0].adding_s == pytest.approx(own[0].seen_s, rel=0.01)


def test_few_tasks_tell_nothing() -> None:
    assert longer(ROWS[:7], 2 * ROWS[:7, 3]) == Longer()
    assert less_or_longer([(1e-4, 1.0)] * 7, 1e-3) == Longer()


def test_a_pass_never_takes_less_than_half() -> None:
    assert Longer(pass_s=-2.0).of(1.0) == -0.5
    assert Longer(share=-2.0).of(1.0) == -0.5


def test_where_ranks_wait_for_cores_all_of_it_is_stretched() -> None:
    """A pass of 1 ms by its clock, for which two are to be waited for, has half a millisecond more of its
    own in a step."""
    own = InStep(Longer(pass_s=3e-4, share=0.2))
    crowding = Crowding((1.0, 2.0), in_step=(own, own), stretch=(1.0, 2.0))
    assert crowding.seconds(work(), 1e-3, 2) == pytest.approx(2e-3)
    assert crowding.in_step_s(work(), 1e-3, 1) == pytest.approx(1.5e-3)
    assert crowding.in_step_s(work(), 2e-3, 2) == pytest.approx(3e-3)


def test_views_are_passes_without_work() -> None:
    """On the way forward; on the way back they are a part of autograd's call."""
    build = GraphBuilder("views")
    x, w = build.input("x", (4, 6)), build.weight("w", (6, 6))
    (seen,) = build.add("reshape", [x], {"shape": (4, 6)}, name="before")
    (same,) = build.add("replicate", [w], {"degree": 2}, name="copies")  # nothing is done for that
    (y,) = build.add("linear", [seen, same, None], name="product")
    (z,) = build.add("permute", [y], {"dims": (1, 0)}, name="after")
    (loss,) = build.add("sum", [z], {"dim": (0, 1)}, name="loss")
    strategy = data_parallel(build.graph(loss=loss), CPUS)
    tasks = task_graph(strategy, CPUS, COSTS)
    counts = {TaskKind.FORWARD: [0, 0], TaskKind.BACKWARD: [0, 0]}
    for number, passes in passes_in(tasks, strategy).items():
        task = tasks.tasks[number]
        if task.resource == CPUS.devices[0].name:
            for own, _ in passes:
                counts[task.kind][own is None] += 1
    assert counts[TaskKind.FORWARD][1] >= 1
    assert counts[TaskKind.BACKWARD][1] == 0
    assert counts[TaskKind.FORWARD][0] == counts[TaskKind.BACKWARD][0] == 2


@pytest.mark.parametrize("is_finer_too", [False, True])
def test_ranks_agree_on_what_they_have_seen(tmp_path: Path, is_finer_too: bool) -> None:
    """Made-up steps: with both ranks at it tasks, views and updates take two and three times as long, 2.5 on
    average; all backward passes take nine tenths. Finer tasks, which take twice as long, count for what is a
    task's own, but for those that wait for others."""
    ranks = Ranks(2)
    first, second = ranks.run(in_step_seen, 2, str(tmp_path), is_finer_too)
    ranks.close()
    assert first == second
    one, both = first
    for found, times in ((one, 1.0), (both, 2.5)):
        assert found.update_once_s <= MOST_ONCE_S
        updates_s = (1.0 + found.update) * PASS_S + found.update_once_s
        assert updates_s == pytest.approx(times * PASS_S, rel=0.01)
        if is_finer_too:
            own = found.forward  # every pass takes alike: it is not told from a task, nor from its time
            assert 0.9 * times * TASK_S < own.task_s + own.pass_s < 3 * times * TASK_S
            assert own.share >= -0.1 - 1e-6
        else:
            assert found.forward.task_s == pytest.approx(times * TASK_S, rel=0.02)
            assert found.forward.view_s == pytest.approx(times * VIEW_S, rel=0.02)
            assert found.forward.share == pytest.approx(0.0, abs=0.01)
        assert found.backward.of(1e-4) == pytest.approx(-1e-5, rel=0.05)
        assert found.collecting_s(1024) * 4 == pytest.approx(SUM_S, rel=0.02)
        assert found.between_s == pytest.approx(BETWEEN_S, rel=0.02)
        assert found.real > 2  # made-up steps sleep, and do not tell


def test_a_gpu_has_nothing_to_do_before_the_first_task_is_launched(tmp_path: Path) -> None:
    """That is a step's own, none of what lies between tasks; and a step ends when its kernels do."""
    ranks = Ranks(2)
    first, second = ranks.run(on_gpus_seen, 2, str(tmp_path))
    ranks.close()
    assert first == second
    strategy = lenet()
    tasks = task_graph(strategy, CPUS, COSTS)
    count = sum(tasks.tasks[n].resource == CPUS.devices[0].name for n in passes_in(tasks, strategy))
    for found, times in zip(first, (1.0, 2.5), strict=True):
        assert found.settled_s == pytest.approx(times * KERNELS_S)
        assert found.beside_s == pytest.approx(BEFORE_S)
        assert found.between_s == pytest.approx((LAUNCHED_S - BEFORE_S) / count, rel=0.01)
        assert found.whole_s < found.settled_s
        assert (found.real, found.beside_weight_s) == (1.0, 0.0)


def test_what_parts_of_passes_take_is_told_from_what_whole_ones_take(tmp_path: Path) -> None:
    """By a step without parts; what others take from a rank is then a part's too."""
    ranks = Ranks(2)
    first, second = ranks.run(in_parts_seen, 2, str(tmp_path))
    ranks.close()
    assert first == second
    one, both = first
    assert one.forward.task_s == both.forward.task_s == pytest.approx(TASK_S, rel=0.02)
    assert one.forward.of(PASS_S) == pytest.approx(0.0, abs=1e-6)
    assert one.forward.part_s == pytest.approx(PART_S, rel=0.02)
    assert both.forward.part_s > 1.2 * PART_S
    assert one.backward.part_s == both.backward.part_s == pytest.approx(2 * PART_S, rel=0.02)
    assert one.backward.of(1e-4) == pytest.approx(-1e-5, rel=0.05)


def test_a_rank_that_fails_alone_keeps_all_from_it() -> None:
    """Also where only its step fails, not what is made for it."""
    ranks = Ranks(2)
    assert ranks.run(step_alone_seen, 2, True) == [False, False]
    assert ranks.run(step_alone_seen, 2, False) == [True, True]
    ranks.close()


def test_what_a_step_takes_beside_its_tasks_is_told_by_two_of_them() -> None:
    own = Rows(tasks=10, between_s=3e-4)
    assert beside_tasks(own, Rows()) == 0.0
    assert beside_tasks(own, Rows(tasks=30, between_s=7e-4)) == pytest.approx(1e-4)
    assert beside_tasks(own, Rows(tasks=30, between_s=9e-4)) == pytest.approx(0.0, abs=1e-12)
    assert beside_tasks(own, Rows(tasks=30, between_s=2e-3)) == 0.0
    assert beside_tasks(own, Rows(tasks=30, between_s=1e-4)) == 3e-4


def test_predictions_take_what_a_step_takes_longer() -> None:
    """A step of data parallelism is longer by what each of its passes, tasks, views and gradients is, by its
    updates, and by what the runtime does between tasks."""
    strategy = lenet()
    plan = planned(strategy, CPUS, predicted(strategy, CPUS, COSTS), COSTS)

    def step_s(own: InStep) -> float:
        crowding = Crowding((1.0, 1.0), in_step=(own, own), stretch=(1.0, 1.0))
        return parts_of(plan, COSTS, crowding, backend="memory").makespan_s(Calibration())

    plain_s = step_s(InStep())
    assert plain_s == parts_of(plan, COSTS, ALONE, backend="memory").makespan_s(Calibration())
    tasks = task_graph(strategy, CPUS, COSTS)
    place = CPUS.devices[0].name
    own = [
        (tasks.tasks[n].kind, p)
        for n, p in passes_in(tasks, strategy).items()
        if tasks.tasks[n].resource == place
    ]
    forward = [passes for kind, passes in own if kind is TaskKind.FORWARD]
    works = [
        sum(w is not None for kind, p in own if kind is which for w, _ in p)
        for which in (TaskKind.FORWARD, TaskKind.BACKWARD)
    ]
    views = sum(work is None for passes in forward for work, _ in passes)
    weights = sum(task.kind is TaskKind.UPDATE and task.resource == place for task in tasks.tasks)
    assert views > 0
    computing_s = sum(task.duration_s for task in tasks.tasks if task.resource == place)
    for in_step, more_s in (
        (InStep(Longer(pass_s=1e-3), Longer(pass_s=2e-3)), 1e-3 * works[0] + 2e-3 * works[1]),
        (InStep(Longer(task_s=1e-3)), 1e-3 * len(forward)),
        (InStep(Longer(view_s=1e-3)), 1e-3 * views),
        (InStep(weight_s=1e-3), 1e-3 * weights),
        (InStep(between_s=1e-3), 1e-3 * len(own)),
        (InStep(between_s=1e-3, real=2.0), 2e-3 * len(own) + computing_s),
        (InStep(update_once_s=1e-3), 1e-3),
        (InStep(beside_s=1e-3), 1e-3),
        (InStep(beside_s=1e-3, real=2.0), 2e-3 + computing_s),
        (InStep(beside_weight_s=1e-3), 1e-3 * weights),
    ):
        assert step_s(in_step) == pytest.approx(plain_s + more_s, rel=1e-3)
    assert step_s(InStep(update=9.0)) > plain_s
