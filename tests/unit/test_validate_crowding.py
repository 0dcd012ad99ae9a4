"""What ranks take from each other: numbers of busy devices, and times that follow from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.ranks import Ranks
from oracles.wirecases import crowding_seen

from soapstone.cost.profile import Measured, OpKey, Profile
from soapstone.validation.crowding import Crowding, busy_devices, crowded, eased, under_way


def test_busy_devices_are_counted_over_time() -> None:
    """Two devices at work for the first second of one's two."""
    start_s, end_s = np.array([0.0, 0.0, 5.0]), np.array([2.0, 1.0, 6.0])
    assert busy_devices(start_s, end_s) == pytest.approx([1.5, 2.0, 1.0])


def test_tasks_that_start_and_end_together_see_all_of_each_other() -> None:
    start_s, end_s = np.zeros(4), np.ones(4)
    assert busy_devices(start_s, end_s) == pytest.approx([4.0] * 4)


def test_a_task_of_no_length_is_by_itself() -> None:
    assert busy_devices(np.array([1.0]), np.array([1.0])) == pytest.approx([1.0])


def test_some_count_for_more_than_one() -> None:
    start_s, end_s = np.array([0.0, 0.0]), np.array([2.0, 1.0])
    found = under_way(start_s, end_s, start_s, end_s, np.array([1.0, 3.0]))
    assert found == pytest.approx([2.5, 4.0])


def side_by_side(durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All tasks start at once."""
    return np.zeros_like(durations), durations


def one_by_one(durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(durations)
    return ends - durations, ends


def test_those_who_compute_together_are_slower() -> None:
    """Each in its own way: the second task takes as long alone as among others."""
    levels_s = np.array([[0.5, 1.0], [1.0, 1.0]])
    nothing, all_compute = np.zeros(2), np.ones(2, dtype=bool)
    together, two = crowded(levels_s, nothing, all_compute, side_by_side)
    apart, one = crowded(levels_s, nothing, all_compute, one_by_one)
    assert together == pytest.approx([1.0, 1.0])
    assert two == pytest.approx([2.0, 2.0])
    assert apart == pytest.approx([0.5, 1.0])
    assert one == pytest.approx([1.0, 1.0])


def test_messages_crowd_nobody() -> None:
    levels_s, messages_s = np.array([[0.5, 0.0], [1.0, 0.0]]), np.array([0.0, 1.0])
    found, _ = crowded(levels_s, messages_s, np.array([True, False]), side_by_side)
    assert found == pytest.approx([0.5, 0.0])


def test_operators_are_crowded_each_in_its_own_way(tmp_path: Path) -> None:
    """Alone the second one takes 20 ms, with another rank at it 30, and the kernels of the third 10 and 20;
    what not all ranks have is not timed."""
    ranks = Ranks(2)
    first, second = ranks.run(crowding_seen, 2, str(tmp_path))
    ranks.close()
    assert first == second
    assert set(first.operators) == {"steady", "crowded", "launched", "uneven"}
    assert first.operators["steady"][0] == pytest.approx(1.0, abs=0.2)
    assert first.operators["crowded"][0] == pytest.approx(2 / 3, abs=0.2)
    assert first.operators["launched"][0] == pytest.approx(1 / 2, abs=0.1)
    assert first.of("odd") == first.usual
    assert first.launching == (1.0, 1.0)


def test_ranks_at_work_count_alike(tmp_path: Path) -> None:
    """Of two that wait for a core, one may have it first."""
    ranks = Ranks(3)
    first, *others = ranks.run(crowding_seen, 3, str(tmp_path))
    ranks.close()
    assert all(other == first for other in others)
    assert first.operators["uneven"] == pytest.approx((1.0, 1.5, 1.0), abs=0.01)


def test_times_with_fewer_ranks_at_work_are_shorter_operator_by_operator() -> None:
    key, other = OpKey("linear", "{}", "f32", 0), OpKey("relu", "{}", "f32", 0)
    measured = Measured(((4, 4),), ((4, 4),), 2e-3, 0.1, 128.0, 128)
    profile = Profile("cpu", {}, {key: (measured,), other: (measured,)})
    crowding = Crowding((0.5, 0.75, 1.0), {"linear": (0.9, 0.95, 1.0)})
    found = eased(profile, crowding, 2)
    assert [found.times[each][0].seconds for each in (key, other)] == pytest.approx([1.9e-3, 1.5e-3])
    assert eased(profile, crowding, 3) == profile


def test_some_ranks_may_always_be_at_work() -> None:
    found = Crowding((0.5, 0.75, 1.0), {"linear": (0.9, 0.95, 1.0)}, (1.0, 1.5, 2.0), stretch=(1.0, 1.0, 3.0))
    two, all_ = found.at_work(2), found.all_at_work
    assert (two.usual, two.operators["linear"], two.launching) == ((0.75,) * 3, (0.95,) * 3, (1.5,) * 3)
    assert (two.stretch, all_.stretch) == ((1.0,) * 3, (3.0,) * 3)
    assert (all_.usual, all_.operators["linear"], all_.launching) == ((1.0,) * 3, (1.0,) * 3, (2.0,) * 3)


def test_kernels_take_longer_in_steps_and_launching_them_does_not() -> None:
    found = Crowding((0.5, 1.0), {"linear": (0.9, 1.0)}, (1.0, 2.0)).with_kernels([1.0, 1.5])
    assert (found.usual, found.operators, found.launching) == ((0.5, 1.5), {"linear": (0.9, 1.5)}, (1.0, 2.0))
