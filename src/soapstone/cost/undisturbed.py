"""Times of what was done several times on a computer that now and then does something else.

That makes everything slower, and for now one thing and now another ([measured] two cores of a shared
computer: the same step in 82 ms or in 120, a second apart). What is compared with each other is therefore
what each takes when nothing disturbs it; how much is disturbed while strategies run is seen there
(`validation.unsteady`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log, sqrt
from statistics import stdev


def undisturbed(times: Iterable[float]) -> float:
    """The faster quartile; of few times, the second fastest or the fastest."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def doubt(times: Sequence[float]) -> float:
    """The standard error of the faster quartile, as a part of it, as if the logarithms of times were normal;
    no less than that of their median."""
    return 1.36 * stdev(map(log, times)) / sqrt(len(times)) if len(times) > 1 else inf
