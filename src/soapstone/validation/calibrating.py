"""The few factors that no single measurement tells, fitted to whole steps.

    compute     how much longer an operator takes within a step than by itself (caches, other ranks)
    handing     how much longer a device's thread takes to see to messages, and to launch a GPU's operators,
                within a step, where it does one thing after another, than for one of them many times; or
                less, where one meeting of ranks follows the other
    overhead_s  what the runtime adds to every operator's pass
    message_s   what handing over or taking a message takes of a device's own time beside what was measured
    wake_s      what a task takes longer that needs something of another rank: ranks that should be there at
                the same moment are not, and one that waited has to wake
    step_s      what a step takes before its first task and after its last
    bandwidth   what links reach within a step, relative to what was measured
    latency     the same of latency

Each is one number for all strategies of a model on a machine. They are found by a descent on the mean
squared logarithm of predicted over actual, over half of the strategies; the other half shows what they are
worth. The descent starts more than once, since factors stand for each other. `parts` says what of a task's
duration each factor is about.

Ten strategies can be explained by seven factors in many ways, and where measured times were near already,
some of these are further off for others. So how far factors may go from one is chosen within that half: each
half of it is predicted by what the other half says, with factors that are free, that are dear, and that stay
one, and the way that does best there is taken for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log

STEPS = (2.0, 1.5, 1.25, 1.1, 1.04)
"""[choice] Factors that are tried, from coarse to fine."""

OVERHEADS_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4, 1.28e-3, 2.56e-3, 5.12e-3)
STRENGTHS = (1.0, 20.0)
"""[choice] How much dearer factors are made than below."""

PRIOR = 0.02
"""[choice] What a factor of e away from one costs, as much as a mean error of 14 %: factors that explain
nothing stay one."""

TRUST = 10.0
"""[choice] How much more the factors of compute and bandwidth cost: operators were measured one by one, and
messages and sums among others."""

PRIOR_PER_S = {"overhead_s": 3e4, "message_s": 5e4, "wake_s": 1e3, "step_s": 12.5}
"""[choice] What seconds cost, of that: an operator's own overhead is in its measured time, to which the
runtime adds microseconds ([measured] `bench/runtime.py`), and a pipeline has many times as many operators as
other strategies; what a message takes of its ends is measured; a step has hundreds of all of these."""

MOST = 32.0
"""[choice] No factor goes further from one than this."""


@dataclass(frozen=True)
class Calibration:
    """Factors of one model on one machine; see the module's docstring."""

    compute: float = 1.0
    handing: float = 1.0
    overhead_s: float = 0.0
    message_s: float = 0.0
    wake_s: float = 0.0
    step_s: float = 0.0
    bandwidth: float = 1.0
    latency: float = 1.0

    @property
    def text(self) -> str:
        """What a reader should know of it."""
        return (
            f"operators take {self.compute:.2f} times as long and {self.overhead_s * 1e6:.0f} us more,"
            f" seeing to messages, and launching, {self.handing:.2f} times as long,"
            f" a message takes {self.message_s * 1e6:.0f} us more of both ends, meeting another rank"
            f" {self.wake_s * 1e6:.0f} us, a step {self.step_s * 1e3:.1f} ms beside its tasks,"
            f" links have {self.bandwidth:.2f} of their bandwidth and {self.latency:.2f} of their latency"
        )


STARTS = (
    Calibration(),
    Calibration(overhead_s=2e-5, message_s=1.6e-4),
    Calibration(overhead_s=4e-5, message_s=8e-5, wake_s=1.6e-4),
)
"""[choice] Where descents begin."""


Predict = Callable[[Calibration], float]
"""The step of a strategy under a calibration."""


def calibrated(strategies: Sequence[Predict], actual_s: Sequence[float]) -> Calibration:
    """The calibration under which predictions are nearest to what was seen, as far as such a calibration is
    good for strategies that it was not made for."""
    # Not every second one: of those that are drawn, every second one is random (`drawing`).
    halves = [[i for i in range(len(strategies)) if i // 2 % 2 == part] for part in (0, 1)]
    if not all(halves):
        return _fitted(strategies, actual_s, STRENGTHS[0])

    def of(numbers: Iterable[int]) -> tuple[list[Predict], list[float]]:
        chosen = list(numbers)
        return [strategies[i] for i in chosen], [actual_s[i] for i in chosen]

    def unseen(strength: float) -> float:
        """How far each half is off by what the other says."""
        return sum(
            _misfit(*of(other), _fitted(*of(own), strength, STARTS[:1])) * len(other)
            for own, other in (halves, reversed(halves))
        )

    as_measured = _misfit(strategies, actual_s, Calibration()) * len(strategies)
    off = {strength: unseen(strength) for strength in STRENGTHS}
    best = min(off, key=lambda strength: off[strength])
    return Calibration() if as_measured <= off[best] else _fitted(strategies, actual_s, best)


def _misfit(
    strategies: Sequence[Predict], actual_s: Sequence[float], found: Calibration, most: float = inf
) -> float:
    """The mean squared logarithm of predicted over actual; or something that is not below `most`, as soon as
    it cannot be."""
    misfit = 0.0
    for predict, seen_s in zip(strategies, actual_s, strict=True):
        misfit += log(predict(found) / seen_s) ** 2 / len(actual_s)
        if misfit >= most:
            break
    return misfit


def _fitted(
    strategies: Sequence[Predict],
    actual_s: Sequence[float],
    strength: float,
    starts: Sequence[Calibration] = STARTS,
) -> Calibration:
    """The calibration that is nearest to what was seen, with factors that are so dear."""

    def badness(found: Calibration, most: float = inf) -> float:
        drift = TRUST * (log(found.compute) ** 2 + log(found.bandwidth) ** 2)
        drift += log(found.handing) ** 2 + log(found.latency) ** 2
        drift += sum(cost * getattr(found, name) for name, cost in PRIOR_PER_S.items())
        dear = strength * PRIOR * drift / len(actual_s)
        return dear + _misfit(strategies, actual_s, found, most - dear)

    found = [_descended(start, badness) for start in starts]
    return min(found, key=badness)


def _descended(start: Calibration, badness: Callable[[Calibration, float], float]) -> Calibration:
    """The best calibration that single steps lead to."""
    best, least = start, badness(start, inf)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for other in _neighbours(best, step):
                found = badness(other, least)
                if found < least * (1 - 1e-6):
                    best, least, improved = other, found, True
    return best


def _neighbours(found: Calibration, step: float) -> list[Calibration]:
    near = [
        replace(found, **{name: getattr(found, name) * factor})
        for name in ("compute", "handing", "bandwidth", "latency")
        for factor in (step, 1 / step)
        if 1 / MOST <= getattr(found, name) * factor <= MOST
    ]
    for name in PRIOR_PER_S:
        own = getattr(found, name)
        others = {*OVERHEADS_S, own * step, own / step} - {own}
        near += [replace(found, **{name: other}) for other in sorted(others) if other <= OVERHEADS_S[-1]]
    return near
