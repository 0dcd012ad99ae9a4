"""Pooling: convolutions without weights. A window's maximum or average, its place given by the
notation; adaptive pooling is the same with windows that share out an axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from soapstone.ops.definitions.convolution import SPACE, WINDOW, bordered, per_axis, space
from soapstone.ops.examples import Example, example
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attr, Attrs, Call, Capture, NotationOf, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


class Window(NamedTuple):
    """A window moving along one spatial axis."""

    dim: str
    axis: int
    size: int
    stride: int
    padding: int
    dilation: int

    def count(self, ceil_mode: object) -> int:
        """How many places it takes."""
        room = self.axis + 2 * self.padding - self.dilation * (self.size - 1) - 1
        count = (room + (self.stride - 1 if ceil_mode else 0)) // self.stride + 1
        return count - 1 if ceil_mode and (count - 1) * self.stride >= self.axis + self.padding else count

    def held(self, place: int, include_pad: object) -> int:
        """How many elements an average at a place is over."""
        start = place * self.stride - self.padding
        end = min(start + self.size, self.axis + self.padding)
        return end - start if include_pad else min(end, self.axis) - max(start, 0)


def _windows(x: Shape | None, attrs: Attrs) -> list[Window]:
    assert x is not None
    dims = space(x)
    kernel = per_axis(attrs["kernel"], len(dims))
    stride = kernel if attrs["stride"] is None else per_axis(attrs["stride"], len(dims))
    rest = (per_axis(attrs["padding"], len(dims)), per_axis(attrs.get("dilation", 1), len(dims)))
    return [Window(*values) for values in zip(dims, x[2:], kernel, stride, *rest, strict=True)]


def _notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    windows = _windows(shapes[0], attrs)
    read = [
        f"{w.dim}:{w.count(attrs['ceil_mode'])}*{w.stride}+{WINDOW[w.dim]}!:{w.size}*{w.dilation}-{w.padding}"
        for w in windows
    ]
    return f"b c {' '.join(read)} -> b c {' '.join(w.dim for w in windows)}"


def _largest(x: Tensor, *, shard: Shard, kernel: Any, stride: Any, dilation: Any) -> Tensor:
    pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.ndim]
    x, padding = bordered(x, shard, value=-math.inf)
    return pool(x, kernel, stride, padding, dilation)


def _max_pool(rank: int, *examples: Example) -> Op:
    def capture(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Call | None:
        if len(x.shape) != rank + 2:
            return None
        attrs = {
            "kernel": per_axis(kernel, rank),
            "stride": per_axis(stride, rank) if stride else None,
            "padding": per_axis(padding, rank),
            "dilation": per_axis(dilation, rank),
            "ceil_mode": ceil_mode,
        }
        return Call((x,), {**attrs}, outputs=(0,))

    return register(
        Op(
            f"max_pool{rank}d",
            _notation,
            body=lambda x: x,
            reduce="max",
            outside=-math.inf,
            torch=_largest,
            attrs={"kernel": 2, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False},
            aten={f"max_pool{rank}d.default": capture, f"max_pool{rank}d_with_indices.default": capture},
            examples=examples,
        )
    )


max_pool1d = _max_pool(
    1, example((2, 2, 8)), example((2, 2, 7), kernel=3, stride=2, padding=1, ceil_mode=True)
)
max_pool2d = _max_pool(
    2,
    example((2, 2, 4, 8)),
    example((2, 2, 7, 8), kernel=3, stride=2, padding=1),
    example((2, 2, 7, 6), kernel=(3, 2), stride=(2, 1), dilation=(2, 1), ceil_mode=True),
)
max_pool3d = _max_pool(3, example((2, 2, 4, 2, 4), kernel=(2, 1, 3), stride=(2, 1, 1), padding=(0, 0, 1)))


def _average_body(
    x: Any,
    *,
    at: Mapping[str, int],
    shapes: Sequence[Shape | None],
    kernel: Any,
    stride: Any,
    padding: Any,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    windows = _windows(shapes[0], {"kernel": kernel, "stride": stride, "padding": padding})
    return x / (divisor_override or prod(w.held(at[w.dim], count_include_pad) for w in windows))


def _averaged(
    x: Tensor,
    *,
    shard: Shard,
    kernel: Any,
    stride: Any,
    padding: Any,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    attrs = {"kernel": kernel, "stride": stride, "padding": padding}
    windows = _windows(shard.signature.shapes[0], attrs)
    pool = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[x.ndim]
    x, border = bordered(x, shard)
    if any(length < w.size for length, w in zip(x.shape[2:], windows, strict=True)):
        # torch's avg_pool3d asks for so much before it adds a border.
        x, border = F.pad(x, [n for n in reversed(border) for _ in range(2)]), [0] * len(border)
    y = pool(x, kernel, stride, border)
    size = prod(w.size for w in windows)
    if divisor_override:
        return y * (size / divisor_override)
    held = [[w.held(at, count_include_pad) for at in range(*shard.box[w.dim])] for w in windows]
    if all(n == w.size for w, row in zip(windows, held, strict=True) for n in row):
        return y
    scale = torch.tensor(float(size), dtype=y.dtype, device=y.device)
    for row in held:
        scale = scale.unsqueeze(-1) / torch.tensor(row, dtype=y.dtype, device=y.device)
    return y * scale


def _avg_pool(rank: int, *examples: Example) -> Op:
    def capture(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Call | None:
        if len(x.shape) != rank + 2:
            return None
        attrs = {
            "kernel": per_axis(kernel, rank),
            "stride": per_axis(stride, rank) if stride else None,
            "padding": per_axis(padding, rank),
            "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad,
            "divisor_override": divisor_override,
        }
        return Call((x,), {**attrs})

    return register(
        Op(
            f"avg_pool{rank}d",
            _notation,
            body=_average_body,
            torch=_averaged,
            keeps=("x",),
            attrs={
                "kernel": 2,
                "stride": None,
                "padding": 0,
                "ceil_mode": False,
                "count_include_pad": True,
                "divisor_override": None,
            },
            flops=1,
            aten={f"avg_pool{rank}d.default": capture},
            examples=examples,
        )
    )


avg_pool1d = _avg_pool(
    1,
    example((2, 2, 8)),
    example((2, 2, 7), kernel=3, stride=2, padding=1, ceil_mode=True),
    example((2, 2, 8), kernel=3, stride=2, padding=1, count_include_pad=False),
)
avg_pool2d = _avg_pool(
    2,
    example((2, 2, 4, 4), kernel=3, stride=1, padding=1),
    example((2, 2, 4, 4), kernel=3, stride=1, padding=1, count_include_pad=False),
    example((2, 2, 7, 6), kernel=(3, 2), stride=2, ceil_mode=True, divisor_override=5),
    example((2, 2, 6, 5), kernel=3, stride=2, padding=1, ceil_mode=True),
)
avg_pool3d = _avg_pool(3, example((2, 2, 4, 2, 4), kernel=(2, 1, 3), stride=(2, 1, 1), padding=(0, 0, 1)))


def _is_even(x: Shape, size: Sequence[int]) -> bool:
    """Whether so many windows share out every axis evenly."""
    return all(given % wanted == 0 for given, wanted in zip(x[2:], size, strict=True))


def _shares(x: Shape | None, attrs: Attrs) -> list[tuple[str, str, int]]:
    """For each spatial axis: its dim, its window's dim, and how many windows share it."""
    assert x is not None
    dims = space(x)
    sizes = per_axis(attrs["size"], len(dims))
    return [(dim, WINDOW[dim], n) for dim, n in zip(dims, sizes, strict=True)]


