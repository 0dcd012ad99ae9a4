"""The few factors that no single measurement tells, fitted to whole steps.

    compute     how much longer an operator takes within a step than by itself (caches, other ranks)
    overhead_s  what the runtime adds to every operator's pass
    bandwidth   what links reach within a step, relative to what was measured
    latency     the same of latency

Each is one number for all strategies of a model on a machine. They are found by a descent on the mean
squared logarithm of predicted over actual, over half of the strategies; the other half shows what they are
worth. A calibration is nothing but other times in the profile and other figures of the links, so predictions
stay what the simulator makes of a profile and a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.measured import MeasuredCosts
from soapstone.cost.profile import Profile
from soapstone.machine import Machine

STEPS = (2.0, 1.5, 1.25, 1.1, 1.04)
"""[choice] Factors that are tried, from coarse to fine."""

OVERHEADS_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5)
PRIOR = 0.02
"""[choice] What a factor of e away from one costs, as much as a mean error of 14 %: factors that explain
nothing stay one."""

MOST = 8.0
"""[choice] No factor goes further from one than this."""


@dataclass(frozen=True)
class Calibration:
    """Factors of one model on one machine; see the module's docstring."""

    compute: float = 1.0
    overhead_s: float = 0.0
    bandwidth: float = 1.0
    latency: float = 1.0

    @property
    def text(self) -> str:
        """What a reader should know of it."""
        return (
            f"operators take {self.compute:.2f} times as long and {self.overhead_s * 1e6:.0f} us more,"
            f" links have {self.bandwidth:.2f} of their bandwidth and {self.latency:.2f} of their latency"
        )

    def costs(self, costs: AnalyticCosts) -> AnalyticCosts:
        """Costs with these factors; analytic ones stay as they are, but for the rates."""
        if not isinstance(costs, MeasuredCosts):
            return replace(
                costs,
                most_flops=costs.most_flops / self.compute,
                most_bandwidth=costs.most_bandwidth / self.compute,
            )
        return replace(
            costs, profiles={kind: self._profile(profile) for kind, profile in costs.profiles.items()}
        )

    def _profile(self, profile: Profile) -> Profile:
        times = {
            key: tuple(replace(m, seconds=m.seconds * self.compute + self.overhead_s) for m in found)
            for key, found in profile.times.items()
        }
        updates = tuple(replace(u, seconds=u.seconds * self.compute) for u in profile.updates)
        return Profile(profile.kind, profile.software, times, updates)

    def machine(self, machine: Machine) -> Machine:
        """The machine with these factors on its links."""
        links = tuple(
            replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.bandwidth,
                latency_s=link.latency_s * self.latency,
            )
            for link in machine.links
        )
        return Machine(machine.name, machine.devices, links, machine.switches)


def calibrated(
    predict: Callable[[Calibration], Sequence[float]], actual_s: Sequence[float], *, with_overhead: bool
) -> Calibration:
    """The calibration under which predictions are nearest to what was seen."""

    def badness(found: Calibration) -> float:
        predicted_s = predict(found)
        misfit = sum(log(p / a) ** 2 for p, a in zip(predicted_s, actual_s, strict=True)) / len(actual_s)
        drift = sum(log(x) ** 2 for x in (found.compute, found.bandwidth, found.latency))
        return misfit + PRIOR * drift / len(actual_s)

    best = Calibration()
    least = badness(best)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for other in _neighbours(best, step, with_overhead):
                found = badness(other)
                if found < least * (1 - 1e-6):
                    best, least, improved = other, found, True
    return best


def _neighbours(found: Calibration, step: float, with_overhead: bool) -> list[Calibration]:
    near = [
        replace(found, **{name: getattr(found, name) * factor})
        for name in ("compute", "bandwidth", "latency")
        for factor in (step, 1 / step)
        if 1 / MOST <= getattr(found, name) * factor <= MOST
    ]
    if with_overhead:
        near += [replace(found, overhead_s=other) for other in OVERHEADS_S if other != found.overhead_s]
    return near
