"""The figures of one training iteration that tell why one strategy is faster than another.

    makespan = mean time that a device computes + mean time that it waits
    bytes moved = those of gradient sums + all others (activations, their gradients, statistics)

`reasons` sets two strategies' figures against each other, in sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        waiting_s = self.makespan_s - self.mean_busy_s
        return waiting_s if waiting_s > ROUNDING * self.makespan_s else 0.0


def figures(found: Outcome) -> Figures:
    """The figures of what the native core foretells."""
    return Figures(found.makespan_s, found.bucketed_s, found.moved_bytes, found.gradient_bytes, found.busy_s)


def reasons(own: Figures, other: Figures) -> tuple[str, ...]:
    """What is different from another strategy, in sentences with numbers: traffic, waiting, compute. First
    what accounts for the difference in time, then what speaks against it, after a "But"."""
    sign = 1 if own.makespan_s <= other.makespan_s else -1
    told = (
        (_traffic(own, other), own.moved_bytes, other.moved_bytes),
        (_waiting(own, other), own.waiting_s, other.waiting_s),
        (_compute(own, other), own.mean_busy_s, other.mean_busy_s),
    )
    against = [not is_alike(a, b) and sign * (a - b) > 0 for _, a, b in told]
    return (
        *(sentence for (sentence, _, _), is_against in zip(told, against, strict=True) if not is_against),
        *(
            f"But {sentence[0].lower()}{sentence[1:]}"
            for (sentence, _, _), is_against in zip(told, against, strict=True)
            if is_against
        ),
    )


def _traffic(own: Figures, other: Figures) -> str:
    parts = ", ".join(
        f"{name} {_instead(a, b)}"
        for name, a, b in (
            ("gradient sums", own.gradient_bytes, other.gradient_bytes),
            ("activations", own.activation_bytes, other.activation_bytes),
        )
        if a or b
    )
    moved = f"It moves {_instead(own.moved_bytes, other.moved_bytes)}{_factor(own, other)}"
    return f"{moved}: {parts}." if parts else f"{moved}."


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
    def text(each: Figures) -> str:
        share = each.waiting_s / each.makespan_s if each.makespan_s else 0.0
        return f"{SECONDS.short_text(each.waiting_s)} ({share:.0%} of the time)"

    return f"A device waits {text(own)} on average instead of {text(other)}."


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
