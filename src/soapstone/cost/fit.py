"""Curves through measured times: exact where a shape was measured, a plane elsewhere.

    seconds = base + per_flop * flops + per_byte * bytes        none of the three below zero

The base is what calling the operator takes, the other two are the inverse of the rates it reaches. Their
relative errors are made least in the sense of squares over the operator's measured shapes; of the planes
with some coefficients left out, the one with the least error whose coefficients are all positive is it.
Where an operator with these attributes was measured at fewer than `FEW` shapes, the plane is that of the
operator with any attributes, and failing that of all operators, in the same direction.

`held_out` says how good that is: planes through half of the shapes, asked for the other half.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

import numpy as np

from soapstone.cost.profile import Measured, OpKey

FEW = 3
"""[choice] A plane has three coefficients: fewer shapes than this say nothing of their own."""


@dataclass(frozen=True)
class Plane:
    """Seconds as a function of flops and bytes."""

    base_s: float
    s_per_flop: float
    s_per_byte: float

    def seconds(self, flops: float, size_bytes: int) -> float:
        """The time; the native core does the same arithmetic in the same order."""
        return self.base_s + self.s_per_flop * flops + self.s_per_byte * float(size_bytes)


@dataclass(frozen=True)
class Curve:
    """The times of one operator: of the shapes that were measured, and of all others by a plane. No shape
    takes less for each of its flops and bytes than the least of both say."""

    plane: Plane
    shapes: tuple[tuple[int, ...], ...] = ()
    seconds: tuple[float, ...] = field(default=())
    least_s_per_flop: float = 0.0
    least_s_per_byte: float = 0.0

    def measured_s(self, shape: tuple[int, ...]) -> float | None:
        """The measured time of a shape; None where there is none."""
        at = bisect_left(self.shapes, shape)
        return self.seconds[at] if at < len(self.shapes) and self.shapes[at] == shape else None


def plane_through(times: Sequence[Measured]) -> Plane:
    """The plane with the least relative error over some times, of which there is at least one."""
    features = np.array([[1.0, m.flops, float(m.size_bytes)] for m in times])
    seconds = np.array([max(m.seconds, 1e-9) for m in times])
    scale = np.maximum(features.max(axis=0), 1e-30)
    rows = features / scale / seconds[:, np.newaxis]
    best, least = np.array([float(np.median(seconds)), 0.0, 0.0]), np.inf
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            part = rows[:, chosen]
            found, *_ = np.linalg.lstsq(part, np.ones(len(times)), rcond=None)
            error = float(np.sum((part @ found - 1.0) ** 2))
            if np.all(found >= 0) and error < least * (1 - 1e-9):
                least, best = error, np.zeros(3)
                best[list(chosen)] = found / scale[list(chosen)]
    return Plane(*map(float, best))


class Fits:
    """Planes of a profile's operators, each made when it is asked for."""

    def __init__(self, times: Mapping[OpKey, Sequence[Measured]]) -> None:
        self._times = times
        self._known: dict[tuple[object, ...], Plane | None] = {}

    def plane(self, key: OpKey) -> Plane | None:
        """The plane of an operator; None if nothing at all was measured in its direction."""
        backward = key.gradients > 0
        same_op = (key.op_name, key.dtype, backward)
        for name, wanted in (
            ((key,), lambda other: other == key),
            (same_op, lambda other: (other.op_name, other.dtype, other.gradients > 0) == same_op),
            ((backward,), lambda other: (other.gradients > 0) == backward),
        ):
            if name not in self._known:
                found = [m for other, times in self._times.items() if wanted(other) for m in times]
                enough = len(found) >= (FEW if len(name) > 1 or isinstance(name[0], OpKey) else 1)
                self._known[name] = plane_through(found) if enough else None
            plane = self._known[name]
            if plane is not None:
                return plane
        return None

    def curve(self, key: OpKey) -> Curve | None:
        """The curve of an operator; None if nothing at all was measured in its direction."""
        plane = self.plane(key)
        if plane is None:
            return None
        times = sorted(self._times.get(key, ()), key=lambda m: m.shape)
        per_flop = [m.seconds / m.flops for m in times if m.flops]
        per_byte = [m.seconds / m.size_bytes for m in times if m.size_bytes]
        return Curve(
            plane,
            tuple(m.shape for m in times),
            tuple(m.seconds for m in times),
            min([plane.s_per_flop, *per_flop]),
            min([plane.s_per_byte, *per_byte]),
        )


@dataclass(frozen=True)
class HeldOut:
    """How far planes are off on shapes that they did not see, relative to what was measured there."""

    count: int
    median: float
    p90: float
    worst: float


def held_out(times: Mapping[OpKey, Sequence[Measured]]) -> HeldOut | None:
    """Fit every second shape of every operator (by size), and ask for the others; None if there are none.
    The smallest and the largest shape are always seen, so that this is interpolation, as in use."""
    seen: dict[OpKey, list[Measured]] = {}
    asked: list[tuple[OpKey, Measured]] = []
    for key, found in times.items():
        ordered = sorted(found, key=lambda m: (m.flops, m.size_bytes, m.shape))
        kept, rest = _halves(ordered)
        seen[key] = kept
        asked += [(key, m) for m in rest]
    fits = Fits(seen)
    errors = sorted(
        abs(plane.seconds(m.flops, m.size_bytes) - m.seconds) / m.seconds
        for key, m in asked
        for plane in [fits.plane(key)]
        if plane is not None and m.seconds > 0
    )
    if not errors:
        return None
    return HeldOut(len(errors), median(errors), errors[int(0.9 * (len(errors) - 1))], errors[-1])


def _halves(ordered: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    if len(ordered) < 3:
        return list(ordered), []
    rest = list(ordered[1:-1:2])
    kept: Iterable[Measured] = (m for m in ordered if m not in rest)
    return list(kept), rest
