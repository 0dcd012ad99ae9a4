"""Activations: elementwise operators of one operand, and PReLU, which has a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from soapstone.ops import scalar
from soapstone.ops.definitions.axes import letters, notation_of, shape_at
from soapstone.ops.examples import example
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, Call, Op
from soapstone.ops.registry import register
from soapstone.ops.scalar import apply, exp, log, sigmoid, tanh
from soapstone.ops.signature import Shape

UNARY = "... -> ..."

# [paper] Klambauer et al. 2017, "Self-Normalizing Neural Networks", in torch's digits
_SELU = {"alpha": 1.6732632423543772, "scale": 1.0507009873554805, "input_scale": 1.0}

relu = register(
    Op(
        "relu",
        UNARY,
        body=lambda x: scalar.maximum(x, 0.0),
        torch=lambda x: F.relu(x),
        aten={"relu.default": None},
        examples=(example((4, 6)), example((2, 2, 4))),
    )
)

leaky_relu = register(
    Op(
        "leaky_relu",
        UNARY,
        body=lambda x, *, negative_slope: scalar.where(x > 0, x, negative_slope * x),
        torch=lambda x, *, negative_slope: F.leaky_relu(x, negative_slope),
        attrs={"negative_slope": 0.01},
        aten={"leaky_relu.default": None},
        examples=(example((4, 6)), example((4, 6), negative_slope=0.2)),
    )
)

elu = register(
    Op(
        "elu",
        UNARY,
        body=lambda x, *, alpha, scale, input_scale: scalar.where(
            x > 0, scale * x, alpha * scale * (exp(input_scale * x) - 1.0)
        ),
        torch=lambda x, *, alpha, scale, input_scale: torch.ops.aten.elu.default(
            x, alpha, scale, input_scale
        ),
        attrs={"alpha": 1.0, "scale": 1.0, "input_scale": 1.0},
        aten={
            "elu.default": None,
            "selu.default": lambda x: Call((x,), dict(_SELU)),
            "celu.default": lambda x, alpha=1.0: Call((x,), {"alpha": alpha, "input_scale": 1.0 / alpha}),
        },
        examples=(example((4, 6), alpha=0.5), example((4, 6), **_SELU)),
    )
)


def _gelu(x: Any, *, approximate: str) -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + tanh(inner))
    return 0.5 * x * (1.0 + apply("erf", x * math.sqrt(0.5)))


gelu = register(
    Op(
        "gelu",
        UNARY,
        body=_gelu,
        torch=lambda x, *, approximate: F.gelu(x, approximate=approximate),
        attrs={"approximate": "none"},
        aten={"gelu.default": None},
        examples=(example((4, 6)), example((4, 6), approximate="tanh")),
    )
)

silu = register(
    Op(
        "silu",
        UNARY,
        body=lambda x: x * sigmoid(x),
        torch=lambda x: F.silu(x),
        aten={"silu.default": None},
        examples=(example((4, 6)),),
    )
)

mish = register(
    Op(
        "mish",
        UNARY,
        body=lambda x: x * tanh(log(1.0 + exp(x))),
        torch=lambda x: F.mish(x),
        aten={"mish.default": None},
        examples=(example((4, 6)),),
    )
)


def _softplus(x: Any, *, beta: float, threshold: float) -> Any:
    scaled = beta * x
    return scalar.where(scaled > threshold, x, log(1.0 + exp(scaled)) / beta)


softplus = register(
    Op(
        "softplus",
        UNARY,
        body=_softplus,
        torch=lambda x, *, beta, threshold: F.softplus(x, beta, threshold),
        attrs={"beta": 1.0, "threshold": 20.0},
        aten={"softplus.default": None},
        examples=(example((4, 6)), example((4, 6), beta=2.0, threshold=0.5)),
    )
)

log_sigmoid = register(
    Op(
        "log_sigmoid",
        UNARY,
        body=lambda x: -log(1.0 + exp(-x)),
        torch=lambda x: F.logsigmoid(x),
        aten={"log_sigmoid.default": None},
        examples=(example((4, 6)),),
    )
)


def _hard_sigmoid(x: Any) -> Any:
    return scalar.minimum(scalar.maximum(x + 3.0, 0.0), 6.0) / 6.0


hardsigmoid = register(
    Op(
        "hardsigmoid",
        UNARY,
        body=_hard_sigmoid,
        torch=lambda x: F.hardsigmoid(x),
        aten={"hardsigmoid.default": None},
        examples=(example((4, 6)),),
    )
)

hardswish = register(
    Op(
        "hardswish",
        UNARY,
        body=lambda x: x * _hard_sigmoid(x),
        torch=lambda x: F.hardswish(x),
        aten={"hardswish.default": None},
        examples=(example((4, 6)),),
    )
)


def _prelu_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    """One slope for all, or one for each channel: the second axis, or the only one."""
    del attrs
    names, slopes = letters(len(shape_at(shapes, 0))), shape_at(shapes, 1)
    channel = [] if not slopes else ["0"] if slopes == (1,) else names[:2][-1:]
    return notation_of([names, channel], names)


prelu = register(
    Op(
        "prelu",
        _prelu_notation,
        body=lambda x, w: scalar.where(x > 0, x, w * x),
        torch=lambda x, w: F.prelu(x, w),
        weights=("w",),
        aten={"prelu.default": None},
        examples=(example((2, 4, 6), (4,)), example((4, 6), (1,))),
    )
)
