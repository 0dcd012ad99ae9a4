"""Regions: runs of compute tasks that autograd takes back in one call.

Inside a region tensors are linked by autograd itself. What enters one is a leaf, whose gradient is left
in an outlet; what leaves it and carries a gradient is a root, whose gradient is the sum of what its
givers have. The graphs of two regions never touch. Of a root only its place in autograd's graph is kept, not
what it holds: partial sums are not needed once they have been given away. Nor is what a large leaf holds:
autograd keeps a leaf until its gradient is there, so the leaf is a stand-in without memory (`stand_in`), and
the tensor lives for as long as some operator's backward pass needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from soapstone.runtime.ports import Giver, Outlet, added

TAKES_EDGES = "GradientEdge" in str(signature(torch.autograd.backward))
"""Whether this torch's autograd can start from places in its graph."""

STAND_IN_BYTES = 2**16
"""[choice] A stand-in takes 7 us more than a leaf of its own ([measured] a core of a 2-core container), so it
is for tensors above this."""


SMALL_PART = 16
"""[choice] A gradient is copied where it is no more than such a part of the memory it lies in."""


class Region:
    """The roots and leaves of one step, collected by the forward tasks."""

    __slots__ = ("_leaves", "_roots", "number", "on_gradient")

    def __init__(self, number: int) -> None:
        self.number = number
        self.on_gradient: Callable[[], None] | None = None
        self._roots: list[tuple[Tensor | GradientEdge, Sequence[Giver]]] = []
        self._leaves: list[tuple[Tensor, _Exit]] = []

    def leaf(self, tensor: Tensor, gradient: Outlet, others: Sequence[Outlet] = ()) -> Tensor:
        """The tensor as it enters the region; its gradient will be left in the outlet, and in others that
        there is nothing more."""
        order: tuple[int, ...] | None = None
        if tensor.nbytes > STAND_IN_BYTES:
            order = _order(tensor)
            leaf, entered = stand_in(tensor, order)
        else:
            leaf = entered = tensor.detach().requires_grad_()
        way_out = _Exit(gradient, others, order)
        self._leaves.append((leaf, way_out))
        if self.on_gradient is not None:
            leaf.register_post_accumulate_grad_hook(self._noted(way_out))
        return entered

    def _noted(self, way_out: _Exit) -> Callable[[Tensor], None]:
        def note(leaf: Tensor) -> None:
            way_out.leave(leaf.grad)
            if self.on_gradient is not None:
                self.on_gradient()

        return note

    def root(self, tensor: Tensor, givers: Sequence[Giver]) -> None:
        """Let the gradient of a tensor be the sum of what the givers have."""
        if tensor.requires_grad and givers:
            self._roots.append((get_gradient_edge(tensor) if TAKES_EDGES else tensor, givers))

    def backward(self) -> None:
        """Take all gradients back from the roots to the leaves, and to the parameters."""
        roots, leaves = self._roots, self._leaves
        self._roots, self._leaves = [], []
        places: list[Any] = []
        gradients: list[Tensor] = []
        with torch.no_grad():
            for place, givers in roots:
                gradient = givers[0].take() if len(givers) == 1 else added([g.take() for g in givers])
                if gradient is not None:
                    places.append(place)
                    gradients.append(gradient)
        if places:
            _taken_back(tuple(places), tuple(gradients))
        for leaf, way_out in leaves:
            if self.on_gradient is None or leaf.grad is None:  # else it was left when it came
                way_out.leave(leaf.grad)

    def clear(self) -> None:
        """Forget a step that was not taken back."""
        self._roots, self._leaves = [], []


def _taken_back(places: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """What `torch.autograd.backward` does, without its looks at each root's shape in Python, which the engine
    checks itself ([measured] an Arm core, three roots: 123 instead of 206 us a call)."""
    torch.autograd.Variable._execution_engine.run_backward(
        places, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Exit:
    """The outlet that a leaf's gradient is left in, others for which nothing is left, and the order in which
    the leaf has its axes, if it is another than the outlet's. It does not hold the leaf, whose hook holds
    it."""

    __slots__ = ("gradient", "order", "others")

    def __init__(self, gradient: Outlet, others: Sequence[Outlet], order: tuple[int, ...] | None) -> None:
        self.gradient, self.others, self.order = gradient, others, order

    def leave(self, gradient: Tensor | None) -> None:
        """Leave a gradient, if there is one. A small part of a large one would hold all of it."""
        if gradient is not None:
            if gradient.untyped_storage().nbytes() >= SMALL_PART * gradient.nbytes:
                gradient = gradient.clone()
            if self.order is not None:
                gradient = _turned_back(gradient, self.order)
        self.gradient.put(gradient)
        for other in self.others:
            other.put(None)


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of a tensor's axes in which its memory is contiguous, if it is in no other."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))
    return order if tensor.permute(order).is_contiguous() else None


def _turned_back(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor whose axes were put in an order, as it was before."""
    return tensor.permute([order.index(axis) for axis in range(tensor.ndim)])


def stand_in(tensor: Tensor, order: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """A leaf that repeats one number, and a view of it that holds a tensor's memory instead: the gradient of
    the second arrives at the first, which does not hold the tensor. If an order is given, the leaf has its
    axes in that: gradients come in the order of the memory, and would be laid out anew for another."""
    within = tensor if order is None else tensor.permute(order)
    leaf = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(within.shape).requires_grad_()
    entered = leaf.view_as(leaf)
    entered.data = within
    return leaf, entered if order is None else _turned_back(entered, order)
