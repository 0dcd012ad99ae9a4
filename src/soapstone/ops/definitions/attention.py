"""Scaled dot-product attention: two matrix products around a softmax, as one operator.

Queries may be split freely; every query reads all keys and values, so `t` stays whole. With
grouped heads each of `g` key and value heads serves `r` query heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops.definitions.axes import shape_at
from soapstone.ops.definitions.dropout import dropped
from soapstone.ops.examples import example, mask
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attr, Attrs, Call, Capture, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _notation(shapes: Sequence[Shape | None], _: Attrs) -> str:
    q, k = shape_at(shapes, 0), shape_at(shapes, 1)
    if len(q) < 2 or len(k) != len(q):
        raise OpError(f"attention takes queries and keys of equal rank, not {list(q)} and {list(k)}")
    batch = ["b" if i == 0 else f"b{i}" for i in range(len(q) - (3 if len(q) > 3 else 2))]
    heads, groups = ([], []) if len(q) < 4 else (["g"], ["g"]) if q[-3] == k[-3] else (["(g r)"], ["g"])
    shared = " ".join([*batch, *groups])
    text = f"{' '.join([*batch, *heads])} s e!, {shared} t! e!, {shared} t! v"
    scores = [*zip([*batch, *heads, "s", "t!"], [*q[:-1], k[-2]], strict=True)]
    bias = shapes[3] or ()
    seen = [
        name if size == full else "0"
        for size, (name, full) in zip(bias, scores[len(scores) - len(bias) :], strict=True)
    ]
    return f"{text}, [{' '.join(seen)}] -> {' '.join([*batch, *heads])} s v"


def _flops(sizes: Mapping[str, int]) -> float:
    outer = prod(n for dim, n in sizes.items() if dim not in ("e", "v"))
    return 2.0 * outer * (sizes["e"] + sizes["v"])


def _causal(q: Tensor, shard: Shard, keys: int) -> Tensor:
    """Which of the first keys each of the shard's queries may see."""
    rows = torch.arange(*shard.box["s"], device=q.device)
    return rows.unsqueeze(-1) >= torch.arange(keys, device=q.device)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    shard: Shard,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if is_causal and shard.length("s") < shard.size("s"):
        # No query of this shard sees a key past its last one.
        keys = min(shard.box["s"].hi, k.shape[-2])
        k, v, bias, is_causal = k[..., :keys, :], v[..., :keys, :], _causal(q, shard, keys), False
    grouped = "r" in shard.signature.sizes
    return F.scaled_dot_product_attention(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=grouped)


def _capture(with_dropout: bool) -> Capture:
    def capture(
        q: Any,
        k: Any,
        v: Any,
        bias: Any = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Call | None:
        if (dropout > 0) != with_dropout:
            return None
        if len(q.shape) > 3 and k.shape[-3] not in (1, q.shape[-3]) and not enable_gqa:
            return None
        attrs: dict[str, Attr] = {"is_causal": is_causal, "scale": scale}
        if with_dropout:
            attrs["p"] = dropout
        return Call((q, k, v, bias), attrs)

    return capture


sdpa = register(
    Op(
        "sdpa",
        _notation,
        torch=_attention,
        keeps=("q", "k", "v", "bias", "output"),
        attrs={"is_causal": False, "scale": None},
        flops=_flops,
        aten={"scaled_dot_product_attention.default": _capture(with_dropout=False)},
        examples=(
            example((2, 2, 4, 6), (2, 2, 8, 6), (2, 2, 8, 6), None),
            example((2, 2, 4, 6), (2, 2, 4, 6), (2, 2, 4, 6), None, is_causal=True, scale=0.3),
            example((2, 4, 4, 2), (2, 2, 6, 2), (2, 2, 6, 2), mask(2, 1, 4, 6)),
            example((2, 4, 4, 2), (2, 2, 4, 2), (2, 2, 4, 2), None, is_causal=True),
            example((2, 2, 4, 2), (2, 2, 6, 2), (2, 2, 6, 4), (2, 4, 6)),
            example((4, 4, 2), (4, 6, 2), (4, 6, 2), (4, 1, 6)),
            example((2, 2, 2, 4, 2), (2, 2, 2, 6, 2), (2, 2, 2, 6, 2), (1, 6), is_causal=False),
        ),
    )
)


def _attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    shard: Shard,
    is_causal: bool,
    scale: float | None,
    p: float,
) -> Tensor:
    if "r" in shard.signature.sizes:
        k, v = (x.repeat_interleave(shard.length("r"), -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        bias = _causal(q, shard, k.shape[-2])
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    dims = [dim for dim in shard.signature.sizes if dim not in ("e", "v")]
    weights = torch.ops.aten._safe_softmax(scores, -1)
    points = weights.view([shard.length(dim) for dim in dims])
    return dropped(points, shard, dims, p).view_as(weights) @ v


# torch's fused kernels draw dropout in their own order, which no other split can repeat: so the
# scores are written out here.
sdpa_dropout = register(
    Op(
        "sdpa_dropout",
        _notation,
        torch=_attention_with_dropout,
        attrs={"is_causal": False, "scale": None, "p": 0.1},
        flops=_flops,
        random=True,
        aten={"scaled_dot_product_attention.default": _capture(with_dropout=True)},
        examples=(
            example((2, 2, 4, 6), (2, 2, 4, 6), (2, 2, 4, 6), None, is_causal=True),
            example((2, 4, 4, 2), (2, 2, 6, 2), (2, 2, 6, 2), mask(4, 6), p=0.5),
            example((4, 4, 2), (4, 6, 2), (4, 6, 2), (4, 6), p=0.2, scale=1.0),
        ),
    )
)
