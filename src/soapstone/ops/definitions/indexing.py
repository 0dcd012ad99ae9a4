"""Operators that read or write where an index operand says, and those that order one axis.

An axis that is indexed by data stays whole; it is always called `i0` (`i1`, ... where there are
several), so that `gathers` can say that little of it is read. To take an element is, as a
scalar meaning, to add up all of the axis where the index matches; so adding at an index is a plain
sum, and can be split along what is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops import scalar
from soapstone.ops.definitions.axes import (
    axis_at,
    int_attr,
    letters,
    notation_of,
    points_but,
    shape_at,
    tuple_attr,
    written_shape,
)
from soapstone.ops.definitions.dtypes import short_name, torch_dtype
from soapstone.ops.examples import example, ids
from soapstone.ops.lazy import torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.scalar import equal
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor

INDEXED = tuple(f"i{n}" for n in range(8))


def _named(shapes: Sequence[Shape | None], attrs: Attrs, operand: int = 0) -> tuple[list[str], int]:
    """Names for an operand's axes, and the axis that `dim` says."""
    names = letters(len(shape_at(shapes, operand)))
    return names, axis_at(int_attr(attrs, "dim"), len(names))


def _with(names: Sequence[str], axis: int, text: str) -> list[str]:
    return [*names[:axis], text, *names[axis + 1 :]]


def _where_it_matches(index: Any, at: Mapping[str, int], value: Any) -> Any:
    return scalar.where(equal(index, at["i0"]), value, 0.0)


def _index_select_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axis = _named(shapes, attrs)
    return notation_of([_with(names, axis, "i0!"), [names[axis]]], names)


index_select = register(
    Op(
        "index_select",
        _index_select_notation,
        body=lambda x, index, *, at: _where_it_matches(index, at, x),
        torch=lambda x, index, *, dim: x.index_select(dim, index),
        flops=0,
        gathers=INDEXED,
        attrs={"dim": 0},
        aten={
            "index_select.default": lambda x, dim, index: Call(
                (x, index), {"dim": axis_at(dim, len(x.shape))}
            )
        },
        examples=(example((6, 4), ids(4, below=6), dim=0), example((2, 4, 2), ids(6, below=4), dim=1)),
    )
)


def _gather_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axis = _named(shapes, attrs)
    sizes = zip(names, shape_at(shapes, 0), shape_at(shapes, 1), strict=False)
    read = [name if size == taken else f"{name}+0" for name, size, taken in sizes]
    return notation_of([_with(read, axis, "i0!"), names], names)


def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Call:
    del sparse_grad  # how the gradient is stored, not what it is
    return Call((x, index), {"dim": axis_at(dim, len(x.shape))})


def _take_along(x: Any, indices: Any, dim: int | None = None) -> Call | None:
    if dim is None or len(indices.shape) != len(x.shape):
        return None
    axis = axis_at(dim, len(x.shape))
    sizes = enumerate(zip(x.shape, indices.shape, strict=True))
    return _gather(x, axis, indices) if all(i == axis or n == m for i, (n, m) in sizes) else None


gather = register(
    Op(
        "gather",
        _gather_notation,
        body=lambda x, index, *, at: _where_it_matches(index, at, x),
        torch=lambda x, index, *, dim: x.gather(dim, index),
        flops=0,
        gathers=INDEXED,
        attrs={"dim": 0},
        aten={"gather.default": _gather, "take_along_dim.default": _take_along},
        examples=(
            example((4, 6), ids(4, 2, below=6), dim=1),
            example((3, 6, 2), ids(3, 4, 2, below=3), dim=0),
        ),
    )
)


def _index_axes(shapes: Sequence[Shape | None]) -> tuple[list[list[str]], list[str]]:
    """The axes of index operands that broadcast against each other, and those of the result."""
    given = [shape for shape in shapes if shape is not None]
    rank = max(len(shape) for shape in given)
    padded = [(1,) * (rank - len(shape)) + shape for shape in given]
    sizes = [max(column) for column in zip(*padded, strict=True)]
    if any(size not in (1, full) for row in padded for size, full in zip(row, sizes, strict=True)):
        raise OpError(f"indices of shapes {', '.join(str(list(s)) for s in given)} do not broadcast")
    names = [f"j{n}" for n in range(rank)]
    reads = [
        [name if size == full else "0" for name, size, full in zip(names, row, sizes, strict=True)]
        for row in padded
    ]
    trimmed = [axes[rank - len(shape) :] for axes, shape in zip(reads, given, strict=True)]
    return trimmed, [f"{name}:{size}" for name, size in zip(names, sizes, strict=True)]


