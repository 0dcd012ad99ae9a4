"""Softmax and normalisation layers.

Most of them look at some dims as a whole, which must then stay whole. Batch norm looks at the
batch, which one wants to split: it is the one operator with `statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops import scalar
from soapstone.ops.definitions.axes import axis_at, shape_at
from soapstone.ops.definitions.convolution import space
from soapstone.ops.definitions.dtypes import short_name, torch_dtype
from soapstone.ops.examples import example, positive
from soapstone.ops.lazy import F, shared_statistics, torch
from soapstone.ops.op import Attrs, Call, NotationOf, Op, Shard, Statistics
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _along_one(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    rank = len(shape_at(shapes, 0))
    dim = attrs["dim"]
    assert isinstance(dim, int)
    after = [f"t{i}" for i in range(rank - axis_at(dim, rank) - 1)]
    axes = " ".join(["...", "s!", *after])
    return f"{axes} -> {axes}"


def _softmax_call(x: Any, dim: int, dtype: Any = None) -> Call:
    name = short_name(dtype)
    return Call(
        (x,), {"dim": dim - len(x.shape) if dim >= 0 else dim, "dtype": None if name == x.dtype else name}
    )


def _plain_softmax_call(x: Any, dim: int, half_to_float: bool) -> Call:
    return _softmax_call(x, dim, "f32" if half_to_float else None)


# A maximum, a difference, an exponential, a sum and a quotient (or logarithm) for each element.
_SOFTMAX_FLOPS = 5

softmax = register(
    Op(
        "softmax",
        _along_one,
        torch=lambda x, *, dim, dtype: F.softmax(x, dim, dtype=torch_dtype(dtype)),
        keeps=("output",),
        attrs={"dim": -1, "dtype": None},
        flops=_SOFTMAX_FLOPS,
        aten={"softmax.int": _softmax_call, "_softmax.default": _plain_softmax_call},
        examples=(example((4, 6)), example((2, 5, 4, 2), dim=-3)),
    )
)

log_softmax = register(
    Op(
        "log_softmax",
        _along_one,
        torch=lambda x, *, dim, dtype: F.log_softmax(x, dim, dtype=torch_dtype(dtype)),
        keeps=("output",),
        attrs={"dim": -1, "dtype": None},
        flops=_SOFTMAX_FLOPS,
        aten={"log_softmax.int": _softmax_call, "_log_softmax.default": _plain_softmax_call},
        examples=(example((4, 6)), example((2, 5, 4), dim=-2)),
    )
)


def _over_last(parameters: int) -> NotationOf:
    """Normalising over the last `axes` axes, with so many parameters of that shape."""

    def notation(_: Sequence[Shape | None], attrs: Attrs) -> str:
        count = attrs["axes"]
        assert isinstance(count, int)
        last = " ".join(f"n{i}!" for i in range(count)) if count > 1 else "n!"
        return f"... {last}" + f", [{last}]" * parameters + f" -> ... {last}"

    return notation


def _layer_norm_call(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, _cudnn: bool = True
) -> Call:
    return Call((x, weight, bias), {"axes": len(shape), "eps": eps}, outputs=(0,))


layer_norm = register(
    Op(
        "layer_norm",
        _over_last(2),
        torch=lambda x, weight=None, bias=None, *, axes, eps: F.layer_norm(
            x, x.shape[-axes:], weight, bias, eps
        ),
        attrs={"axes": 1, "eps": 1e-5},
        weights=("weight", "bias"),
        flops=8,
        aten={"layer_norm.default": _layer_norm_call, "native_layer_norm.default": _layer_norm_call},
        examples=(
            example((2, 4, 6), (6,), (6,)),
            example((4, 6), None, None, eps=0.1),
            example((2, 4, 3, 2), (3, 2), None, axes=2),
        ),
    )
)


def _rms_norm_call(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Call:
    return Call((x, weight), {"axes": len(shape), "eps": eps}, outputs=(0,))


rms_norm = register(
    Op(
        "rms_norm",
        _over_last(1),
        torch=lambda x, weight=None, *, axes, eps: F.rms_norm(x, x.shape[-axes:], weight, eps),
        attrs={"axes": 1, "eps": None},
        weights=("weight",),
        flops=4,
        aten={"rms_norm.default": _rms_norm_call, "_fused_rms_norm.default": _rms_norm_call},
        examples=(example((2, 4, 6), (6,)), example((4, 3, 2), None, axes=2, eps=0.1)),
    )
)


def _grouped(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    rest = " ".join(f"s{i}!" for i in range(len(shape_at(shapes, 0)) - 2))
    return f"b (g:{attrs['groups']} c!) {rest}, [(g c!)], [(g c!)] -> b (g c!) {rest}"


def _group_norm_call(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, _cudnn: bool = True
) -> Call:
    return Call((x, weight, bias), {"groups": groups, "eps": eps})


def _native_group_norm_call(x: Any, weight: Any, bias: Any, *rest: Any) -> Call:
    *_, groups, eps = rest
    return Call((x, weight, bias), {"groups": groups, "eps": eps}, outputs=(0,))


def _instance_norm_call(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Call | None:
    from_input, _, eps, _ = rest
    if mean is not None or var is not None or not from_input:
        return None
    return Call((x, weight, bias), {"groups": x.shape[1], "eps": eps})


group_norm = register(
    Op(
        "group_norm",
        _grouped,
        torch=lambda x, weight=None, bias=None, *, shard, eps: F.group_norm(
            x, shard.length("g"), weight, bias, eps
        ),
        attrs={"groups": 1, "eps": 1e-5},
        weights=("weight", "bias"),
        flops=8,
        aten={
            "group_norm.default": _group_norm_call,
            "native_group_norm.default": _native_group_norm_call,
            "instance_norm.default": _instance_norm_call,
        },
        examples=(
            example((2, 4, 3, 2), (4,), (4,), groups=2),
            example((4, 6), None, None, groups=2, eps=0.1),
            example((2, 4, 3), (4,), (4,), groups=4),
        ),
    )
)


def _over_channels(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    x = shape_at(shapes, 0)
    size = attrs["size"]
    assert isinstance(size, int)
    rest = " ".join(f"s{i}" for i in range(len(x) - 2))
    return f"b c:{x[1]}+j!:{size}-{size // 2} {rest} -> b c {rest}"


def _responses(x: Tensor, *, shard: Shard, size: int, alpha: float, beta: float, k: float) -> Tensor:
    before, after = shard.pads(0)[1]
    squares = F.pad(x.flatten(2).square().unsqueeze(1), (0, 0, before, after))
    mean = F.avg_pool2d(squares, (size, 1), stride=1).squeeze(1)
    middle = x.narrow(1, size // 2 - before, shard.length("c"))
    return middle / (k + alpha * mean.view_as(middle)).pow(beta)


local_response_norm = register(
    Op(
        "local_response_norm",
        _over_channels,
        torch=_responses,
        attrs={"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0},
        flops=3,
        examples=(
            example((2, 6, 2, 2), size=3, alpha=0.5),
            example((2, 4, 6), size=4, alpha=0.5, beta=0.5, k=2.0),
        ),
    )
)


def _batch_notation(shapes: Sequence[Shape | None], _: Attrs) -> str:
    x = " ".join(["b", "c", *space(shape_at(shapes, 0))])
    kept = ", c, c" if shapes[3] is not None else ""
    return f"{x}, [c], [c], [c], [c] -> {x}{kept}"


_ONE_VALUE = (
    "a batch norm takes its own statistics of a shard that has one value per channel, whose variance is"
    " undefined: train with a larger batch, or with statistics of the whole batch (--batch-norm whole)"
)


def _normalised(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    stats: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor | tuple[Tensor, ...]:
    held = [running.detach() for running in (running_mean, running_var) if running is not None]
    if stats is None:
        if x.numel() == x.shape[1]:
            raise OpError(_ONE_VALUE)
        kept = [running.clone() for running in held]
        mean, var = kept or (None, None)
        y = torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, torch.backends.cudnn.enabled)
        return (y, *kept)
    y = shared_statistics.normalised(x, stats, weight, bias, eps)
    if not held:
        return (y,)
    count, mean, squares = stats.detach()
    seen = mean, squares / (count - 1)
    return (y, *(torch.lerp(old, new.to(old.dtype), momentum) for old, new in zip(held, seen, strict=True)))


def _training_call(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Call | None:
    if not training:
        return None
    return Call((x, weight, bias, mean, var), {"momentum": momentum, "eps": eps}, outputs=(0, 3, 4))


def _stateless_call(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Call | None:
    if not training:
        return None
    return Call((x, weight, bias, None, None), {"momentum": momentum, "eps": eps}, outputs=(0,))


# Statistics are those of the whole batch, however it is split. With sync=False every shard takes
# its own, as DDP does; the running statistics that shards give then differ, and to keep the first
# shard's is again what DDP does (it broadcasts the buffers of rank 0).
batch_norm = register(
    Op(
        "batch_norm",
        _batch_notation,
        torch=_normalised,
        keeps=("x", "weight"),
        attrs={"momentum": 0.1, "eps": 1e-5, "sync": True},
        weights=("weight", "bias"),
        flops=8,
        statistics=Statistics(
            ("b", "l", "z", "h", "w"),
            lambda x, *_: shared_statistics.local(x),
            lambda parts: shared_statistics.merged(parts),
            lambda *parts: shared_statistics.pulled(*parts),
        ),
        aten={
            "_native_batch_norm_legit_functional.default": _training_call,
            "_native_batch_norm_legit.no_stats": _stateless_call,
        },
        examples=(
            example((4, 2, 2, 4), (2,), (2,), (2,), positive(2), momentum=0.3),
            example((4, 6), (6,), None, (6,), positive(6)),
            example((4, 2, 6), None, None, None, None, eps=0.1),
            example((2, 2, 2, 2, 2), (2,), (2,), (2,), positive(2)),
        ),
    )
)


def _inference_notation(shapes: Sequence[Shape | None], _: Attrs) -> str:
    x = " ".join(["b", "c", *space(shape_at(shapes, 0))])
    return f"{x}, [c], [c], c, c -> {x}"


def _inference_body(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *, eps: float) -> Any:
    y = (x - mean) / scalar.sqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _with_given_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *, eps: float
) -> Tensor:
    return F.batch_norm(x, mean.detach(), var.detach(), weight, bias, eps=eps)


def _no_training_call(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, _momentum: float, eps: float
) -> Call:
    return Call((x, weight, bias, mean, var), {"eps": eps}, outputs=(0,))


def _untrained_call(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> Call | None:
    _, eps, *_ = rest
    return None if training or mean is None else Call((x, weight, bias, mean, var), {"eps": eps})


batch_norm_inference = register(
    Op(
        "batch_norm_inference",
        _inference_notation,
        body=_inference_body,
        torch=_with_given_statistics,
        attrs={"eps": 1e-5},
        weights=("weight", "bias"),
        aten={
            "_native_batch_norm_legit_no_training.default": _no_training_call,
            "batch_norm.default": _untrained_call,
        },
        examples=(
            example((4, 2, 2, 2), (2,), (2,), (2,), positive(2)),
            example((4, 6), None, None, (6,), positive(6), eps=0.1),
        ),
    )
)
