"""Degrees that are numbers, or products of symbols: one layout calculus for planning and for proofs.

A degree is only ever multiplied, divided and compared. A proof that holds for every degree runs the same
code on a `Symbolic` degree: `k`, `k k`, `k j`, with 1 as the empty product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Symbolic:
    """A product of symbols."""

    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Degree) -> Symbolic:
        return Symbolic(tuple(sorted(self.symbols + _symbols(other))))

    __rmul__ = __mul__

    def __floordiv__(self, other: Degree) -> Symbolic:
        """The quotient.

        REQUIRES: `divides(other, self)`.
        """
        left = Counter(self.symbols)
        left.subtract(_symbols(other))
        return Symbolic(tuple(sorted(left.elements())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | Symbolic) and self.symbols == _symbols(other)

    def __hash__(self) -> int:
        return hash(self.symbols) if self.symbols else hash(1)

    def __str__(self) -> str:
        return "·".join(self.symbols) or "1"


Degree = int | Symbolic


def _symbols(degree: Degree) -> tuple[str, ...]:
    if isinstance(degree, Symbolic):
        return degree.symbols
    return () if degree == 1 else (str(degree),)


def divides(part: Degree, whole: Degree) -> bool:
    """Whether the second is a multiple of the first."""
    if isinstance(part, int) and isinstance(whole, int):
        return whole % part == 0
    return not Counter(_symbols(part)) - Counter(_symbols(whole))


def quotient(whole: Degree, part: Degree) -> Degree:
    """The whole divided by one of its divisors."""
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part
    return (whole if isinstance(whole, Symbolic) else Symbolic(_symbols(whole))) // part


def product(degrees: Iterable[Degree]) -> Degree:
    """All of them, multiplied."""
    result: Degree = 1
    for degree in degrees:
        if degree != 1:
            result = degree if result == 1 else result * degree
    return result


def as_z3(z3: Any, degree: Degree) -> Any:
    """The degree as a Z3 integer, its symbols as constants."""
    factors = [z3.IntVal(int(name)) if name.isdigit() else z3.Int(name) for name in _symbols(degree)]
    result = z3.IntVal(1)
    for factor in factors:
        result = result * factor
    return result