def _indexed_axes(names: Sequence[str], axes: Sequence[int], result: Sequence[str]) -> list[str]:
    """What indexing gives: the indices' axes in place of those they index, or in front of all
    others where something lies between them."""
    rest = [name for axis, name in enumerate(names) if axis not in axes]
    adjacent = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    at = axes[0] if adjacent else 0
    return [*rest[:at], *result, *rest[at:]]


def _index_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axes = letters(len(shape_at(shapes, 0))), tuple_attr(attrs, "axes")
    reads, result = _index_axes(shapes[1:])
    read = list(names)
    for n, axis in enumerate(axes):
        read[axis] = f"{INDEXED[n]}!"
    return notation_of([read, *reads], _indexed_axes(names, axes, result))


def _indexed(x: Tensor, *indices: Tensor, axes: tuple[int, ...]) -> Tensor:
    places: list[Any] = [slice(None)] * x.dim()
    for axis, index in zip(axes, indices, strict=True):
        places[axis] = index
    return x[tuple(places)]


def _taken(
    x: Any, *indices: Any, axes: tuple[int, ...], at: Mapping[str, int], shapes: Sequence[Shape]
) -> Any:
    """The element where every index matches; one below zero counts from the end."""
    for dim, axis, index in zip(INDEXED, axes, indices, strict=False):
        place = scalar.where(index < 0, index + shapes[0][axis], index)
        x = scalar.where(equal(place, at[dim]), x, 0.0)
    return x


def _places(indices: Sequence[Any]) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
    """The indexed axes and their indices; None for masks, whose result has no fixed shape."""
    given = {axis: index for axis, index in enumerate(indices) if index is not None}
    if not given or any(index.dtype in ("bool", "u8") for index in given.values()):
        return None
    return tuple(given), tuple(given.values())


def _index(x: Any, indices: Sequence[Any]) -> Call | None:
    found = _places(indices)
    return None if found is None else Call((x, *found[1]), {"axes": found[0]})


index = register(
    Op(
        "index",
        _index_notation,
        body=_taken,
        torch=_indexed,
        flops=0,
        gathers=INDEXED,
        attrs={"axes": (0,)},
        aten={"index.Tensor": _index},
        examples=(
            example((6, 4), ids(4, below=6), axes=(0,)),
            example((2, 2, 3, 2), ids(2, 1, below=2), ids(2, below=3), axes=(1, 2)),
            example((4, 2, 6), ids(4, below=4), ids(4, below=6), axes=(0, 2)),
        ),
    )
)


def _index_put_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape, axes = shape_at(shapes, 0), tuple_attr(attrs, "axes")
    names = letters(len(shape))
    reads, result = _index_axes(shapes[2:])
    target = _indexed_axes(names, axes, [f"{axis}!" for axis in result])
    values = shape_at(shapes, 1)
    given = [
        "0" if size == 1 else text
        for size, text in zip(values, target[len(target) - len(values) :], strict=True)
    ]
    kept = list(names)
    for n, axis in enumerate(axes):
        kept[axis] = f"{INDEXED[n]}!:{shape[axis]}"
    return notation_of([kept, given, *reads], kept)


def _put(x: Tensor, values: Tensor, *indices: Tensor, axes: tuple[int, ...], accumulate: bool) -> Tensor:
    places: list[Any] = [None] * x.dim()
    for axis, index in zip(axes, indices, strict=True):
        places[axis] = index
    return torch.ops.aten.index_put.default(x, places, values, accumulate)  # type: ignore[no-any-return]


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Call | None:
    found = _places(indices)
    if found is None:
        return None
    return Call((x, values, *found[1]), {"axes": found[0], "accumulate": accumulate})


index_put = register(
    Op(
        "index_put",
        _index_put_notation,
        torch=_put,
        flops=0,
        attrs={"axes": (0,), "accumulate": False},
        aten={"index_put.default": _index_put},
        examples=(
            example((6, 4), (2, 4), ids(2, below=6), axes=(0,), accumulate=True),
            example((2, 4, 6), (), ids(2, below=4), ids(2, below=6), axes=(1, 2)),
            example((4, 6), (4, 1), ids(1, below=6), axes=(1,)),
        ),
    )
)


