"""Dropout and random tensors. What an element draws depends on the seed and on its coordinates
over all shards (`soapstone.ops.mask`), so every split of a model drops the same elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from soapstone.ops.definitions.axes import shape_at
from soapstone.ops.definitions.dtypes import short_name, torch_dtype
from soapstone.ops.examples import example, probabilities
from soapstone.ops.lazy import torch
from soapstone.ops.mask import bits, kept, normal, uniform
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def drawn(shard: Shard, dims: Sequence[str], device: torch.device | None = None, stream: int = 0) -> Tensor:
    """Random bits for each point of a shard's box along these dims; streams are independent."""
    place = torch.device(shard.device) if device is None else device
    return bits(shard.seed + stream, [shard.size(d) for d in dims], [shard.box[d] for d in dims], place)


def dropped(x: Tensor, shard: Shard, dims: Sequence[str], p: float) -> Tensor:
    """`x`, whose leading axes are these dims, with elements zeroed with probability `p`."""
    if p == 0:
        return x
    keep = kept(drawn(shard, dims, x.device), 1 - p)
    keep = keep[(..., *[None] * (x.ndim - len(dims)))]
    return x * keep * (1 / (1 - p) if p < 1 else 0.0)


def _dropout_call(x: Any, p: float, train: bool | None) -> Call:
    return Call((x,), {"p": 0.0 if train is False else p}, outputs=(0,))


dropout = register(
    Op(
        "dropout",
        "... -> ...",
        torch=lambda x, *, shard, p: dropped(x, shard, tuple(shard.signature.sizes), p),
        keeps=(),
        attrs={"p": 0.5},
        flops=2,
        random=True,
        aten={"native_dropout.default": _dropout_call, "dropout.default": _dropout_call},
        examples=(example((4, 6)), example((2, 4, 6), p=0.1), example((4, 6), p=0.0), example((8,), p=1.0)),
    )
)


def _feature_notation(shapes: Sequence[Shape | None], _: Attrs) -> str:
    axes = " ".join(["b", "c", *(f"s{i}" for i in range(len(shape_at(shapes, 0)) - 2))])
    return f"{axes} -> {axes}"


feature_dropout = register(
    Op(
        "feature_dropout",
        _feature_notation,
        torch=lambda x, *, shard, p: dropped(x, shard, ("b", "c"), p),
        keeps=(),
        attrs={"p": 0.5},
        flops=2,
        random=True,
        aten={"feature_dropout.default": _dropout_call},
        examples=(example((4, 6, 2, 2)),),
    )
)


def _made(_: Sequence[Shape | None], attrs: Attrs) -> str:
    size = attrs["size"]
    assert isinstance(size, tuple)
    return "-> " + " ".join(f"{'b' if i == 0 else f'b{i}'}:{n}" for i, n in enumerate(size))


def _given_size(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Call:
    return Call((), {"size": tuple(size), "dtype": short_name(dtype) or "f32"})


def _without_generator(size: Sequence[int], *, generator: Any = None, **options: Any) -> Call | None:
    return _given_size(size, **options) if generator is None else None


def _like(x: Any, *, dtype: Any = None, **_: Any) -> Call:
    return Call((), {"size": x.shape, "dtype": short_name(dtype) or x.dtype})


def _flipped_like(x: Any, p: float = 0.5, **_: Any) -> Call:
    return Call((), {"size": x.shape, "dtype": x.dtype, "p": p})


def _generator(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A shard of a tensor made from the bits of each of its elements."""

    def make(*, shard: Shard, dtype: str) -> Tensor:
        dims = tuple(shard.signature.sizes)
        return draw(lambda stream: drawn(shard, dims, stream=stream), torch_dtype(dtype))

    return make


rand = register(
    Op(
        "rand",
        _made,
        torch=_generator(lambda draw, dtype: uniform(draw(0), dtype)),
        attrs={"size": (), "dtype": "f32"},
        flops=1,
        random=True,
        needs_grad=False,
        aten={"rand.default": _given_size, "rand.generator": _without_generator, "rand_like.default": _like},
        examples=(example(size=(4, 6)), example(size=(2, 4, 6), dtype="f64")),
    )
)

# Two streams of one seed, far from those of its neighbours.
_SECOND_STREAM = 1 << 48

randn = register(
    Op(
        "randn",
        _made,
        torch=_generator(lambda draw, dtype: normal(draw(0), draw(_SECOND_STREAM), dtype)),
        attrs={"size": (), "dtype": "f32"},
        flops=6,
        random=True,
        needs_grad=False,
        aten={
            "randn.default": _given_size,
            "randn.generator": _without_generator,
            "randn_like.default": _like,
        },
        examples=(example(size=(4, 6), dtype="f64"),),
    )
)


def _flips(*, shard: Shard, p: float, dtype: str) -> Tensor:
    return kept(drawn(shard, tuple(shard.signature.sizes)), p).to(torch_dtype(dtype))


coin_flips = register(
    Op(
        "coin_flips",
        _made,
        torch=_flips,
        attrs={"size": (), "dtype": "f32", "p": 0.5},
        flops=1,
        random=True,
        needs_grad=False,
        aten={"bernoulli.p": _flipped_like},
        examples=(example(size=(4, 6), p=0.3),),
    )
)

bernoulli = register(
    Op(
        "bernoulli",
        "... -> ...",
        torch=lambda p, *, shard: (
            uniform(drawn(shard, tuple(shard.signature.sizes), p.device), torch.float64) < p
        ).to(p.dtype),
        flops=1,
        random=True,
        needs_grad=False,
        aten={"bernoulli.default": lambda p, **_: Call((p,))},
        examples=(example(probabilities(4, 6)),),
    )
)
