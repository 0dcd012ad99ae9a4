"""Embeddings: rows of a table, picked by index.

Written as a sum over all rows `v` of which the index leaves one, so a table may be split by rows:
a shard gives the rows it holds and zeros for the others, and the results add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soapstone.ops.definitions.axes import points_but, shape_at
from soapstone.ops.examples import example, ids
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.scalar import equal, where
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _row_here(row: int, shard: Shard) -> int | None:
    """A row's number within the shard's part of the table, if it lies there."""
    held = shard.box["v"]
    return row - held.lo if held.lo <= row < held.hi else None


def _lookup(index: Tensor, table: Tensor, *, shard: Shard, padding_idx: int) -> Tensor:
    padding = _row_here(padding_idx, shard)
    if shard.length("v") == shard.size("v"):
        return F.embedding(index, table, padding)
    local = index - shard.start("v")
    here = (local >= 0) & (local < shard.length("v"))
    return F.embedding(torch.where(here, local, 0), table, padding) * here.unsqueeze(-1)


def _embedding_call(
    table: Any, index: Any, padding_idx: int = -1, by_frequency: bool = False, _sparse: bool = False
) -> Call | None:
    if by_frequency:
        return None
    return Call((index, table), {"padding_idx": padding_idx})


embedding = register(
    Op(
        "embedding",
        "..., v e -> ... e",
        body=lambda index, w, *, at: where(equal(index, at["v"]), w, 0.0),
        torch=_lookup,
        attrs={"padding_idx": -1},
        weights=("table",),
        flops=0,
        gathers=("v",),
        aten={"embedding.default": _embedding_call},
        examples=(
            example(ids(4, below=6), (6, 2)),
            example(ids(2, 2, below=4), (4, 4), padding_idx=3),
        ),
    )
)


def _bag_body(
    index: Any, w: Any, factor: Any, *, at: Mapping[str, int], shapes: Sequence[Shape], mode: str
) -> Any:
    row = w if factor is None else w * factor
    return where(equal(index, at["v"]), row / shapes[0][1] if mode == "mean" else row, 0.0)


def _bags(index: Tensor, table: Tensor, factors: Tensor | None = None, *, shard: Shard, mode: str) -> Tensor:
    if shard.length("v") < shard.size("v"):
        index = index - shard.start("v")
        here = (index >= 0) & (index < shard.length("v"))
        index = torch.where(here, index, 0)
        factors = here.to(table.dtype) if factors is None else factors * here
    y = F.embedding_bag(index, table, mode="sum", per_sample_weights=factors)
    return y / shard.size("l") if mode == "mean" else y


# Bags of equal length, of which the rows are added or averaged.
embedding_bag = register(
    Op(
        "embedding_bag",
        "b l, v e, [b l] -> b e",
        body=_bag_body,
        torch=_bags,
        attrs={"mode": "sum"},
        weights=("table",),
        flops=points_but("v"),
        gathers=("v",),
        examples=(
            example(ids(2, 4, below=4), (4, 2), None),
            example(ids(4, 2, below=4), (4, 4), None, mode="mean"),
            example(ids(2, 2, below=4), (4, 2), (2, 2)),
        ),
    )
)


def _offsets_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    bags = shape_at(shapes, 1)[0] - (1 if attrs["include_last"] else 0)
    return f"n!, k!, v! e, [n!] -> m!:{bags} e"


def _bags_at(
    index: Tensor,
    offsets: Tensor,
    table: Tensor,
    factors: Tensor | None = None,
    *,
    mode: str,
    include_last: bool,
    padding_idx: int | None,
) -> Tensor:
    return F.embedding_bag(
        index,
        table,
        offsets,
        mode=mode,
        per_sample_weights=factors,
        include_last_offset=include_last,
        padding_idx=padding_idx,
    )


_MODES = ("sum", "mean", "max")
"""ATen's ways to join the rows of a bag, by their numbers."""


def _offsets_call(
    table: Any,
    index: Any,
    offsets: Any,
    by_frequency: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    factors: Any = None,
    include_last: bool = False,
    padding_idx: int | None = None,
) -> Call | None:
    if by_frequency:
        return None
    padding = padding_idx if padding_idx is not None and padding_idx >= 0 else None
    return Call(
        (index, offsets, table, factors),
        {"mode": _MODES[mode], "include_last": include_last, "padding_idx": padding},
        outputs=(0,),
    )


# Bags of any length, one after the other: where each begins is known only to the data.
embedding_bag_offsets = register(
    Op(
        "embedding_bag_offsets",
        _offsets_notation,
        torch=_bags_at,
        attrs={"mode": "sum", "include_last": False, "padding_idx": None},
        weights=("table",),
        flops=points_but("v", "m", "k"),
        gathers=("v",),
        aten={
            "embedding_bag.padding_idx": _offsets_call,
            "embedding_bag.default": _offsets_call,
            "_embedding_bag.default": _offsets_call,
        },
        examples=(
            example(ids(6, below=4), ids(3, below=1), (4, 4), None),
            example(ids(6, below=4), ids(3, below=1), (4, 4), (6,)),
            example(ids(6, below=4), ids(1, below=1), (4, 4), None, mode="mean", padding_idx=1),
        ),
    )
)
