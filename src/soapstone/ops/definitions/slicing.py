"""Operators that take, join or replace pieces: reads at an offset, or with a stride.

An element that lies past an operand's border reads as padding. So a concatenation is the sum of
its operands, each shifted to its place, and a crop is a padding by less than nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops import scalar
from soapstone.ops.definitions.axes import (
    axis_at,
    int_attr,
    keeps,
    letters,
    notation_of,
    points_but,
    shape_at,
    tuple_attr,
)
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.examples import example
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _shifted(dim: str, by: int) -> str:
    """The index `dim + by`; written as a sum even by 0, for the axis may be longer than the dim."""
    return f"{dim}+{by}" if by >= 0 else f"{dim}-{-by}"


def _named(shapes: Sequence[Shape | None], attrs: Attrs) -> tuple[list[str], Shape, int]:
    """Names for the first operand's axes, its shape, and the axis that `dim` says."""
    shape = shape_at(shapes, 0)
    return letters(len(shape)), shape, axis_at(int_attr(attrs, "dim"), len(shape))


def _letter(dim: int) -> str:
    return letters(dim + 1)[dim]


def _place(at: Mapping[str, int], dim: int) -> int:
    return at[_letter(dim)]


def _slice_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, shape, axis = _named(shapes, attrs)
    taken = range(int_attr(attrs, "start"), int_attr(attrs, "end"), int_attr(attrs, "step"))
    if not taken or taken[0] < 0 or taken[-1] >= shape[axis]:
        raise OpError(f"the slice {taken} is empty or leaves an axis of size {shape[axis]}")
    read, written = list(names), list(names)
    read[axis] = (
        f"{taken.step}*{names[axis]}+{taken.start}" if taken.step > 1 else _shifted(names[axis], taken.start)
    )
    written[axis] += f":{len(taken)}"
    return notation_of([read], written)


def _sliced(x: Tensor, *, dim: int, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(None, None, step),)]


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Call:
    axis = axis_at(dim, len(x.shape))
    first, last, by = slice(start, end, step).indices(x.shape[axis])
    return Call((x,), {"dim": axis, "start": first, "end": last, "step": by})


def _narrow(x: Any, dim: int, start: int, length: int) -> Call:
    first = start % x.shape[dim] if start else 0
    return _slice(x, dim, first, first + length)


piece = register(
    Op(
        "slice",
        _slice_notation,
        is_view=True,
        body=keeps,
        torch=_sliced,
        attrs={"dim": 0, "start": 0, "end": 0, "step": 1},
        aten={"slice.Tensor": _slice, "narrow.default": _narrow},
        examples=(
            example((4, 8), dim=1, start=2, end=8),
            example((2, 8, 2), dim=1, start=1, end=8, step=2),
            example((4, 6), dim=0, start=0, end=4),
        ),
    )
)


def _select_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, shape, axis = _named(shapes, attrs)
    index = int_attr(attrs, "index")
    if not 0 <= index < shape[axis]:
        raise OpError(f"there is no index {index} on an axis of size {shape[axis]}")
    return notation_of([[*names[:axis], str(index), *names[axis + 1 :]]], [*names[:axis], *names[axis + 1 :]])


def _select(x: Any, dim: int, index: int) -> Call:
    axis = axis_at(dim, len(x.shape))
    return Call((x,), {"dim": axis, "index": axis_at(index, x.shape[axis])})


select = register(
    Op(
        "select",
        _select_notation,
        is_view=True,
        body=keeps,
        torch=lambda x, *, dim: x.select(dim, 0),
        attrs={"dim": 0, "index": 0},
        aten={"select.int": _select},
        examples=(example((4, 6), dim=1, index=2), example((2, 4, 6), dim=0, index=1)),
    )
)


def _concat_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, _, axis = _named(shapes, attrs)
    reads, offset = [], 0
    for i in range(len(shapes)):
        if len(shape_at(shapes, i)) != len(names):
            raise OpError(f"concat joins values of one rank, not {len(names)} and {len(shape_at(shapes, i))}")
        reads.append([*names[:axis], _shifted(names[axis], -offset), *names[axis + 1 :]])
        offset += shape_at(shapes, i)[axis]
    return notation_of(reads, [*names[:axis], f"{names[axis]}:{offset}", *names[axis + 1 :]])


def _concat(xs: Sequence[Any], dim: int = 0) -> Call | None:
    parts = [x for x in xs if 0 not in x.shape]
    if not parts or any(x.dtype != parts[0].dtype for x in parts):
        return None
    return Call(tuple(parts), {"dim": axis_at(dim, len(parts[0].shape))})


