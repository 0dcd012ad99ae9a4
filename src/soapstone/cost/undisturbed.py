"""Times of what was done several times on a computer that now and then does something else.

That makes everything slower, and for now one thing and now another ([measured] two cores of a shared
computer: the same step in 82 ms or in 120, a second apart). What is compared with each other is therefore
what each takes when nothing disturbs it; how much is disturbed while strategies run is seen there
(`validation.unsteady`).
"""

from __future__ import annotations

from collections.abc import Iterable


def undisturbed(times: Iterable[float]) -> float:
    """The faster quartile; of few times, the second fastest or the fastest."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]
