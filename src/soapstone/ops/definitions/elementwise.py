"""Elementwise operators: every operand is read where the output is written, broadcast as in torch.

An operand may be a number. Where Python's operators mean the same to a tensor and to a scalar
expression, one function is both the torch function and the body. Operators that no real number
tells apart (a cast, a detached copy) or that no real number satisfies (`isnan`) have no body: a
proof about reals must not remove them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from soapstone.ops import scalar
from soapstone.ops.definitions.axes import keeps
from soapstone.ops.definitions.dtypes import short_name, torch_dtype
from soapstone.ops.examples import Example, example, ids, mask, positive
from soapstone.ops.lazy import torch
from soapstone.ops.op import Call, Op
from soapstone.ops.registry import register
from soapstone.ops.scalar import apply, equal, exp, log, sqrt

UNARY = "... -> ..."
BINARY = "..., ... -> ..."
TERNARY = "..., ..., ... -> ..."


def _scaled(factor: Any, x: Any) -> Any:
    return x if factor == 1 else factor * x


def _truncated(x: Any) -> Any:
    return scalar.where(x < 0, -apply("floor", -x), apply("floor", x))


def _sum(a: Any, b: Any, *, alpha: float) -> Any:
    return a + _scaled(alpha, b)


def _difference(a: Any, b: Any, *, alpha: float) -> Any:
    return a - _scaled(alpha, b)


add = register(
    Op(
        "add",
        BINARY,
        body=_sum,
        torch=_sum,
        attrs={"alpha": 1},
        aten={"add.Tensor": None, "add.Scalar": None},
        examples=(
            example((4, 6), (4, 6)),
            example((2, 4, 6), (4, 1), alpha=2),
            example((4, 6), 2.0),
            example(ids(4, 2, below=9), 1),
        ),
    )
)

sub = register(
    Op(
        "sub",
        BINARY,
        body=_difference,
        torch=_difference,
        attrs={"alpha": 1},
        aten={
            "sub.Tensor": None,
            "sub.Scalar": None,
            "rsub.Tensor": lambda b, a, *, alpha=1: Call((a, b), {"alpha": alpha}),
            "rsub.Scalar": lambda b, a, alpha=1: Call((a, b), {"alpha": alpha}),
        },
        examples=(example((4, 6), (6,), alpha=0.5), example(1, (4, 6)), example((4, 6), ())),
    )
)

mul = register(
    Op(
        "mul",
        BINARY,
        body=operator.mul,
        torch=lambda a, b: a * b,
        aten={"mul.Tensor": None, "mul.Scalar": None, "multiply.Tensor": None, "multiply.Scalar": None},
        examples=(example((4, 6), (4, 6)), example((2, 1, 6), (4, 1)), example((4, 6), 0.5)),
    )
)


def _quotient(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    rounded = {None: keeps, "floor": lambda q: apply("floor", q), "trunc": _truncated}
    return rounded[rounding_mode](a / b)


div = register(
    Op(
        "div",
        BINARY,
        body=_quotient,
        torch=lambda a, b, *, rounding_mode: torch.div(a, b, rounding_mode=rounding_mode),
        attrs={"rounding_mode": None},
        aten={
            "div.Tensor": None,
            "div.Scalar": None,
            "div.Tensor_mode": None,
            "div.Scalar_mode": None,
            "true_divide.Tensor": None,
            "floor_divide.default": lambda a, b: Call((a, b), {"rounding_mode": "floor"}),
            "floor_divide.Scalar": lambda a, b: Call((a, b), {"rounding_mode": "floor"}),
        },
        examples=(
            example((4, 6), positive(6)),
            example((4, 6), 3.0),
            example((4, 6), positive(4, 1), rounding_mode="floor"),
            example((4, 6), 0.3, rounding_mode="trunc"),
        ),
    )
)

remainder = register(
    Op(
        "remainder",
        BINARY,
        body=lambda a, b: a - b * apply("floor", a / b),
        torch=lambda a, b: torch.remainder(a, b),
        aten={"remainder.Tensor": None, "remainder.Scalar": None, "remainder.Scalar_Tensor": None},
        examples=(example((4, 6), positive(6)), example(ids(4, 6, below=9), 4)),
    )
)

fmod = register(
    Op(
        "fmod",
        BINARY,
        body=lambda a, b: a - b * _truncated(a / b),
        torch=lambda a, b: torch.fmod(a, b),
        aten={"fmod.Tensor": None, "fmod.Scalar": None},
        examples=(example((4, 6), positive(6)), example((4, 6), 0.4)),
    )
)

power = register(
    Op(
        "pow",
        BINARY,
        body=operator.pow,
        torch=lambda a, b: torch.pow(a, b),
        aten={"pow.Tensor_Tensor": None, "pow.Tensor_Scalar": None, "pow.Scalar": None},
        examples=(example(positive(4, 6), (6,)), example((4, 6), 2), example(2.0, (4, 6))),
    )
)

maximum = register(
    Op(
        "maximum",
        BINARY,
        body=scalar.maximum,
        torch=lambda a, b: torch.maximum(a, b),
        aten={"maximum.default": None, "max.other": None},
        examples=(example((4, 6), (4, 6)), example((2, 4, 6), (4, 1))),
    )
)

minimum = register(
    Op(
        "minimum",
        BINARY,
        body=scalar.minimum,
        torch=lambda a, b: torch.minimum(a, b),
        aten={"minimum.default": None, "min.other": None},
        examples=(example((4, 6), (4, 6)),),
    )
)


def _unary(name: str, body: Callable[..., Any], *examples: Example, needs_grad: bool = True) -> Op:
    """An operator of one operand that torch calls by the same name."""
    return register(
        Op(
            name,
            UNARY,
            body=body,
            torch=lambda x: getattr(torch, name)(x),
            aten={f"{name}.default": None},
            needs_grad=needs_grad,
            examples=examples or (example((4, 6)),),
        )
    )


POSITIVE = example(positive(4, 6))

neg = _unary("neg", operator.neg)
absolute = _unary("abs", lambda x: apply("abs", x))
square = _unary("square", lambda x: x * x)
exponential = _unary("exp", exp)
expm1 = _unary("expm1", lambda x: exp(x) - 1.0)
logarithm = _unary("log", log, POSITIVE)
log1p = _unary("log1p", lambda x: log(1.0 + x), POSITIVE)
log2 = _unary("log2", lambda x: log(x) / math.log(2.0), POSITIVE)
root = _unary("sqrt", sqrt, POSITIVE)
rsqrt = _unary("rsqrt", lambda x: 1.0 / sqrt(x), POSITIVE)
reciprocal = _unary("reciprocal", lambda x: 1.0 / x, POSITIVE)
sine = _unary("sin", lambda x: apply("sin", x))
cosine = _unary("cos", lambda x: apply("cos", x))
tangent = _unary("tan", lambda x: apply("sin", x) / apply("cos", x))
arctangent = _unary("atan", lambda x: apply("atan", x))
tanh = _unary("tanh", scalar.tanh)
sigmoid = _unary("sigmoid", scalar.sigmoid)
arsinh = _unary("asinh", lambda x: log(x + sqrt(x * x + 1.0)))
erf = _unary("erf", lambda x: apply("erf", x))
floor = _unary("floor", lambda x: apply("floor", x), needs_grad=False)
ceil = _unary("ceil", lambda x: -apply("floor", -x), needs_grad=False)
rounded = _unary("round", lambda x: apply("round", x), needs_grad=False)
truncated = _unary("trunc", _truncated, needs_grad=False)
sign = _unary("sign", lambda x: scalar.where(x > 0, 1.0, scalar.where(x < 0, -1.0, 0.0)), needs_grad=False)


def _bounded(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else scalar.maximum(x, low)
    return x if high is None else scalar.minimum(x, high)


clamp = register(
    Op(
        "clamp",
        "..., [...], [...] -> ...",
        body=_bounded,
        torch=lambda x, low=None, high=None: torch.clamp(x, low, high),
        aten={
            "clamp.default": None,
            "clamp.Tensor": None,
            "clip.default": None,
            "clip.Tensor": None,
            "clamp_min.default": lambda x, low: Call((x, low, None)),
            "clamp_min.Tensor": lambda x, low: Call((x, low, None)),
            "clamp_max.default": lambda x, high: Call((x, None, high)),
            "clamp_max.Tensor": lambda x, high: Call((x, None, high)),
            "hardtanh.default": lambda x, low=-1, high=1: Call((x, low, high)),
            "relu6.default": lambda x: Call((x, 0, 6)),
        },
        examples=(
            example((4, 6), -0.5, 0.5),
            example((4, 6), 0, None),
            example((2, 4, 6), None, (4, 1)),
            example((4, 6), (6,), positive(4, 1)),
        ),
    )
)

where = register(
    Op(
        "where",
        TERNARY,
        body=scalar.where,
        torch=lambda condition, a, b: torch.where(condition, a, b),
        aten={"where.self": None, "where.ScalarSelf": None, "where.ScalarOther": None, "where.Scalar": None},
        examples=(
            example(mask(4, 6), (4, 6), (6,)),
            example(mask(4, 1), 1.0, (2, 4, 6)),
            example(mask(4, 6), 1.0, 0.0),
        ),
    )
)

masked_fill = register(
    Op(
        "masked_fill",
        TERNARY,
        body=lambda x, masked, value: scalar.where(masked, value, x),
        torch=lambda x, masked, value: x.masked_fill(masked, value),
        aten={"masked_fill.Scalar": None, "masked_fill.Tensor": None},
        examples=(example((2, 4, 6), mask(4, 1), -1e9), example((4, 6), mask(4, 6), ())),
    )
)

lerp = register(
    Op(
        "lerp",
        TERNARY,
        body=lambda a, b, weight: a + weight * (b - a),
        torch=lambda a, b, weight: torch.lerp(a, b, weight),
        aten={"lerp.Scalar": None, "lerp.Tensor": None},
        examples=(example((4, 6), (4, 6), 0.25), example((4, 6), (6,), (4, 1))),
    )
)

addcmul = register(
    Op(
        "addcmul",
        TERNARY,
        body=lambda x, a, b, *, value: x + _scaled(value, a * b),
        torch=lambda x, a, b, *, value: torch.addcmul(x, a, b, value=value),
        attrs={"value": 1},
        aten={"addcmul.default": None},
        examples=(example((4, 6), (6,), (4, 1), value=0.5),),
    )
)

addcdiv = register(
    Op(
        "addcdiv",
        TERNARY,
        body=lambda x, a, b, *, value: x + _scaled(value, a / b),
        torch=lambda x, a, b, *, value: torch.addcdiv(x, a, b, value=value),
        attrs={"value": 1},
        aten={"addcdiv.default": None},
        examples=(example((4, 6), (6,), positive(4, 1), value=0.5),),
    )
)


def _comparison(name: str, body: Callable[..., Any]) -> Op:
    return register(
        Op(
            name,
            BINARY,
            body=body,
            torch=lambda a, b: getattr(torch, name)(a, b),
            aten={f"{name}.Tensor": None, f"{name}.Scalar": None},
            needs_grad=False,
            examples=(example(ids(4, 6, below=3), ids(6, below=3)), example(ids(4, 6, below=3), 1)),
        )
    )


eq = _comparison("eq", equal)
ne = _comparison("ne", lambda a, b: apply("not", equal(a, b)))
lt = _comparison("lt", operator.lt)
le = _comparison("le", operator.le)
gt = _comparison("gt", operator.gt)
ge = _comparison("ge", operator.ge)


def _of_bools(*operands: Any) -> Call | None:
    """A bitwise operator is a logical one only on booleans."""
    return Call(operands) if all(getattr(x, "dtype", None) == "bool" for x in operands) else None


def _logical(name: str, body: Callable[..., Any]) -> Op:
    return register(
        Op(
            f"logical_{name}",
            BINARY,
            body=body,
            torch=lambda a, b: getattr(torch, f"logical_{name}")(a, b),
            aten={
                f"logical_{name}.default": None,
                f"bitwise_{name}.Tensor": _of_bools,
                f"__{name}__.Tensor": _of_bools,
            },
            needs_grad=False,
            examples=(example(mask(4, 6), mask(6)), example(mask(4, 6), ids(4, 6, below=2))),
        )
    )


def _exclusive(a: Any, b: Any) -> Any:
    return apply("or", apply("and", a, apply("not", b)), apply("and", apply("not", a), b))


logical_and = _logical("and", lambda a, b: apply("and", a, b))
logical_or = _logical("or", lambda a, b: apply("or", a, b))
logical_xor = _logical("xor", _exclusive)

logical_not = register(
    Op(
        "logical_not",
        UNARY,
        body=lambda x: apply("not", x),
        torch=lambda x: torch.logical_not(x),
        aten={"logical_not.default": None, "bitwise_not.default": _of_bools},
        needs_grad=False,
        examples=(example(mask(4, 6)),),
    )
)


def _bitwise(name: str) -> Op:
    """An operator on the bits of integers; that of booleans is logical."""
    return register(
        Op(
            f"bitwise_{name}",
            BINARY,
            torch=lambda a, b: getattr(torch, f"bitwise_{name}")(a, b),
            flops=1,
            aten=dict.fromkeys(
                (
                    f"bitwise_{name}.Tensor",
                    f"bitwise_{name}.Scalar",
                    f"__{name}__.Tensor",
                    f"__{name}__.Scalar",
                ),
                lambda a, b: Call((a, b)),
            ),
            needs_grad=False,
            examples=(
                example(ids(4, 6, below=9), ids(6, below=9)),
                example(ids(4, 6, below=9), 5),
                example(mask(4, 6), ids(4, 6, below=9)),
            ),
        )
    )


bitwise_and = _bitwise("and")
bitwise_or = _bitwise("or")
bitwise_xor = _bitwise("xor")


def _test(name: str) -> Op:
    """A question that only floating-point numbers answer with yes."""
    return register(
        Op(
            name,
            UNARY,
            torch=lambda x: getattr(torch, name)(x),
            flops=1,
            aten={f"{name}.default": None},
            needs_grad=False,
            examples=(example((4, 6)),),
        )
    )


isnan = _test("isnan")
isinf = _test("isinf")
isfinite = _test("isfinite")


def _cast(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Call:
    return Call((x,), {"dtype": short_name(dtype) or x.dtype})


cast = register(
    Op(
        "cast",
        UNARY,
        torch=lambda x, *, dtype: x.to(torch_dtype(dtype)),
        flops=0,
        attrs={"dtype": "f32"},
        aten={
            "_to_copy.default": _cast,
            "to.dtype": _cast,
            "to.dtype_layout": _cast,
            "to.device": lambda x, device, dtype, *_, **__: _cast(x, dtype),  # noqa: ARG005
            "to.other": lambda x, other, *_, **__: _cast(x, other.dtype),
            "type_as.default": lambda x, other: _cast(x, other.dtype),
        },
        examples=(
            example((4, 6), dtype="f32"),
            example((4, 6), dtype="i64"),
            example(mask(4, 6), dtype="f64"),
        ),
    )
)

copy = register(
    Op(
        "copy",
        UNARY,
        body=keeps,
        torch=lambda x: x.view_as(x),
        aten=dict.fromkeys(
            ("alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default"),
            lambda x, **_: Call((x,)),
        ),
        examples=(example((4, 6)),),
    )
)

detach = register(
    Op(
        "detach",
        UNARY,
        torch=lambda x: x.detach(),
        flops=0,
        aten={"detach.default": None},
        needs_grad=False,
        examples=(example((4, 6)),),
    )
)
