"""Operators that give elements another place: the notation is all there is to them.

`reshape` is every view, flatten and squeeze. Its notation is found by factoring: neighbouring axes
of both shapes that hold the same elements form a block, and where the sizes of a block have a
common refinement each axis becomes a group of its factors,

    (2, 12) -> (2, 3, 4)        a:2 (b:3 c:4) -> a b c
    (8, 3)  -> (4, 6)           (a:4 b:2) c:3 -> a (b c)

Where they have none, rows of the output still need only some rows of the operand: with the position
4a + b of an output element, the row that holds it is the one exact quotient of

    (4, 6)  -> (6, 4)           (4*a+b-c)/6 c:6! -> a:6 b:4!

A shard never sees the sizes written in the model: its own shape follows from its box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops.definitions.axes import (
    axes_at,
    axis_at,
    keeps,
    letters,
    notation_of,
    shape_at,
    tuple_attr,
    written_shape,
)
from soapstone.ops.examples import example
from soapstone.ops.lazy import torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor

Block = tuple[list[int], list[int]]


def _blocks(before: Shape, after: Shape) -> Iterator[Block]:
    """The smallest groups of axes on both sides with the same number of elements; ones left out."""
    left = [axis for axis, size in enumerate(before) if size != 1]
    right = [axis for axis, size in enumerate(after) if size != 1]
    while left and right:
        block = [left.pop(0)], [right.pop(0)]
        counts = [before[block[0][0]], after[block[1][0]]]
        while counts[0] != counts[1]:
            side, rest, shape = (0, left, before) if counts[0] < counts[1] else (1, right, after)
            if not rest:
                break
            block[side].append(rest.pop(0))
            counts[side] *= shape[block[side][-1]]
        yield block


def _refinement(before: Sequence[int], after: Sequence[int]) -> list[int] | None:
    """The factors, outermost first, of which both lists of sizes are products; None if there are none."""
    factors, left, right = [], list(before), list(after)
    while left and right:
        factor = min(left[0], right[0])
        if left[0] % factor or right[0] % factor:
            return None
        factors.append(factor)
        for side in (left, right):
            side[0] //= factor
            if side[0] == 1:
                side.pop(0)
    return factors


def _grouped(sizes: Sequence[int], dims: Sequence[tuple[str, int]]) -> list[str]:
    """The dims, in order, as one axis for each size that they multiply up to."""
    axes, rest = [], list(dims)
    for size in sizes:
        group: list[str] = []
        count = 1
        while count < size:
            name, factor = rest.pop(0)
            group.append(f"{name}:{factor}")
            count *= factor
        axes.append(group[0] if len(group) == 1 else f"({' '.join(group)})")
    return axes


def _strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _times(stride: int, dim: str) -> str:
    return dim if stride == 1 else f"{stride}*{dim}"


def _quotients(
    before: Sequence[int], after: Sequence[int], names: Iterator[str]
) -> tuple[list[str], list[str]]:
    """The axes of a block without refinement: the first one read is a quotient, and all but the
    first one written are whole, so that a shard's elements lie next to each other."""
    written, rest = [next(names) for _ in after], [next(names) for _ in before[1:]]
    plus = [_times(stride, dim) for dim, stride in zip(written, _strides(after), strict=True)]
    minus = [_times(stride, dim) for dim, stride in zip(rest, _strides(before)[1:], strict=True)]
    row = f"({'+'.join(plus)}-{'-'.join(minus)})/{prod(before[1:])}"
    return (
        [row, *(f"{dim}:{size}!" for dim, size in zip(rest, before[1:], strict=True))],
        [f"{dim}:{size}{'!' if i else ''}" for i, (dim, size) in enumerate(zip(written, after, strict=True))],
    )


def _reshape_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    before, after = shape_at(shapes, 0), tuple_attr(attrs, "shape")
    if prod(before) != prod(after) or not prod(before):
        raise OpError(f"reshape cannot make {list(after)} of {list(before)}: the sizes do not match")
    read, written = ["0"] * len(before), ["0"] * len(after)
    names = iter(letters(26))
    for inner, outer in _blocks(before, after):
        sizes = [before[axis] for axis in inner], [after[axis] for axis in outer]
        factors = _refinement(*sizes)
        if factors is None:
            axes = _quotients(*sizes, names)
        else:
            dims = [(next(names), factor) for factor in factors]
            axes = _grouped(sizes[0], dims), _grouped(sizes[1], dims)
        for side, places, texts in ((read, inner, axes[0]), (written, outer, axes[1])):
            for place, text in zip(places, texts, strict=True):
                side[place] = text
    return notation_of([read], written)


