"""Exchanges: how boxes get from the devices that have them to the devices that need them.

One rule covers the activations of the forward pass, their gradients on the way back, partial sums,
and the gradients of weights:

    a Source   is a box of a value, held by one or more devices (copies); sources with different
               summands are to be added where they overlap, copies of one summand are not;
    a Sink     is a box that one device needs: for every element, the sum over all summands.

A sink takes each summand from its own device if that holds a copy, else from the copy with the
widest route; equally wide ones take turns. What one device gives a sink of the same box is added up
before it is sent, and sinks of one device that want the same have it sent once. Transfers of one
micro-batch (that of their first source) that together form a known pattern between n devices are one
collective (`recognised`): every ordered pair of devices moves one box, all of one size, and

    boxes are added on arrival      all the same box               all_reduce
                                    a box for each receiver        reduce_scatter
    boxes are put side by side      a box for each sender          all_gather
                                    a box for each pair            all_to_all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

from soapstone.machine import Machine
from soapstone.ops.box import Box, Interval, intersection, volume


@dataclass(frozen=True)
class Source:
    """A box that devices hold; `summand` numbers what is to be added up, `lane` is the micro-batch."""

    summand: int
    box: Box
    devices: tuple[int, ...]
    lane: int = 0


@dataclass(frozen=True)
class Sink:
    """A box that a device needs."""

    box: Box
    device: int


class Pattern(StrEnum):
    """What a set of moves is to a communication library."""

    TRANSFER = "transfer"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True)
class Transfer:
    """A box on its way from one device to another: the sources added up in it, and the sinks it is for
    (by number)."""

    sender: int
    receiver: int
    box: Box
    sources: tuple[int, ...]
    sinks: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """Elements on their way: `elements` per pair of devices, from sources to sinks (by number).

    `devices` are (sender, receiver) of a transfer, and the ring of a collective; `transfers` are what
    it consists of, for a runtime that must know which box goes where.
    """

    pattern: Pattern
    devices: tuple[int, ...]
    elements: int
    sources: tuple[tuple[int, int], ...]  # (number of the source, device that gives it)
    sinks: tuple[int, ...]
    transfers: Sequence[Transfer] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Exchange:
    """All that one exchange takes: what moves, and which sources sinks find on their own device."""

    moves: tuple[Move, ...]
    local: tuple[tuple[int, int], ...]  # (number of the source, number of the sink)
    sink_devices: tuple[int, ...]
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    sinks: tuple[Sink, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_one_sum(self) -> bool:
        """Whether it is an all-reduce that waits for all that is to be added up."""
        if [move.pattern for move in self.moves] != [Pattern.ALL_REDUCE]:
            return False
        return {source for source, _ in self.moves[0].sources} == set(range(len(self.sources)))


def exchange(sources: Sequence[Source], sinks: Sequence[Sink], machine: Machine) -> Exchange:
    """How the sinks get what they need. Neither order matters but for the numbers in the result."""
    plain = _all_reduce(sources, sinks)
    if plain is not None:
        return plain
    turn = {device: i for i, device in enumerate(sorted({sink.device for sink in sinks}))}
    local: list[tuple[int, int]] = []
    takers: dict[tuple[int, int, Box, tuple[int, ...]], list[int]] = {}
    near = _Near(sources)
    for k, sink in enumerate(sinks):
        parts: dict[tuple[int, Box], list[int]] = {}  # (giver, box) -> sources to be added up
        for i in near.to(sink.box):
            source = sources[i]
            overlap = intersection(source.box, sink.box)
            if overlap is None:
                continue
            if sink.device in source.devices:
                local.append((i, k))
                continue
            giver = _nearest(source.devices, sink.device, turn[sink.device], machine)
            parts.setdefault((giver, overlap), []).append(i)
        for (giver, box), given in parts.items():
            takers.setdefault((giver, sink.device, box, tuple(given)), []).append(k)
    transfers = [
        Move(
            Pattern.TRANSFER,
            (a, b),
            volume(box),
            tuple((i, a) for i in given),
            tuple(taken),
            (Transfer(a, b, box, given, tuple(taken)),),
        )
        for (a, b, box, given), taken in sorted(takers.items())
    ]
    boxes = [box for _, _, box, _ in sorted(takers)]
    return Exchange(
        tuple(_with_collectives(transfers, boxes, sources)),
        tuple(sorted(set(local))),
        tuple(s.device for s in sinks),
        tuple(sources),
        tuple(sinks),
    )


def _all_reduce(sources: Sequence[Source], sinks: Sequence[Sink]) -> Exchange | None:
    """The commonest exchange by far, told without looking at every pair: one box of which every source is
    a summand on one device, and these devices need the sum."""
    if len(sources) < 2 or len(sinks) < 2 or any(len(source.devices) != 1 for source in sources):
        return None
    devices = sorted({source.devices[0] for source in sources})
    place = {sink.device: k for k, sink in enumerate(sinks)}
    if len({source.summand for source in sources}) != len(sources) or len(place) != len(sinks):
        return None
    if len({*(source.box for source in sources), *(sink.box for sink in sinks)}) != 1:
        return None
    if sorted(place) != devices:
        return None
    given = tuple((i, source.devices[0]) for i, source in enumerate(sources))
    box = sinks[0].box
    move = Move(
        Pattern.ALL_REDUCE,
        tuple(devices),
        volume(box),
        given,
        tuple(range(len(sinks))),
        _AllPairs(box, given, place),
    )
    local = tuple((i, place[device]) for i, device in given)
    return Exchange((move,), local, tuple(s.device for s in sinks), tuple(sources), tuple(sinks))


class _AllPairs(Sequence[Transfer]):
    """The transfers of an all-reduce, from every device to every other, made when they are asked for."""

    def __init__(self, box: Box, given: Sequence[tuple[int, int]], place: Mapping[int, int]) -> None:
        self.box, self.place = box, place
        self.devices = sorted(place)
        self.sources = {d: tuple(i for i, device in given if device == d) for d in self.devices}

    def __len__(self) -> int:
        return len(self.devices) * (len(self.devices) - 1)

    @overload
    def __getitem__(self, at: int) -> Transfer: ...

    @overload
    def __getitem__(self, at: slice) -> list[Transfer]: ...

    def __getitem__(self, at: int | slice) -> Transfer | list[Transfer]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        sender, other = divmod(range(len(self))[at], len(self.devices) - 1)
        receiver = other + (other >= sender)
        a, b = self.devices[sender], self.devices[receiver]
        return Transfer(a, b, self.box, self.sources[a], (self.place[b],))


class _Near:
    """Which sources may overlap a box, told by the axis along which they differ most."""

    def __init__(self, sources: Sequence[Source]) -> None:
        rank = len(sources[0].box) if sources else 0
        self.axis = max(range(rank), key=lambda axis: len({s.box[axis] for s in sources}), default=None)
        self.sources: dict[Interval | None, list[int]] = {}
        for i, source in enumerate(sources):
            key = None if self.axis is None else source.box[self.axis]
            self.sources.setdefault(key, []).append(i)

    def to(self, box: Box) -> list[int]:
        """The numbers of the sources that may overlap it, ascending."""
        if self.axis is None:
            return self.sources.get(None, [])
        lo, hi = box[self.axis]
        return sorted(
            i for own, found in self.sources.items() if own and own[0] < hi and lo < own[1] for i in found
        )


def _nearest(holders: Sequence[int], device: int, turn: int, machine: Machine) -> int:
    if len(holders) == 1:
        return holders[0]
    widest = max(machine.bandwidth(holder, device) for holder in holders)
    best = sorted(holder for holder in holders if machine.bandwidth(holder, device) == widest)
    return best[turn % len(best)]


def _with_collectives(
    transfers: Sequence[Move], boxes: Sequence[Box], sources: Sequence[Source]
) -> list[Move]:
    """The transfers, those of each connected set of devices made one move where they form a pattern."""
    moves: list[Move] = []
    for numbers in _connected(transfers, [sources[move.sources[0][0]].lane for move in transfers]):
        group = [transfers[i] for i in numbers]
        given = sorted({source for move in group for source in move.sources})
        adds = _overlap([sources[i] for i, _ in given])
        pattern = recognised([move.devices for move in group], [boxes[i] for i in numbers], adds)
        if pattern is Pattern.TRANSFER:
            moves.extend(group)
            continue
        devices = tuple(sorted({device for move in group for device in move.devices}))
        sinks = tuple(sorted({sink for move in group for sink in move.sinks}))
        parts = tuple(part for move in group for part in move.transfers)
        moves.append(Move(pattern, devices, group[0].elements, tuple(given), sinks, parts))
    return moves


def _overlap(sources: Sequence[Source]) -> bool:
    """Whether different summands share elements, so that what arrives is added."""
    return any(
        a.summand != b.summand and intersection(a.box, b.box) is not None
        for i, a in enumerate(sources)
        for b in sources[:i]
    )


def _connected(transfers: Sequence[Move], lanes: Sequence[int]) -> list[list[int]]:
    """The numbers of the transfers, apart for each lane and set of devices that exchange among themselves."""
    leader: dict[tuple[int, int], tuple[int, int]] = {}

    def find(place: tuple[int, int]) -> tuple[int, int]:
        while leader.setdefault(place, place) != place:
            place = leader[place]
        return place

    for move, lane in zip(transfers, lanes, strict=True):
        a, b = (find((lane, device)) for device in move.devices)
        leader[max(a, b)] = min(a, b)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (move, lane) in enumerate(zip(transfers, lanes, strict=True)):
        groups.setdefault(find((lane, move.devices[0])), []).append(i)
    return list(groups.values())


def recognised(pairs: Sequence[tuple[int, ...]], boxes: Sequence[Box], adds: bool) -> Pattern:
    """The pattern that transfers of these boxes between these (sender, receiver) pairs form."""
    devices = {device for pair in pairs for device in pair}
    n, distinct = len(devices), len(set(boxes))
    if n < 2 or len(pairs) != n * (n - 1) or len(set(pairs)) != len(pairs):
        return Pattern.TRANSFER
    if len({volume(box) for box in boxes}) != 1:
        return Pattern.TRANSFER
    moved = list(zip(pairs, boxes, strict=True))
    per_sender = all(len({box for (a, _), box in moved if a == device}) == 1 for device in devices)
    per_receiver = all(len({box for (_, b), box in moved if b == device}) == 1 for device in devices)
    if adds:
        if distinct == 1:
            return Pattern.ALL_REDUCE
        return Pattern.REDUCE_SCATTER if per_receiver and distinct == n else Pattern.TRANSFER
    if per_sender and distinct == n:
        return Pattern.ALL_GATHER
    return Pattern.ALL_TO_ALL if distinct == n * (n - 1) else Pattern.TRANSFER