def _index_add_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axis = _named(shapes, attrs, 2)
    kept = _with(names, axis, "i0!")
    return notation_of([["k"], _with(names, axis, "k"), kept], kept)


def _added(
    index: Tensor, source: Tensor, x: Tensor | None, *, dim: int, alpha: float, shard: Shard
) -> Tensor:
    base = source.new_zeros(written_shape(shard)) if x is None else x
    return base.index_add(dim, index, source, alpha=alpha)


def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Call | None:
    if not index.shape:
        return None
    return Call((index, source, x), {"dim": axis_at(dim, len(x.shape)), "alpha": alpha})


index_add = register(
    Op(
        "index_add",
        _index_add_notation,
        body=lambda index, source, *, alpha, at: _where_it_matches(index, at, alpha * source),
        finish=lambda total, x: total + x,
        torch=_added,
        flops=points_but("i0"),
        attrs={"dim": 0, "alpha": 1},
        aten={"index_add.default": _index_add},
        examples=(
            example(ids(6, below=4), (6, 2), (4, 2), dim=0),
            example(ids(4, below=3), (2, 4), (2, 3), dim=1, alpha=0.5),
        ),
    )
)


def _scatter_add_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    """What is scattered agrees with what it is scattered into but for one axis, or is smaller: then
    the rest of that axis is padding."""
    names, axis = _named(shapes, attrs, 2)
    taken, target = shape_at(shapes, 0), shape_at(shapes, 2)
    if taken != shapes[1] or len(taken) != len(target):
        raise OpError(f"{list(shape_at(shapes, 1))} cannot be added at indices of shape {list(taken)}")
    smaller = [n != m for n, m in zip(taken, target, strict=True)]
    read = [f"{name}+0" if less else name for name, less in zip(names, smaller, strict=True)]
    kept = [f"{name}!" if less else name for name, less in zip(names, smaller, strict=True)]
    return notation_of(
        [_with(read, axis, "k"), _with(read, axis, "k"), _with(kept, axis, "i0!")], _with(kept, axis, "i0!")
    )


def _scatter_added(index: Tensor, source: Tensor, x: Tensor | None, *, dim: int, shard: Shard) -> Tensor:
    base = source.new_zeros(written_shape(shard)) if x is None else x
    return base.scatter_add(dim, index, source)


scatter_add = register(
    Op(
        "scatter_add",
        _scatter_add_notation,
        body=lambda index, source, *, at: _where_it_matches(index, at, source),
        finish=lambda total, x: total + x,
        torch=_scatter_added,
        flops=points_but("i0"),
        attrs={"dim": 0},
        aten={
            "scatter_add.default": lambda x, dim, index, source: Call(
                (index, source, x), {"dim": axis_at(dim, len(x.shape))}
            )
        },
        examples=(
            example(ids(6, 2, below=4), (6, 2), (4, 2), dim=0),
            example(ids(2, 4, below=3), (2, 4), (2, 3), dim=1),
            example(ids(2, 4, 1, below=3), (2, 4, 1), (2, 3, 2), dim=1),
        ),
    )
)


def _scatter_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    """Axes that agree in all operands may be split; others have a whole dim in each."""
    names, axis = _named(shapes, attrs)
    given = [shape for shape in shapes if shape]
    agree = [i != axis and len({shape[i : i + 1] for shape in given}) == 1 for i in range(len(names))]

    def axes(letter: str, shape: Shape) -> list[str]:
        return [names[i] if agree[i] else f"{letter}{i}:{size}!" for i, size in enumerate(shape)]

    kept = axes("i", shape_at(shapes, 0))
    return notation_of([kept, axes("k", shape_at(shapes, 1)), axes("l", shape_at(shapes, 2))], kept)


def _scatter(x: Any, dim: int, index: Any, source: Any) -> Call:
    return Call((x, index, source), {"dim": axis_at(dim, len(x.shape))})


scatter = register(
    Op(
        "scatter",
        _scatter_notation,
        torch=lambda x, index, source, *, dim: x.scatter(dim, index, source),
        flops=0,
        attrs={"dim": 0},
        aten={"scatter.src": _scatter, "scatter.value": _scatter},
        examples=(
            example((4, 6), ids(4, 1, below=6), (4, 1), dim=1),
            example((4, 6), ids(4, 2, below=6), 1.0, dim=1),
            example((4, 6, 2), ids(4, 1, 1, below=6), (4, 1, 1), dim=1),
        ),
    )
)


