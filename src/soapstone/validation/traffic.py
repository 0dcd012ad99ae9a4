"""What bytes take between ranks, beyond what one bandwidth says: many messages at once, and sums.

A machine has one bandwidth for each link. Ranks of one computer share more than links (memory, the threads
that carry messages), so messages that are under way at once slow each other down; the sums that gradients
need are the backend's own, at a speed of their own, and at another where several are asked for at once; and
sums go beside messages, which a link would carry one after the other. All of this is measured beside the
strategies, relative to what the machine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import log, sqrt
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from soapstone.cost.analytic import collective_s
from soapstone.machine import Machine
from soapstone.runtime.belts import first_piece
from soapstone.runtime.detecting import timed
from soapstone.runtime.wire import Wire
from soapstone.tasks.exchange import Pattern
from soapstone.validation.handing import Handing, measured_handing, pieces_of
from soapstone.validation.meeting import measured_meeting

Floats = NDArray[np.float64]

MESSAGE_BYTES = 2**20, 12 * 2**20
"""[choice] A small and a large message: what the bytes between them take is asked for."""

LARGEST_BYTES = 64 * 2**20
"""[choice] A message that is larger than caches are."""

NO_BYTES = 4096
SUM_BYTES = 2**22, 2**24, 2**26
"""[choice] Sums that stand for those of all sizes, and one that takes next to no time but its latency."""

AT_ONCE = 3
"""[choice] Sums that are asked for at once."""

SUMS_AMID, AMID_REPEATS, AMID_WARM_UP = 4, 12, 2
"""[choice] So many of the largest sums are under way while a message goes around all ranks once, so often,
and so often before that."""

LAPS = 4, 20
"""[choice] How often a message goes around all ranks: what the longer way takes more is what hops take."""


@dataclass(frozen=True)
class Traffic:
    """Times of bytes relative to the machine's: of messages by how many are under way at once (one, two,
    ...), and of sums by the number of ranks and the bytes, alone and among others; latencies of sums by the
    number of ranks; the part of its time by which a sum delays a message and a message a sum, None where
    links carry both, one after the other; how much longer the bytes of a message take beyond those of a large
    one; the latency of messages, relative to the machine's; the largest piece in which messages go by belts,
    0 where they go whole; what all of this takes of the threads of ranks; what their meeting takes, and
    how much more where one has slept (`meeting.waking_s`); whether ranks share memory only within each of
    several computers; and pairs of a number of ranks, which need not be whole, and the seconds that a message
    by belts is on its way longer while so many others add up (`_amid`)."""

    messages: tuple[float, ...] = (1.0,)
    sums: dict[int, tuple[tuple[int, float, float], ...]] = field(default_factory=dict)
    latencies: dict[int, float] = field(default_factory=dict)
    delay: float | None = None
    beyond: float = 1.0
    latency: float = 1.0
    piece_bytes: int = 0
    handing: Handing = field(default_factory=Handing)
    meeting_s: float = 0.0
    waking: tuple[float, float] = (0.0, 0.0)
    within_nodes: bool = False
    amid: tuple[tuple[float, float], ...] = ()

    def held_up_s(self, adding: Floats) -> Floats:
        """How much longer a message is on its way while so many other ranks add up."""
        others, seconds = zip((0.0, 0.0), *self.amid, strict=True)
        return np.interp(adding, others, seconds)

    def handed(self, size_bytes: int) -> float:
        """How many messages of one piece a message of this size is as much work as, at each of its ends."""
        return 1.0 + self.handing.further * (pieces_of(size_bytes, self.piece_bytes) - 1)

    def of_message(self, size_bytes: int) -> float:
        """How much longer the bytes of a message of this size take than those of smaller ones; or than those
        of a larger one, where it goes in pieces."""
        more = max(0, size_bytes - MESSAGE_BYTES[-1])
        beyond = 1.0 + (self.beyond - 1.0) * more / max(1, size_bytes)
        return beyond * _in_pieces(size_bytes, self.piece_bytes) / max(1, size_bytes)

    def of_sum(self, count: int, size_bytes: int) -> tuple[float, float]:
        """How much longer than the machine says the bytes of a sum over so many ranks take, if it is alone
        and if it is one of several."""
        if not self.sums:
            return 1.0, 1.0
        at, counts = log(max(1, size_bytes)), sorted(self.sums)
        alone, among = np.transpose([_at_size(at, self.sums[known]) for known in counts])
        return float(np.interp(count, counts, alone)), float(np.interp(count, counts, among))

    def latency_of_sum(self, count: int) -> float:
        """How much longer than the machine says a sum of next to nothing takes."""
        if not self.latencies:
            return 1.0
        counts = sorted(self.latencies)
        return float(np.interp(count, counts, [self.latencies[known] for known in counts]))


def _at_size(at: float, factors: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    sizes, alone, among = zip(*factors, strict=True)
    places = [log(size) for size in sizes]
    return float(np.interp(at, places, alone)), float(np.interp(at, places, among))


AS_THE_MACHINE_SAYS = Traffic()


def measured_traffic(wire: Wire, machine: Machine) -> Traffic:
    """Messages and sums among the ranks of a computer, all of which ask at once; the same on every rank."""
    if wire.size == 1:
        return AS_THE_MACHINE_SAYS
    meeting_s, waking = measured_meeting(wire) if wire.device.type == "cpu" else (0.0, (0.0, 0.0))
    if len(machine.nodes) > 1:
        shares = wire.told_by_all("yes" if len(wire.neighbours) > 1 else "no", "shared memory")
        handing = measured_handing(wire, ())
        within = "yes" in shares
        return Traffic(handing=handing, meeting_s=meeting_s, waking=waking, within_nodes=within)
    messages = [_messages(wire, machine, busy) for busy in range(1, wire.size + 1)]
    counts = sorted({2, max(2, wire.size // 2), wire.size})
    wire.prepare([range(count) for count in counts])
    are_apart = wire.backend != "memory"  # where ranks add up themselves, one sum follows the other
    handing = measured_handing(wire, counts)
    sums = {count: _sums(wire, machine, count, handing, are_apart=are_apart) for count in counts}
    return Traffic(
        tuple(messages),
        {count: factors for count, (_, factors) in sums.items()},
        {count: latency for count, (latency, _) in sums.items()},
        _delay(wire) if are_apart else None,
        _beyond(wire) if are_apart else 1.0,
        _latency(wire, machine, handing.message_s),
        0 if wire.belts is None else wire.belts.piece_bytes,
        handing,
        meeting_s,
        waking,
        amid=() if wire.belts is None else _amid(wire, counts),
    )


def between(first: Traffic, second: Traffic) -> Traffic:
    """What lies between two measurements, of which both hold in part: before and after the strategies."""
    handing = first.handing.between(second.handing)
    meeting_s = (first.meeting_s + second.meeting_s) / 2
    short_s, long_s = ((a + b) / 2 for a, b in zip(first.waking, second.waking, strict=True))
    waking = short_s, long_s
    if not first.sums:
        return replace(first, handing=handing, meeting_s=meeting_s, waking=waking)

    def mean(a: float, b: float) -> float:
        return _digits(sqrt(a * b))

    return Traffic(
        tuple(map(mean, first.messages, second.messages)),
        {
            count: tuple(
                (size, mean(alone, other_alone), mean(among, other_among))
                for (size, alone, among), (_, other_alone, other_among) in zip(
                    factors, second.sums[count], strict=True
                )
            )
            for count, factors in first.sums.items()
        },
        {count: mean(latency, second.latencies[count]) for count, latency in first.latencies.items()},
        None if first.delay is None or second.delay is None else mean(first.delay, second.delay),
        mean(first.beyond, second.beyond),
        mean(first.latency, second.latency),
        first.piece_bytes,
        handing,
        meeting_s,
        waking,
        amid=tuple((n, (a + b) / 2) for (n, a), (_, b) in zip(first.amid, second.amid, strict=True)),
    )


def _messages(wire: Wire, machine: Machine, busy: int) -> float:
    """The time of bytes while so many ranks send, relative to the machine's; where all do, to all."""
    tags = range(1, wire.size) if busy == wire.size > 2 else range(1, 2)
    taken = []
    for size_bytes in MESSAGE_BYTES:
        tensor = torch.zeros(size_bytes // 4, device=wire.device)
        seconds, _ = timed(wire, partial(_around, wire, tensor, busy, tags))
        taken.append(seconds / len(tags))
    most_bytes = 0 if wire.belts is None else wire.belts.piece_bytes
    small, large = (_in_pieces(size_bytes, most_bytes) for size_bytes in MESSAGE_BYTES)
    return _digits((taken[1] - taken[0]) / ((large - small) / machine.bandwidth(0, 1)))


def _in_pieces(size_bytes: int, most_bytes: int) -> int:
    """The bytes that a message takes the time of: its first piece is copied twice, and nothing beside it."""
    return size_bytes + (first_piece(size_bytes, most_bytes) if most_bytes and size_bytes else 0)


def _beyond(wire: Wire) -> float:
    """How much longer the last bytes of a message that is larger than caches are take than the first."""
    taken = [
        timed(wire, partial(_around, wire, torch.zeros(size // 4, device=wire.device), wire.size, (1,)))[0]
        for size in (*MESSAGE_BYTES, LARGEST_BYTES)
    ]
    most_bytes = 0 if wire.belts is None else wire.belts.piece_bytes
    small, large, largest = (_in_pieces(size, most_bytes) for size in (*MESSAGE_BYTES, LARGEST_BYTES))
    first, last = (taken[1] - taken[0]) / (large - small), (taken[2] - taken[1]) / (largest - large)
    return _digits(last / max(first, 1e-15))


def _latency(wire: Wire, machine: Machine, message_s: float) -> float:
    """How long a message of no bytes is on its way, beside what it takes of its ends, relative to what the
    machine says: by one that each rank hands on to the next once it is there. By belts all of this has been
    asked for long before it happens, and its ends take nothing of that time."""
    said_s = machine.latency(0, 1)
    if not said_s:  # a machine file may say so, and no factor helps
        return 1.0
    tensor = torch.zeros(NO_BYTES // 4, device=wire.device)
    few_s, many_s = (timed(wire, partial(_handed_on, wire, tensor, laps))[0] for laps in LAPS)
    hop_s = (many_s - few_s) / (LAPS[1] - LAPS[0]) / wire.size
    return _digits((hop_s - (2 * message_s if wire.belts is None else 0.0)) / said_s)


def _handed_on(wire: Wire, tensor: torch.Tensor, laps: int) -> None:
    before, after = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
    if not wire.rank:
        wire.send(tensor, after, 1, "message")
    for lap in range(laps):
        tensor = wire.receive(tensor.shape, tensor.dtype, before, 1, "message").wait().add(1.0)
        if wire.rank or lap < laps - 1:
            wire.send(tensor, after, 1, "message")
    wire.settle()


def _around(wire: Wire, tensor: torch.Tensor, busy: int, tags: Sequence[int]) -> None:
    """The first ranks send to those that are so many places after them."""
    if wire.rank < busy:
        for tag in tags:
            wire.send(tensor, (wire.rank + tag) % wire.size, tag, "message")
    givers = {tag: (wire.rank - tag) % wire.size for tag in tags}
    coming = [
        wire.receive(tensor.shape, tensor.dtype, giver, tag, "message")
        for tag, giver in givers.items()
        if giver < busy
    ]
    for pending in coming:
        pending.wait()
    wire.settle()


def _sums(
    wire: Wire, machine: Machine, count: int, handing: Handing, *, are_apart: bool
) -> tuple[float, tuple[tuple[int, float, float], ...]]:
    """The latency of sums over the first ranks, beside what one takes of its ends (which by belts it has been
    asked for long before), and the time of their bytes, alone and among others, relative to the machine's."""
    ranks = range(count)

    def act(tensors: Sequence[torch.Tensor]) -> None:
        if wire.rank in ranks:
            for pending in [wire.sum_up(tensor, ranks, "sum") for tensor in tensors]:
                pending.wait()

    def taken_s(size_bytes: int, number: int) -> float:
        # Gradients that CPUs add up are not those of a moment before: they come from memory, which zeros need
        # not have.
        is_cached = size_bytes == NO_BYTES or wire.device.type != "cpu"
        others = 1 if is_cached else max(1, LARGEST_BYTES // (number * size_bytes))
        sets = cycle(
            [[torch.ones(size_bytes // 4, device=wire.device) for _ in range(number)] for _ in range(others)]
        )
        return timed(wire, lambda: act(next(sets)))[0] / number

    said = partial(
        collective_s, Pattern.ALL_REDUCE, count=count, bandwidth_bytes_per_s=machine.bandwidth(0, 1)
    )
    least_s = taken_s(NO_BYTES, 1)
    factors = []
    for size_bytes in SUM_BYTES:
        own = [
            _digits((taken_s(size_bytes, number) - least_s / number) / said(size_bytes, latency_s=0.0))
            for number in ((1, AT_ONCE) if are_apart else (1,))
        ]
        factors.append((size_bytes, own[0], own[-1]))
    ends_s = handing.message_s * handing.of_sum(count, NO_BYTES) if wire.belts is None else 0.0
    latency = (least_s - ends_s) / said(NO_BYTES, latency_s=machine.latency(0, 1))
    return _digits(latency), tuple(factors)


def _delay(wire: Wire) -> float:
    """How much longer messages and a sum take at once than the longer of both by itself, as a part of the
    shorter."""
    ranks = range(wire.size)
    given = torch.zeros(MESSAGE_BYTES[-1] // 4, device=wire.device)
    added = torch.zeros(SUM_BYTES[1] // 4, device=wire.device)

    def both(*, messages: bool, sums: bool) -> None:
        pending = [wire.sum_up(added, ranks, "sum")] if sums else []
        if messages:
            _around(wire, given, wire.size, (1,))
        for each in pending:
            each.wait()

    message_s, _ = timed(wire, partial(both, messages=True, sums=False))
    sum_s, _ = timed(wire, partial(both, messages=False, sums=True))
    both_s, _ = timed(wire, partial(both, messages=True, sums=True))
    longer_s, shorter_s = max(message_s, sum_s), min(message_s, sum_s)
    return min(1.0, _digits((both_s - longer_s) / shorter_s))


def _amid(wire: Wire, counts: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """How much longer a message is on its way while other ranks add up, by how many of them do. The engine
    that copies between a GPU and its host serves one process for about a millisecond, and then another
    ([measured] AlexNet in pipelines on four quarters of an H200, the copies of a step: all that one rank has
    to copy goes on for 1 ms, then all of another's; a message's first copy begins 0.95 ms late).
    What a small message's bytes share with those of sums is a part of it."""
    tensor = torch.zeros(MESSAGE_BYTES[0] // 4, device=wire.device)
    added = [torch.zeros(LARGEST_BYTES // 4, device=wire.device) for _ in range(SUMS_AMID)]

    def hop_s(count: int) -> float:
        """Seconds of a hop while the first ranks add up."""
        found = []
        for _ in range(AMID_WARM_UP + AMID_REPEATS):
            wire.meet("messages")
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            some = added if wire.rank < count else ()
            pending = [wire.sum_up(each, range(count), "sum") for each in some]
            begin.record()
            _handed_on(wire, tensor, 1)
            end.record()
            for each in pending:
                each.wait()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / wire.size)
        told = wire.told_by_all(str(fmean(found[AMID_WARM_UP:])), "messages")
        return float(told[0])  # the first rank's are whole laps

    alone_s = hop_s(0)
    # Each rank is the sender of one hop, and no other rank than itself.
    others = {count: count * (1.0 - 1.0 / wire.size) for count in counts}
    return tuple((others[count], max(0.0, float(f"{hop_s(count) - alone_s:.3g}"))) for count in counts)


def _digits(number: float) -> float:
    """Three digits, and no less than a hundredth: what else runs on a computer may make small messages
    slower than large ones."""
    return float(f"{max(number, 0.01):.3g}")
