"""Predicted against actual: errors and rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

STATISTICS = {"quartile": 0.25, "median": 0.5, "fastest": 0.0}
"""What can be told of several steps, as the part of them that is faster."""


@dataclass(frozen=True)
class Compared:
    """One strategy: predicted and actual step time, and peak memory of each rank; and by what part of its
    time steps differ (half the distance between their quartiles)."""

    name: str
    predicted_s: float
    actual_s: float
    predicted_bytes: tuple[int, ...]
    actual_bytes: tuple[int, ...]
    spread: float = 0.0

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to what was seen; below zero if it promised too much."""
        return (self.predicted_s - self.actual_s) / self.actual_s

    @property
    def memory_error(self) -> float:
        """The same of memory, of the rank that needs most."""
        most = max(range(len(self.actual_bytes)), key=lambda rank: self.actual_bytes[rank])
        actual = self.actual_bytes[most]
        return (self.predicted_bytes[most] - actual) / actual if actual else 0.0


@dataclass(frozen=True)
class Summary:
    """Figures over several strategies. Of `near_pairs` runs do not tell which is the faster: their times
    differ by no more than their steps do; `clear_tau` leaves these out."""

    count: int
    median_error: float
    worst_error: float
    tau: float
    clear_tau: float
    near_pairs: int
    median_memory_error: float
    worst_memory_error: float


@dataclass(frozen=True)
class Choice:
    """What predictions would choose, and what was the fastest."""

    predicted: Compared
    fastest: Compared

    @property
    def loss(self) -> float:
        """How much longer what would be chosen takes than the fastest, as a part of the fastest's time."""
        return self.predicted.actual_s / self.fastest.actual_s - 1.0


def choice(found: Sequence[Compared]) -> Choice:
    """The best of some strategies, of which there must be at least one."""
    return Choice(min(found, key=lambda each: each.predicted_s), min(found, key=lambda each: each.actual_s))


def summary(found: Sequence[Compared]) -> Summary:
    """The figures; errors count by their size. There must be at least one."""
    errors = [abs(each.error) for each in found]
    memory = [abs(each.memory_error) for each in found]
    predicted_s, actual_s = [each.predicted_s for each in found], [each.actual_s for each in found]
    pairs = list(combinations(range(len(found)), 2))
    clear = [(i, j) for i, j in pairs if not _are_near(found[i], found[j])]
    return Summary(
        len(found),
        median(errors),
        max(errors),
        kendall_tau(predicted_s, actual_s),
        kendall_tau(predicted_s, actual_s, clear),
        len(pairs) - len(clear),
        median(memory),
        max(memory),
    )


def _are_near(a: Compared, b: Compared) -> bool:
    return abs(a.actual_s - b.actual_s) <= a.spread * a.actual_s + b.spread * b.actual_s


def kendall_tau(
    a: Sequence[float], b: Sequence[float], pairs: Sequence[tuple[int, int]] | None = None
) -> float:
    """Kendall's tau-b: of these pairs, or of all, those in the same order less those in opposite order, ties
    apart; 1 if there is nothing to order."""
    agree = ties_a = ties_b = 0
    pairs = list(combinations(range(len(a)), 2)) if pairs is None else pairs
    for i, j in pairs:
        x, y = (a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])
        agree += x * y
        ties_a += not x
        ties_b += not y
    ordered = (len(pairs) - ties_a) * (len(pairs) - ties_b)
    return float(agree / ordered**0.5) if ordered else 1.0
