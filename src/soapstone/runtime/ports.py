"""Ports: where tensors change hands between the tasks of a rank, and between ranks.

    Outlet      a tensor that a task of this rank leaves for others (a Source of an exchange)
    Inbox       a box that a task of this rank needs (a Sink), put together from outlets and arrivals
    Arrival     a box that another rank sends
    Departure   a box that this rank sends: outlets, added up

Ports are made once; a step fills them and `clear` empties them. A gradient that is None is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from soapstone.ops.box import Box, relative_to, shape_of, slices, volume
from soapstone.runtime.wire import Pending, Slot, Wire

Index = tuple[slice, ...] | None
"""A part of a tensor; None for all of it."""

Row = tuple[int, list[int]]
"""Parts that lie side by side: along which axis, and in which order."""


class Giver(Protocol):
    """What can be asked for a tensor."""

    def take(self) -> Tensor | None:
        """The tensor; None for zero."""


def index_of(inner: Box, outer: Box) -> Index:
    """Where a box lies in the tensor that fills another."""
    return None if inner == outer else slices(relative_to(inner, outer))


class Outlet:
    """A tensor left by a task, with the box it fills."""

    __slots__ = ("box", "is_filled", "is_kept", "tensor")

    def __init__(self, box: Box) -> None:
        self.box = box
        self.tensor: Tensor | None = None
        self.is_filled = False
        self.is_kept = False  # until the end of the step

    def put(self, tensor: Tensor | None) -> None:
        """Leave a tensor."""
        self.tensor, self.is_filled = tensor, True

    def take(self) -> Tensor | None:
        """The tensor that was left."""
        return self.tensor

    def part(self, index: Index) -> Tensor | None:
        """A part of the tensor that was left."""
        return self.tensor if index is None or self.tensor is None else self.tensor[index]

    def release(self) -> None:
        """Let go of the tensor when no task takes it any more. One that is kept keeps its numbers alone: with
        its place in autograd's graph it would hold the region's leaves, and their gradients."""
        if not self.is_kept:
            self.clear()
        elif self.tensor is not None:
            self.tensor = self.tensor.detach()

    def clear(self) -> None:
        """Forget the tensor."""
        self.tensor, self.is_filled = None, False


class Arrival:
    """A box that another rank sends; it is posted before it is waited for."""

    __slots__ = (
        "box",
        "count",
        "dtype",
        "is_here",
        "name",
        "peer",
        "pending",
        "shape",
        "tag",
        "takers",
        "tensor",
    )

    def __init__(self, box: Box, dtype: torch.dtype, peer: int, tag: int, name: str) -> None:
        self.box, self.dtype, self.peer, self.tag, self.name = box, dtype, peer, tag, name
        self.shape, self.count = shape_of(box), volume(box)
        self.pending: Pending | Slot | None = None
        self.tensor: Tensor | None = None
        self.is_here = False
        self.takers = 0  # inboxes that it fills a part of

    def post(self, wire: Wire) -> None:
        """Be ready for the message."""
        self.pending = wire.receive(self.shape, self.dtype, self.peer, self.tag, self.name)

    def expect(self, slot: Slot) -> None:
        """Be a part of what a collective brings."""
        self.pending = slot

    def take(self) -> Tensor | None:
        """The box, once it is there; None for zero."""
        if not self.is_here:
            assert self.pending is not None, f"{self.name} is read before it is expected"
            self.tensor, self.pending, self.is_here = self.pending.wait(), None, True
        return self.tensor

    def borrow(self) -> tuple[Tensor | None, Callable[[], None] | None]:
        """The box, once it is there, and what to call when it has been read: where one inbox alone reads
        it, it need not be copied first."""
        if self.is_here or self.takers != 1:
            return self.take(), None
        pending, self.pending, self.is_here = self.pending, None, True
        assert pending is not None, f"{self.name} is read before it is expected"
        return pending.borrow(), pending.give_back

    def clear(self) -> None:
        """Forget the box, once it is there: a receive that is dropped would leave its message behind."""
        if self.pending is not None:
            self.pending.wait()
        self.tensor, self.pending, self.is_here = None, None, False

    release = clear


class Departure:
    """A box that this rank sends: the sum of outlets that hold it."""

    __slots__ = ("box", "dtype", "name", "outlets", "peer", "tag")

    def __init__(
        self, box: Box, dtype: torch.dtype, peer: int, tag: int, name: str, outlets: Sequence[Outlet]
    ) -> None:
        self.box, self.dtype, self.peer, self.tag, self.name = box, dtype, peer, tag, name
        self.outlets = [(outlet, index_of(box, outlet.box)) for outlet in outlets]

    @property
    def is_ready(self) -> bool:
        """Whether all that is to be sent has been left."""
        return all(outlet.is_filled for outlet, _ in self.outlets)

    def post(self, wire: Wire) -> None:
        """Send the box."""
        wire.send(self.total(wire.device), self.peer, self.tag, self.name)

    def total(self, device: torch.device) -> Tensor:
        """What is to be sent."""
        with torch.no_grad():
            total = added([outlet.part(index) for outlet, index in self.outlets])
            if total is None:
                return torch.zeros(shape_of(self.box), dtype=self.dtype, device=device)
            return total.detach()


def added(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The sum; None where all are. The tensors themselves stay as they are."""
    total: Tensor | None = None
    is_own = False
    for tensor in tensors:
        if tensor is None:
            continue
        if total is None:
            total = tensor
        elif is_own:
            total += tensor
        else:
            total, is_own = total + tensor, True
    return total