def _even_notation(mark: str) -> NotationOf:
    def notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
        shares = _shares(shapes[0], attrs)
        read = [f"({dim}:{n} {window}{mark})" for dim, window, n in shares]
        return f"b c {' '.join(read)} -> b c {' '.join(dim for dim, _, _ in shares)}"

    return notation


def _uneven_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    shares = _shares(shapes[0], attrs)
    read, written = [f"{window}!" for _, window, _ in shares], [f"{dim}!:{n}" for dim, _, n in shares]
    return f"b c {' '.join(read)} -> b c {' '.join(written)}"


def _held(at: Mapping[str, int], x: Shape, size: Any) -> int:
    """How many elements an uneven window holds; zero if this point is not among them."""
    held = 1
    for (dim, window, n), axis in zip(_shares(x, {"size": size}), x[2:], strict=True):
        start, end = at[dim] * axis // n, -(-(at[dim] + 1) * axis // n)
        held *= end - start if start <= at[window] < end else 0
    return held


def _uneven_average(x: Any, *, at: Mapping[str, int], shapes: Sequence[Shape], size: Any) -> Any:
    held = _held(at, shapes[0], size)
    return x / held if held else 0.0


def _uneven_largest(x: Any, *, at: Mapping[str, int], shapes: Sequence[Shape], size: Any) -> Any:
    return x if _held(at, shapes[0], size) else -math.inf


def _uneven_flops(sizes: Mapping[str, int]) -> float:
    return float(prod(n for dim, n in sizes.items() if dim not in WINDOW))


def _shared_out(x: Tensor, pool: str, shard: Shard) -> Tensor:
    """Adaptive pooling to as many windows as the shard writes."""
    dims = space(x.shape)
    pooled: Tensor = getattr(F, f"adaptive_{pool}_pool{len(dims)}d")(x, [shard.length(dim) for dim in dims])
    return pooled


