"""Measured costs: what a profile holds of a kind of device, analytic for kinds without one.

Compute takes what was measured at the shard's shapes, or else what the plane through the operator's other
shapes says (`fit`). An update takes the longer of a least time and its bytes at a rate, both fitted. The
native core gets the same curves (`tasks.flat`), so both build the same task graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.fit import Curve, Fits
from soapstone.cost.profile import OpKey, Profile, Updated, flat_shape, key_of
from soapstone.cost.work import Work
from soapstone.machine import DeviceKind


class Basis(StrEnum):
    """What a time rests on."""

    MEASURED = "measured"
    FITTED = "fitted"
    ANALYTIC = "analytic"


@dataclass(frozen=True)
class MeasuredCosts(AnalyticCosts):
    """Profiles by the name of the kind of device they were measured on."""

    profiles: Mapping[str, Profile] = field(default_factory=dict, hash=False)

    name = "measured"

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """How long a node's shard takes on a device."""
        curve = self.curve(key_of(work), kind)
        if curve is None:
            return super().compute_s(work, kind)
        measured_s = curve.measured_s(flat_shape(work.operands, work.outputs))
        return curve.plane.seconds(work.flops, work.size_bytes) if measured_s is None else measured_s

    def basis(self, work: Work, kind: DeviceKind) -> Basis:
        """What the time of a work rests on."""
        curve = self.curve(key_of(work), kind)
        if curve is None:
            return Basis.ANALYTIC
        is_measured = curve.measured_s(flat_shape(work.operands, work.outputs)) is not None
        return Basis.MEASURED if is_measured else Basis.FITTED

    def curve(self, key: OpKey, kind: DeviceKind) -> Curve | None:
        """The times of an operator on a kind of device; None where only analysis is left."""
        if kind.name not in self._usable:
            return None
        if (key, kind.name) not in self._curves:
            if kind.name not in self._fits:
                self._fits[kind.name] = Fits(self.profiles[kind.name].times)
            self._curves[key, kind.name] = self._fits[kind.name].curve(key)
        return self._curves[key, kind.name]

    def update_rate(self, kind: DeviceKind) -> tuple[float, float]:
        """The least time of an update, and the bytes it moves in a second."""
        profile = self._usable.get(kind.name)
        if profile is None or not profile.updates:
            return super().update_rate(kind)
        if kind.name not in self._updates:
            self._updates[kind.name] = _fitted(profile.updates, self.update_bytes_per_byte)
        return self._updates[kind.name]

    def of(self, keys: Iterable[OpKey]) -> MeasuredCosts:
        """The part of the profiles that some operators need."""
        wanted = set(keys)
        parts = {name: profile.of(wanted) for name, profile in self.profiles.items()}
        return MeasuredCosts(self.most_flops, self.most_bandwidth, self.update_bytes_per_byte, parts)

    @cached_property
    def _usable(self) -> dict[str, Profile]:
        """The profiles that know of both passes: with less, not every time could follow from measured ones,
        and a device would be partly one thing and partly another."""
        return {
            name: profile
            for name, profile in self.profiles.items()
            if {key.gradients > 0 for key, times in profile.times.items() if times} == {False, True}
        }

    @cached_property
    def _fits(self) -> dict[str, Fits]:
        return {}

    @cached_property
    def _curves(self) -> dict[tuple[OpKey, str], Curve | None]:
        return {}

    @cached_property
    def _updates(self) -> dict[str, tuple[float, float]]:
        return {}


def _fitted(updates: Iterable[Updated], bytes_per_byte: float) -> tuple[float, float]:
    """The least time and the rate: the smallest update's time, and the median rate of those that take at
    least twice as long (of the largest, if none does)."""
    ordered = sorted(updates, key=lambda each: each.size_bytes)
    least_s = ordered[0].seconds
    slow = [each for each in ordered if each.seconds >= 2 * least_s and each.size_bytes] or ordered[-1:]
    rates = sorted(max(each.size_bytes, 1) * bytes_per_byte / max(each.seconds, 1e-9) for each in slow)
    return least_s, rates[len(rates) // 2]
