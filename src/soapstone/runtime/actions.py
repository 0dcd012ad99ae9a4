"""What a rank does, one thing after another: its part of the one task graph as a list of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from soapstone.runtime.localshard import LocalSegment
from soapstone.runtime.ports import Arrival, Departure
from soapstone.runtime.region import Region
from soapstone.runtime.weights import Piece
from soapstone.tasks.exchange import Pattern


@dataclass(frozen=True)
class Forward:
    """Compute a segment of a shard."""

    task: int
    segment: LocalSegment


@dataclass(frozen=True)
class Backward:
    """Take a segment of a shard back: the first of its region does it for all."""

    task: int
    region: Region
    is_first: bool


@dataclass(frozen=True)
class Exchanged:
    """Post this rank's part of a move: sends, then receives."""

    task: int
    arrivals: Sequence[Arrival] = field(default_factory=list)
    departures: Sequence[Departure] = field(default_factory=list)
    pattern: Pattern = Pattern.TRANSFER  # a collective between the ranks, if it is none
    ranks: Sequence[int] = ()

    @property
    def is_ready(self) -> bool:
        """Whether all that is to be sent has been left."""
        return all(departure.is_ready for departure in self.departures)


@dataclass(frozen=True)
class SumGradients:
    """Add up gradients of pieces of weights among the ranks that hold them, in one all-reduce."""

    task: int
    pieces: Sequence[Piece]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold the pieces."""
        return self.pieces[0].holders


@dataclass(frozen=True)
class ReportLoss:
    """Add up the loss over ranks, so that all of them can tell it."""


Action = Forward | Backward | Exchanged | SumGradients | ReportLoss
