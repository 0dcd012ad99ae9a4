"""What a rank takes longer to compute after it has met others.

A rank that waits for another watches for it a moment (`mailbox.WATCH_S`), then falls asleep and has to wake;
what it computes next finds caches and threads cold; and ranks that should come to the same place at the same
moment do not quite. No single message shows that: a rank that does nothing else between messages does not
fall asleep. So ranks compute between messages, and what that takes beyond the computing and the messages,
each by itself, is the meeting's. All of them at once, a little at a time: that is a meeting for which nobody
sleeps. Seeing to messages takes longer after computing, too, though nobody be at the other end; that is none
of the meeting, since steps that ranks do alone tell it (`pieces`; [measured] two x86 cores, 60 us of
computing: 80 us beyond messages in a row, of which 41 are so without anybody). One after the other, for so
long that the others sleep meanwhile: what that takes more is waking's (two such cores, 0.21 and 0.24 ms of
computing: 86 and 109 us in all). Who has slept for longer finds less of what it needs in its core's caches,
so it is measured for two lengths, and more for each time as long ([measured] two such cores, an operator done
over and over: 50 to 100 us longer after 0.6 ms of waiting, 80 to 110 after 2.4, 140 to 170 after 10; 2 to 3
ms of it 50 to 160, 100 to 270 and 350 to 640 us longer). After milliseconds of computing a meeting without
sleep is more, too, since ranks differ by more then; that is seen while strategies run (`unsteady`).

Between GPUs it is not measured: where they wait for messages themselves (`runtime.belts`) no thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from soapstone.cost.undisturbed import undisturbed
from soapstone.ops.box import Interval
from soapstone.runtime.alone import AloneWire
from soapstone.runtime.mailbox import WATCH_S
from soapstone.runtime.ports import Arrival, Departure, Outlet
from soapstone.runtime.wire import Wire

ROWS = 128
"""[choice] Rows of the matrices whose product is computed in between: a fraction of a millisecond, in which
ranks hardly differ."""

SLEPT_S = 3e-4, 1e-3
"""[choice] So long a rank computes while others sleep: several times what they watch for it, and longer."""

LONGEST_S = 1e-2
"""[choice] Who sleeps for longer than this wakes as after that."""

ELEMENTS = 1024
"""[choice] Elements of a message that takes next to no time but that of being handed over."""

ROUNDS = 8
REPEATS = 32
"""[choice] Messages of a rank in a row, and how often each row is sent."""

Compute = Callable[[], None]
Floats = NDArray[np.float64]


def waking_s(waking: Sequence[float], waited_s: Floats) -> Floats:
    """What waking takes after waits, where it takes so long after each of `SLEPT_S`: nothing while a rank
    watches, and as much more for each time as long."""
    at = np.log([WATCH_S, *SLEPT_S])
    more_s = (waking[1] - waking[0]) / (at[2] - at[1])
    waited = np.log(np.clip(waited_s, WATCH_S, LONGEST_S))
    return np.interp(waited, at, [0.0, *waking]) + more_s * np.maximum(waited - at[2], 0.0)


def measured_meeting(wire: Wire) -> tuple[float, tuple[float, float]]:
    """Seconds that a meeting takes among ranks whose threads wait for messages, and what it takes more where
    one has slept for so long (`SLEPT_S`); the same on every rank."""
    a, b = torch.rand(ROWS, ROWS), torch.rand(ROWS, ROWS)
    stream = torch.rand(2 * ROWS * ROWS)

    def little() -> None:
        torch.mm(a, b)
        stream.mul(2.0).sum()

    little_s = _over_ranks(wire, _seconds(little), dist.ReduceOp.MIN)

    def much(long_s: float) -> None:
        for _ in range(ceil(long_s / little_s)):
            little()

    nobody = AloneWire(wire)
    ways = [
        partial(_relay, wire, _nothing),
        partial(_at_once, wire, little),
        *(partial(_swap, wire, ends, compute) for ends in (wire, nobody) for compute in (little, _nothing)),
        *(partial(way, wire, partial(much, long_s)) for long_s in SLEPT_S for way in (_alone, _relay)),
    ]
    taken = [[way() for way in ways] for _ in range(REPEATS + 1)][1:]
    handed_s, at_once_s, swap_s, swapped_s, nobodys_s, nothings_s, *slept = map(
        undisturbed, zip(*taken, strict=True)
    )
    after_s = max(0.0, swap_s - swapped_s - at_once_s)
    handing_s = max(0.0, nobodys_s - nothings_s - at_once_s)
    alone_s, relay_s = np.array(slept).reshape(-1, 2).T
    short_s, long_s = np.maximum.accumulate(np.maximum(relay_s - alone_s - handed_s - after_s, 0.0))
    return _digits(max(0.0, after_s - handing_s)), (_digits(short_s), _digits(long_s))


def _digits(number: float) -> float:
    return float(f"{number:.3g}")


def _nothing() -> None:
    """Ranks that only hand messages over."""


def _alone(wire: Wire, compute: Compute) -> float:
    """Seconds of computing on one rank after the other, the others asleep; two stand for all."""
    own_s = 0.0
    for rank in (0, wire.size - 1):
        wire.meet("computing")
        if wire.rank == rank:
            own_s = _seconds(compute)
    return _over_ranks(wire, own_s, dist.ReduceOp.SUM) / 2


def _at_once(wire: Wire, compute: Compute) -> float:
    """Seconds of computing on all ranks."""
    wire.meet("computing")
    return _over_ranks(wire, _seconds(compute), dist.ReduceOp.SUM) / wire.size


def _seconds(compute: Compute) -> float:
    compute()
    start = perf_counter()
    for _ in range(ROUNDS):
        compute()
    return (perf_counter() - start) / ROUNDS


def _relay(wire: Wire, compute: Compute) -> float:
    """Seconds of a hop, where each rank computes when the one before has done so."""
    size, rank = wire.size, wire.rank
    hops = range(max(2 * ROUNDS, size))
    wire.meet("a relay")
    start = perf_counter()
    for hop in hops[rank::size]:
        if hop:
            _take(wire, (rank - 1) % size, hop)
        compute()
        if hop < hops[-1]:
            _give(wire, (rank + 1) % size, hop + 1)
    own_s = perf_counter() - start
    wire.settle()
    return _over_ranks(wire, own_s, dist.ReduceOp.MAX) / len(hops)


def _swap(wire: Wire, ends: Wire, compute: Compute) -> float:
    """Seconds of a round, where all ranks compute and then give each other something; or give it to nobody,
    and take what nobody has sent."""
    wire.meet("a swap")
    start = perf_counter()
    for number in range(ROUNDS):
        compute()
        _give(ends, (wire.rank + 1) % wire.size, number)
        _take(ends, (wire.rank - 1) % wire.size, number)
    own_s = perf_counter() - start
    ends.settle()
    return _over_ranks(wire, own_s, dist.ReduceOp.MAX) / ROUNDS


def _give(wire: Wire, peer: int, tag: int) -> None:
    box = (Interval(0, ELEMENTS),)
    own = Outlet(box)
    own.put(torch.zeros(ELEMENTS))
    Departure(box, torch.float32, peer, tag, "message", [own]).post(wire)


def _take(wire: Wire, peer: int, tag: int) -> None:
    arrival = Arrival((Interval(0, ELEMENTS),), torch.float32, peer, tag, "message")
    arrival.post(wire)
    arrival.take()


def _over_ranks(wire: Wire, own_s: float, how: dist.ReduceOp.RedOpType) -> float:
    told = torch.tensor([own_s], dtype=torch.float64, device=wire.host)
    dist.all_reduce(told, op=how)
    return float(told)
