"""What operators take longer in a step than over and over again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.ranks import Ranks
from oracles.wirecases import in_step_seen

from soapstone.cost.among import InTurn, Turn
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.profiler import Profiler, device_at_hand
from soapstone.cost.work import Work, is_free
from soapstone.frontends.source import load
from soapstone.graph import GraphBuilder
from soapstone.machine import preset
from soapstone.plans import planned, predicted
from soapstone.search.baselines import data_parallel
from soapstone.strategy.strategy import Strategy
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding
from soapstone.validation.in_step import InStep, Longer, longer, operators_in_turn
from soapstone.validation.parts import parts_of

COSTS = AnalyticCosts()
ALONE = Crowding((1.0, 1.0))


def lenet() -> Strategy:
    return data_parallel(load("lenet", tiny=True, devices=2).captured().graph, preset("cpu:1x2"))


def work(size_bytes: int, *, backward: bool = False) -> Work:
    return Work(
        "relu", (), ((size_bytes // 4,),), ((size_bytes // 4,),), "f32", int(backward), 1.0, size_bytes
    )


def seconds_of(own: Work) -> float:
    """Not in proportion to its bytes, or nothing tells one from the other."""
    return 1e-5 + 1e-10 * (own.size_bytes % 65536) * 40


SIZES = [4096 * (7 * n % 31 + 1) for n in range(20)]


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-9))
def test_what_was_put_in_is_found(pass_s: float, byte_s: float) -> None:
    works = [work(size) for size in SIZES]
    wanted = Longer(pass_s, byte_s)
    found = longer(
        works, [seconds_of(each) + wanted.of(each, seconds_of(each)) for each in works], seconds_of
    )
    for each in works:
        assert found.of(each, seconds_of(each)) == pytest.approx(wanted.of(each, seconds_of(each)), rel=0.02)


def test_no_pass_is_shorter_for_its_own_sake_or_for_its_bytes() -> None:
    works = [work(size) for size in SIZES]
    found = longer(works, [max(1e-7, seconds_of(each) * 0.9) for each in works], seconds_of)
    assert found.pass_s == found.byte_s == 0.0
    assert found.share == pytest.approx(-0.1, abs=1e-3)


@given(st.lists(st.floats(0.5, 2.5), min_size=20, max_size=20))
def test_together_passes_take_what_they_took(factors: list[float]) -> None:
    """Whatever each of them took."""
    works = [work(size) for size in SIZES]
    own_s = [seconds_of(each) for each in works]
    seen_s = [factor * each for factor, each in zip(factors, own_s, strict=True)]
    found = longer(works, seen_s, seconds_of)
    assume(-0.5 < found.share < 1.0)  # its bounds
    said_s = sum(each + found.of(own, each) for own, each in zip(works, own_s, strict=True))
    assert said_s == pytest.approx(sum(seen_s), rel=0.02)


def test_few_passes_tell_nothing_and_those_without_a_time_are_none() -> None:
    works = [work(4096 * n) for n in range(1, 8)]
    assert longer(works, [1.0] * 7, seconds_of) == Longer()
    assert longer([*works, work(4), None], [1.0] * 7 + [0.0, 1.0], seconds_of) == Longer()


def test_a_pass_never_takes_less_than_nothing() -> None:
    assert Longer(share=-2.0).of(work(64), 1.0) == -1.0


def test_where_ranks_wait_for_cores_all_of_it_is_stretched() -> None:
    """A pass of 1 ms by its clock, for which two are to be waited for, has half a millisecond more of its
    own in a step."""
    own = InStep(Longer(3e-4, share=0.2))
    crowding = Crowding((1.0, 2.0), in_step=(own, own), stretch=(1.0, 2.0))
    assert crowding.seconds(work(64), 1e-3, 1) == pytest.approx(1.5e-3)
    assert crowding.seconds(work(64), 1e-3, 2) == pytest.approx(3e-3)


def test_all_operators_of_a_device_have_their_turn_or_an_even_part_of_them() -> None:
    """As many as there is time for, a quarter of a second, but no fewer than 16; in the order of the
    graph."""
    strategy = lenet()
    graph = strategy.graph
    every = operators_in_turn(strategy, lambda _: 0.0)
    assert {each.node.name for each in every} >= {
        node.name
        for block in strategy.blocks
        for node in block.nodes
        if not is_free(graph, node, backward=False)
    }
    deep = data_parallel(
        load("mlp:layers=40,features=64,hidden=64", devices=2).captured().graph, preset("cpu:1x2")
    )
    many = operators_in_turn(deep, lambda _: 0.0)
    assert len(many) > 64
    names = [each.node.name for each in many]
    for pass_s, count in ((0.25 / 100, len(many) // 2), (1.0, 16)):
        some = [each.node.name for each in operators_in_turn(deep, lambda _, own_s=pass_s: own_s)]
        assert len(some) == pytest.approx(count, rel=0.5)
        assert some == sorted(some, key=names.index)


def test_each_operator_has_a_time_forward_and_backward_but_for_the_first_gradient() -> None:
    profiler = Profiler(device_at_hand("cpu"))
    todo, in_turn = profiler.in_turn(operators_in_turn(lenet(), lambda _: 0.0))
    turn = in_turn.run()
    assert len(turn.forward_s) == len(turn.backward_s) == len(todo)
    assert all(each > 0 for each in turn.forward_s)
    without = [i for i, each in enumerate(todo) if each.backward is not None and not turn.backward_s[i]]
    assert len(without) == 1  # what came first in the call of autograd
    assert all(not turn.backward_s[i] for i, each in enumerate(todo) if each.backward is None)
    assert turn.update_s > 0


def test_nothing_has_its_turn_where_something_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together may be too much for a rank, each by itself not."""

    def too_much(_: InTurn) -> Turn:
        raise MemoryError("too much")

    monkeypatch.setattr(InTurn, "run", too_much)
    todo, in_turn = Profiler(device_at_hand("cpu")).in_turn(operators_in_turn(lenet(), lambda _: 0.0))
    assert todo == []
    assert in_turn.weight_bytes == []


