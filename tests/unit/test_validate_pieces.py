"""What messages, pieces and calls of autograd take in a step beyond what was measured of them."""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.ranks import Ranks
from oracles.wirecases import ASKING_S, BACK_S, PIECE_S, beyond_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, predicted
from soapstone.search.baselines import baseline, data_parallel
from soapstone.sim.reference import simulate
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import TaskKind
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding
from soapstone.validation.drawing import Drawn, to_do_alone
from soapstone.validation.ends import ends_of
from soapstone.validation.handing import Handing
from soapstone.validation.in_step import InStep
from soapstone.validation.longer import longer
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.pieces import (
    LIKELY_BYTE_S,
    LIKELY_PIECE_S,
    LIKELY_S,
    MOST_LESS,
    Beyond,
    Said,
    Seen,
    beyond_said,
)
from soapstone.validation.traffic import Traffic

COSTS = AnalyticCosts()
CPUS = preset("cpu:1x2")
HANDING = Handing(message_s=4e-5, part_s=2e-5, call_s=1e-4)


def plan_of(strategy: Strategy) -> Plan:
    return planned(strategy, CPUS, predicted(strategy, CPUS, COSTS), COSTS)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load("rnnlm", tiny=True, devices=2).captured().graph


@pytest.fixture(scope="module")
def cut_up(graph: Graph) -> Parts:
    plan = plan_of(random_strategy(graph, 2, Random(3)))
    return parts_of(plan, COSTS, backend="memory", traffic=Traffic(handing=HANDING))


def of_one_rank(parts: Parts) -> list[list[int]]:
    """Forward tasks, each by itself, and backward tasks of which each three are taken back by one call."""
    place, tasks = CPUS.devices[0].name, parts.tasks.tasks
    own = [n for n, task in enumerate(tasks) if task.resource == place]
    back = [n for n in own if tasks[n].kind is TaskKind.BACKWARD]
    calls = [back[i : i + 3] for i in range(0, len(back), 3)]
    return [[n] for n in own if tasks[n].kind is TaskKind.FORWARD] + calls


def seen(parts: Parts, found: Beyond, *, asking_s: float = 0.0, times: int = 1) -> Seen:
    """What would be seen of a step in which messages, pieces and calls take longer, by a clock that counts
    one while `times` seconds pass. Each message is asked for in `asking_s`, and a nanosecond for a byte."""
    rows = of_one_rank(parts)
    tasks_s = {}
    for numbers in rows:
        put, messages = parts.handed.put[numbers].sum(), parts.handed.messages[numbers].sum()
        is_call = parts.tasks.tasks[numbers[0]].kind is TaskKind.BACKWARD
        handed_s = (HANDING.part_s + found.piece_s) * put + found.message_s * messages
        handed_s += parts.handed.put_s[numbers].sum()
        handed_s += found.came_byte_s * parts.handed.came_bytes[numbers].sum()
        handed_s += (HANDING.call_s + found.call_s) * is_call
        tasks_s[numbers[0]] = parts.seconds[numbers].sum() + handed_s / times
    cut = sum(parts.handed.cut[numbers].sum() for numbers in rows)
    sizes = [256 * n for n in range(1, 41)]
    cutting_s = (HANDING.part_s + found.piece_s) * cut / len(sizes)
    return Seen(rows, tasks_s, [(1, size, (asking_s + cutting_s + 1e-9 * size) / times) for size in sizes])


@given(
    st.floats(-1e-5, 1e-4),
    st.floats(-1e-5, 1e-4),
    st.floats(-7e-5, 3e-4),
    st.floats(0, 1e-9),
    st.sampled_from([1, 2]),
)
def test_what_was_put_in_is_found(
    cut_up: Parts, message_s: float, piece_s: float, call_s: float, byte_s: float, times: int
) -> None:
    """Also that they take less than by themselves; with what asking for messages took beyond messages to
    nobody, or less; what is cut out for them is in the time of asking."""
    put_in = Beyond(max(0.0, message_s), piece_s, call_s, byte_s)
    as_seen = seen(cut_up, put_in, asking_s=5e-5 + min(0.0, message_s), times=times)
    found = beyond_said(Said(cut_up, cut_up.seconds, times), as_seen, 5e-5)
    assert found is not None
    assert found.message_s == pytest.approx(message_s, abs=1e-8)
    assert found.piece_s == pytest.approx(piece_s, abs=1e-8)
    assert found.call_s == pytest.approx(call_s, abs=1e-8)
    assert found.came_byte_s == pytest.approx(byte_s, abs=1e-12)


