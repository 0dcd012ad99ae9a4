"""Seams: what the shards of a block tell each other between two segments.

a split sum     partial results go to all shards of the sum, which add them up; each has the whole
                gradient of the sum, which is that of its own part too
statistics      each shard's own go to the others, and all merge them; on the way back the gradients
                of what was merged are added up over the shards, and pulled through the merge to each
                shard's own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from soapstone.runtime.localshard import LocalSegment, Made
from soapstone.runtime.noderun import NodeRun
from soapstone.runtime.ports import Arrival, Departure, Inbox, Outlet

Merge = Callable[[Sequence[Tensor]], Tensor]


class StatisticsDeparture(Departure):
    """Statistics of this rank, merged, on their way to another."""

    __slots__ = ("merge",)

    def __init__(self, *args: Any, merge: Merge) -> None:
        super().__init__(*args)
        self.merge = merge

    def total(self, device: torch.device) -> Tensor:
        """What is to be sent."""
        del device
        found = [outlet.tensor for outlet, _ in self.outlets if outlet.tensor is not None]
        return (found[0] if len(found) == 1 else self.merge(found)).flatten()


class Statistics:
    """The statistics that one shard takes of one node, and hears of from the others.

    `parts` are all that is to be merged, in one order for all shards; `own` is what this shard leaves
    there. `total` is where the gradients of what was merged are added up.
    """

    def __init__(self, node: NodeRun, own: Outlet, gradient: Outlet) -> None:
        self.node, self.own, self.gradient = node, own, gradient
        self.parts: list[Outlet | Arrival] = []
        self.total: Inbox | None = None
        self._own: Tensor | None = None
        self._merged: Tensor | None = None

    @property
    def merge(self) -> Merge:
        """How parts become one."""
        assert self.node.op.statistics is not None
        return self.node.op.statistics.merge

    def before(self, segment: LocalSegment) -> None:
        """The end of the segment before the seam: take this shard's statistics."""
        assert self.node.op.statistics is not None
        self.node.operands = self.node.fetch()
        local = self.node.op.statistics.local(*self.node.operands)
        self.own.put(local.detach())
        if segment.region is not None:
            segment.region.root(local, [self])

    def after(
        self, segment: LocalSegment, reads: Sequence[Callable[[Any], Any]], made: Sequence[Made]
    ) -> None:
        """The start of the segment after the seam: merge, and compute the node's outputs."""
        own = self.own.tensor
        assert own is not None
        parts = [own if part is self.own else _detached(part.take()).view(own.shape) for part in self.parts]
        with torch.no_grad():
            stats = self.merge(parts)
        if segment.region is not None:
            self._own, self._merged = own, stats
            stats = segment.region.leaf(stats.flatten(), self.gradient).view(stats.shape)
        operands = [read(operand) for read, operand in zip(reads, self.node.operands, strict=True)]
        self.node.operands = []
        for each, tensor in zip(made, self.node.compute(operands, stats), strict=True):
            segment.keep(each, tensor)

    def take(self) -> Tensor | None:
        """The gradient of this shard's own statistics."""
        assert self.total is not None
        total = self.total.take()
        if total is None or self._own is None or self._merged is None:
            return None
        assert self.node.op.statistics is not None
        gradient: Tensor = self.node.op.statistics.pull(self._own, self._merged, total.view(self._own.shape))
        return gradient

    def clear(self) -> None:
        """Forget the step."""
        self.node.operands = []
        self._own = self._merged = None


def _detached(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach()
