"""Convolutions. Strides, dilation and padding are coefficients of the notation, so the halo a
shard needs is interval arithmetic, and what reaches past a border is padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.ops.examples import example
from soapstone.ops.lazy import F
from soapstone.ops.op import Op, Shard
from soapstone.ops.registry import register

if TYPE_CHECKING:
    from torch import Tensor


def bordered(x: Tensor, pads: tuple[tuple[int, int], ...], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """`x` with the padding that torch's operators cannot apply themselves, and what they still can:
    equal padding on both sides of an axis is left to the operator (it is free there)."""
    spatial = pads[2:]
    if all(lo == hi for lo, hi in spatial):
        return x, [lo for lo, _ in spatial]
    return F.pad(x, [n for pair in reversed(spatial) for n in pair], value=value), [0] * len(spatial)


def _conv2d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, shard: Shard, sh: int, sw: int, dh: int, dw: int
) -> Tensor:
    x, padding = bordered(x, shard.pads(0))
    return F.conv2d(x, w, bias, (sh, sw), tuple(padding), (dh, dw), shard.length("g"))


conv2d = register(
    Op(
        "conv2d",
        "b (g c) h*sh+r*dh-ph w*sw+q*dw-pw, (g o) c r! q!, [(g o)] -> b (g o) h w",
        body=lambda x, w: x * w,
        finish=lambda total, bias: total + bias,
        torch=_conv2d,
        attrs={"sh": 1, "sw": 1, "ph": 0, "pw": 0, "dh": 1, "dw": 1, "g": 1},
        weights=("w", "bias"),
        examples=(
            example((2, 2, 4, 4), (2, 2, 3, 3), (2,), ph=1, pw=1),
            example((2, 4, 7, 8), (4, 2, 3, 3), None, sh=2, sw=2, ph=1, pw=1, g=2),
            example((2, 2, 4, 6), (2, 1, 3, 3), (2,), dh=2, dw=2, ph=2, pw=2, g=2),
        ),
    )
)
