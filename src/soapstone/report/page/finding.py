"""How the plan was found: the best-so-far curve and how far it may be from the optimum.

What a plan file says of its search is read with care: another Soapstone may have written it, or a person.
What is missing or of another form is left out of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 2000
"""[choice] Points of the curve: beyond that, evenly chosen ones and the last."""

LOOKED_AT = "strategies that its search looks at"
"""What a proof is about where a plan file claims one and says nothing else."""


@dataclass(frozen=True)
class Finding:
    """A search. The curve's points are (seconds, proposals, best so far in seconds); `proved_among` and
    `bounded_among` say which strategies a proof and the lower bound are about."""

    method: str
    seed: int | None
    proposals: int | None
    elapsed_s: float | None
    stop: str
    lower_bound_s: float | None
    is_optimal: bool
    gap: float | None
    curve: tuple[tuple[float, float, float], ...]
    proved_among: str | None
    bounded_among: str | None


def finding(search: Mapping[str, Any] | None, makespan_s: float, trained_s: float) -> Finding | None:
    """What a plan says of its search; None if it says nothing. The gap is that of the time as trained; an
    exact search's bound is for gradients that are summed one by one."""
    if not search:
        return None
    bound = _number(search.get("lower_bound_s"))
    is_optimal = search.get("is_optimal") is True
    bounded_s = makespan_s if search.get("method") == "exact" else trained_s
    gap = 0.0 if is_optimal else bounded_s / bound - 1 if bound else None
    return Finding(
        str(search.get("method", "")),
        _whole(search.get("seed")),
        _whole(search.get("proposals")),
        _number(search.get("elapsed_s")),
        str(search.get("stop", "")),
        bound,
        is_optimal,
        gap,
        _curve(search.get("curve")),
        _text(search.get("proved_among")) or (LOOKED_AT if is_optimal else None),
        _text(search.get("bounded_among")) or (None if bound is None else LOOKED_AT),
    )


def _curve(points: object) -> tuple[tuple[float, float, float], ...]:
    found: list[tuple[float, float, float]] = []
    for point in points if isinstance(points, list) else []:
        numbers = [_number(x) for x in point] if isinstance(point, list) else []
        if len(numbers) == 3:
            seconds, proposals, best_s = numbers
            if seconds is not None and proposals is not None and best_s is not None:
                found.append((seconds, proposals, best_s))
    step = math.ceil(len(found) / MOST_POINTS) or 1
    return tuple(found[::step]) + (tuple(found[-1:]) if (len(found) - 1) % step else ())


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
