"""The figures of one training iteration that tell why one strategy is faster than another.

    time = mean time that a device computes + mean time that it waits
    bytes moved = those of gradient sums + all others (activations, their gradients, statistics)

`as_trained` has the time with small gradients summed together. `reasons` sets two strategies' figures against
each other, in sentences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from soapstone.machine.units import BYTES, SECONDS
from soapstone.sim.outcome import Outcome

ALIKE = 0.005
"""[choice] Two quantities whose ratio is closer to 1 than this are called equal."""

ROUNDING = 1e-9
"""[choice] A difference of times that is a smaller part of them is that of adding up in another order."""


@dataclass(frozen=True)
class Figures:
    """What one iteration takes. `bucketed_s` is its time with small gradients summed together; `busy_s` is
    how long each device computes; `gradient_bytes` is the part of the moved bytes that sums gradients of
    weights."""

    makespan_s: float
    bucketed_s: float
    moved_bytes: int
    gradient_bytes: int
    busy_s: tuple[float, ...]

    @property
    def activation_bytes(self) -> int:
        """The bytes moved for all else: activations and their gradients."""
        return self.moved_bytes - self.gradient_bytes

    @cached_property
    def compute_s(self) -> float:
        """How long all devices together compute."""
        return sum(self.busy_s)

    @property
    def mean_busy_s(self) -> float:
        """How long a device computes on average."""
        return self.compute_s / len(self.busy_s)

    @property
    def busiest_s(self) -> float:
        """How long the busiest device computes."""
        return max(self.busy_s)

    @property
    def imbalance(self) -> float:
        """The busiest device's compute in parts of the mean; 1 when all are alike."""
        return self.busiest_s / self.mean_busy_s if self.mean_busy_s else 1.0

    @property
    def waiting_s(self) -> float:
        """How long a device waits on average, for data, for gradient sums, or for the others to end."""
        return self._left_s(self.mean_busy_s)

    @property
    def busiest_waiting_s(self) -> float:
        """How long the busiest device waits."""
        return self._left_s(self.busiest_s)

    def _left_s(self, busy_s: float) -> float:
        waiting_s = self.makespan_s - busy_s
        return waiting_s if waiting_s > ROUNDING * self.makespan_s else 0.0


def figures(found: Outcome) -> Figures:
    """The figures of what the native core foretells."""
    return Figures(found.makespan_s, found.bucketed_s, found.moved_bytes, found.gradient_bytes, found.busy_s)


def as_trained(own: Figures) -> Figures:
    """The same with the time that `soapstone train` takes: bytes and compute are no others in buckets."""
    return replace(own, makespan_s=own.bucketed_s)


def reasons(own: Figures, other: Figures) -> tuple[str, ...]:
    """What is different from another strategy, in sentences with numbers: traffic, waiting, compute. First
    what accounts for the difference in time, then what speaks against it, after a "But"."""
    sign = 1 if own.makespan_s <= other.makespan_s else -1
    told = (_traffic(own, other), *(_of_busiest(own, other) if _idles(own, other) else _of_mean(own, other)))
    against = [not is_alike(each.own, each.other) and sign * (each.own - each.other) > 0 for each in told]
    speaks_for = [each.sentence for each, is_against in zip(told, against, strict=True) if not is_against]
    rest = [each.sentence for each, is_against in zip(told, against, strict=True) if is_against]
    joined = zip(("But", *("And" for _ in rest[1:])), rest, strict=False)
    return (*speaks_for, *(f"{word} {each[0].lower()}{each[1:]}" for word, each in joined))


class _Told(NamedTuple):
    """A sentence, and the two quantities that it sets against each other: less is better."""

    sentence: str
    own: float
    other: float


def _idles(own: Figures, other: Figures) -> bool:
    """Whether a device computes more or less than before on average, and the busiest one does not: where some
    merely stand idle, means say nothing of the time."""
    mean, busiest = own.mean_busy_s - other.mean_busy_s, own.busiest_s - other.busiest_s
    return not is_alike(own.mean_busy_s, other.mean_busy_s) and (
        is_alike(own.busiest_s, other.busiest_s) or mean * busiest < 0
    )


def _of_mean(own: Figures, other: Figures) -> tuple[_Told, _Told]:
    return (
        _Told(_waiting(own, other), own.waiting_s, other.waiting_s),
        _Told(_compute(own, other), own.mean_busy_s, other.mean_busy_s),
    )


def _of_busiest(own: Figures, other: Figures) -> tuple[_Told, _Told]:
    waits = own.busiest_waiting_s, other.busiest_waiting_s
    texts = [SECONDS.short_text(each.busiest_s) for each in (own, other)]
    compared = "in both" if texts[0] == texts[1] else f"instead of {texts[1]}"
    computes = f"The busiest device computes {texts[0]} {compared}"
    rest = f"{own.imbalance:.2f} times the mean instead of {other.imbalance:.2f}"
    return (
        _Told(_waits("The busiest device", own, other, waits), *waits),
        _Told(f"{computes}, {rest}.", own.busiest_s, other.busiest_s),
    )


def _traffic(own: Figures, other: Figures) -> _Told:
    parts = ", ".join(
        f"{name} {_instead(a, b)}"
        for name, a, b in (
            ("gradient sums", own.gradient_bytes, other.gradient_bytes),
            ("activations", own.activation_bytes, other.activation_bytes),
        )
        if a or b
    )
    moved = f"It moves {_instead(own.moved_bytes, other.moved_bytes)}{_factor(own, other)}"
    return _Told(f"{moved}: {parts}." if parts else f"{moved}.", own.moved_bytes, other.moved_bytes)


def _instead(own: int, other: int) -> str:
    text, before = (BYTES.short_text(size) for size in (own, other))
    return f"{text} in both" if text == before else f"{text} instead of {before}"


def _factor(own: Figures, other: Figures) -> str:
    if not own.moved_bytes or not other.moved_bytes or is_alike(own.moved_bytes, other.moved_bytes):
        return ""
    if own.moved_bytes < other.moved_bytes:
        return f" ({other.moved_bytes / own.moved_bytes:.3g} times less)"
    return f" ({own.moved_bytes / other.moved_bytes:.3g} times as much)"


def _waiting(own: Figures, other: Figures) -> str:
    return _waits("A device", own, other, (own.waiting_s, other.waiting_s), " on average")


def _waits(who: str, own: Figures, other: Figures, waits: tuple[float, float], how: str = "") -> str:
    def text(each: Figures, waiting_s: float) -> str:
        share = waiting_s / each.makespan_s if each.makespan_s else 0.0
        return f"{SECONDS.short_text(waiting_s)} ({share:.0%} of the time)"

    return f"{who} waits {text(own, waits[0])}{how} instead of {text(other, waits[1])}."


def _compute(own: Figures, other: Figures) -> str:
    computes = SECONDS.short_text(own.mean_busy_s)
    before = SECONDS.short_text(other.mean_busy_s)
    compared = "in both" if computes == before else f"instead of {before}"
    return (
        f"It computes {computes} on average {compared}; the busiest device {own.imbalance:.2f} times the "
        f"mean instead of {other.imbalance:.2f}."
    )


def is_alike(a: float, b: float) -> bool:
    """Whether two quantities differ by next to nothing."""
    return abs(a - b) <= ALIKE * max(abs(a), abs(b))