concat = register(
    Op(
        "concat",
        _concat_notation,
        body=lambda *xs: reduce(operator.add, xs),
        torch=lambda *xs, dim: torch.cat([x for x in xs if x is not None], dim),
        flops=0,
        attrs={"dim": 0},
        aten={"cat.default": _concat, "concat.default": _concat, "concatenate.default": _concat},
        examples=(
            example((4, 2), (4, 4), dim=1),
            example((2, 3, 2), (2, 2, 2), (2, 1, 2), dim=1),
            example((4, 6), dim=0),
        ),
    )
)


def _pad_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape, pads = shape_at(shapes, 0), tuple_attr(attrs, "pads")
    names = letters(len(shape))
    read, written = list(names), list(names)
    for axis, (before, after) in zip(range(len(shape) - len(pads), len(shape)), pads, strict=True):
        size = shape[axis] + before + after
        if size < 1:
            raise OpError(f"padding by {before} and {after} leaves nothing of an axis of size {shape[axis]}")
        read[axis] = _shifted(names[axis], -before)
        written[axis] += f":{size}"
    return notation_of([read], written)


def _padded(x: Tensor | None, *, shard: Shard, value: float = 0.0) -> Tensor:
    """What a shard reads, with the padding that it reaches into, which may be all there is."""
    pads = shard.pads(0)
    if x is None:
        box = shard.signature.read(0, shard.box).box
        shape = [axis.length + sum(pair) for axis, pair in zip(box, pads, strict=True)]
        return torch.full(shape, value, dtype=torch_dtype(shard.dtype), device=shard.device)
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=value)


def _pad(x: Any, pad: Sequence[int], value: float = 0) -> Call:
    pairs = tuple(zip(pad[::2], pad[1::2], strict=True))
    return Call((x,), {"pads": pairs[::-1], "value": value})


pad = register(
    Op(
        "pad",
        _pad_notation,
        body=keeps,
        torch=_padded,
        attrs={"pads": (), "value": 0.0},
        outside="value",
        aten={
            "constant_pad_nd.default": _pad,
            "pad.default": lambda x, pad, mode="constant", value=None: (
                _pad(x, pad, value or 0) if mode == "constant" else None
            ),
        },
        examples=(
            example((2, 4), pads=((2, 2),), value=0.5),
            example((2, 3, 5), pads=((1, 0), (-2, 1))),
            example((4, 6), pads=((0, 0), (4, 2))),
        ),
    )
)


def _border_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    """A padded axis stays whole: it is read by `i0`, `i1`, ..., numbered from the first padded one."""
    shape, pads = shape_at(shapes, 0), tuple_attr(attrs, "pads")
    read = letters(len(shape))
    written = list(read)
    first = len(shape) - len(pads)
    for i, (before, after) in enumerate(pads):
        written[first + i] += f":{shape[first + i] + before + after}!"
        read[first + i] = f"i{i}!"
    return notation_of([read], written)


_SOURCES: dict[str, Callable[[int, int], int]] = {
    "reflect": lambda place, size: (size - 1) - abs((size - 1) - abs(place)),
    "replicate": lambda place, size: min(max(place, 0), size - 1),
    "circular": lambda place, size: place % size,
}


def _bordered(x: Any, *, pads: Any, mode: str, at: Mapping[str, int], shapes: Sequence[Shape]) -> Any:
    first = len(shapes[0]) - len(pads)
    for i, (before, _) in enumerate(pads):
        place = _SOURCES[mode](_place(at, first + i) - before, shapes[0][first + i])
        if place != at[f"i{i}"]:
            return 0.0
    return x


