"""Kernels that are constants (TASO's I_conv and C_pool): one with which a convolution changes nothing, and
one with which it takes means. Each has the shape of the kernel it is given, and reads nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from soapstone.ops.examples import example
from soapstone.ops.lazy import torch
from soapstone.ops.op import Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.scalar import Scalar, const
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _middle(at: Mapping[str, int], shape: Shape) -> float:
    """One in the middle of the window of the output channel's own input channel."""
    is_there = (at["r"], at["q"]) == (shape[2] // 2, shape[3] // 2)
    return float(at["o"] == at["c"] and is_there)


def _anywhere(at: Mapping[str, int], _: Shape) -> float:
    """One everywhere in the window of the output channel's own input channel."""
    return float(at["o"] == at["c"])


def _one(_: Shape) -> int:
    return 1


def _window(shape: Shape) -> int:
    return shape[2] * shape[3]


def _constant(
    name: str, element: Callable[[Mapping[str, int], Shape], float], share: Callable[[Shape], int]
) -> Op:
    """A kernel of ones and zeros, divided by its `share`."""

    def body(w: object, *, at: Mapping[str, int], shapes: Sequence[Shape]) -> Scalar:
        del w
        return const(element(at, shapes[0])) / share(shapes[0])

    def made(w: Tensor, *, shard: Shard) -> Tensor:
        whole = shard.signature.shapes[0]
        assert whole is not None
        result = torch.zeros_like(w)
        starts = [shard.start(dim) for dim in "ocrq"]
        for channel in range(min(whole[:2])):
            here = channel - starts[0], channel - starts[1]
            if not all(0 <= i < n for i, n in zip(here, w.shape[:2], strict=True)):
                continue
            for r in range(w.shape[2]):
                for q in range(w.shape[3]):
                    at = {"o": channel, "c": channel, "r": starts[2] + r, "q": starts[3] + q}
                    result[here[0], here[1], r, q] = element(at, whole)
        return result / share(whole)

    return register(
        Op(
            name,
            "o c r q -> o c r q",
            body=body,
            torch=made,
            needs_grad=False,
            flops=0,
            examples=(example((4, 4, 3, 3)), example((4, 2, 2, 4))),
        )
    )


identity_kernel = _constant("identity_kernel", _middle, _one)
mean_kernel = _constant("mean_kernel", _anywhere, _window)