def _one_hot(x: Tensor, *, shard: Shard) -> Tensor:
    first = shard.start("c")
    classes = torch.arange(first, first + shard.length("c"), device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64)


one_hot = register(
    Op(
        "one_hot",
        lambda shapes, attrs: f"... -> ... c:{int_attr(attrs, 'classes')}",  # noqa: ARG005
        body=lambda x, *, at: scalar.where(equal(x, at["c"]), 1.0, 0.0),
        torch=_one_hot,
        attrs={"classes": 1},
        aten={
            "one_hot.default": lambda x, classes=-1: Call((x,), {"classes": classes}) if classes > 0 else None
        },
        needs_grad=False,
        examples=(example(ids(4, 2, below=6), classes=6),),
    )
)


def _cumulated_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axis = _named(shapes, attrs)
    size = shape_at(shapes, 0)[axis]
    return notation_of([_with(names, axis, "i0!")], _with(names, axis, f"j0:{size}!"))


def _cumulated(x: Any, dim: int, *, dtype: Any = None) -> Call:
    return Call((x,), {"dim": axis_at(dim, len(x.shape)), "dtype": short_name(dtype)})


cumsum = register(
    Op(
        "cumsum",
        _cumulated_notation,
        body=lambda x, *, at: x if at["i0"] <= at["j0"] else 0.0,
        torch=lambda x, *, dim, dtype: x.cumsum(dim, dtype=torch_dtype(dtype)),
        flops=points_but("j0"),
        attrs={"dim": 0, "dtype": None},
        aten={"cumsum.default": _cumulated},
        examples=(example((4, 6), dim=1), example((6, 2), dim=0)),
    )
)

cumprod = register(
    Op(
        "cumprod",
        _cumulated_notation,
        torch=lambda x, *, dim, dtype: x.cumprod(dim, dtype=torch_dtype(dtype)),
        flops=points_but("j0"),
        attrs={"dim": 0, "dtype": None},
        aten={"cumprod.default": _cumulated},
        examples=(example((4, 6), dim=1),),
    )
)


def _topk_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, axis = _named(shapes, attrs)
    written = _with(names, axis, f"j0:{int_attr(attrs, 'k')}!")
    return notation_of([_with(names, axis, "i0!")], written, written)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Call:
    axis = axis_at(dim, len(x.shape))
    return Call((x,), {"k": k, "dim": axis, "largest": largest, "in_order": in_order})


topk = register(
    Op(
        "topk",
        _topk_notation,
        torch=lambda x, *, k, dim, largest, in_order: tuple(torch.topk(x, k, dim, largest, in_order)),
        flops=points_but("j0"),
        attrs={"k": 1, "dim": 0, "largest": True, "in_order": True},
        aten={"topk.default": _topk},
        examples=(example((4, 6), k=2, dim=1), example((6, 2, 2), k=3, dim=0, largest=False)),
    )
)


def _comparisons(sizes: Mapping[str, int]) -> float:
    """What sorting takes: n log n for each row."""
    return math.prod(sizes.values()) * math.log2(max(sizes["i0"], 2))


def _sort_notation(shapes: Sequence[Shape | None], attrs: Attrs, outputs: int = 2) -> str:
    names, axis = _named(shapes, attrs)
    ordered = _with(names, axis, "i0!")
    return notation_of([ordered], *[ordered] * outputs)


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = False) -> Call:
    axis = axis_at(dim, len(x.shape))
    return Call((x,), {"dim": axis, "descending": descending, "stable": bool(stable)})


sort = register(
    Op(
        "sort",
        _sort_notation,
        torch=lambda x, *, dim, descending, stable: tuple(
            torch.sort(x, dim=dim, descending=descending, stable=stable)
        ),
        flops=_comparisons,
        attrs={"dim": 0, "descending": False, "stable": False},
        aten={"sort.default": _sort, "sort.stable": _sort},
        examples=(example((4, 6), dim=1), example((6, 4), dim=0, descending=True, stable=True)),
    )
)

argsort = register(
    Op(
        "argsort",
        partial(_sort_notation, outputs=1),
        torch=lambda x, *, dim, descending, stable: torch.argsort(
            x, dim=dim, descending=descending, stable=stable
        ),
        flops=_comparisons,
        attrs={"dim": 0, "descending": False, "stable": False},
        aten={"argsort.default": _sort, "argsort.stable": _sort},
        needs_grad=False,
        examples=(example((4, 6), dim=1), example((6, 4), dim=0, descending=True)),
    )
)
