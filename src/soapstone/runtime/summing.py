"""The gradients of a bucket on this rank: where each lies, found once, and not in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soapstone.ops.box import shape_of, volume
from soapstone.runtime.actions import SumGradients
from soapstone.runtime.ports import Index, index_of
from soapstone.runtime.weights import Held, Holding
from soapstone.runtime.wire import Wire


class Bucket:
    """The pieces of weights whose gradients are added up together; what one alone has is added up where it
    lies. On a CPU the place of several is kept from step to step: new memory costs a page fault for every
    4 KiB."""

    def __init__(self, action: SumGradients, held: Held, wire: Wire) -> None:
        self.tensor: Tensor | None = None  # where it is kept
        self._action, self._wire = action, wire
        self._weights = [piece.weight for piece in action.pieces]
        self._sizes = [volume(piece.box) for piece in action.pieces]
        self._shapes = [shape_of(piece.box) for piece in action.pieces]
        self._places: list[tuple[Holding, Index]] = []
        for piece in action.pieces:
            holding = held.holding(piece.weight, piece.box)
            self._places.append((holding, index_of(piece.box, holding.box)))
        self._views: list[Tensor] = []  # of the kept tensor
        self._there = 0

    def begin(self) -> None:
        """No gradient is there."""
        self._there = 0

    def is_ready(self, fired: Mapping[str, int], expected: Mapping[str, int]) -> bool:
        """Whether all gradients are there, by how often each of the weights has told so and will. What was
        there is not looked at again."""
        names = self._weights
        while self._there < len(names):
            name = names[self._there]
            if fired.get(name, -1) < expected.get(name, 0):
                return False
            self._there += 1
        return True

    def filled(self) -> Tensor:
        """All gradients one after the other. Parameters have theirs there from now on: what autograd made is
        not needed beside it."""
        found = [holding.gradient_at(index) for holding, index in self._places]
        if len(found) == 1:  # and is overwritten
            return found[0].reshape(-1)
        if found[0].device.type != "cpu":
            made = torch.cat([gradient.reshape(-1) for gradient in found])
            self._move_in(self._parts(made))
            return made
        if self.tensor is None:
            self.tensor = self._kept(found[0].dtype)
            self._views = self._parts(self.tensor)
        if all(gradient.is_contiguous() for gradient in found):
            torch.cat([gradient.view(-1) for gradient in found], out=self.tensor)
        else:  # without a copy of each beside the bucket
            for view, gradient in zip(self._views, found, strict=True):
                view.copy_(gradient)
        self._move_in(self._views)
        return self.tensor

    def put_back(self, flat: Tensor) -> None:
        """Let parameters have what was added up."""
        parts = self._views if self.tensor is not None and _is_same(flat, self.tensor) else self._parts(flat)
        self._move_in(parts)
        for (holding, index), part in zip(self._places, parts, strict=True):
            if index is not None:
                holding.gradient_at(index).copy_(part)

    def _kept(self, dtype: torch.dtype) -> Tensor:
        count = sum(self._sizes)
        kept = self._wire.bucket(count, dtype, self._action.ranks)
        return torch.empty(count, dtype=dtype) if kept is None else kept

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self._sizes), self._shapes, strict=True)]

    def _move_in(self, parts: Sequence[Tensor]) -> None:
        for (holding, index), part in zip(self._places, parts, strict=True):
            if index is None:
                holding.parameter.grad = part


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors are the same part of the same memory."""
    places = [(each.untyped_storage()._cdata, each.storage_offset(), each.numel()) for each in (one, other)]
    return places[0] == places[1]
