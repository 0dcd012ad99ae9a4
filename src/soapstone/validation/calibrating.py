"""The few factors that no single measurement tells, fitted to whole steps.

    compute     how much longer an operator takes within a step than by itself (caches, other ranks)
    overhead_s  what the runtime adds to every operator's pass
    message_s   what handing over or taking a message takes of a device's own time
    wake_s      what a device that waited takes to be at work again (its threads, its caches)
    bandwidth   what links reach within a step, relative to what was measured
    latency     the same of latency

Each is one number for all strategies of a model on a machine. They are found by a descent on the mean
squared logarithm of predicted over actual, over half of the strategies; the other half shows what they are
worth. The descent starts more than once, since factors stand for each other. `parts` says what of a task's
duration each factor is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

STEPS = (2.0, 1.5, 1.25, 1.1, 1.04)
"""[choice] Factors that are tried, from coarse to fine."""

OVERHEADS_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4)
PRIOR = 0.02
"""[choice] What a factor of e away from one costs, as much as a mean error of 14 %: factors that explain
nothing stay one."""

TRUST = 10.0
"""[choice] How much more the factors of compute and bandwidth cost: operators were measured one by one, and
messages and sums among others."""

PRIOR_PER_S = {"overhead_s": 3e4, "message_s": 1e3, "wake_s": 1e3}
"""[choice] What seconds cost, of that: an operator's own overhead is in its measured time, to which the
runtime adds microseconds ([measured] `bench/runtime.py`), and a pipeline has many times as many operators as
other strategies."""

MOST = 32.0
"""[choice] No factor goes further from one than this."""


@dataclass(frozen=True)
class Calibration:
    """Factors of one model on one machine; see the module's docstring."""

    compute: float = 1.0
    overhead_s: float = 0.0
    message_s: float = 0.0
    wake_s: float = 0.0
    bandwidth: float = 1.0
    latency: float = 1.0

    @property
    def text(self) -> str:
        """What a reader should know of it."""
        return (
            f"operators take {self.compute:.2f} times as long and {self.overhead_s * 1e6:.0f} us more,"
            f" a message takes {self.message_s * 1e6:.0f} us of both ends, going on after a wait"
            f" {self.wake_s * 1e6:.0f} us,"
            f" links have {self.bandwidth:.2f} of their bandwidth and {self.latency:.2f} of their latency"
        )


STARTS = (
    Calibration(),
    Calibration(overhead_s=2e-5, message_s=1.6e-4),
    Calibration(overhead_s=4e-5, message_s=8e-5, wake_s=1.6e-4),
)
"""[choice] Where descents begin."""


def calibrated(predict: Callable[[Calibration], Sequence[float]], actual_s: Sequence[float]) -> Calibration:
    """The calibration under which predictions are nearest to what was seen."""

    def badness(found: Calibration) -> float:
        predicted_s = predict(found)
        misfit = sum(log(p / a) ** 2 for p, a in zip(predicted_s, actual_s, strict=True)) / len(actual_s)
        drift = TRUST * (log(found.compute) ** 2 + log(found.bandwidth) ** 2) + log(found.latency) ** 2
        drift += sum(cost * getattr(found, name) for name, cost in PRIOR_PER_S.items())
        return misfit + PRIOR * drift / len(actual_s)

    found = [_descended(start, badness) for start in STARTS]
    return min(found, key=badness)


def _descended(start: Calibration, badness: Callable[[Calibration], float]) -> Calibration:
    """The best calibration that single steps lead to."""
    best, least = start, badness(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for other in _neighbours(best, step):
                found = badness(other)
                if found < least * (1 - 1e-6):
                    best, least, improved = other, found, True
    return best


def _neighbours(found: Calibration, step: float) -> list[Calibration]:
    near = [
        replace(found, **{name: getattr(found, name) * factor})
        for name in ("compute", "bandwidth", "latency")
        for factor in (step, 1 / step)
        if 1 / MOST <= getattr(found, name) * factor <= MOST
    ]
    return near + [
        replace(found, **{name: other})
        for name in PRIOR_PER_S
        for other in OVERHEADS_S
        if other != getattr(found, name)
    ]
