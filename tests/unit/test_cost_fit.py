"""Planes through measured times."""

from __future__ import annotations

from random import Random

import pytest

from soapstone.cost.fit import Fits, held_out, plane_through
from soapstone.cost.profile import Measured, OpKey

LINEAR, RELU = OpKey("linear", "{}", "f32", 0), OpKey("relu", "{}", "f32", 0)


def times(base_s: float, per_flop: float, per_byte: float, count: int = 9, seed: int = 0) -> list[Measured]:
    random = Random(seed)
    found = []
    for size in range(1, count + 1):
        flops, size_bytes = random.uniform(1e3, 1e8), random.randrange(100, 10**7)
        seconds = base_s + per_flop * flops + per_byte * size_bytes
        found.append(Measured(((size,),), ((size,),), seconds, 0.0, flops, size_bytes))
    return found


@pytest.mark.parametrize(
    "true", [(1e-5, 1e-11, 1e-10), (0.0, 1e-11, 0.0), (1e-5, 0.0, 0.0), (0.0, 0.0, 1e-9)]
)
def test_a_plane_is_found_again(true: tuple[float, float, float]) -> None:
    plane = plane_through(times(*true))
    for m in times(*true, seed=1):
        assert plane.seconds(m.flops, m.size_bytes) == pytest.approx(m.seconds, rel=1e-6)


def test_no_coefficient_is_below_zero() -> None:
    """Even where time falls as work grows."""
    falling = [Measured(((n,),), ((n,),), 1.0 / n, 0.0, 1e6 * n, 1000 * n) for n in range(1, 8)]
    plane = plane_through(falling)
    assert min(plane.base_s, plane.s_per_flop, plane.s_per_byte) >= 0
    assert plane.seconds(1e6, 1000) > 0


def test_one_time_is_enough_for_a_plane() -> None:
    (only,) = times(1e-5, 1e-11, 0.0, count=1)
    assert plane_through([only]).seconds(only.flops, only.size_bytes) == pytest.approx(only.seconds)


def test_few_shapes_borrow_from_the_operator_and_then_from_all() -> None:
    other = OpKey("linear", '{"x": 1}', "f32", 0)
    fits = Fits({LINEAR: times(1e-5, 1e-11, 0.0), other: times(9.0, 0.0, 0.0, count=1)})
    assert fits.plane(OpKey("linear", '{"x": 2}', "f32", 0)) == fits.plane(other)
    assert fits.plane(other) != fits.plane(LINEAR)
    assert fits.plane(RELU) is not None
    assert fits.plane(OpKey("linear", "{}", "f32", 2)) is None


def test_a_measured_shape_is_exact() -> None:
    found = times(1e-5, 1e-11, 0.0)
    curve = Fits({LINEAR: found}).curve(LINEAR)
    assert curve is not None
    assert [curve.measured_s(m.shape) for m in found] == [m.seconds for m in found]
    assert curve.measured_s((1, 77, 1, 77)) is None


def test_held_out_shapes_are_not_seen() -> None:
    """Of times on a plane the others follow; of times without a law they do not."""
    lawful = held_out({LINEAR: times(1e-5, 1e-11, 1e-10)})
    assert lawful is not None
    assert lawful.worst < 1e-6
    random = Random(3)
    lawless = [Measured(((n,),), ((n,),), random.uniform(1, 100), 0.0, 1.0, 1) for n in range(1, 40)]
    found = held_out({RELU: lawless})
    assert found is not None
    assert found.count == 19
    assert found.median > 0.2
    assert held_out({RELU: lawless[:2]}) is None
