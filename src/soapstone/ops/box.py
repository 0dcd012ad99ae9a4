"""Intervals and boxes: the arithmetic behind shards, halos and transfers.

An `Interval` is half open, `[lo, hi)`. A `Box` is one interval per axis of a tensor; the box of a
rank-0 tensor is `()` and holds one element. Everything that moves between devices is a box.
"""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """The integers from `lo` up to, not including, `hi`; empty when `hi <= lo`."""

    lo: int
    hi: int

    @property
    def length(self) -> int:
        return max(0, self.hi - self.lo)

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.lo, other.lo), min(self.hi, other.hi))

    def part(self, index: int, degree: int) -> Interval:
        """Part `index` of this interval cut into `degree` equal parts."""
        step = self.length // degree
        return Interval(self.lo + index * step, self.lo + (index + 1) * step)

    def __str__(self) -> str:
        return f"{self.lo}:{self.hi}"


Box = tuple[Interval, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple(Interval(0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of the tensor that fills the box."""
    return tuple([hi - lo if hi > lo else 0 for lo, hi in box])


def volume(box: Box) -> int:
    """How many elements the box holds."""
    count = 1
    for lo, hi in box:
        if hi <= lo:
            return 0
        count *= hi - lo
    return count


def intersection(a: Box, b: Box) -> Box | None:
    """The elements in both boxes of one tensor, or None when there are none.

    Called for every pair of shards that may meet, so that most answers are None: the first axis on which they
    do not meet ends it.
    """
    if a == b:
        return a if volume(a) else None
    shared = []
    for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True):
        lo = a_lo if a_lo > b_lo else b_lo  # noqa: FURB136, three times as fast as max
        hi = a_hi if a_hi < b_hi else b_hi  # noqa: FURB136
        if hi <= lo:
            return None
        shared.append(Interval(lo, hi))
    return tuple(shared)


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` lies in `outer`."""
    for (outer_lo, outer_hi), (lo, hi) in zip(outer, inner, strict=True):
        if lo < outer_lo or hi > outer_hi:
            return not volume(inner)
    return True


def relative_to(box: Box, origin: Box) -> Box:
    """The same box, counted from the lower corner of `origin`."""
    return tuple(Interval(b.lo - o.lo, b.hi - o.lo) for b, o in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index for an array."""
    return tuple(slice(interval.lo, interval.hi) for interval in box)