def _reshaped(x: Tensor, *, shard: Shard) -> Tensor:
    before, after = shard.signature.shapes[0], shard.signature.output_shapes[0]
    shape = written_shape(shard)
    assert before is not None
    blocks = [] if shard.is_whole else list(_blocks(before, after))
    for inner, outer in reversed(blocks):
        sizes = [before[axis] for axis in inner], [after[axis] for axis in outer]
        if _refinement(*sizes) is not None:
            continue
        first_row = shard.signature.read(0, shard.box).box[inner[0]].lo
        first = shard.signature.write(0, shard.box)[outer[0]].lo
        start = first * _strides(sizes[1])[0] - first_row * _strides(sizes[0])[0]
        count = prod(shape[axis] for axis in outer)
        x = x.flatten(inner[0], inner[-1]).narrow(inner[0], start, count)
    return x.reshape(shape)


def _resolved(x: Any, size: Iterable[int]) -> Call:
    """A shape in which one size may be -1: what is left."""
    given = list(size)
    if -1 in given:
        given[given.index(-1)] = prod(x.shape) // -prod(given)
    return Call((x,), {"shape": tuple(given)})


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Call:
    shape = x.shape or (1,)
    first, last = axis_at(start_dim, len(shape)), axis_at(end_dim, len(shape))
    merged = prod(shape[first : last + 1])
    return Call((x,), {"shape": (*shape[:first], merged, *shape[last + 1 :])})


