"""Reductions: the output lacks some dims of the operand, or has 0 in their place.

Sums and means may be split along the dims they reduce: the partial sums add up, and a mean
divides by the count over all shards. What does not add up keeps those dims whole.
Everywhere, `dims` (or `dim`) None means all axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from soapstone.ops import scalar
from soapstone.ops.definitions.axes import (
    axes_at,
    axis_at,
    keeps,
    letters,
    notation_of,
    points_but,
    shape_at,
)
from soapstone.ops.definitions.dtypes import short_name, torch_dtype
from soapstone.ops.examples import Example, example, ids, mask
from soapstone.ops.lazy import torch
from soapstone.ops.op import Attrs, Call, Op
from soapstone.ops.registry import register
from soapstone.ops.scalar import apply, equal, exp, log
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _axes(given: object, rank: int) -> tuple[int, ...]:
    """The axes that an attribute names: one, several, or None for all."""
    assert given is None or isinstance(given, int | tuple)
    return tuple(range(rank)) if given is None else (given,) if isinstance(given, int) else given


def _summed(shapes: Sequence[Shape | None], attrs: Attrs, mark: str = "", outputs: int = 1) -> str:
    """`a b c -> a c`, with 0 for `b` when its axis is kept."""
    names = letters(len(shape_at(shapes, 0)))
    gone = {names[axis] for axis in _axes(attrs.get("dims", attrs.get("dim")), len(names))}
    kept = ["0"] if attrs["keepdim"] else []
    written = [axis for name in names for axis in (kept if name in gone else [name])]
    return notation_of([[name + mark * (name in gone) for name in names]], *[written] * outputs)


_whole = partial(_summed, mark="!")
_whole_twice = partial(_summed, mark="!", outputs=2)


def _over(
    x: Any, dim: int | Iterable[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Call:
    """ATen's usual arguments of a reduction."""
    attrs: dict[str, Any] = {"dims": axes_at(dim, len(x.shape)), "keepdim": keepdim}
    if dtype is not None:
        attrs["dtype"] = short_name(dtype)
    return Call((x,), attrs)


