"""Operators as programs of the native core: tables of positions and scalar expressions in postfix order.

An operator with a body is that body, evaluated on the elements that its notation makes meet. One without, or
whose body looks at its coordinates, is a hash: of all elements that its notation lets an element of the
output depend on, and of the output's coordinates along the dims that must stay whole.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, prod
from typing import Any

import numpy as np

from soapstone.native import TermBank
from soapstone.ops import Signature, scalar
from soapstone.ops.signature import Access
from soapstone.subst.words import Applied

PRIME = 2**61 - 1
_STEPS = {"add": 2, "sub": 3, "mul": 4, "div": 5, "neg": 6, "max": 7, "min": 8}
_COMBINE = {"sum": 0, "max": 1, "min": 2}
_CHAIN = 3
_HASH = 9
_LEFT_OUT, _NO_POINT = -1, -2

Steps = list[tuple[int, int]]


def add_program(bank: TermBank, meant: Applied) -> int:
    """Add an operator at given shapes to the bank; the number of its program."""
    signature = meant.signature
    operands = [i for i, shape in enumerate(meant.shapes) if shape is not None and i not in meant.numbers]
    size = prod(signature.output_shapes[0])
    parallel = [dim for dim in signature.sizes if dim in signature.output_dims]
    body = None if meant.op.body is None else _body(meant)
    if body is None:
        return _add_chain(bank, meant, operands, size)
    taken = [i for i in operands if i < meant.op.body_arity(signature)]
    rest = [i for i in operands if i not in taken]
    summed = list(_points(signature, list(signature.summed_dims)))
    table = np.full((size, max(1, len(summed)), len(taken)), _NO_POINT, np.int32)
    extra = np.full((size, len(rest)), _LEFT_OUT, np.int32)
    for place in _points(signature, parallel):
        element = _position(signature.outputs[0], signature.output_shapes[0], place)
        for number, inner in enumerate(summed):
            at = {**place, **inner}
            table[element, number] = [_read(signature, i, at) for i in taken]
        extra[element] = [_read(signature, i, place) for i in rest]
    finish = meant.op.finish_meaning(signature, meant.attrs)
    names = {"sum": 0, **{f"x{i}": 1 + n for n, i in enumerate(rest)}}
    return bank.add_program(
        arity=len(taken),
        size=size,
        points=table.shape[1],
        combine=_COMBINE[meant.op.reduce],
        outside=_element(float(_outside(meant))),
        gather=table.ravel(),
        body=_steps(body, {f"x{i}": n for n, i in enumerate(taken)}, meant),
        extra=len(rest),
        finish_gather=extra.ravel(),
        finish=[] if finish is None else _steps(finish, names, meant),
        salt=[],
    )


def _outside(meant: Applied) -> float:
    named = meant.op.outside
    value = meant.op.complete(meant.attrs)[named] if isinstance(named, str) else named
    assert isinstance(value, int | float)
    return value


def _points(signature: Signature, dims: Sequence[str]) -> Any:
    for at in itertools.product(*(range(signature.sizes[dim]) for dim in dims)):
        yield dict(zip(dims, at, strict=True))


def _position(access: Access, shape: Sequence[int], place: dict[str, int]) -> int:
    index = [axis.at(place) or 0 for axis in access]
    return int(np.ravel_multi_index(index, shape)) if shape else 0


def _read(signature: Signature, operand: int, place: dict[str, int]) -> int:
    access, shape = signature.operands[operand], signature.shapes[operand]
    assert access is not None
    assert shape is not None
    index = [axis.at(place) for axis in access]
    if any(i is None for i in index):
        return _NO_POINT
    exact = [i for i in index if i is not None]
    if any(not 0 <= i < size for i, size in zip(exact, shape, strict=True)):
        return _LEFT_OUT
    return int(np.ravel_multi_index(exact, shape)) if shape else 0


def _body(meant: Applied) -> scalar.Scalar | None:
    """The body, if it is the same at every point."""
    signature = meant.signature
    if not meant.op.body_knows_place:
        return meant.op.body_meaning(signature, dict.fromkeys(signature.sizes, 0), meant.attrs)
    bodies = [
        meant.op.body_meaning(signature, place, meant.attrs)
        for place in _points(signature, list(signature.sizes))
    ]
    return bodies[0] if len({_text(body) for body in bodies}) == 1 else None


def _text(expression: scalar.Scalar) -> str:
    if expression.op in ("var", "const"):
        return repr(expression.args[0])
    return f"{expression.op}({','.join(_text(arg) for arg in expression.args)})"


def _element(value: float) -> int:
    """A number as an element of the field; an infinity is the last element on its side."""
    if not isfinite(value):
        return PRIME // 2 + (1 if value < 0 else 0)
    fraction = Fraction(value)
    return fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME


def _steps(expression: scalar.Scalar, names: dict[str, int], meant: Applied) -> Steps:
    match expression.op:
        case "var":
            name = expression.args[0]
            number = int(name[1:]) if name[1:].isdigit() else -1
            if number in meant.numbers:
                return [(1, _element(meant.numbers[number]))]
            return [(0, names[name])]
        case "const":
            return [(1, _element(float(expression.args[0])))]
        case op:
            steps = [step for arg in expression.args for step in _steps(arg, names, meant)]
            if op in _STEPS:
                return [*steps, (_STEPS[op], 0)]
            return [*steps, (_HASH, zlib.crc32(op.encode()) << 8 | len(expression.args))]


def _add_chain(bank: TermBank, meant: Applied, operands: Sequence[int], size: int) -> int:
    signature = meant.signature
    fixed = [d for d in signature.sizes if d in signature.output_dims and d not in signature.whole]
    walked = [dim for dim in signature.sizes if dim not in fixed]
    shown = [dim for dim in signature.sizes if dim in signature.output_dims and dim in signature.whole]
    name = zlib.crc32(f"{meant.op.name}{sorted(meant.attrs.items())}".encode())
    points = list(_points(signature, walked))
    table = np.full((size, len(points), len(operands)), _LEFT_OUT, np.int32)
    salt = [0] * size
    for place in _points(signature, fixed):
        reads = [[_read(signature, i, {**place, **inner}) for i in operands] for inner in points]
        for own in _points(signature, shown):
            rest = dict.fromkeys(signature.sizes, 0)
            element = _position(signature.outputs[0], signature.output_shapes[0], {**rest, **place, **own})
            table[element] = reads
            salt[element] = (name << 24) + sum(value << 4 * n for n, value in enumerate(own.values()))
    return bank.add_program(
        arity=len(operands),
        size=size,
        points=len(points),
        combine=_CHAIN,
        outside=0,
        gather=table.ravel(),
        body=[],
        extra=0,
        finish_gather=np.zeros(0, np.int32),
        finish=[],
        salt=salt,
    )
