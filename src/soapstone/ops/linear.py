"""Whether an operator is linear in some operands, read off the expression of its body.

A rule for each operation says what linearity its result has; what no rule knows is not linear. Beside
`subst.linearity`, which asks Z3, this takes no time, and knows that a quotient is linear in what is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet
from enum import Enum

from soapstone.ops.op import Attrs, Op
from soapstone.ops.scalar import Scalar
from soapstone.ops.signature import Signature

MOST_POINTS = 4096
"""[choice] A body that depends on the place is read at every point, unless there are more than this."""


class Degree(Enum):
    """How an expression depends on the symbols in question."""

    ZERO = "is zero, whatever they are"
    CONSTANT = "does not depend on them"
    LINEAR = "is a sum of multiples of them"
    OTHER = "neither, as far as we can tell"


def is_linear(op: Op, signature: Signature, attrs: Attrs, operands: AbstractSet[int]) -> bool:
    """Whether the first output is linear in these operands taken together, the others being fixed."""
    if op.body is None or op.reduce != "sum" or op.random or op.outside:
        return False
    taken = op.body_arity(signature)
    symbols = {f"x{i}" for i in operands}
    points = [dict.fromkeys(signature.sizes, 0)]
    if op.body_knows_place:
        every = itertools.product(*map(range, signature.sizes.values()))
        points = [
            dict(zip(signature.sizes, at, strict=True)) for at in itertools.islice(every, MOST_POINTS + 1)
        ]
        if len(points) > MOST_POINTS:
            return False
    bodies = {degree(op.body_meaning(signature, at, attrs), symbols) for at in points}
    finish = op.finish_meaning(signature, attrs)
    if finish is not None:
        after = {name for name in symbols if int(name[1:]) >= taken}
        summed = bodies <= {Degree.LINEAR, Degree.ZERO}
        return summed and degree(finish, after | {"sum"}) is Degree.LINEAR
    return bodies <= {Degree.LINEAR, Degree.ZERO} and Degree.LINEAR in bodies


def degree(expression: Scalar, symbols: AbstractSet[str]) -> Degree:
    """How an expression depends on the symbols."""
    if expression.op == "var":
        return Degree.LINEAR if expression.args[0] in symbols else Degree.CONSTANT
    if expression.op == "const":
        return Degree.ZERO if expression.args[0] == 0 else Degree.CONSTANT
    found = [degree(arg, symbols) for arg in expression.args]
    if set(found) <= {Degree.CONSTANT, Degree.ZERO}:
        return Degree.CONSTANT
    match expression.op, found:
        case ("add" | "sub", [a, b]) | ("where", [Degree.CONSTANT | Degree.ZERO, a, b]):
            return _either(a, b)
        case ("mul", [Degree.CONSTANT, a] | [a, Degree.CONSTANT]):
            return a
        case ("div", [a, Degree.CONSTANT]) | ("neg", [a]):
            return a
        case _:
            return Degree.OTHER


def _either(a: Degree, b: Degree) -> Degree:
    if Degree.ZERO in (a, b):
        return b if a is Degree.ZERO else a
    return a if a is b else Degree.OTHER
