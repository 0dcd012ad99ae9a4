"""Operators without operands: their elements follow from their coordinates.

What is only shaped like a tensor (`zeros_like`) does not read it, so nothing has to be moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops.definitions.axes import int_attr, letters, notation_of, tuple_attr, written_shape
from soapstone.ops.definitions.dtypes import name_for, short_name, torch_dtype
from soapstone.ops.examples import example
from soapstone.ops.lazy import torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _full_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    del shapes
    shape = tuple_attr(attrs, "shape")
    return notation_of([], [f"{name}:{size}" for name, size in zip(letters(len(shape)), shape, strict=True)])


def _filled(shape: Sequence[int], value: float, dtype: Any) -> Call:
    return Call((), {"shape": tuple(shape), "value": value, "dtype": short_name(dtype)})


def _full(size: Sequence[int], value: float, *, dtype: Any = None, **_: Any) -> Call:
    return _filled(size, value, dtype or name_for(value))


def _sized(value: float) -> Any:
    """ATen's `zeros(size)` and the like."""
    return lambda size, *, dtype=None, **_: _filled(size, value, dtype or "f32")


def _like(value: float) -> Any:
    """ATen's `zeros_like(x)` and the like."""
    return lambda x, *, dtype=None, **_: _filled(x.shape, value, dtype or x.dtype)


def _sized_like(value: float) -> Any:
    """ATen's `x.new_zeros(size)` and the like."""
    return lambda x, size, *, dtype=None, **_: _filled(size, value, dtype or x.dtype)


full = register(
    Op(
        "full",
        _full_notation,
        body=lambda *, value: value,
        torch=lambda *, value, dtype, shard: torch.full(
            written_shape(shard), value, dtype=torch_dtype(dtype), device=shard.device
        ),
        attrs={"shape": (), "value": 0.0, "dtype": "f32"},
        aten={
            "full.default": _full,
            "zeros.default": _sized(0),
            "ones.default": _sized(1),
            "empty.memory_format": _sized(0),
            "scalar_tensor.default": lambda value, *, dtype=None, **_: _filled((), value, dtype or "f32"),
            "zeros_like.default": _like(0),
            "ones_like.default": _like(1),
            "empty_like.default": _like(0),
            "full_like.default": lambda x, value, *, dtype=None, **_: _filled(
                x.shape, value, dtype or x.dtype
            ),
            "fill.Scalar": lambda x, value: _filled(x.shape, value, x.dtype),
            "new_zeros.default": _sized_like(0),
            "new_ones.default": _sized_like(1),
            "new_empty.default": _sized_like(0),
            "new_full.default": lambda x, size, value, *, dtype=None, **_: _filled(
                size, value, dtype or x.dtype
            ),
        },
        needs_grad=False,
        examples=(
            example(shape=(4, 6), value=0.5, dtype="f64"),
            example(shape=(4,), value=True, dtype="bool"),
            example(shape=(), value=2, dtype="i64"),
        ),
    )
)


def _range(shard: Shard, dim: str) -> Tensor:
    """The shard's indices of a dim."""
    return torch.arange(shard.start(dim), shard.start(dim) + shard.length(dim), device=shard.device)


def _line_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    del shapes
    return notation_of([], [f"a:{int_attr(attrs, 'count')}"])


def _line(*, shard: Shard, start: float, step: float, dtype: str) -> Tensor:
    index = _range(shard, "a")
    exact = index.double() if isinstance(start, float) or isinstance(step, float) else index
    return (start + exact * step).to(torch_dtype(dtype))


def _arange(*ends: float, dtype: Any = None, **_: Any) -> Call:
    start, end, step = ends if len(ends) == 3 else (*ends, 1) if len(ends) == 2 else (0, *ends, 1)
    count = math.ceil((end - start) / step)
    if count < 1:
        raise OpError(f"a range from {start} to {end} by {step} is empty")
    chosen = short_name(dtype) or name_for(start + end + step)
    return Call((), {"start": start, "step": step, "count": count, "dtype": chosen})


def _linspace(start: float, end: float, steps: int, *, dtype: Any = None, **_: Any) -> Call:
    step = (end - start) / max(steps - 1, 1)
    chosen = short_name(dtype) or "f32"
    return Call((), {"start": float(start), "step": step, "count": steps, "dtype": chosen})


arange = register(
    Op(
        "arange",
        _line_notation,
        body=lambda *, start, step, at: start + step * at["a"],
        torch=_line,
        attrs={"start": 0, "step": 1, "count": 1, "dtype": "i64"},
        aten={
            "arange.default": _arange,
            "arange.start": _arange,
            "arange.start_step": _arange,
            "linspace.default": _linspace,
        },
        needs_grad=False,
        examples=(
            example(count=10),
            example(start=3, step=-2, count=8, dtype="i32"),
            example(start=0.5, step=0.25, count=6, dtype="f64"),
        ),
    )
)


def _eye_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    del shapes
    return notation_of([], [f"i:{int_attr(attrs, 'rows')}", f"j:{int_attr(attrs, 'columns')}"])


def _eye(rows: int, columns: int | None = None, *, dtype: Any = None, **_: Any) -> Call:
    shape = {"rows": rows, "columns": rows if columns is None else columns}
    return Call((), {**shape, "dtype": short_name(dtype) or "f32"})


eye = register(
    Op(
        "eye",
        _eye_notation,
        body=lambda *, at: float(at["i"] == at["j"]),
        torch=lambda *, shard, dtype: (_range(shard, "i")[:, None] == _range(shard, "j")).to(
            torch_dtype(dtype)
        ),
        attrs={"rows": 1, "columns": 1, "dtype": "f32"},
        aten={"eye.default": _eye, "eye.m": _eye},
        needs_grad=False,
        examples=(example(rows=4, columns=6), example(rows=4, columns=4, dtype="i64")),
    )
)