def _shared_average(x: Tensor, *, shard: Shard, count: int) -> Tensor:
    y = _shared_out(x, "avg", shard)
    local = prod(shard.length(WINDOW[dim]) for dim in space(x.shape))
    return y if local == count else y * (local / count)


def _adaptive_captures(pool: str, even: bool) -> dict[str, Capture]:
    def capture_for(rank: int) -> Capture:
        def capture(x: Any, size: Any) -> Call | None:
            wanted = per_axis(size, rank)
            if len(x.shape) != rank + 2 or _is_even(x.shape, wanted) != even:
                return None
            return Call((x,), {"size": wanted}, outputs=(0,))

        return capture

    return {f"adaptive_{pool}_pool{rank}d.default": capture_for(rank) for rank in SPACE}


adaptive_avg_pool = register(
    Op(
        "adaptive_avg_pool",
        _even_notation(""),
        body=lambda x: x,
        finish=lambda total, *, count: total / count,
        torch=_shared_average,
        keeps=("x",),
        attrs={"size": 1},
        aten=_adaptive_captures("avg", even=True),
        examples=(
            example((2, 2, 4, 6)),
            example((2, 2, 4, 4), size=2),
            example((2, 2, 8), size=4),
            example((2, 2, 2, 2, 2)),
        ),
    )
)

adaptive_avg_pool_uneven = register(
    Op(
        "adaptive_avg_pool_uneven",
        _uneven_notation,
        body=_uneven_average,
        torch=lambda x, *, shard: _shared_out(x, "avg", shard),
        keeps=("x",),
        attrs={"size": 1},
        flops=_uneven_flops,
        aten=_adaptive_captures("avg", even=False),
        examples=(example((2, 2, 4, 5), size=(3, 2)), example((2, 2, 7), size=3)),
    )
)

adaptive_max_pool = register(
    Op(
        "adaptive_max_pool",
        _even_notation("!"),
        body=lambda x: x,
        reduce="max",
        torch=lambda x, *, shard: _shared_out(x, "max", shard),
        attrs={"size": 1},
        aten=_adaptive_captures("max", even=True),
        examples=(example((2, 2, 4, 6)), example((2, 2, 4, 4), size=2), example((2, 2, 8), size=4)),
    )
)

adaptive_max_pool_uneven = register(
    Op(
        "adaptive_max_pool_uneven",
        _uneven_notation,
        body=_uneven_largest,
        reduce="max",
        torch=lambda x, *, shard: _shared_out(x, "max", shard),
        attrs={"size": 1},
        flops=_uneven_flops,
        aten=_adaptive_captures("max", even=False),
        examples=(example((2, 2, 4, 5), size=(3, 2)),),
    )
)


def _interpolation_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    x, size = shapes[0], attrs["size"]
    assert x is not None
    assert isinstance(size, tuple)
    dims = space(x)
    written = " ".join(f"{WINDOW[dim]}!:{n}" for dim, n in zip(dims, size, strict=True))
    return f"b c {' '.join(f'{dim}!' for dim in dims)} -> b c {written}"


def _interpolated(x: Tensor, *, method: str, size: Any, align_corners: bool, scales: Any) -> Tensor:
    function = getattr(torch.ops.aten, method).default
    return function(x, size, align_corners, *scales)  # type: ignore[no-any-return]


def _interpolation(method: str) -> Capture:
    def capture(x: Any, size: Any, align_corners: bool, *scales: Any) -> Call:
        """Scales come one by one, or as one list in place of a size."""
        given = scales[0] if scales and isinstance(scales[0], list | tuple) else scales
        factors = tuple(given) if given and given[0] is not None else ()
        places = size or [int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True)]
        attrs: dict[str, Attr] = {"method": method, "size": tuple(places), "scales": factors}
        return Call((x,), attrs | {"align_corners": align_corners})

    return capture


_METHODS = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)

interpolate = register(
    Op(
        "interpolate",
        _interpolation_notation,
        torch=_interpolated,
        # A weighted mean of four elements, whatever the method.
        flops=lambda sizes: 8.0 * prod(size for dim, size in sizes.items() if dim not in WINDOW),
        attrs={"method": "upsample_bilinear2d", "size": (1, 1), "align_corners": False, "scales": ()},
        aten={f"{m}.{form}": _interpolation(m) for m in _METHODS for form in ("vec", "default")},
        examples=(
            example((2, 4, 3, 4), size=(6, 5)),
            example((2, 2, 4, 4), size=(8, 8), method="upsample_bicubic2d", scales=(2.0, 2.0)),
            example((4, 2, 3), size=(7,), method="upsample_linear1d", align_corners=True),
        ),
    )
)
