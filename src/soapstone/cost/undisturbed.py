"""Times of what was done several times on a computer that now and then does something else.

That makes everything slower, and for now one thing and now another ([measured] two cores of a shared
computer: the same step in 82 ms or in 120, a second apart). What is compared with each other is therefore
what each takes when nothing disturbs it; how much is disturbed while strategies run is seen there
(`validation.unsteady`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from statistics import quantiles


def undisturbed(times: Iterable[float]) -> float:
    """The faster quartile; of few times, the second fastest or the fastest."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def doubt(times: Sequence[float]) -> float:
    """The standard error of the faster quartile, as a part of it, as if times were normal."""
    if len(times) < 2:
        return inf
    low, middle, _ = quantiles(times, n=4)
    return 2.0 * (middle - low) / low / sqrt(len(times))
