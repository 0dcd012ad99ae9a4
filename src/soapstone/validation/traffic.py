"""What bytes take between ranks, beyond what one bandwidth says: many messages at once, and sums.

A machine has one bandwidth for each link. Ranks of one computer share more than links (memory, the threads
that carry messages), so messages that are under way at once slow each other down; the sums that gradients
need are the backend's own, at a speed of their own, and at another where several are asked for at once; and
sums go beside messages, which a link would carry one after the other. All of this is measured beside the
strategies, relative to what the machine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log, sqrt

import numpy as np
import torch

from soapstone.cost.analytic import collective_s
from soapstone.machine import Machine
from soapstone.ops.box import Interval
from soapstone.runtime.belts import IN_PIECES, first_piece
from soapstone.runtime.detecting import timed
from soapstone.runtime.ports import Arrival, Departure, Inbox, Outlet
from soapstone.runtime.region import Region
from soapstone.runtime.wire import Wire
from soapstone.tasks.exchange import Pattern

MESSAGE_BYTES = 2**20, 12 * 2**20
"""[choice] A small and a large message: what the bytes between them take is asked for."""

LARGEST_BYTES = 64 * 2**20
"""[choice] A message that is larger than caches are."""

NO_BYTES = 4096
SUM_BYTES = 2**22, 2**24, 2**26
"""[choice] Sums that stand for those of all sizes, and one that takes next to no time but its latency."""

AT_ONCE = 3
"""[choice] Sums, or messages in pieces, that are asked for at once."""

LAPS = 4, 20
"""[choice] How often a message goes around all ranks: what the longer way takes more is what hops take."""

MANY = 24
"""[choice] Messages of next to no bytes, by which it is seen what one more of them takes of its ends."""


@dataclass(frozen=True)
class Traffic:
    """Times of bytes relative to the machine's: of messages by how many are under way at once (one, two,
    ...), and of sums by the number of ranks and the bytes, alone and among others; latencies of sums by the
    number of ranks; the part of its time by which a sum delays a message and a message a sum, None where
    links carry both, one after the other; what a message takes of the thread at each of its ends; how much
    longer the bytes of a message take beyond those of a large one; the latency of messages, relative to the
    machine's; the largest piece in which messages go by belts, 0 where they go whole; what it takes of the
    thread to cut a message out of a tensor or to put it into one; what each further piece of a message takes
    of it, relative to a message of one; and what one more call of autograd takes of it, for as many
    operators."""

    messages: tuple[float, ...] = (1.0,)
    sums: dict[int, tuple[tuple[int, float, float], ...]] = field(default_factory=dict)
    latencies: dict[int, float] = field(default_factory=dict)
    delay: float | None = None
    message_s: float = 0.0
    beyond: float = 1.0
    latency: float = 1.0
    piece_bytes: int = 0
    part_s: float = 0.0
    further: float = 0.0
    call_s: float = 0.0

    def handed(self, size_bytes: int) -> float:
        """How many messages of one piece a message of this size is as much work as, at each of its ends."""
        pieces = _pieces(size_bytes, self.piece_bytes)
        return 1.0 + self.further * (pieces - 1)

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
    if wire.size == 1 or len(machine.nodes) > 1:
        return AS_THE_MACHINE_SAYS
    messages = [_messages(wire, machine, busy) for busy in range(1, wire.size + 1)]
    counts = sorted({2, max(2, wire.size // 2), wire.size})
    wire.prepare([range(count) for count in counts])
    are_apart = wire.backend != "memory"  # where ranks add up themselves, one sum follows the other
    sums = {count: _sums(wire, machine, count, are_apart=are_apart) for count in counts}
    message_s, part_s = _message_s(wire)
    return Traffic(
        tuple(messages),
        {count: factors for count, (_, factors) in sums.items()},
        {count: latency for count, (latency, _) in sums.items()},
        _delay(wire) if are_apart else None,
        message_s,
        _beyond(wire) if are_apart else 1.0,
        _latency(wire, machine, message_s) if are_apart else 1.0,
        0 if wire.belts is None else wire.belts.piece_bytes,
        part_s,
        0.0 if wire.belts is None else _further(wire, wire.belts.piece_bytes),
        _call_s(wire),
    )


def between(first: Traffic, second: Traffic) -> Traffic:
    """What lies between two measurements, of which both hold in part: before and after the strategies."""
    if not first.sums:
        return first

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
        sqrt(first.message_s * second.message_s),
        mean(first.beyond, second.beyond),
        mean(first.latency, second.latency),
        first.piece_bytes,
        sqrt(first.part_s * second.part_s),
        sqrt(first.further * second.further),
        sqrt(first.call_s * second.call_s),
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


def _pieces(size_bytes: int, most_bytes: int) -> int:
    """In how many pieces a message goes."""
    return -(-size_bytes // first_piece(size_bytes, most_bytes)) if most_bytes and size_bytes else 1


def _further(wire: Wire, most_bytes: int) -> float:
    """What each further piece of a message takes of the thread, relative to a message of one piece, where it
    need not wait for any."""
    size_bytes = MESSAGE_BYTES[0]
    while _pieces(size_bytes, most_bytes) < IN_PIECES:
        size_bytes *= 2

    def asked_s(size_bytes: int) -> float:
        tensor = torch.zeros(size_bytes // 4, device=wire.device)

        def act() -> None:
            for _ in range(AT_ONCE):
                _around(wire, tensor, wire.size, (1,))

        return timed(wire, act, to_the_end=False)[0]

    one_s, several_s = asked_s(NO_BYTES), asked_s(size_bytes)
    return _digits((several_s / one_s - 1.0) / (_pieces(size_bytes, most_bytes) - 1))


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


def message_overhead_s(wire: Wire) -> float:
    """What a message takes of its ends, both together: of the threads that hand it over and take it, and of
    the one that has autograd begin anew where it goes back, which is so for every second message: those of
    the forward pass."""
    message_s, _ = _message_s(wire)
    return float(f"{2 * message_s + _call_s(wire) / 2:.3g}")


def _message_s(wire: Wire) -> tuple[float, float]:
    """What one more message takes of the thread at each of its ends, as the runtime hands it over; and what
    it takes to cut one out of a tensor, or to put a part into one."""
    tags = [tag for tag in range(1, 2 * MANY) if tag % wire.size][:MANY]
    more_s = []
    for in_parts in (False, True):
        few, many = (_Handing(wire, some, in_parts=in_parts) for some in (tags[:1], tags))
        few_s, many_s = (timed(wire, each)[0] for each in (few, many))
        more_s.append(max(many_s - few_s, 0.0) / (MANY - 1))
    whole_s, in_parts_s = more_s
    parts_s = max(in_parts_s - whole_s, 0.0) / _Handing.PARTS
    return float(f"{whole_s / 2:.3g}"), float(f"{parts_s:.3g}")


class _Handing:
    """Messages of next to no bytes that all ranks give to the next ones: whole tensors, or halves of which
    the receiver has the other."""

    PARTS = 3  # one is cut out, two are put together
    ROWS, COLUMNS = 16, 64

    def __init__(self, wire: Wire, tags: Sequence[int], *, in_parts: bool) -> None:
        self._wire = wire
        whole = Interval(0, self.ROWS), Interval(0, self.COLUMNS)
        left, right = (
            (whole[0], Interval(start, start + self.COLUMNS // 2)) for start in (0, self.COLUMNS // 2)
        )
        given = right if in_parts else whole
        own = Outlet(whole)
        own.put(torch.zeros(self.ROWS, self.COLUMNS, device=wire.device))
        self._departures, self._arrivals, self._inboxes = [], [], []
        for tag in tags:
            to, origin = (wire.rank + tag) % wire.size, (wire.rank - tag) % wire.size
            self._departures.append(Departure(given, torch.float32, to, tag, "message", [own]))
            arrival = Arrival(given, torch.float32, origin, tag, "message")
            inbox = Inbox(whole, torch.float32, wire.device, adds=False)
            if in_parts:
                inbox.connect(own, left)
            inbox.connect(arrival, given)
            self._arrivals.append(arrival)
            self._inboxes.append(inbox)

    def __call__(self) -> None:
        for departure in self._departures:
            departure.post(self._wire)
        for arrival in self._arrivals:
            arrival.post(self._wire)
        region = Region(0)
        for inbox in self._inboxes:
            tensor = inbox.take()
            assert tensor is not None
            region.leaf(tensor, Outlet(inbox.box))
        self._wire.settle()
        for arrival, inbox in zip(self._arrivals, self._inboxes, strict=True):
            arrival.clear()
            inbox.clear()


def _call_s(wire: Wire) -> float:
    """What it takes of the thread to have autograd take operators back one by one, not all in one call."""
    tensor = torch.zeros(_Handing.ROWS, _Handing.COLUMNS, device=wire.device)

    def act(*, in_one: bool) -> None:
        regions = [Region(0)] * MANY if in_one else [Region(number) for number in range(MANY)]
        for region in regions:
            gradient = Outlet(())
            gradient.put(tensor)
            region.root(region.leaf(tensor, Outlet(())) * 2.0, [gradient])
        for region in regions[:1] if in_one else regions:
            region.backward()

    in_one_s, apart_s = (timed(wire, partial(act, in_one=way), to_the_end=False)[0] for way in (True, False))
    return float(f"{max(apart_s - in_one_s, 0.0) / (MANY - 1):.3g}")


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
    wire: Wire, machine: Machine, count: int, *, are_apart: bool
) -> tuple[float, tuple[tuple[int, float, float], ...]]:
    """The latency of sums over the first ranks, and the time of their bytes, alone and among others, relative
    to the machine's."""
    ranks = range(count)

    def act(tensors: Sequence[torch.Tensor]) -> None:
        if wire.rank in ranks:
            for pending in [wire.sum_up(tensor, ranks, "sum") for tensor in tensors]:
                pending.wait()

    def taken_s(size_bytes: int, number: int) -> float:
        tensors = [torch.zeros(size_bytes // 4, device=wire.device) for _ in range(number)]
        return timed(wire, partial(act, tensors))[0] / number

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
    return _digits(least_s / said(NO_BYTES, latency_s=machine.latency(0, 1))), tuple(factors)


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


def _digits(number: float) -> float:
    """Three digits, and no less than a hundredth: what else runs on a computer may make small messages
    slower than large ones."""
    return float(f"{max(number, 0.01):.3g}")