def test_what_cannot_be_told_apart_is_not_believed(cut_up: Parts) -> None:
    """Where tasks take now more and now less by far more than messages do, messages are as they were measured
    by themselves; where it is less than theirs, they are found."""
    put_in = Beyond(5e-5, 5e-5, 5e-5, 2e-10)

    def found_amid(noise_s: float) -> list[Beyond]:
        found = []
        for seed in range(8):
            random, usual = Random(seed), seen(cut_up, put_in, asking_s=5e-5)
            tasks_s = {first: each_s + random.gauss(0, noise_s) for first, each_s in usual.tasks_s.items()}
            asked = [(*each, asked_s + random.gauss(0, noise_s)) for *each, asked_s in usual.asked]
            own = beyond_said(Said(cut_up, cut_up.seconds), Seen(usual.as_one, tasks_s, asked), 5e-5)
            assert own is not None
            found.append(own)
        return found

    amid_little, amid_much = (np.array([astuple(each) for each in found_amid(s)]) for s in (2e-5, 2e-2))
    assert np.median(amid_little[:, :3], axis=0) == pytest.approx([5e-5] * 3, rel=0.3)
    assert (amid_much.max(axis=0) < 2 * np.array([LIKELY_S, LIKELY_PIECE_S, LIKELY_S, LIKELY_BYTE_S])).all()


def test_nothing_is_found_to_take_next_to_nothing(cut_up: Parts) -> None:
    usual = seen(cut_up, Beyond())
    asked = [(times, size_bytes, 0.0) for times, size_bytes, _ in usual.asked]
    nothing = Seen(usual.as_one, dict.fromkeys(usual.tasks_s, 0.0), asked)
    found = beyond_said(Said(cut_up, cut_up.seconds), nothing, 3e-5)
    assert found is not None
    assert -MOST_LESS * HANDING.message_s <= found.message_s < -1e-5
    assert found.piece_s >= -MOST_LESS * HANDING.part_s * (1 + 1e-9)
    assert found.call_s >= -MOST_LESS * HANDING.call_s * (1 + 1e-9)
    assert found.came_byte_s == pytest.approx(0.0, abs=1e-15)
    assert found.added_to(Traffic(handing=HANDING)).handing.message_s > 0


def test_few_pieces_tell_nothing(graph: Graph) -> None:
    parts = parts_of(plan_of(data_parallel(graph, CPUS)), COSTS, backend="memory")
    assert beyond_said(Said(parts, parts.seconds), seen(parts, Beyond(), asking_s=1.0), 0.0) is None


def test_predictions_take_what_is_beyond(graph: Graph) -> None:
    """Messages, pieces and calls take longer, and sums, which are told in ends of messages, as long as
    before."""
    handing = Handing(4e-5, 2e-5, 0.5, 1e-4, {2: (3.0, 6.0)})
    traffic = Traffic(handing=handing, meeting_s=1e-4)
    found = Beyond(4e-5, 3e-5, 5e-5).added_to(traffic)
    assert found.handing.message_s == pytest.approx(8e-5)
    assert found.handing.part_s == pytest.approx(5e-5)
    assert found.handing.call_s == pytest.approx(15e-5)
    assert found.handing.further == pytest.approx(0.25)
    assert found.handing.sums == {2: pytest.approx((1.5, 3.0))}
    assert found.meeting_s == traffic.meeting_s
    assert Beyond().added_to(traffic) == traffic
    plan = plan_of(random_strategy(graph, 2, Random(3)))
    steps_s = [
        parts_of(plan, COSTS, backend="memory", traffic=each).makespan_s(Calibration())
        for each in (traffic, found)
    ]
    assert steps_s[1] > steps_s[0] + 1e-3


def test_what_is_gathered_is_met_once(graph: Graph) -> None:
    """Under ZeRO all cells of a layer read weights that come once."""
    zero = parts_of(plan_of(baseline("zero", graph, CPUS, COSTS, 0)), COSTS, backend="memory")
    tasks = zero.tasks.tasks
    reads = [
        task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        and any(
            tasks[i].kind in (TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.TRANSFER) for i in after
        )
        for task, after in zip(tasks, zero.tasks.after, strict=True)
    ]
    assert 0 < zero.meets.sum() < 0.75 * sum(reads)
    assert not zero.meets[~np.array(reads)].any()


