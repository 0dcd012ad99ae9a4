"""What kernels take longer in a step than over and over, by the time of a step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soapstone.validation.kernels import LEAST_TIMES, MOST_TIMES, longer_in_step


@given(st.floats(LEAST_TIMES, MOST_TIMES), st.floats(1e-3, 1.0), st.floats(0.0, 0.3))
def test_what_kernels_take_longer_is_found(times: float, kernels_s: float, beside: float) -> None:
    """Whatever part of a step is none of theirs, as long as most of it is."""

    def said_s(tried: float) -> float:
        return kernels_s * (tried + beside)

    assert longer_in_step(said_s, said_s(times)) == pytest.approx(times, rel=6e-3)


@given(st.floats(0.0, 10.0))
def test_where_the_thread_is_waited_for_a_step_tells_nothing_of_kernels(seen_s: float) -> None:
    assert longer_in_step(lambda tried: max(2.0, tried), seen_s) == 1.0
    assert longer_in_step(lambda tried: 2.0 + tried / 2, seen_s) == 1.0


def test_kernels_take_no_less_in_a_step_and_not_many_times_as_long() -> None:
    assert longer_in_step(lambda tried: tried, 0.5) == pytest.approx(LEAST_TIMES)
    assert longer_in_step(lambda tried: tried, 9.0) == pytest.approx(MOST_TIMES)