def _border(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Call | None:
    del value
    pairs = tuple(zip(pad[::2], pad[1::2], strict=True))
    return Call((x,), {"pads": pairs[::-1], "mode": mode}) if mode in _SOURCES else None


pad_border = register(
    Op(
        "pad_border",
        _border_notation,
        body=_bordered,
        torch=lambda x, *, pads, mode: F.pad(x, [n for pair in reversed(pads) for n in pair], mode),
        flops=0,
        attrs={"pads": (), "mode": "reflect"},
        aten={
            "pad.default": _border,
            **{f"reflection_pad{n}d.default": partial(_border, mode="reflect") for n in (1, 2, 3)},
            **{f"replication_pad{n}d.default": partial(_border, mode="replicate") for n in (1, 2, 3)},
        },
        examples=(
            example((2, 2, 4), pads=((2, 1),)),
            example((2, 2, 2, 3), pads=((1, 0), (1, 2)), mode="replicate"),
            example((2, 2, 4), pads=((1, 2),), mode="circular"),
        ),
    )
)


def _triangle(name: str, is_kept: Any) -> Op:
    """A triangle of every matrix, the other one zero; a shard's diagonal is shifted by its place."""

    def torch_function(x: Tensor, *, shard: Shard, diagonal: int) -> Tensor:
        shift = diagonal + shard.start("i") - shard.start("j")
        return getattr(torch, name)(x, shift)  # type: ignore[no-any-return]

    return register(
        Op(
            name,
            "... i j -> ... i j",
            body=lambda x, *, diagonal, at: scalar.where(is_kept(at["j"] - at["i"], diagonal), x, 0.0),
            torch=torch_function,
            attrs={"diagonal": 0},
            aten={f"{name}.default": None},
            examples=(example((4, 6)), example((2, 4, 4), diagonal=1), example((4, 6), diagonal=-1)),
        )
    )


tril = _triangle("tril", operator.le)
triu = _triangle("triu", operator.ge)


def _diagonal_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape, offset = shape_at(shapes, 0), int_attr(attrs, "offset")
    row, column = (axis_at(int_attr(attrs, name), len(shape)) for name in ("dim1", "dim2"))
    names = letters(len(shape))
    down, right = max(0, -offset), max(0, offset)
    length = min(shape[row] - down, shape[column] - right)
    if length < 1:
        raise OpError(f"{list(shape)} has no diagonal {offset}")
    read = list(names)
    read[row], read[column] = _shifted(names[row], down), _shifted(names[row], right)
    rest = [name for axis, name in enumerate(names) if axis not in (row, column)]
    return notation_of([read], [*rest, f"{names[row]}:{length}"])


diagonal = register(
    Op(
        "diagonal",
        _diagonal_notation,
        is_view=True,
        body=keeps,
        torch=lambda x, *, dim1, dim2: x.diagonal(0, dim1, dim2),
        attrs={"offset": 0, "dim1": 0, "dim2": 1},
        aten={"diagonal.default": None},
        examples=(example((4, 6)), example((2, 4, 6), offset=2, dim1=1, dim2=2), example((6, 4), offset=-1)),
    )
)


def _unfold_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, shape, axis = _named(shapes, attrs)
    window, step = int_attr(attrs, "window"), int_attr(attrs, "step")
    count = (shape[axis] - window) // step + 1
    if count < 1:
        raise OpError(f"a window of {window} does not fit into an axis of size {shape[axis]}")
    read = [*names[:axis], f"{step}*{names[axis]}+k", *names[axis + 1 :]]
    return notation_of([read], [*names[:axis], f"{names[axis]}:{count}", *names[axis + 1 :], f"k:{window}"])


def _unfold(x: Any, dimension: int, size: int, step: int) -> Call:
    return Call((x,), {"dim": axis_at(dimension, len(x.shape)), "window": size, "step": step})


unfold = register(
    Op(
        "unfold",
        _unfold_notation,
        body=keeps,
        torch=lambda x, *, dim, step, shard: x.unfold(dim, shard.length("k"), step),
        attrs={"dim": 0, "window": 1, "step": 1},
        aten={"unfold.default": _unfold},
        examples=(example((2, 9), dim=1, window=4, step=2), example((5, 2), dim=0, window=2, step=1)),
    )
)


def _im2col_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape = shape_at(shapes, 0)
    if len(shape) != 4:
        raise OpError(f"im2col takes a batch of images, not a tensor of shape {list(shape)}")
    names = ("window", "dilation", "padding", "stride")
    window, dilation, padding, stride = (tuple_attr(attrs, name) for name in names)
    read, counts = [], []
    for i, (place, tap) in enumerate((("h", "r"), ("w", "q"))):
        read.append(f"{stride[i]}*{place}+{dilation[i]}*{tap}-{padding[i]}")
        reach = dilation[i] * (window[i] - 1) + 1
        counts.append((shape[2 + i] + 2 * padding[i] - reach) // stride[i] + 1)
    if min(counts) < 1:
        raise OpError(f"a window of {list(window)} does not fit into images of {list(shape[2:])}")
    taps = f"(c r:{window[0]}! q:{window[1]}!)"
    return notation_of([["b", "c", *read]], ["b", taps, f"(h:{counts[0]} w:{counts[1]})"])


def _columns(x: Tensor | None, *, shard: Shard, window: Any, dilation: Any, stride: Any) -> Tensor:
    return F.unfold(_padded(x, shard=shard), window, dilation, 0, stride)


def _im2col(x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Call:
    given = {"window": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}
    return Call((x,), {name: tuple(value) for name, value in given.items()})


im2col = register(
    Op(
        "im2col",
        _im2col_notation,
        body=keeps,
        torch=_columns,
        attrs={"window": (1, 1), "dilation": (1, 1), "padding": (0, 0), "stride": (1, 1)},
        aten={"im2col.default": _im2col},
        examples=(
            example((2, 2, 4, 4), window=(3, 3), padding=(1, 1)),
            example((2, 2, 4, 5), window=(2, 2), stride=(2, 1)),
            example((2, 1, 2, 2), window=(1, 2), padding=(1, 0)),
        ),
    )
)


def _slice_scatter_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, shape, axis = _named(shapes, attrs)
    start, end = int_attr(attrs, "start"), int_attr(attrs, "end")
    if not 0 <= start < end <= shape[axis] or shape_at(shapes, 1)[axis] != end - start:
        raise OpError(f"{list(shape_at(shapes, 1))} does not fit at {start}:{end} of {list(shape)}")
    return notation_of([names, [*names[:axis], _shifted(names[axis], -start), *names[axis + 1 :]]], names)


def _with_slice(x: Tensor, part: Tensor | None, *, shard: Shard, dim: int, start: int) -> Tensor:
    if part is None:
        return x.view_as(x)
    first = max(start - shard.start(_letter(dim)), 0)
    return torch.slice_scatter(x, part, dim, first, first + part.shape[dim])


def _slice_scatter(
    x: Any, part: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Call | None:
    axis = axis_at(dim, len(x.shape))
    first, last, by = slice(start, end, step).indices(x.shape[axis])
    return Call((x, part), {"dim": axis, "start": first, "end": last}) if by == 1 else None


slice_scatter = register(
    Op(
        "slice_scatter",
        _slice_scatter_notation,
        body=lambda x, part, *, dim, start, end, at: part if start <= _place(at, dim) < end else x,
        torch=_with_slice,
        attrs={"dim": 0, "start": 0, "end": 1},
        aten={"slice_scatter.default": _slice_scatter},
        examples=(
            example((4, 8), (4, 3), dim=1, start=2, end=5),
            example((4, 2), (4, 2), dim=0, start=0, end=4),
        ),
    )
)


def _select_scatter_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, _, axis = _named(shapes, attrs)
    return notation_of([names, [*names[:axis], *names[axis + 1 :]]], names)


def _with_selected(x: Tensor, part: Tensor, *, shard: Shard, dim: int, index: int) -> Tensor:
    place = index - shard.start(_letter(dim))
    if not 0 <= place < x.shape[dim]:
        return x.view_as(x)
    return torch.select_scatter(x, part, dim, place)


def _select_scatter(x: Any, part: Any, dim: int, index: int) -> Call:
    axis = axis_at(dim, len(x.shape))
    return Call((x, part), {"dim": axis, "index": axis_at(index, x.shape[axis])})


select_scatter = register(
    Op(
        "select_scatter",
        _select_scatter_notation,
        body=lambda x, part, *, dim, index, at: part if _place(at, dim) == index else x,
        torch=_with_selected,
        attrs={"dim": 0, "index": 0},
        aten={"select_scatter.default": _select_scatter},
        examples=(example((4, 6), (4,), dim=1, index=2), example((2, 4), (4,), dim=0, index=1)),
    )
)


def _diff_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, shape, axis = _named(shapes, attrs)
    read = [*names[:axis], f"{names[axis]}+k:2!", *names[axis + 1 :]]
    return notation_of([read], [*names[:axis], f"{names[axis]}:{shape[axis] - 1}", *names[axis + 1 :]])


def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Call | None:
    if n != 1 or prepend is not None or append is not None:
        return None
    return Call((x,), {"dim": axis_at(dim, len(x.shape))})


diff = register(
    Op(
        "diff",
        _diff_notation,
        body=lambda x, *, at: x if at["k"] else -x,
        torch=lambda x, *, dim: torch.diff(x, dim=dim),
        flops=points_but("k"),
        attrs={"dim": 0},
        aten={"diff.default": _diff},
        examples=(example((4, 5), dim=1), example((5, 2), dim=0)),
    )
)
