"""What operators take of a GPU and of the thread that launches them, each by itself (`profile.Launched`).

Where a pass of this shape was not measured, launching takes what it does at the operator's measured shape of
the nearest size, and the kernels the same part of the pass's time as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from statistics import median

from soapstone.cost.profile import Launched, Measured, OpKey, Profile, flat_shape, key_of
from soapstone.cost.work import Work

Seconds = Callable[[Work], float]


@dataclass(frozen=True)
class Launches:
    """The launches of a profile; `seconds` gives the time of any pass."""

    profile: Profile
    seconds: Seconds
    _known: dict[Work, Launched] = field(default_factory=dict)

    def of(self, work: Work) -> Launched:
        """The kernels of a pass, and launching them."""
        if work not in self._known:
            self._known[work] = self._found(work)
        return self._known[work]

    def _found(self, work: Work) -> Launched:
        key, shape = key_of(work), flat_shape(work.operands, work.outputs)
        measured = [each for each in self._alike(key) if each.launched is not None]
        if not measured:
            return Launched(self.seconds(work), self._usual_s)
        exact = next((each for each in measured if each.shape == shape), None)
        near = exact or min(measured, key=lambda each: _distance(each, work))
        assert near.launched is not None
        if exact is not None:
            return near.launched
        share = min(1.0, near.launched.kernels_s / max(near.seconds, 1e-9))
        return Launched(share * self.seconds(work), near.launched.launching_s)

    def _alike(self, key: OpKey) -> tuple[Measured, ...]:
        """The measured shapes of an operator, or of it with other attributes."""
        if key in self.profile.times:
            return self.profile.times[key]
        return tuple(
            each
            for other, times in self.profile.times.items()
            if (other.op_name, other.gradients > 0) == (key.op_name, key.gradients > 0)
            for each in times
        )

    @property
    def _usual_s(self) -> float:
        found = [m.launched.launching_s for times in self.profile.times.values() for m in times if m.launched]
        return median(found) if found else 0.0


def _distance(measured: Measured, work: Work) -> float:
    return abs(log(max(1, measured.size_bytes)) - log(max(1, work.size_bytes)))
