"""The scalar meaning of operators: one table, read by floats, by Z3 and by a flop counter.

A body such as `lambda x, w: x * w` is called once with symbols and leaves an expression tree.
`evaluate` reads the tree in one of two domains: Python floats (the reference meaning) and Z3
reals (proofs). `flops` counts it. All three look into the same `TABLE`, so an operator's
meaning cannot differ between the test, the proof and the cost.

Where the domains differ, the table says so: Z3 has no transcendental functions, so there they
are uninterpreted (equal arguments give equal results, nothing else is known), which is sound.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Scalar:
    """A node of an expression: a symbol (`op == "var"`), a number (`"const"`) or an operation."""

    op: str
    args: tuple[Any, ...]

    def __add__(self, other: Operand) -> Scalar:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Scalar:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Scalar:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Scalar:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Scalar:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Scalar:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Scalar:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Scalar:
        return apply("div", other, self)

    def __pow__(self, other: Operand) -> Scalar:
        return apply("pow", self, other)

    def __neg__(self) -> Scalar:
        return apply("neg", self)

    def __lt__(self, other: Operand) -> Scalar:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Scalar:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Scalar:
        return apply("lt", other, self)

    def __ge__(self, other: Operand) -> Scalar:
        return apply("le", other, self)

    def __bool__(self) -> bool:
        raise TypeError("a scalar body cannot branch in Python: use where(condition, a, b)")


Operand = Scalar | float | int | bool


@dataclass(frozen=True)
class Meaning:
    """What one operation means to a float, how many flops it takes, and what it means to Z3.

    `z3` takes the Z3 module and Z3 terms; None means the float function works on terms as it is
    (Python's operators do), "uninterpreted" that Z3 knows only the name.
    """

    number: Callable[..., Any]
    flops: int = 1
    z3: Callable[..., Any] | str | None = None


def _z3_pow(z3: Any, base: Any, exponent: Any) -> Any:
    power = z3.simplify(exponent)
    if z3.is_rational_value(power) and power.denominator_as_long() == 1:
        count = power.numerator_as_long()
        if 0 <= count <= 4:
            return math.prod([base] * count, start=z3.RealVal(1))
    return z3.Function("pow", z3.RealSort(), z3.RealSort(), z3.RealSort())(base, exponent)


def _truth(z3: Any, term: Any) -> Any:
    return term if z3.is_bool(term) else term != 0


def _float_pow(base: float, exponent: float) -> float:
    try:
        result = base**exponent
    except (OverflowError, ZeroDivisionError):
        return math.inf
    return math.nan if isinstance(result, complex) else result


TABLE: dict[str, Meaning] = {
    "add": Meaning(operator.add),
    "sub": Meaning(operator.sub),
    "mul": Meaning(operator.mul),
    "div": Meaning(operator.truediv),
    "neg": Meaning(operator.neg),
    "pow": Meaning(_float_pow, z3=_z3_pow),
    "abs": Meaning(abs, z3=lambda z3, a: z3.If(a < 0, -a, a)),
    "max": Meaning(max, z3=lambda z3, a, b: z3.If(a >= b, a, b)),
    "min": Meaning(min, z3=lambda z3, a, b: z3.If(a <= b, a, b)),
    "lt": Meaning(operator.lt),
    "le": Meaning(operator.le),
    "eq": Meaning(operator.eq),
    "and": Meaning(
        lambda a, b: bool(a) and bool(b), z3=lambda z3, a, b: z3.And(_truth(z3, a), _truth(z3, b))
    ),
    "or": Meaning(lambda a, b: bool(a) or bool(b), z3=lambda z3, a, b: z3.Or(_truth(z3, a), _truth(z3, b))),
    "not": Meaning(operator.not_, z3=lambda z3, a: z3.Not(_truth(z3, a))),
    "where": Meaning(lambda c, a, b: a if c else b, z3=lambda z3, c, a, b: z3.If(_truth(z3, c), a, b)),
    "floor": Meaning(math.floor, z3=lambda z3, a: z3.ToReal(z3.ToInt(a))),
    "round": Meaning(round, z3="uninterpreted"),
    "exp": Meaning(math.exp, z3="uninterpreted"),
    "log": Meaning(
        lambda a: math.log(a) if a > 0 else (-math.inf if a == 0 else math.nan), z3="uninterpreted"
    ),
    "sqrt": Meaning(lambda a: math.sqrt(a) if a >= 0 else math.nan, z3="uninterpreted"),
    "tanh": Meaning(math.tanh, z3="uninterpreted"),
    "erf": Meaning(math.erf, z3="uninterpreted"),
    "sin": Meaning(math.sin, z3="uninterpreted"),
    "cos": Meaning(math.cos, z3="uninterpreted"),
    "atan": Meaning(math.atan, z3="uninterpreted"),
}


def apply(op: str, *args: Operand) -> Scalar:
    """The expression that applies an operation of `TABLE`."""
    return Scalar(op, tuple(arg if isinstance(arg, Scalar) else const(arg) for arg in args))


def var(name: str) -> Scalar:
    """A symbol."""
    return Scalar("var", (name,))


def const(value: float | bool) -> Scalar:
    """A number."""
    return Scalar("const", (value,))


def equal(a: Operand, b: Operand) -> Scalar:
    """Whether two are equal."""
    return apply("eq", a, b)


def where(condition: Operand, a: Operand, b: Operand) -> Scalar:
    """The first where the condition holds, else the second."""
    return apply("where", condition, a, b)


def maximum(a: Operand, b: Operand) -> Scalar:
    """The larger."""
    return apply("max", a, b)


def minimum(a: Operand, b: Operand) -> Scalar:
    """The smaller."""
    return apply("min", a, b)


def exp(a: Operand) -> Scalar:
    """e to the power of it."""
    return apply("exp", a)


def log(a: Operand) -> Scalar:
    """The natural logarithm."""
    return apply("log", a)


def sqrt(a: Operand) -> Scalar:
    """The square root."""
    return apply("sqrt", a)


def tanh(a: Operand) -> Scalar:
    """The hyperbolic tangent."""
    return apply("tanh", a)


def sigmoid(a: Operand) -> Scalar:
    """The logistic function."""
    return 1.0 / (1.0 + exp(-1.0 * a if not isinstance(a, Scalar) else -a))


def evaluate(expression: Scalar, symbols: dict[str, Any]) -> Any:
    """The value of an expression over Python numbers."""
    match expression.op:
        case "var":
            return symbols[expression.args[0]]
        case "const":
            return expression.args[0]
        case name:
            return TABLE[name].number(*(evaluate(arg, symbols) for arg in expression.args))


def evaluate_z3(expression: Scalar, symbols: dict[str, Any]) -> Any:
    """The value of an expression over Z3 terms of real sort."""
    z3 = importlib.import_module("z3")
    match expression.op:
        case "var":
            return symbols[expression.args[0]]
        case "const":
            value = expression.args[0]
            return z3.BoolVal(value) if isinstance(value, bool) else z3_number(value)
        case name:
            args = [evaluate_z3(arg, symbols) for arg in expression.args]
            meaning = TABLE[name]
            if meaning.z3 is None:
                return meaning.number(*args)
            if callable(meaning.z3):
                return meaning.z3(z3, *args)
            return z3.Function(name, *[z3.RealSort()] * (len(args) + 1))(*args)


def z3_number(value: float) -> Any:
    """A number as a Z3 real; infinities become named constants, about which nothing is assumed."""
    z3 = importlib.import_module("z3")
    if math.isinf(value) or math.isnan(value):
        return z3.Real(f"number:{value}")
    return z3.RealVal(value)


def flops(expression: Scalar) -> int:
    """How many floating-point operations the expression takes; what it uses twice is computed once."""
    nodes: dict[int, Scalar] = {}
    rest = [expression]
    while rest:
        node = rest.pop()
        if node.op not in ("var", "const") and id(node) not in nodes:
            nodes[id(node)] = node
            rest.extend(node.args)
    return sum(TABLE[node.op].flops for node in nodes.values())


def traced(function: Callable[..., Any], names: Sequence[str | None], **keywords: Any) -> Scalar:
    """The expression that a body leaves when called with one symbol per name (None stays None)."""
    result = function(*(None if name is None else var(name) for name in names), **keywords)
    return result if isinstance(result, Scalar) else const(result)