def _along(x: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Call | None:
    """The arguments of a reduction along one axis, or along all as if they were one."""
    if short_name(dtype) not in (None, x.dtype):
        return None
    return Call((x,), {"dim": None if dim is None else axis_at(dim, len(x.shape)), "keepdim": keepdim})


def _reductions(*extra: Example) -> tuple[Example, ...]:
    """Some axes, all axes, and some kept."""
    return (
        example((4, 2, 6), dims=(1, 2)),
        example((4, 6)),
        example((2, 4, 2), dims=(0, 2), keepdim=True),
        *extra,
    )


def _sum(x: Tensor, *, dims: object, keepdim: bool, dtype: str | None) -> Tensor:
    return x.sum(_axes(dims, x.dim()), keepdim, dtype=torch_dtype(dtype))


total = register(
    Op(
        "sum",
        _summed,
        body=keeps,
        torch=_sum,
        attrs={"dims": None, "keepdim": False, "dtype": None},
        aten={"sum.default": _over, "sum.dim_IntList": _over},
        examples=_reductions(
            example(mask(4, 6), dims=(0,)), example(ids(4, 6, below=9), dims=(1,), dtype="f64")
        ),
    )
)


def _mean(x: Tensor, *, dims: object, keepdim: bool, dtype: str | None, count: int) -> Tensor:
    axes = _axes(dims, x.dim())
    if prod(x.shape[axis] for axis in axes) == count:
        return x.mean(axes, keepdim, dtype=torch_dtype(dtype))
    return x.sum(axes, keepdim, dtype=torch_dtype(dtype)) / count


mean = register(
    Op(
        "mean",
        _summed,
        body=keeps,
        finish=lambda total, *, count: total / count,
        torch=_mean,
        attrs={"dims": None, "keepdim": False, "dtype": None},
        aten={"mean.default": _over, "mean.dim": _over},
        examples=_reductions(),
    )
)

amax = register(
    Op(
        "amax",
        _whole,
        body=keeps,
        reduce="max",
        torch=lambda x, *, dims, keepdim: x.amax(_axes(dims, x.dim()), keepdim),
        attrs={"dims": None, "keepdim": False},
        aten={"amax.default": _over, "max.default": _over},
        examples=_reductions(),
    )
)

amin = register(
    Op(
        "amin",
        _whole,
        body=keeps,
        reduce="min",
        torch=lambda x, *, dims, keepdim: x.amin(_axes(dims, x.dim()), keepdim),
        attrs={"dims": None, "keepdim": False},
        aten={"amin.default": _over, "min.default": _over},
        examples=_reductions(),
    )
)


def _extreme(name: Literal["max", "min"]) -> Op:
    """The largest or smallest element along one axis, and where it is."""
    return register(
        Op(
            name,
            _whole_twice,
            body=keeps,
            reduce=name,
            torch=lambda x, *, dim, keepdim: tuple(getattr(torch, name)(x, dim, keepdim)),
            attrs={"dim": 0, "keepdim": False},
            aten={f"{name}.dim": _along},
            examples=(example((4, 6), dim=1), example((4, 6), dim=0, keepdim=True)),
        )
    )


def _extreme_place(name: str) -> Op:
    """Where the largest or smallest element is."""
    return register(
        Op(
            name,
            _whole,
            torch=lambda x, *, dim, keepdim: getattr(torch, name)(x, dim, keepdim),
            flops=1,
            attrs={"dim": None, "keepdim": False},
            aten={f"{name}.default": _along},
            needs_grad=False,
            examples=(example((4, 6), dim=1), example((4, 6), dim=0, keepdim=True), example((4, 6))),
        )
    )


largest = _extreme("max")
smallest = _extreme("min")
argmax = _extreme_place("argmax")
argmin = _extreme_place("argmin")


def _truths(name: str, least: Literal["max", "min"]) -> Op:
    """Whether any element, or every one, is true: the largest, or the smallest, of 0 and 1."""
    return register(
        Op(
            name,
            _whole,
            body=lambda x: scalar.where(x, 1.0, 0.0),
            finish=lambda total: total > 0.5,
            reduce=least,
            torch=lambda x, *, dims, keepdim: getattr(torch, name)(x, _axes(dims, x.dim()), keepdim),
            attrs={"dims": None, "keepdim": False},
            aten={f"{name}.default": _over, f"{name}.dim": _over, f"{name}.dims": _over},
            needs_grad=False,
            examples=(
                example(mask(4, 6), dims=(1,)),
                example(mask(4, 6), dims=(0,), keepdim=True),
                example(mask(4)),
            ),
        )
    )


any_true = _truths("any", "max")
all_true = _truths("all", "min")

product = register(
    Op(
        "prod",
        _whole,
        torch=lambda x, *, dim, keepdim: x.prod() if dim is None else x.prod(dim, keepdim),
        flops=1,
        attrs={"dim": None, "keepdim": False},
        aten={"prod.default": _along, "prod.dim_int": _along},
        examples=(example((4, 6), dim=1), example((4, 6), dim=0, keepdim=True), example((4, 2))),
    )
)

logsumexp = register(
    Op(
        "logsumexp",
        _whole,
        body=exp,
        finish=log,
        torch=lambda x, *, dims, keepdim: torch.logsumexp(x, _axes(dims, x.dim()), keepdim),
        attrs={"dims": None, "keepdim": False},
        aten={"logsumexp.default": _over},
        examples=_reductions(),
    )
)


def _norm(
    x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Call | None:
    if not 0 < order < float("inf") or short_name(dtype) not in (None, x.dtype):
        return None
    return Call((x,), {"order": order, "dims": axes_at(dim, len(x.shape)), "keepdim": keepdim})


def _norm_of_vectors(
    x: Any, order: float | None = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Call | None:
    """Norms of matrices are others, but for the default one."""
    axes = 1 if isinstance(dim, int) else len(dim or x.shape)
    if order is not None and axes != 1:
        return None
    return _norm(x, 2 if order is None else order, dim, keepdim, dtype=dtype)


norm = register(
    Op(
        "norm",
        _whole,
        body=lambda x, *, order: x * x if order == 2 else apply("abs", x) ** order,
        finish=lambda total, *, order: scalar.sqrt(total) if order == 2 else total ** (1.0 / order),
        torch=lambda x, *, order, dims, keepdim: torch.linalg.vector_norm(
            x, order, _axes(dims, x.dim()), keepdim
        ),
        attrs={"order": 2, "dims": None, "keepdim": False},
        aten={"linalg_vector_norm.default": _norm, "linalg_norm.default": _norm_of_vectors},
        examples=_reductions(example((4, 6), dims=(1,), order=1)),
    )
)


def _spread(
    x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Call:
    given = int(unbiased) if correction is None else correction
    return Call((x,), {"dims": axes_at(dim, len(x.shape)), "correction": given, "keepdim": keepdim})


def _spread_of(name: str) -> Op:
    """The variance or its root, over dims that stay whole."""
    return register(
        Op(
            name,
            _whole,
            torch=lambda x, *, dims, correction, keepdim: getattr(torch, name)(
                x, _axes(dims, x.dim()), correction=correction, keepdim=keepdim
            ),
            flops=4,
            attrs={"dims": None, "correction": 1, "keepdim": False},
            aten={
                f"{name}.correction": _spread,
                f"{name}.dim": _spread,
                f"{name}.default": lambda x, unbiased=True: _spread(x, None, unbiased),
            },
            examples=_reductions(example((4, 6), dims=(1,), correction=0)),
        )
    )


variance = _spread_of("var")
deviation = _spread_of("std")


def _bin(x: Any, *, low: float, high: float, bins: int, at: dict[str, int]) -> Any:
    """One where the number falls into the bin; the last bin holds its upper border."""
    place = scalar.minimum(apply("floor", (x - low) * (bins / (high - low))), bins - 1)
    inside = apply("and", x >= low, x <= high)
    return scalar.where(apply("and", inside, equal(place, at["b"])), 1.0, 0.0)


def _histc(x: Any, bins: int = 100, low: float = 0, high: float = 0) -> Call | None:
    if len(x.shape) != 1 or low == high:
        return None
    return Call((x,), {"bins": bins, "low": low, "high": high})


histogram = register(
    Op(
        "histogram",
        lambda shapes, attrs: f"t -> b:{attrs['bins']}!",  # noqa: ARG005
        body=_bin,
        torch=lambda x, *, bins, low, high: torch.histc(x, bins, low, high),
        flops=points_but("b"),
        attrs={"bins": 1, "low": 0.0, "high": 1.0},
        aten={"histc.default": _histc},
        needs_grad=False,
        examples=(example((12,), bins=4, low=-1.0, high=1.0),),
    )
)
