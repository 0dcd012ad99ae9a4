"""The shards that a rank computes: a block's nodes on one part of their iteration spaces.

A node runs its Op's torch function on the slices that its shard reads. A read is one of

    a number, or an operand left out
    a free value's part                 made by this rank from the batch
    a weight's part                     the parameter itself, so that autograd adds to its gradient
    a value of the shard's own block    as it is, or as a leaf where the two ends lie in two regions
    a box of another block's value      a leaf, the same for all of a region whose gradients go the same
                                        ways, or linked when the two ends lie in one region

Shards of a block that is cut into segments hear from each other in between (`seams`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from soapstone.runtime.inputs import FreeValues
from soapstone.runtime.noderun import Read
from soapstone.runtime.ports import Giver, Inbox, Index, Outlet
from soapstone.runtime.region import Region
from soapstone.runtime.weights import Holding


def fixed(value: Any) -> Read:
    """A number, or None."""
    return lambda: value


def free_part(values: FreeValues, name: str, index: Index) -> Read:
    """A part of a free value."""
    return (lambda: values[name]) if index is None else (lambda: values[name][index])


def weight_part(holding: Holding, box: Any, contributes: bool, returns_views: bool = False) -> Read:
    """A part of a weight; it gets no gradient from a read that does not contribute. `returns_views` says
    whether its reader's gradient may be a view of what others have, too."""
    if contributes and holding.box == box:
        if returns_views:
            holding.keep_apart()
        return lambda: holding.parameter
    holding.expect(box)
    return (lambda: holding.read(box)) if contributes else (lambda: holding.read(box).detach())


def linked_box(outlet: Outlet, index: Index) -> Read:
    """A box of a value of this rank, as autograd sees it."""
    return lambda: outlet.part(index)


def leaf_box(inbox: Inbox, region: Region | None, gradient: Outlet | None) -> Read:
    """A box of another block's value, as a leaf of the region."""

    def read() -> Tensor:
        tensor = inbox.take()
        assert tensor is not None
        if region is None or gradient is None or not tensor.is_floating_point():
            return tensor.detach()
        return region.leaf(tensor, gradient)

    return read


class Entrance:
    """Where a box of another block's value enters a region: one leaf for all nodes there that read it and
    whose gradients go the same ways, so that autograd adds these up. Under ZeRO they are those of all cells
    of a layer ([measured] NMT, hidden 256, an Arm core: 162 instead of 190 ms of a step)."""

    def __init__(self, inbox: Inbox, region: Region) -> None:
        self._inbox, self._region = inbox, region
        self._gradients: list[Outlet] = []
        self._entered: Tensor | None = None
        self._unread = 0

    def add(self, gradient: Outlet) -> Read:
        """What one more node reads; its gradient is expected in the outlet."""
        self._gradients.append(gradient)
        return self._read

    def _read(self) -> Tensor:
        if self._entered is None:
            tensor = self._inbox.take()
            assert tensor is not None
            if not tensor.is_floating_point():
                return tensor.detach()
            first, *others = self._gradients
            self._entered, self._unread = self._region.leaf(tensor, first, others), len(self._gradients)
        entered = self._entered
        self._unread -= 1
        if not self._unread:  # autograd holds what it needs
            self._entered = None
        return entered

    def clear(self) -> None:
        """Forget the step."""
        self._entered = None


@dataclass
class Made:
    """A value that a shard writes: where it is left, and who has its gradient."""

    name: str
    outlet: Outlet
    givers: list[Giver] = field(default_factory=list)
    is_read_within: bool = True  # by a later node of the block
    is_left: bool = True  # for others


class LocalShard:
    """A copy of a shard of a block on this rank; `values` holds what it has made in this step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Tensor] = {}
        self.segments: list[LocalSegment] = []

    def clear(self) -> None:
        """Forget the step."""
        self.values.clear()
        for segment in self.segments:
            segment.clear()


class LocalSegment:
    """What a shard does between two seams: actions in order. `region` is where its backward pass
    belongs; None if it has none."""

    def __init__(self, shard: LocalShard, region: Region | None) -> None:
        self.shard, self.region = shard, region
        self.actions: list[Callable[[], None]] = []
        self.gradients: dict[str, Outlet] = {}  # of the values of earlier segments that it reads
        self._bridges: dict[str, Tensor] = {}

    def forward(self) -> None:
        """Do the actions; what has no backward pass leaves no trace for one."""
        if self.region is not None:
            for action in self.actions:
                action()
        else:
            with torch.no_grad():
                for action in self.actions:
                    action()
        self._bridges.clear()  # nobody else reads them, and they hold memory

    def keep(self, made: Made, tensor: Tensor) -> None:
        """Put a value where others find it, and remember that its gradient is wanted."""
        if made.is_read_within:
            self.shard.values[made.name] = tensor
        if made.is_left:
            made.outlet.put(tensor)
        if self.region is not None:
            self.region.root(tensor, made.givers)

    def bridge(self, name: str, tensor: Tensor, gradient: Outlet) -> Tensor:
        """A tensor of an earlier segment as a leaf of this one, the same for all who read it here."""
        if name not in self._bridges:
            if self.region is None or not tensor.requires_grad:
                return tensor.detach()
            self._bridges[name] = self.region.leaf(tensor, gradient)
        return self._bridges[name]

    def clear(self) -> None:
        """Forget the step."""
        self._bridges.clear()