def test_a_weight_that_two_nodes_read_is_one() -> None:
    build = GraphBuilder("twice")
    x, w = build.input("x", (4, 6)), build.weight("w", (6, 6))
    (y,) = build.add("linear", [x, w, None], name="first")
    (z,) = build.add("linear", [y, w, None], name="second")
    (loss,) = build.add("sum", [z], {"dim": (0, 1)}, name="loss")
    strategy = data_parallel(build.graph(loss=loss), preset("cpu:1x2"))
    _, in_turn = Profiler(device_at_hand("cpu")).in_turn(operators_in_turn(strategy, lambda _: 0.0))
    assert in_turn.weight_bytes == [6 * 6 * 4]


def test_ranks_agree_on_what_they_have_seen(tmp_path: Path) -> None:
    """Made-up turns: alone every pass takes 50 us longer, with both ranks at it 100 and 150, 125 on average;
    updates twice and three times as long."""
    ranks = Ranks(2)
    first, second = ranks.run(in_step_seen, 2, str(tmp_path))
    ranks.close()
    assert first == second
    one, both = first
    for found, longer_s, update in ((one, 5e-5, 1.0), (both, 1.25e-4, 2.0)):
        assert found.update == pytest.approx(update)
        for passes in (found.forward, found.backward):
            assert passes.of(work(64), 1e-4) == pytest.approx(longer_s, rel=0.05)


def test_predictions_take_what_a_step_takes_longer() -> None:
    """A step of data parallelism is longer by what each of its passes is, and by its updates."""
    machine, strategy = preset("cpu:1x2"), lenet()
    plan = planned(strategy, machine, predicted(strategy, machine, COSTS), COSTS)

    def step_s(crowding: Crowding) -> float:
        return parts_of(plan, COSTS, crowding, backend="memory").makespan_s(Calibration())

    plain_s = step_s(ALONE)
    own = InStep(Longer(1e-3), Longer(2e-3))
    todo = operators_in_turn(strategy, lambda _: 0.0)
    more_s = sum(1e-3 for each in todo if each.forward) + sum(2e-3 for each in todo if each.backward)
    assert step_s(Crowding((1.0, 1.0), in_step=(own, own), stretch=(1.0, 1.0))) == pytest.approx(
        plain_s + more_s, rel=1e-3
    )
    slow = InStep(update=9.0)
    assert step_s(Crowding((1.0, 1.0), in_step=(slow, slow), stretch=(1.0, 2.0))) > plain_s
