"""Ports: a box is the same however it is put together."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soapstone.ops.box import Interval, slices
from soapstone.runtime.ports import Inbox, Outlet

CPU = torch.device("cpu")


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    seed=st.integers(0, 999),
)
def test_parts_make_the_whole_in_whatever_order_they_come(
    shape: list[int], cuts: list[int], seed: int
) -> None:
    random = Random(seed)
    whole = torch.rand(shape)
    box = tuple(Interval(0, size) for size in shape)
    bounds = [
        [0, *sorted(random.sample(range(1, size), min(count, size - 1))), size]
        for size, count in zip(shape, cuts, strict=False)
    ]
    parts = list(product(*([Interval(a, b) for a, b in pairwise(each)] for each in bounds)))
    random.shuffle(parts)
    inbox = Inbox(box, torch.float32, CPU, adds=False)
    outlets = [Outlet(part) for part in parts]
    for outlet in outlets:
        outlet.put(whole[slices(outlet.box)])
        inbox.connect(outlet, outlet.box)
    taken = inbox.take()
    assert taken is not None
    assert torch.equal(taken, whole)
    assert len(parts) == 1 or taken.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_parts_are_cut_out_of_what_holds_them() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    inbox = Inbox((Interval(1, 3), Interval(0, 6)), torch.float32, CPU, adds=False)
    for start, stop, held in ((3, 6, 2), (0, 3, 0)):
        outlet = Outlet((Interval(0, 4), Interval(held, 6)))
        outlet.put(whole[:, held:])
        inbox.connect(outlet, (Interval(1, 3), Interval(start, stop)))
    taken = inbox.take()
    assert taken is not None
    assert torch.equal(taken, whole[1:3])


@pytest.mark.parametrize("is_there", [(True, False), (False, True)])
def test_a_part_that_is_none_is_zero(is_there: tuple[bool, bool]) -> None:
    inbox = Inbox((Interval(0, 4),), torch.float32, CPU, adds=True)
    for number, there in enumerate(is_there):
        outlet = Outlet((Interval(2 * number, 2 * number + 2),))
        outlet.put(torch.ones(2) if there else None)
        inbox.connect(outlet, outlet.box)
    taken = inbox.take()
    assert taken is not None
    assert taken.tolist() == [float(is_there[0])] * 2 + [float(is_there[1])] * 2
