"""What messages, pieces and calls of autograd take in a step beyond what was measured of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.ranks import Ranks
from oracles.wirecases import beyond_seen

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, planned, predicted
from soapstone.search.baselines import baseline, data_parallel
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.task import TaskKind
from soapstone.validation.crowding import Crowding
from soapstone.validation.drawing import Drawn, to_do_alone
from soapstone.validation.handing import Handing
from soapstone.validation.in_step import InStep, longer
from soapstone.validation.meeting import Meeting
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.pieces import IN_MEETINGS, Beyond, Said, beyond_said
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


def taken(parts: Parts, found: Beyond, bytes_share: float) -> dict[int, float]:
    """What tasks would take, asking for messages left out."""
    seconds = {}
    for numbers in of_one_rank(parts):
        pieces, messages = parts.pieces[numbers].sum(), parts.messages[numbers].sum()
        seconds[numbers[0]] = (
            parts.seconds[numbers].sum()
            + (HANDING.part_s + found.piece_s) * pieces
            + found.message_s * messages
            + bytes_share * parts.wire_s[numbers].sum()
        )
        if parts.tasks.tasks[numbers[0]].kind is TaskKind.BACKWARD:
            seconds[numbers[0]] += HANDING.call_s + found.call_s
    return seconds


@given(st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 3e-4), st.floats(0, 1))
def test_what_was_put_in_is_found(
    cut_up: Parts, message_s: float, piece_s: float, call_s: float, bytes_share: float
) -> None:
    """Whatever the bytes took, and with what asking for messages took beyond messages to nobody."""
    put_in = Beyond(message_s, piece_s, call_s)
    rows = of_one_rank(cut_up)
    messages = sum(cut_up.messages[numbers].sum() for numbers in rows)
    said = Said(cut_up, cut_up.seconds)
    found = beyond_said(said, rows, taken(cut_up, put_in, bytes_share), 5e-5 * messages, 3e-5)
    assert found is not None
    assert found.message_s == pytest.approx(message_s + 2e-5, abs=1e-8)
    assert found.piece_s == pytest.approx(piece_s, abs=1e-8)
    assert found.call_s == pytest.approx(call_s, abs=1e-8)


def test_nothing_is_found_to_take_less(cut_up: Parts) -> None:
    rows = of_one_rank(cut_up)
    seconds = {first: 0.5 * each_s for first, each_s in taken(cut_up, Beyond(), 0.0).items()}
    assert beyond_said(Said(cut_up, cut_up.seconds), rows, seconds, 0.0, 1.0) == Beyond()


def test_few_pieces_tell_nothing(graph: Graph) -> None:
    parts = parts_of(plan_of(data_parallel(graph, CPUS)), COSTS, backend="memory")
    rows = of_one_rank(parts)
    assert beyond_said(Said(parts, parts.seconds), rows, taken(parts, Beyond(), 0.0), 1.0, 0.0) is None


def test_predictions_take_what_is_beyond(graph: Graph) -> None:
    """Messages, pieces and calls take longer; meetings less by what they had of that, but never less than
    nothing."""
    traffic = Traffic(handing=HANDING, meeting=Meeting((1e-4, 1e-3), (1e-5, 3e-4)))
    found = Beyond(2e-5, 3e-5, 4e-5).added_to(traffic)
    assert found.handing.message_s == pytest.approx(6e-5)
    assert found.handing.part_s == pytest.approx(5e-5)
    assert found.handing.call_s == pytest.approx(14e-5)
    assert found.meeting.taken_s == pytest.approx((0.0, 3e-4 - IN_MEETINGS * 2e-5))
    assert Beyond().added_to(traffic) == traffic
    plan = plan_of(random_strategy(graph, 2, Random(3)))
    usual, more = (parts_of(plan, COSTS, backend="memory", traffic=each) for each in (traffic, found))
    both = [each.handing.taken_s(each.messages, each.pieces, each.calls) for each in (usual, more)]
    longer_s = 2e-5 * usual.messages + 3e-5 * usual.pieces + 4e-5 * usual.calls
    assert both[1] - both[0] == pytest.approx(longer_s)


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


def test_done_alone_are_the_one_of_the_finest_tasks_and_the_one_of_the_most_pieces(graph: Graph) -> None:
    names = ["data_parallel", "pipeline", "model_parallel"]
    found = [Drawn(name, baseline(name, graph, CPUS, COSTS, 0)) for name in names]
    found.append(Drawn("random", random_strategy(graph, 2, Random(3))))
    finer, cut = to_do_alone(found, CPUS)
    assert (finer.name, cut.name) == ("pipeline", "random")


def test_tasks_of_other_sizes_tell_what_is_a_tasks_own() -> None:
    """Few tasks that all take alike tell nothing of it: by them all that is longer would be the tasks'."""
    alike = np.array([(1.0, 0.0, 1e-3)] * 9)
    smaller = np.array([(1.0, 0.0, 1e-5 * n) for n in range(1, 40)])
    as_seen = np.array([2e-5, 0.0, 1.1])
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


def test_ranks_agree_on_what_real_steps_show() -> None:
    """A step of a strategy that cuts up much, on two ranks."""
    ranks = Ranks(2)
    first, second = ranks.run(beyond_seen, 2)
    ranks.close()
    assert first == second
    assert min(first.message_s, first.piece_s, first.call_s) >= 0
    assert max(first.message_s, first.piece_s, first.call_s) > 0
