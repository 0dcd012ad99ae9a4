"""What messages take of the thread that hands them over and takes them.

Where the thread waits for nobody (belts, `runtime.belts`), that is measured amid operators, as in a step:
what a thread does over and over again it does in a third of the time ([measured] handing a message over takes
59 us between operators and 19 us after 23 others, asking for one 62 and 23, on four slices of an H200). Where
it waits for others, one rank's waiting for another would be measured too, and messages follow each other.
Calls of autograd wait for nobody, and are measured amid operators everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional

from soapstone.ops.box import Interval
from soapstone.runtime.actions import Exchanged
from soapstone.runtime.alone import AloneWire
from soapstone.runtime.belts import FEW_BYTES, IN_PIECES, first_piece
from soapstone.runtime.collectives import post
from soapstone.runtime.detecting import timed
from soapstone.runtime.ports import Arrival, Departure, Inbox, Outlet
from soapstone.runtime.region import Region
from soapstone.runtime.wire import Wire
from soapstone.tasks.exchange import Pattern

MANY = 24
"""[choice] Messages, by which it is seen what one more of them takes of its ends."""

FEW = 4096
"""[choice] The bytes of a message or sum that takes next to no time but that of being asked for."""

REPEATS = 15
"""[choice] How often what is done amid operators is done."""

Act = Callable[[], object]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Handing:
    """What a message takes of the thread at each of its ends; what cutting a message out of a tensor does, or
    putting it into one; what each further piece of a message does, relative to a message of one; what one
    more call of autograd does, for as many operators; how many ends of messages a sum over so many ranks
    is as much work as, of few bytes and of many; and what each byte that comes takes beyond copying."""

    message_s: float = 0.0
    part_s: float = 0.0
    further: float = 0.0
    call_s: float = 0.0
    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    came_byte_s: float = 0.0

    def taken_s(self, messages: Floats, parts: Floats, came_bytes: Floats, calls: Floats) -> Floats:
        """What so many of these take of tasks."""
        parts_s = self.part_s * parts + self.came_byte_s * came_bytes
        return self.message_s * messages + parts_s + self.call_s * calls

    def of_sum(self, count: int, size_bytes: int) -> float:
        """How many ends of messages a sum is as much work as, for each of its ranks."""
        if not self.sums:
            return 2.0
        counts = sorted(self.sums)
        which = int(size_bytes > FEW_BYTES)
        return float(np.interp(count, counts, [self.sums[known][which] for known in counts]))

    def between(self, other: Handing) -> Handing:
        """What lies between two measurements."""
        return Handing(
            sqrt(self.message_s * other.message_s),
            sqrt(self.part_s * other.part_s),
            sqrt(self.further * other.further),
            sqrt(self.call_s * other.call_s),
            {
                count: (sqrt(few * other.sums[count][0]), sqrt(many * other.sums[count][1]))
                for count, (few, many) in self.sums.items()
            },
            sqrt(self.came_byte_s * other.came_byte_s),
        )


def pieces_of(size_bytes: int, most_bytes: int) -> int:
    """In how many pieces a message goes that is cut into pieces of so many bytes at most (0: not at all)."""
    return -(-size_bytes // first_piece(size_bytes, most_bytes)) if most_bytes and size_bytes else 1


def measured_handing(wire: Wire, counts: Sequence[int]) -> Handing:
    """What messages take of the threads of ranks, and sums over so many of them."""
    message_s, part_s = _message_s(wire)
    if wire.belts is None:
        return Handing(message_s, part_s, call_s=_call_s(wire))
    sums = {count: _sum_ends(wire, range(count), message_s) for count in counts}
    return Handing(message_s, part_s, _further(wire, wire.belts.piece_bytes, message_s), _call_s(wire), sums)


def message_overhead_s(wire: Wire) -> float:
    """What a message takes of its ends, both together: of the threads that hand it over and take it, and of
    the one that has autograd begin anew where it goes back, which is so for every second message: those of
    the forward pass."""
    message_s, _ = _message_s(wire)
    return float(f"{2 * message_s + _call_s(wire) / 2:.3g}")


class _Operators:
    """Operators of several kinds, which a thread launches between messages."""

    ROWS, COLUMNS = 64, 256

    def __init__(self, place: torch.device) -> None:
        shape = self.ROWS, self.COLUMNS
        self._x, self._table = torch.rand(shape, device=place), torch.rand(shape, device=place)
        self._weight = torch.rand(self.COLUMNS, self.COLUMNS, device=place)
        self._rows = torch.arange(self.ROWS, device=place)

    def __call__(self) -> None:
        x = torch.relu(functional.linear(self._x, self._weight))
        x = torch.softmax(functional.layer_norm(x, (self.COLUMNS,)), -1)
        y = functional.embedding(self._rows, self._table)
        x = torch.cat([x, y], 1)[:, : self.COLUMNS] * y
        torch.sigmoid(x).add_(torch.tanh(y))


def _asking_s(wire: Wire, acts: Sequence[Act], end: Act) -> float:
    """What acts take of the thread where operators are launched after each of them, on the slowest rank."""
    operators = _Operators(wire.device)
    taken_s = []
    for _ in range(REPEATS + 2):
        wire.meet("messages amid operators")
        own_s = 0.0
        for act in acts:
            start = perf_counter()
            act()
            own_s += perf_counter() - start
            operators()
        end()
        if wire.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s.append(own_s)
    own = torch.tensor([median(taken_s[2:])], dtype=torch.float64, device=wire.host)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own)


def message_to_nobody_s(wire: Wire) -> float:
    """What a message takes of the thread at each of its ends that is not the wire's own, measured as messages
    are."""
    alone = AloneWire(wire)
    messages = _Messages(alone, _tags(wire), in_parts=False)
    if wire.belts is not None:
        return _asking_s(wire, messages.acts, messages.end) / MANY / 2
    return timed(wire, messages, to_the_end=False)[0] / MANY / 2


def _tags(wire: Wire) -> list[int]:
    """Of messages to and from all other ranks in turn."""
    return [tag for tag in range(1, 2 * MANY) if tag % wire.size][:MANY]


def _message_s(wire: Wire) -> tuple[float, float]:
    """What one more message takes of the thread at each of its ends, as the runtime hands it over; and what
    it takes to cut one out of a tensor, or to put a part into one."""
    tags = _tags(wire)
    more_s = []
    for in_parts in (False, True):
        many = _Messages(wire, tags, in_parts=in_parts)
        if wire.belts is not None:
            more_s.append(_asking_s(wire, many.acts, many.end) / MANY)
            continue
        few = _Messages(wire, tags[:1], in_parts=in_parts)
        few_s, many_s = (timed(wire, each)[0] for each in (few, many))
        more_s.append(max(many_s - few_s, 0.0) / (MANY - 1))
    whole_s, in_parts_s = more_s
    parts_s = max(in_parts_s - whole_s, 0.0) / _Messages.PARTS
    return float(f"{whole_s / 2:.3g}"), float(f"{parts_s:.3g}")


class _Messages:
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
        self._region = Region(0)
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
        """Hand all of them over, then take all of them."""
        for departure in self._departures:
            departure.post(self._wire)
        for arrival in self._arrivals:
            arrival.post(self._wire)
        for inbox in self._inboxes:
            self._take(inbox)
        self.end()

    @property
    def acts(self) -> list[Act]:
        """Handing over, asking for and taking each of them, one after the other."""
        return [
            act
            for departure, arrival, inbox in zip(self._departures, self._arrivals, self._inboxes, strict=True)
            for act in (
                partial(departure.post, self._wire),
                partial(arrival.post, self._wire),
                partial(self._take, inbox),
            )
        ]

    def _take(self, inbox: Inbox) -> None:
        tensor = inbox.take()
        assert tensor is not None
        self._region.leaf(tensor, Outlet(inbox.box))

    def end(self) -> None:
        """Be ready to begin anew."""
        self._wire.settle()
        for arrival, inbox in zip(self._arrivals, self._inboxes, strict=True):
            arrival.clear()
            inbox.clear()
        self._region = Region(0)


def _call_s(wire: Wire) -> float:
    """What it takes of the thread to have autograd take operators back one by one, not all in one call; amid
    operators, as in a step ([measured] 181 us on an Arm core, and 68 with nothing in between)."""
    tensor = torch.zeros(_Messages.ROWS, _Messages.COLUMNS, device=wire.device)
    operators = _Operators(wire.device)

    def act(*, in_one: bool) -> None:
        regions = [Region(0)] * MANY if in_one else [Region(number) for number in range(MANY)]
        for region in regions:
            gradient = Outlet(())
            gradient.put(tensor)
            region.root(region.leaf(tensor, Outlet(())) * 2.0, [gradient])
        for number, region in enumerate(regions):
            if not number or not in_one:
                region.backward()
            operators()

    in_one_s, apart_s = (timed(wire, partial(act, in_one=way), to_the_end=False)[0] for way in (True, False))
    return float(f"{max(apart_s - in_one_s, 0.0) / (MANY - 1):.3g}")


def _further(wire: Wire, most_bytes: int, message_s: float) -> float:
    """What each further piece of a message takes of the thread, relative to a message of one piece."""
    size_bytes = FEW
    while pieces_of(size_bytes, most_bytes) < IN_PIECES:
        size_bytes *= 2

    def asked_s(size_bytes: int) -> float:
        tensor = torch.zeros(size_bytes // 4, device=wire.device)
        to, origin = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size

        def act() -> None:
            wire.send(tensor, to, 1, "message")
            wire.receive(tensor.shape, tensor.dtype, origin, 1, "message").wait()

        return _asking_s(wire, [act] * MANY, wire.settle) / MANY / 2

    more_s = max(asked_s(size_bytes) - asked_s(FEW), 0.0) / (pieces_of(size_bytes, most_bytes) - 1)
    return float(f"{more_s / max(message_s, 1e-9):.3g}")


def _sum_ends(wire: Wire, ranks: Sequence[int], message_s: float) -> tuple[float, float]:
    """How many ends of messages a sum over ranks is as much work as, of few bytes and of many. Few are what
    shards tell each other amid their operators, many are gradients of weights."""
    many = torch.zeros(2 * FEW_BYTES // 4, device=wire.device)

    def add_many() -> None:
        if wire.rank in ranks:
            wire.sum_up(many, ranks, "sum").wait()

    few = _Sums(wire, ranks) if wire.rank in ranks else None
    acts: list[Act] = [_nothing] * MANY if few is None else few.acts
    few_s = _asking_s(wire, acts, _nothing if few is None else few.end) / MANY
    many_s = _asking_s(wire, [add_many] * MANY, _nothing) / MANY
    ends = [float(f"{asked_s / max(message_s, 1e-9):.3g}") for asked_s in (few_s, many_s)]
    return ends[0], ends[1]


def _nothing() -> None:
    """What a rank does that is not among those that add something up."""


class _Sums:
    """Sums of few bytes over ranks, and as many of what they merge and do not add, in turn."""

    def __init__(self, wire: Wire, ranks: Sequence[int]) -> None:
        self._wire = wire
        box = (Interval(0, FEW // 4),)
        own = Outlet(box)
        own.put(torch.zeros(FEW // 4, device=wire.device))
        others = [rank for rank in ranks if rank != wire.rank]
        self._moves = [
            Exchanged(
                0,
                [Arrival(box, torch.float32, rank, 0, "sum") for rank in others],
                [Departure(box, torch.float32, rank, 0, "sum", [own]) for rank in others],
                Pattern.ALL_GATHER if number % 2 else Pattern.ALL_REDUCE,
                tuple(ranks),
            )
            for number in range(MANY)
        ]

    @property
    def acts(self) -> list[Act]:
        """Asking for each of them, and taking what it brings."""
        return [partial(self._act, move) for move in self._moves]

    def _act(self, move: Exchanged) -> None:
        post(move, self._wire)
        for arrival in move.arrivals:
            arrival.take()

    def end(self) -> None:
        """Be ready to begin anew."""
        for move in self._moves:
            for arrival in move.arrivals:
                arrival.clear()
