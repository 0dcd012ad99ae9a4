"""What every search returns: the best strategy, and how it was found.

A search ends for one of the reasons of `StopReason` and never by an exception: what it had found until
then is always there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from soapstone.strategy.strategy import Strategy


class StopReason(StrEnum):
    """Why a search, or one of its starts, ended."""

    BUDGET = "the budget was used up"
    CONVERGED = "it came to its end within the budget"
    INTERRUPTED = "it was interrupted"
    OPTIMAL = "the best of its space is found"
    OPTIMAL_WITHOUT_COPIES = "nothing in its space, which has no copies of shards, is better"
    OPTIMAL_OF_RANGES = "the best on devices that follow each other is found"
    TOO_LARGE = "the best there is does not fit in memory"


PROOFS = frozenset({StopReason.OPTIMAL, StopReason.OPTIMAL_WITHOUT_COPIES, StopReason.OPTIMAL_OF_RANGES})
"""The reasons that say that the strategy which was found is the best of some."""

_SPACE = (
    "strategies of whole batches and whole blocks that give each device at most one shard of a block, and "
    "each shard to one device"
)
_RANGES = f"{_SPACE}, devices that follow each other by number"
_BOUNDED = "strategies of whole batches and whole blocks with no more shards of a block than devices"
_COUNTED = "each gradient is summed by itself"
"""How exact searches count time: `soapstone train` sums small gradients together."""


@dataclass(frozen=True)
class CurvePoint:
    """The best makespan known after so many proposals and seconds."""

    elapsed_s: float
    proposals: int
    best_s: float


@dataclass(frozen=True)
class StartReport:
    """What came of one initial strategy."""

    name: str
    first_s: float
    best_s: float
    proposals: int
    accepted: int
    stop: StopReason


@dataclass(frozen=True)
class SearchReport:
    """The best strategy that was found. `makespan_s` is what the native core predicts for it, `fits`
    whether every device has the memory for it. The curve is that of all starts together; no strategy of those
    in `bounded_among` takes less than `lower_bound_s`, if that is known. `rewrites` are the rules by which
    the strategy's graph was made from the one that was given, in the order of their use."""

    method: str
    seed: int
    strategy: Strategy
    makespan_s: float
    fits: bool
    curve: tuple[CurvePoint, ...]
    starts: tuple[StartReport, ...]
    elapsed_s: float
    stop: StopReason
    lower_bound_s: float | None = None
    rewrites: tuple[str, ...] = ()

    @property
    def proposals(self) -> int:
        """How many strategies were proposed in all."""
        return sum(start.proposals for start in self.starts)

    @property
    def accepted(self) -> int:
        """How many of them were accepted."""
        return sum(start.accepted for start in self.starts)

    @property
    def is_optimal(self) -> bool:
        """Whether it is the best of the exact search's space, and that is proved (`proved_among`)."""
        return self.stop is StopReason.OPTIMAL

    @property
    def proved_among(self) -> str | None:
        """The strategies none of which is better, in words, where that is proved. What lies outside of them,
        such as a file that names a device several times, may be better."""
        if self.stop not in PROOFS:
            return None
        which = _RANGES if self.stop is StopReason.OPTIMAL_OF_RANGES else _SPACE
        return f"{which}; {_COUNTED}"

    @property
    def bounded_among(self) -> str | None:
        """The strategies none of which takes less than the lower bound, in words, where there is one. That of
        `exact.lower_bound` counts no gradient sums, so that it holds however these are done."""
        if self.lower_bound_s is None:
            return None
        return f"{_SPACE}; {_COUNTED}" if self.has_bound_of_proof else _BOUNDED

    @property
    def has_bound_of_proof(self) -> bool:
        """Whether the lower bound is that of an exact search, and not the one for problems of any size."""
        return self.method == "exact"

    @property
    def gap(self) -> float | None:
        """By what part of the lower bound the strategy may be off the optimum among those that are bounded;
        None if there is no bound."""
        if self.is_optimal:
            return 0.0
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else None

    def document(self) -> dict[str, Any]:
        """What a plan file keeps of it, as JSON has it."""
        return {
            "method": self.method,
            "seed": self.seed,
            "makespan_s": self.makespan_s,
            "fits": self.fits,
            "proposals": self.proposals,
            "accepted": self.accepted,
            "elapsed_s": self.elapsed_s,
            "stop": self.stop.value,
            "is_optimal": self.is_optimal,
            "proved_among": self.proved_among,
            "lower_bound_s": self.lower_bound_s,
            "bounded_among": self.bounded_among,
            "rewrites": list(self.rewrites),
            "curve": [[point.elapsed_s, point.proposals, point.best_s] for point in self.curve],
            "starts": [
                {
                    "name": start.name,
                    "first_s": start.first_s,
                    "best_s": start.best_s,
                    "proposals": start.proposals,
                    "accepted": start.accepted,
                    "stop": start.stop.value,
                }
                for start in self.starts
            ],
        }


ShowSearch = Callable[[float, str], None]
"""Called now and then with the part of the budget that is used up and a few words on what was found."""
