"""Convolutions. Strides, dilation and padding are coefficients of the notation, so the halo a
shard needs is interval arithmetic, and what reaches past a border is padding.

A transposed convolution is the same sum read the other way: the output row `h` meets the kernel
row `r` at the input row `(h+p-r*d)/s`, where that division comes out even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops.examples import Example, example
from soapstone.ops.lazy import F
from soapstone.ops.op import Attrs, Call, Capture, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor

SPACE = {1: "l", 2: "hw", 3: "zhw"}
"""The spatial dims of samples with so many of them."""

WINDOW = {"l": "r", "z": "t", "h": "r", "w": "q"}
"""The dim that runs over the window along each spatial dim."""


def space(shape: Shape) -> str:
    """The spatial dims of a batch of this shape: what follows sample and channel."""
    rank = len(shape) - 2
    if rank and rank not in SPACE:
        raise OpError(f"a batch of shape {list(shape)} has {rank} spatial axes; 0 to 3 are known")
    return SPACE.get(rank, "")


def per_axis(value: Any, rank: int) -> tuple[int, ...]:
    """ATen's way of giving a number for each spatial axis: one for all, or one each."""
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    return given * rank if len(given) == 1 else given


def bordered(x: Tensor, shard: Shard, value: float = 0.0) -> tuple[Tensor, list[int]]:
    """`x` with the padding that a torch operator cannot apply itself, and what it still can.

    torch pads both sides of an axis alike. That is the shard's padding when it reads as far past
    both borders, or less far past the upper one without room for another window. Copying is
    needed only for a shard whose upper border is padded more than its lower one.
    """
    signature = shard.signature
    accesses = signature.operands[0]
    assert accesses is not None
    copied: list[int] = []
    padding: list[int] = []
    for axis, (lo, hi), length in zip(accesses[2:], shard.pads(0)[2:], x.shape[2:], strict=True):
        (position, stride), (window, step) = axis.terms
        reach = step * (shard.length(window) - 1) + 1
        alike = hi <= lo and (length + 2 * lo - reach) // stride + 1 == shard.length(position)
        padding.append(lo if alike else 0)
        copied = [*((0, 0) if alike else (lo, hi)), *copied]
    return (F.pad(x, copied, value=value) if any(copied) else x), padding


def _only_padding(w: Tensor, bias: Tensor | None, shard: Shard) -> Tensor:
    """What a shard gives that reads nothing but padding."""
    lengths = [shard.length(dim) for dim in space(w.shape)]
    y = w.new_zeros(shard.length("b"), shard.length("g") * shard.length("o"), *lengths)
    return y if bias is None else y + bias.view(-1, *[1] * len(lengths))


def _convolved(x: Tensor | None, w: Tensor, bias: Tensor | None = None, *, shard: Shard) -> Tensor:
    if x is None:
        return _only_padding(w, bias, shard)
    accesses = shard.signature.operands[0]
    assert accesses is not None
    strides, dilation = zip(*([step for _, step in axis.terms] for axis in accesses[2:]), strict=True)
    x, padding = bordered(x, shard)
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    return convolve(x, w, bias, strides, padding, dilation, shard.length("g"))


