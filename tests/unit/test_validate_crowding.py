"""What ranks take from each other: numbers of busy devices, and times that follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.validation.crowding import busy_devices, crowded


def test_busy_devices_are_counted_over_time() -> None:
    """Two devices at work for the first second of one's two."""
    start_s, end_s = np.array([0.0, 0.0, 5.0]), np.array([2.0, 1.0, 6.0])
    assert busy_devices(start_s, end_s) == pytest.approx([1.5, 2.0, 1.0])


def test_tasks_that_start_and_end_together_see_all_of_each_other() -> None:
    start_s, end_s = np.zeros(4), np.ones(4)
    assert busy_devices(start_s, end_s) == pytest.approx([4.0] * 4)


def test_a_task_of_no_length_is_by_itself() -> None:
    assert busy_devices(np.array([1.0]), np.array([1.0])) == pytest.approx([1.0])


def side_by_side(durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All tasks start at once."""
    return np.zeros_like(durations), durations


def one_by_one(durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(durations)
    return ends - durations, ends


def test_those_who_compute_together_are_slower() -> None:
    seconds, nothing, all_compute = np.ones(2), np.zeros(2), np.ones(2, dtype=bool)
    together = crowded(seconds, nothing, all_compute, (0.5, 1.0), side_by_side)
    apart = crowded(seconds, nothing, all_compute, (0.5, 1.0), one_by_one)
    assert together == pytest.approx([1.0, 1.0])
    assert apart == pytest.approx([0.5, 0.5])


def test_messages_crowd_nobody() -> None:
    seconds, messages_s = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    found = crowded(seconds, messages_s, np.array([True, False]), (0.5, 1.0), side_by_side)
    assert found == pytest.approx([0.5, 0.0])
