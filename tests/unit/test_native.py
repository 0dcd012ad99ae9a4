"""The native core against the same questions answered by brute force in Python."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from soapstone import native

Box = list[tuple[int, int]]

bounds = st.tuples(st.integers(-3, 12), st.integers(-3, 12))
ranks = st.integers(0, 4)


def boxes_of_rank(rank: int, max_size: int = 12) -> st.SearchStrategy[list[Box]]:
    return st.lists(st.lists(bounds, min_size=rank, max_size=rank), max_size=max_size)


@st.composite
def grids(draw: st.DrawFn, rank: int) -> tuple[list[int], list[int]]:
    degrees = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    extents = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    return [degree * extent for degree, extent in zip(degrees, extents, strict=True)], degrees


def array_of(boxes: list[Box], rank: int) -> NDArray[np.int64]:
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), rank, 2)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(lower, upper) for lower, upper in box)))


def brute_force(written: list[Box], read: list[Box]) -> list[list[int]]:
    return [
        [i, j]
        for i, left in enumerate(map(elements, written))
        for j, right in enumerate(map(elements, read))
        if left & right
    ]


def cells_of(sizes: list[int], degrees: list[int]) -> list[Box]:
    intervals = [
        [(part * size // degree, (part + 1) * size // degree) for part in range(degree)]
        for size, degree in zip(sizes, degrees, strict=True)
    ]
    return [list(cell) for cell in itertools.product(*intervals)]


@given(st.data())
def test_overlaps_are_the_pairs_that_share_an_element(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    written = data.draw(boxes_of_rank(rank, max_size=6))
    read = data.draw(boxes_of_rank(rank, max_size=6))
    pairs = native.overlaps(array_of(written, rank), array_of(read, rank))
    assert pairs.tolist() == brute_force(written, read)


@given(st.data())
def test_grid_overlaps_are_the_overlaps_with_the_cells(data: st.DataObject) -> None:
    rank = data.draw(ranks)
    sizes, degrees = data.draw(grids(rank))
    read = array_of(data.draw(boxes_of_rank(rank)), rank)
    cells = array_of(cells_of(sizes, degrees), rank)
    assert len(cells) == math.prod(degrees)
    assert native.grid_overlaps(sizes, degrees, read).tolist() == native.overlaps(cells, read).tolist()


@given(st.data())
def test_overlaps_are_symmetric(data: st.DataObject) -> None:
    rank = data.draw(ranks)
    left, right = (array_of(data.draw(boxes_of_rank(rank)), rank) for _ in range(2))
    swapped = native.overlaps(right, left)[:, ::-1].tolist()
    assert sorted(swapped) == native.overlaps(left, right).tolist()


def test_scalars_overlap_always() -> None:
    scalars = np.zeros((2, 0, 2), dtype=np.int64)
    assert native.overlaps(scalars, scalars).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert native.grid_overlaps([], [], scalars).tolist() == [[0, 0], [0, 1]]


def test_no_overlap_is_an_array_of_no_pairs() -> None:
    written, read = array_of([[(0, 2)]], 1), array_of([[(2, 4)]], 1)
    pairs = native.overlaps(written, read)
    assert pairs.shape == (0, 2)
    assert pairs.dtype == np.int64


def test_a_grid_of_many_cells_costs_only_what_overlaps() -> None:
    side = 1 << 31
    read = array_of([[(5, 7), (0, 1)]], 2)
    assert native.grid_overlaps([side, side], [side, side], read)[:, 0].tolist() == [5 * side, 6 * side]


def test_bounds_reach_the_ends_of_int64() -> None:
    everything = np.iinfo(np.int64)
    read = array_of([[(everything.min, everything.max)]], 1)
    assert native.overlaps(read, read).tolist() == [[0, 0]]
    assert native.grid_overlaps([6], [3], read)[:, 0].tolist() == [0, 1, 2]


def test_a_view_and_a_read_only_array_are_accepted() -> None:
    boxes = array_of([[(0, 2)], [(9, 9)], [(1, 3)], [(9, 9)]], 1)
    boxes.flags.writeable = False
    assert native.overlaps(boxes[::2], boxes[::2]).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_threads_get_the_same_answer() -> None:
    boxes = array_of([[(i, i + 3), (0, i)] for i in range(60)], 2)
    alone = native.overlaps(boxes, boxes).tolist()
    with ThreadPoolExecutor(max_workers=4) as pool:
        together = pool.map(lambda _: native.overlaps(boxes, boxes).tolist(), range(16))
        assert all(answer == alone for answer in together)


@pytest.mark.parametrize(
    ("sizes", "degrees", "complaint"),
    [
        ([4], [3], "does not divide"),
        ([4], [0], "less than 1"),
        ([-4], [2], "negative"),
        ([4, 4], [2], "one entry for each dim"),
        ([4, 4], [2, 2], "one entry for each dim"),
    ],
)
def test_an_impossible_grid_is_a_value_error(sizes: list[int], degrees: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        native.grid_overlaps(sizes, degrees, array_of([[(0, 1)]], 1))


def test_a_grid_of_too_many_cells_is_a_value_error() -> None:
    side = 1 << 32
    with pytest.raises(ValueError, match="more cells"):
        native.grid_overlaps([side, side], [side, side], array_of([[(0, 1), (0, 1)]], 2))


def test_boxes_of_different_rank_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="differ in rank"):
        native.overlaps(array_of([[(0, 1)]], 1), array_of([[(0, 1), (0, 1)]], 2))


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 1, 2)), np.zeros((1, 2), np.int64), np.zeros((1, 1, 3), np.int64)]
)
def test_boxes_of_another_dtype_or_shape_are_a_type_error(wrong: NDArray[np.int64]) -> None:
    with pytest.raises(TypeError):
        native.overlaps(wrong, array_of([[(0, 1)]], 1))


def test_tasks_that_wait_for_each_other_are_a_value_error() -> None:
    durations, resources = np.ones(3), np.zeros(3, np.int32)
    begin = np.array([0, 0, 2, 3], np.int64)
    in_a_circle, in_a_row = np.array([0, 2, 1], np.int32), np.array([0, 0, 1], np.int32)
    assert native.simulate(durations, resources, begin, in_a_row, 1)[2] == 3.0
    with pytest.raises(ValueError, match="wait for each other"):
        native.simulate(durations, resources, begin, in_a_circle, 1)