def _same_padding(w: Any, dilation: Sequence[int]) -> list[tuple[int, int]]:
    """What padding='same' adds before and after each axis."""
    total = [step * (size - 1) for step, size in zip(dilation, w.shape[2:], strict=True)]
    return [(n // 2, n - n // 2) for n in total]


def _captures(rank: int) -> dict[str, Capture]:
    """ATen's convolutions with so many spatial axes, where padding is alike on both sides."""

    def default(
        x: Any,
        w: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        if len(x.shape) != rank + 2:
            return None
        attrs = {"g": groups}
        for letter, given in (("s", stride), ("p", padding), ("d", dilation)):
            attrs |= {letter + dim: n for dim, n in zip(SPACE[rank], per_axis(given, rank), strict=True)}
        return Call((x, w, bias), {**attrs})

    def named(
        x: Any,
        w: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: str = "valid",
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        pads = _same_padding(w, per_axis(dilation, rank)) if padding == "same" else [(0, 0)] * rank
        if any(lo != hi for lo, hi in pads):
            return None
        return default(x, w, bias, stride, [lo for lo, _ in pads], dilation, groups)

    def any_rank(x: Any, w: Any, bias: Any, *geometry: Any) -> Call | None:
        stride, padding, dilation, transposed, _, groups = geometry
        return None if transposed else default(x, w, bias, stride, padding, dilation, groups)

    return {
        f"conv{rank}d.default": default,
        f"conv{rank}d.padding": named,
        "convolution.default": any_rank,
    }


def _convolution(rank: int, notation: str, *examples: Example) -> Op:
    return register(
        Op(
            f"conv{rank}d",
            notation,
            body=lambda x, w: x * w,
            finish=lambda total, bias: total + bias,
            torch=_convolved,
            attrs={
                **{letter + dim: n for letter, n in (("s", 1), ("p", 0), ("d", 1)) for dim in SPACE[rank]},
                "g": 1,
            },
            weights=("w", "bias"),
            aten=_captures(rank),
            examples=examples,
        )
    )


conv1d = _convolution(
    1,
    "b (g c) l*sl+r*dl-pl, (g o) c r!, [(g o)] -> b (g o) l",
    example((2, 2, 8), (4, 2, 3), (4,), pl=1),
    example((2, 4, 9), (4, 2, 3), None, sl=2, dl=2, pl=1, g=2),
    example((2, 2, 4), (2, 2, 1), (2,), pl=2),
)
conv2d = _convolution(
    2,
    "b (g c) h*sh+r*dh-ph w*sw+q*dw-pw, (g o) c r! q!, [(g o)] -> b (g o) h w",
    example((2, 2, 4, 4), (2, 2, 3, 3), (2,), ph=1, pw=1),
    example((2, 4, 7, 8), (4, 2, 3, 3), None, sh=2, sw=2, ph=1, pw=1, g=2),
    example((2, 2, 4, 6), (2, 1, 3, 3), (2,), dh=2, dw=2, ph=2, pw=2, g=2),
)
conv3d = _convolution(
    3,
    "b (g c) z*sz+t*dz-pz h*sh+r*dh-ph w*sw+q*dw-pw, (g o) c t! r! q!, [(g o)] -> b (g o) z h w",
    example((2, 2, 4, 2, 2), (2, 2, 3, 2, 1), (2,), pz=1, sh=2),
)


def _same_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    x, w, _ = shapes
    assert x is not None
    assert w is not None
    dims = space(x)
    dilation = per_axis(attrs["dilation"], len(dims))
    total = [step * (size - 1) for step, size in zip(dilation, w[2:], strict=True)]
    read = [
        f"{dim}:{size}+{WINDOW[dim]}*{step}-{n // 2}"
        for dim, size, step, n in zip(dims, x[2:], dilation, total, strict=True)
    ]
    windows = " ".join(f"{WINDOW[dim]}!" for dim in dims)
    return (
        f"b (g:{attrs['groups']} c) {' '.join(read)}, (g o) c {windows}, [(g o)] -> b (g o) {' '.join(dims)}"
    )


def _same_call(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    if padding != "same" or len(x.shape) != len(w.shape) or {*per_axis(stride, 1)} != {1}:
        return None
    return Call((x, w, bias), {"dilation": per_axis(dilation, len(x.shape) - 2), "groups": groups})


conv_same = register(
    Op(
        "conv_same",
        _same_notation,
        body=lambda x, w: x * w,
        finish=lambda total, bias: total + bias,
        torch=_convolved,
        attrs={"dilation": 1, "groups": 1},
        weights=("w", "bias"),
        aten={f"conv{rank}d.padding": _same_call for rank in SPACE},
        examples=(
            example((2, 2, 6), (2, 2, 4), (2,)),
            example((2, 2, 4, 4), (2, 1, 2, 3), None, dilation=(1, 2), groups=2),
        ),
    )
)


def _transposed_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    x, w, _ = shapes
    assert x is not None
    assert w is not None
    dims = space(x)
    stride, padding, extra, dilation = (
        per_axis(attrs[name], len(dims)) for name in ("stride", "padding", "output_padding", "dilation")
    )
    read: list[str] = []
    for i, dim in enumerate(dims):
        size = (x[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (w[i + 2] - 1) + 1 + extra[i]
        read.append(f"({dim}:{size}+{padding[i]}-{WINDOW[dim]}*{dilation[i]})/{stride[i]}")
    windows = " ".join(f"{WINDOW[dim]}!" for dim in dims)
    return (
        f"b (g:{attrs['groups']} c) {' '.join(read)}, (g c) o {windows}, [(g o)] -> b (g o) {' '.join(dims)}"
    )


def _transposed(
    x: Tensor | None,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    shard: Shard,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
) -> Tensor:
    if x is None:
        return _only_padding(w, bias, shard)
    rank = w.ndim - 2
    strides, before, dilations = (per_axis(given, rank) for given in (stride, padding, dilation))
    deconvolve = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[rank]
    groups = shard.length("g")
    rows = [shard.box[dim] for dim in SPACE[rank]]
    if all(rows[i].length == shard.size(dim) for i, dim in enumerate(SPACE[rank])):
        extra = per_axis(output_padding, rank)
        return deconvolve(x, w, bias, strides, before, extra, groups, dilations)
    y = deconvolve(x, w, None, strides, 0, 0, groups, dilations)
    crops: list[int] = []
    for i, read in enumerate(shard.signature.read(0, shard.box).box[2:]):
        ahead = read.lo * strides[i] - (rows[i].lo + before[i])
        crops = [ahead, rows[i].length - ahead - y.shape[i + 2], *crops]
    y = F.pad(y, crops)
    return y if bias is None else y + bias.view(-1, *[1] * rank)


def _transposed_captures(rank: int) -> dict[str, Capture]:
    def default(
        x: Any,
        w: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Call | None:
        if len(x.shape) != rank + 2:
            return None
        given = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        attrs = {name: per_axis(value, rank) for name, value in given.items()}
        return Call((x, w, bias), {**attrs, "groups": groups})

    def any_rank(x: Any, w: Any, bias: Any, *geometry: Any) -> Call | None:
        stride, padding, dilation, transposed, output_padding, groups = geometry
        if not transposed:
            return None
        return default(x, w, bias, stride, padding, output_padding, groups, dilation)

    overload = "default" if rank == 1 else "input"
    return {f"conv_transpose{rank}d.{overload}": default, "convolution.default": any_rank}


def _transposed_convolution(rank: int, *examples: Example) -> Op:
    return register(
        Op(
            f"conv_transpose{rank}d",
            _transposed_notation,
            body=lambda x, w: x * w,
            finish=lambda total, bias: total + bias,
            torch=_transposed,
            attrs={"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1},
            weights=("w", "bias"),
            aten=_transposed_captures(rank),
            examples=examples,
        )
    )


conv_transpose1d = _transposed_convolution(
    1,
    example((2, 2, 4), (2, 4, 3), (4,), stride=2, padding=1, output_padding=1),
    example((2, 4, 4), (4, 1, 2), (2,), stride=4, padding=1, output_padding=2, groups=2, dilation=3),
    example((2, 2, 2), (2, 2, 1), (2,), stride=3, output_padding=2),
)
conv_transpose2d = _transposed_convolution(
    2,
    example((2, 2, 2, 3), (2, 2, 2, 2), (2,), stride=2),
    example((2, 2, 2, 2), (2, 2, 4, 3), None, stride=(2, 1), padding=(1, 1)),
)
conv_transpose3d = _transposed_convolution(
    3, example((2, 2, 2, 2, 2), (2, 2, 2, 1, 1), (2,), stride=(2, 1, 1))
)
