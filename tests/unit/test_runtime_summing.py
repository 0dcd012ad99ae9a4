"""Buckets of gradients: where they lie, and when they are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from soapstone.ops.box import Box, Interval
from soapstone.runtime.actions import SumGradients
from soapstone.runtime.nobody import NobodysWire
from soapstone.runtime.summing import Bucket
from soapstone.runtime.weights import Holding, Piece

WIRE = NobodysWire(0, 2, torch.device("cpu"), "memory")


def box(*lengths: int, start: int = 0) -> Box:
    return tuple(Interval(start, start + n) if not i else Interval(0, n) for i, n in enumerate(lengths))


def bucket(*parts: tuple[Holding, Box]) -> Bucket:
    """Pieces of what this rank holds."""
    pieces = [Piece(own.weight, part, (0, 1), (n,), is_summed=True) for n, (own, part) in enumerate(parts)]
    holdings = {own.weight: own for own, _ in parts}
    held: Any = SimpleNamespace(holding=lambda name, _: holdings[name])
    return Bucket(SumGradients(0, pieces), held, WIRE)


def holding(name: str, *lengths: int) -> Holding:
    return Holding(name, box(*lengths), nn.Parameter(torch.zeros(lengths)))


def test_whole_gradients_move_into_the_bucket_and_stay_there() -> None:
    a, b = holding("a", 2, 3), holding("b", 4)
    both = bucket((a, a.box), (b, b.box))
    places = []
    for step in (1.0, 2.0):
        a.parameter.grad, b.parameter.grad = torch.full((3, 2), step).t(), torch.full((4,), 10 * step)
        flat = both.filled()
        assert flat.tolist() == [step] * 6 + [10 * step] * 4
        flat *= 2  # what others have added
        both.put_back(flat.detach())
        assert a.parameter.grad.tolist() == [[2 * step] * 3] * 2
        assert b.parameter.grad.tolist() == [20 * step] * 4
        places.append((flat.data_ptr(), a.parameter.grad.data_ptr(), b.parameter.grad.data_ptr()))
        a.parameter.grad = b.parameter.grad = None
    assert places[0] == places[1]
    assert places[0][0] == places[0][1]


def test_a_sum_that_comes_elsewhere_is_put_back_too() -> None:
    a, b = holding("a", 2), holding("b", 1)
    both = bucket((a, a.box), (b, b.box))
    a.parameter.grad = torch.ones(2)  # b has none: zero
    both.put_back(both.filled() + 5.0)
    assert a.parameter.grad.tolist() == [6.0, 6.0]
    assert b.parameter.grad is not None
    assert b.parameter.grad.tolist() == [5.0]


def test_parts_of_a_weight_are_summed_apart_from_the_rest() -> None:
    a, b = holding("a", 4, 2), holding("b", 3)
    both = bucket((a, box(2, 2, start=1)), (b, b.box))
    a.parameter.grad, b.parameter.grad = torch.arange(8.0).view(4, 2), torch.ones(3)
    flat = both.filled()
    assert flat.tolist() == [2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 1.0]
    flat += 100.0
    both.put_back(flat)
    assert a.parameter.grad.tolist() == [[0.0, 1.0], [102.0, 103.0], [104.0, 105.0], [6.0, 7.0]]
    assert b.parameter.grad.tolist() == [101.0] * 3


@pytest.mark.parametrize("start", [0, 1])
def test_one_alone_is_summed_where_it_lies(start: int) -> None:
    a = holding("a", 3)
    part = box(3 - start, start=start)
    alone = bucket((a, part))
    a.parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    flat = alone.filled()
    flat *= 10
    alone.put_back(flat)
    assert alone.tensor is None
    assert a.parameter.grad.tolist() == [10.0 if not start else 1.0, 20.0, 30.0]


def test_a_bucket_is_ready_when_all_have_told() -> None:
    a, b = holding("a", 1), holding("b", 1)
    both = bucket((a, a.box), (b, b.box))
    expected = {"a": 2, "b": 1}
    for fired, is_ready in (({"a": 1, "b": 1}, False), ({"a": 2, "b": 0}, False), ({"a": 2, "b": 1}, True)):
        assert both.is_ready(fired, expected) is is_ready
    both.begin()
    assert not both.is_ready({"a": 0, "b": 1}, expected)
    assert not both.is_ready({}, expected)