def test_a_gradient_that_many_added_to_is_put_together_once(graph: Graph) -> None:
    """Under ZeRO a part of a weight's gradient is that of this rank, by all cells that read the weight, and
    that of the other."""
    zero = parts_of(plan_of(baseline("zero", graph, CPUS, COSTS, 0)), COSTS, backend="memory")
    tasks, handed = zero.tasks.tasks, zero.handed
    together = [n for n in np.flatnonzero(handed.put).tolist() if tasks[n].kind is TaskKind.BACKWARD]
    come = {
        n: {tasks[i].size_bytes for i in zero.tasks.after[n] if tasks[i].kind is TaskKind.REDUCE_SCATTER}
        for n in together
    }
    alike = [n for n in together if len(come[n]) == 1]
    assert alike
    for n in alike:
        assert handed.came_bytes[n] == handed.put[n] * come[n].pop()
        assert zero.wire_s[n] == pytest.approx(handed.put_s[n])


def test_what_comes_counts_with_its_bytes_where_it_is_needed_first(graph: Graph) -> None:
    """Whether it is put together or not; where it is, so does what is there already."""
    strategy = random_strategy(graph, 2, Random(3))
    plain = task_graph(strategy, CPUS, COSTS)
    came = np.zeros(len(plain.tasks))
    for number, taken in ends_of(plain, simulate(plain), CPUS).taken.items():
        if taken >= 0:
            came[taken] += plain.tasks[number].size_bytes
    handed = parts_of(plan_of(strategy), COSTS, backend="memory").handed
    passes = np.array([task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD) for task in plain.tasks])
    whole, together = passes & (handed.put == 0), passes & (handed.put > 0)
    assert (came[whole] > 0).any()
    assert handed.came_bytes[whole] == pytest.approx(came[whole])
    assert (handed.came_bytes[together] >= came[together]).all()
    assert (handed.came_bytes[together] > came[together]).any()


def test_done_alone_are_the_first_in_micro_batches_and_the_one_of_the_most_pieces(graph: Graph) -> None:
    """Or else the one of the finest tasks."""
    names = ["data_parallel", "pipeline", "model_parallel"]
    found = [Drawn(name, baseline(name, graph, CPUS, COSTS, 0)) for name in names]
    found.append(Drawn("random", random_strategy(graph, 2, Random(3))))
    finer, cut = to_do_alone(found, CPUS)
    assert cut.name == "random"
    assert finer.strategy.pipeline is not None
    assert finer.strategy.of_one().placements == found[0].strategy.placements
    assert finer.name == "data_parallel, in micro-batches"
    assert to_do_alone(found[1:], CPUS)[0].name == "pipeline"


def test_tasks_of_other_sizes_tell_what_is_a_tasks_own() -> None:
    """Few tasks that all take alike tell nothing of it: by them all that is longer would be the tasks'."""
    alike = np.array([(1.0, 0.0, 0.0, 1e-3)] * 9)
    smaller = np.array([(1.0, 0.0, 0.0, 1e-5 * n) for n in range(1, 40)])
    as_seen = np.array([2e-5, 0.0, 0.0, 1.1])
    by_them = longer(alike, alike @ as_seen)
    found = longer(alike, alike @ as_seen, smaller, smaller @ as_seen)
    assert by_them.task_s > 9e-5
    assert found.task_s < 4e-5
    for each in (by_them, found):  # together they take what they took
        assert each.task_s + each.of(1e-3) == pytest.approx(2e-5 + 1e-4, rel=0.01)


def test_all_at_work_are_always_all_at_work() -> None:
    ones, others = InStep(between_s=1.0), InStep(between_s=2.0)
    found = Crowding((0.5, 1.0), {"relu": (0.25, 1.0)}, (0.5, 1.0), in_step=(ones, others), stretch=(1, 2))
    same = Crowding((1.0, 1.0), {"relu": (1.0, 1.0)}, (1.0, 1.0), in_step=(others, others), stretch=(2, 2))
    assert found.all_at_work == same


def test_ranks_find_what_was_put_into_steps() -> None:
    """Steps of a strategy that cuts up much, on two ranks, of which the second takes twice as long for all of
    it: both find what lies between."""
    ranks = Ranks(2)
    first, second = ranks.run(beyond_seen, 2)
    ranks.close()
    assert first == second
    assert first.piece_s == pytest.approx(1.5 * PIECE_S, rel=0.02)
    assert first.call_s == pytest.approx(1.5 * BACK_S, rel=0.02)
    assert 0 < 1.5 * ASKING_S - first.message_s < 0.5 * ASKING_S  # less what one to nobody takes