def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Call:
    axis = axis_at(dim, len(x.shape))
    return _resolved(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def _squeeze(x: Any, dim: int | Sequence[int] | None = None) -> Call:
    gone = axes_at(dim, len(x.shape)) if dim != [] else ()
    return Call((x,), {"shape": tuple(n for axis, n in enumerate(x.shape) if axis not in gone or n != 1)})


def _unsqueeze(x: Any, dim: int) -> Call:
    axis = axis_at(dim, len(x.shape) + 1)
    return Call((x,), {"shape": (*x.shape[:axis], 1, *x.shape[axis:])})


reshape = register(
    Op(
        "reshape",
        _reshape_notation,
        is_view=True,
        body=keeps,
        torch=_reshaped,
        flops=0,
        attrs={"shape": ()},
        aten={
            "view.default": _resolved,
            "reshape.default": _resolved,
            "_unsafe_view.default": _resolved,
            "flatten.using_ints": _flatten,
            "unflatten.int": _unflatten,
            "squeeze.default": _squeeze,
            "squeeze.dim": _squeeze,
            "squeeze.dims": _squeeze,
            "unsqueeze.default": _unsqueeze,
        },
        examples=(
            example((2, 12), shape=(2, 3, 4)),
            example((4, 2, 3), shape=(8, 3)),
            example((8, 3), shape=(4, 6)),
            example((2, 1, 4), shape=(1, 2, 4, 1)),
            example((4, 6), shape=(6, 4)),
            example((2, 4, 3, 2, 2), shape=(2, 6, 4, 2)),
            example((1,), shape=()),
        ),
    )
)


def _permute_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    names, order = letters(len(shape_at(shapes, 0))), tuple_attr(attrs, "dims")
    if sorted(order) != list(range(len(names))):
        raise OpError(f"{list(order)} is not an order of {len(names)} axes")
    return notation_of([names], [names[axis] for axis in order])


def _permute(x: Any, dims: Iterable[int]) -> Call:
    return Call((x,), {"dims": tuple(axis_at(dim, len(x.shape)) for dim in dims)})


def _transpose(x: Any, dim0: int, dim1: int) -> Call:
    order = list(range(len(x.shape)))
    first, second = axis_at(dim0, len(order)), axis_at(dim1, len(order))
    if order:
        order[first], order[second] = second, first
    return Call((x,), {"dims": tuple(order)})


permute = register(
    Op(
        "permute",
        _permute_notation,
        is_view=True,
        body=keeps,
        torch=lambda x, *, dims: x.permute(dims),
        attrs={"dims": ()},
        aten={
            "permute.default": _permute,
            "transpose.int": _transpose,
            "t.default": lambda x: _transpose(x, 0, len(x.shape) - 1),
        },
        examples=(example((2, 4, 6), dims=(2, 0, 1)), example((4, 6), dims=(1, 0))),
    )
)


def _expand_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    before, after = shape_at(shapes, 0), tuple_attr(attrs, "size")
    if len(before) > len(after):
        raise OpError(f"a tensor of shape {list(before)} cannot be expanded to {list(after)}")
    names = letters(len(after))
    shown = list(zip(names[len(after) - len(before) :], before, strict=True))
    read = [name if size != 1 else "0" for name, size in shown]
    written = [f"{name}:{size}" for name, size in zip(names, after, strict=True)]
    return notation_of([read], written)


def _expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Call:
    del implicit
    kept = (1,) * (len(size) - len(x.shape)) + tuple(x.shape)
    return Call((x,), {"size": tuple(old if n == -1 else n for n, old in zip(size, kept, strict=True))})


def _assigned(x: Any, source: Any, non_blocking: bool = False) -> Call | None:
    """`x` with all elements replaced by `source`'s: of `x` only the shape is left."""
    del non_blocking
    return Call((source,), {"size": tuple(x.shape)}) if source.dtype == x.dtype else None


expand = register(
    Op(
        "expand",
        _expand_notation,
        is_view=True,
        body=keeps,
        torch=lambda x, *, shard: x.expand(written_shape(shard)),
        attrs={"size": ()},
        aten={
            "expand.default": _expand,
            "broadcast_to.default": _expand,
            "expand_as.default": lambda x, other: Call((x,), {"size": tuple(other.shape)}),
            "copy.default": _assigned,
            "fill.Tensor": _assigned,
        },
        examples=(
            example((4, 1, 6), size=(2, 4, 2, 6)),
            example((4, 6), size=(4, 6)),
            example((), size=(4, 2)),
        ),
    )
)


def _rearranged(x: Tensor, *, shard: Shard) -> Tensor:
    access = shard.signature.operands[0]
    assert access is not None
    read = [dim for axis in access for dim in axis.dims]
    written = [dim for axis in shard.signature.outputs[0] for dim in axis.dims]
    x = x.reshape([shard.length(dim) for dim in read])
    return x.permute([read.index(dim) for dim in written]).reshape(written_shape(shard))


def _channel_shuffle(x: Any, groups: int) -> Call:
    places = " ".join(letters(len(x.shape))[2:])
    return Call((x,), {"pattern": f"n (g:{groups} m) {places} -> n (m g) {places}"})


rearrange = register(
    Op(
        "rearrange",
        lambda shapes, attrs: str(attrs["pattern"]),  # noqa: ARG005
        body=keeps,
        torch=_rearranged,
        attrs={"pattern": "... -> ..."},
        aten={
            "pixel_shuffle.default": lambda x, n: Call(
                (x,), {"pattern": f"... (c r:{n} q:{n}) h w -> ... c (h r) (w q)"}
            ),
            "pixel_unshuffle.default": lambda x, n: Call(
                (x,), {"pattern": f"... c (h r:{n}) (w q:{n}) -> ... (c r q) h w"}
            ),
            "channel_shuffle.default": _channel_shuffle,
        },
        examples=(
            example((2, 8, 2, 2), pattern="... (c r:2 q:2) h w -> ... c (h r) (w q)"),
            example((2, 2, 4, 2), pattern="... c (h r:2) (w q:2) -> ... (c r q) h w"),
            example((2, 4, 2), pattern="n (g:2 m) c -> n (m g) c"),
        ),
    )
)


def _repeats(attrs: Attrs, rank: int) -> tuple[int, ...]:
    counts = tuple_attr(attrs, "repeats")
    if len(counts) < rank or any(count < 1 for count in counts):
        raise OpError(f"{list(counts)} does not say how often to repeat each of {rank} axes")
    return counts


def _repeat_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    """An axis repeated is `(r a)`, one whose every element is repeated would be `(a r)`."""
    shape = shape_at(shapes, 0)
    counts = _repeats(attrs, len(shape))
    added = len(counts) - len(shape)
    names = letters(len(shape))
    new = [f"r{i}:{count}" for i, count in enumerate(counts)]
    written = [
        f"({n} {name})" if c > 1 else name
        for n, c, name in zip(new[added:], counts[added:], names, strict=True)
    ]
    return notation_of([names], [*new[:added], *written])


def _repeated(x: Tensor, *, shard: Shard) -> Tensor:
    shape = written_shape(shard)
    old = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
    return x.repeat([n // size for n, size in zip(shape, old, strict=True)])


def _repeat(x: Any, repeats: Sequence[int]) -> Call:
    return Call((x,), {"repeats": (1,) * (len(x.shape) - len(repeats)) + tuple(repeats)})


repeat = register(
    Op(
        "repeat",
        _repeat_notation,
        body=keeps,
        torch=_repeated,
        attrs={"repeats": ()},
        aten={"repeat.default": _repeat, "tile.default": _repeat},
        examples=(example((2, 4), repeats=(2, 1, 3)), example((4, 6), repeats=(2, 1))),
    )
)


def _interleave_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape = shape_at(shapes, 0)
    names, counts = letters(len(shape)), _repeats(attrs, len(shape))
    if len(counts) > len(names):
        raise OpError(f"{list(counts)} repeats more axes than the {len(names)} there are")
    pairs = enumerate(zip(names, counts, strict=True))
    written = [f"({name} r{i}:{count})" if count > 1 else name for i, (name, count) in pairs]
    return notation_of([names], written)


def _interleaved(x: Tensor, *, shard: Shard) -> Tensor:
    shape = written_shape(shard)
    spread = [count for n, size in zip(shape, x.shape, strict=True) for count in (size, n // size)]
    with_ones = [count for size in x.shape for count in (size, 1)]
    return x.reshape(with_ones).expand(spread).reshape(shape)


def _interleave(
    x: Any, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Call | None:
    del output_size
    if dim is None:
        return None
    axis = axis_at(dim, len(x.shape))
    return Call((x,), {"repeats": tuple(repeats if i == axis else 1 for i in range(len(x.shape)))})


def _nearest(x: Any, output_size: Sequence[int] | None, *scales: Any) -> Call | None:
    """Upsampling to the nearest element, by whole factors."""
    places = x.shape[2:]
    sizes = output_size or [int(n * factor) for n, factor in zip(places, scales[0], strict=True)]
    if any(new % n for new, n in zip(sizes, places, strict=True)):
        return None
    return Call((x,), {"repeats": (1, 1, *(new // n for new, n in zip(sizes, places, strict=True)))})


repeat_interleave = register(
    Op(
        "repeat_interleave",
        _interleave_notation,
        body=keeps,
        torch=_interleaved,
        attrs={"repeats": ()},
        aten={
            "repeat_interleave.self_int": _interleave,
            "upsample_nearest1d.vec": _nearest,
            "upsample_nearest2d.vec": _nearest,
            "upsample_nearest3d.vec": _nearest,
            "upsample_nearest1d.default": _nearest,
            "upsample_nearest2d.default": _nearest,
            "upsample_nearest3d.default": _nearest,
        },
        examples=(example((2, 4, 2), repeats=(1, 2, 1)), example((2, 2, 2, 4), repeats=(1, 1, 2, 2))),
    )
)


def _flip_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shape, flipped = shape_at(shapes, 0), tuple_attr(attrs, "dims")
    names = letters(len(shape))
    read = [
        f"{n - 1}-{name}" if i in flipped else name
        for i, (name, n) in enumerate(zip(names, shape, strict=True))
    ]
    written = [f"{name}:{size}" for name, size in zip(names, shape, strict=True)]
    return notation_of([read], written)


flip = register(
    Op(
        "flip",
        _flip_notation,
        body=keeps,
        torch=lambda x, *, dims: x.flip(dims),
        attrs={"dims": ()},
        aten={
            "flip.default": lambda x, dims: Call((x,), {"dims": axes_at(dims, len(x.shape)) if dims else ()})
        },
        examples=(example((4, 6), dims=(1,)), example((2, 4, 2), dims=(0, 1))),
    )
)


def _roll_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    rolled = tuple_attr(attrs, "dims")
    names = [name + "!" * (i in rolled) for i, name in enumerate(letters(len(shape_at(shapes, 0))))]
    return notation_of([names], names)


def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Call | None:
    if not dims and len(x.shape) != 1:
        return None
    axes = tuple(axis_at(dim, len(x.shape)) for dim in dims or (0,))
    return Call((x,), {"shifts": tuple(shifts), "dims": axes})


roll = register(
    Op(
        "roll",
        _roll_notation,
        torch=lambda x, *, shifts, dims: torch.roll(x, shifts, dims),
        flops=0,
        attrs={"shifts": (), "dims": ()},
        aten={"roll.default": _roll},
        examples=(example((4, 6), shifts=(2,), dims=(1,)), example((2, 4, 6), shifts=(1, -2), dims=(1, 2))),
    )
)


# Complex numbers come as pairs of real ones and end as such; what lies between is elementwise.
to_complex = register(
    Op(
        "to_complex",
        "... k:2! -> ...",
        torch=lambda x: torch.view_as_complex(x.contiguous()),
        flops=0,
        aten={"view_as_complex.default": None},
        examples=(example((4, 6, 2)), example((2, 2, 4, 2))),
    )
)

from_complex = register(
    Op(
        "from_complex",
        "... -> ... k:2!",
        torch=lambda x: torch.view_as_real(x if x.is_complex() else torch.complex(x, torch.zeros_like(x))),
        flops=0,
        aten={"view_as_real.default": None},
        examples=(example((4, 6)),),
    )
)