class Inbox:
    """A box that this rank needs. `adds` says whether what comes is added up or put side by side;
    contributions are taken in one order on all ranks, that of the devices they come from."""

    __slots__ = ("_row", "adds", "box", "device", "dtype", "is_full", "parts", "shape", "tensor")

    def __init__(self, box: Box, dtype: torch.dtype, device: torch.device, adds: bool) -> None:
        self.box, self.dtype, self.device, self.adds = box, dtype, device, adds
        self.shape = shape_of(box)
        self.parts: list[tuple[Outlet | Arrival, Index, Index]] = []  # (from, part of it, place in the box)
        self._row: Row | None = None  # that the parts make, if they make one
        self.tensor: Tensor | None = None
        self.is_full = False

    def connect(self, port: Outlet | Arrival, overlap: Box) -> None:
        """Take this part from a port."""
        self.parts.append((port, index_of(overlap, port.box), index_of(overlap, self.box)))
        self._row = None if self.adds else _row([place for _, _, place in self.parts], self.shape)
        if isinstance(port, Arrival):
            port.takers += 1

    @property
    def only_outlet(self) -> Outlet | None:
        """The outlet that has all of the box, if nothing else is needed."""
        if len(self.parts) != 1:
            return None
        port, _, place = self.parts[0]
        return port if place is None and isinstance(port, Outlet) else None

    @property
    def arrivals(self) -> list[Arrival]:
        """What comes from other ranks."""
        return [port for port, _, _ in self.parts if isinstance(port, Arrival)]

    def take(self) -> Tensor | None:
        """The box, put together on first use; None when all of it is zero."""
        if not self.is_full:
            if len(self.parts) == 1 and self.parts[0][2] is None:
                port, index, _ = self.parts[0]
                self.tensor = _part(port.take(), index)
            else:
                with torch.no_grad():
                    self.tensor = self._together()
            self.is_full = True
        return self.tensor

    def _together(self) -> Tensor | None:
        """A tensor of its own, unless all there is is one outlet's."""
        borrowed: list[Callable[[], None]] = []
        found = []
        for port, index, place in self.parts:
            if isinstance(port, Arrival):
                tensor, give_back = port.borrow()
                borrowed += [] if give_back is None else [give_back]
            else:
                tensor = port.take()
            found.append((_part(tensor, index), place))
        total = self._combined(found)
        if borrowed and any(total is tensor for tensor, _ in found) and total is not None:
            total = total.clone()
        for give_back in borrowed:
            give_back()
        return total

    def _combined(self, found: Sequence[tuple[Tensor | None, Index]]) -> Tensor | None:
        if all(place is None for _, place in found):
            tensors = [tensor for tensor, _ in found]
            return added(tensors) if self.adds else tensors[0]
        if all(tensor is None for tensor, _ in found):
            return None
        if self._row is not None:
            there = [tensor for tensor, _ in found if tensor is not None]
            if len(there) == len(found):
                axis, order = self._row
                return torch.cat([there[i] for i in order], axis)
        make = torch.zeros if self.adds else torch.empty
        total = make(self.shape, dtype=self.dtype, device=self.device)
        for tensor, place in found:
            if tensor is None:
                continue
            target = total if place is None else total[place]
            if self.adds:
                target += tensor
            else:
                target.copy_(tensor)
        return total

    def clear(self) -> None:
        """Forget the box."""
        self.tensor, self.is_full = None, False

    release = clear


def _row(places: Sequence[Index], shape: Sequence[int]) -> Row | None:
    """The row that parts at these places make, if they fill a tensor of this shape in one."""
    if len(places) < 2 or any(place is None for place in places):
        return None
    found = [place for place in places if place is not None]
    ends = [[(each.start, each.stop) for each in place] for place in found]
    axes = [axis for axis, size in enumerate(shape) if any(own[axis] != (0, size) for own in ends)]
    if len(axes) != 1:
        return None
    (axis,) = axes
    order = sorted(range(len(ends)), key=lambda i: ends[i][axis])
    bounds = [0, *(ends[i][axis][1] for i in order)]
    is_filled = [ends[i][axis][0] for i in order] == bounds[:-1] and bounds[-1] == shape[axis]
    return (axis, order) if is_filled else None


def _part(tensor: Tensor | None, index: Index) -> Tensor | None:
    return tensor if tensor is None or index is None else tensor[index]


Port = Outlet | Arrival | Inbox
