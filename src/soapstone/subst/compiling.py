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
import numpy.typing as npt

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
    value = _lone_value(meant)
    if value is not None:
        return _add_constant(bank, meant, size, value)
    parallel = [dim for dim in signature.sizes if dim in signature.output_dims]
    body = None if meant.op.body is None else _body(meant)
    if body is None:
        return _add_chain(bank, meant, operands, size)
    taken = [i for i in operands if i < meant.op.body_arity(signature)]
    rest = [i for i in operands if i not in taken]
    summed = list(signature.summed_dims)
    count = prod(signature.sizes[dim] for dim in parallel)
    places = _grid(signature, [*parallel, *summed])
    outer = {dim: places[dim].reshape(count, -1)[:, 0] for dim in signature.sizes}
    element = _flat(signature.outputs[0], signature.output_shapes[0], outer)
    points = max(1, prod(signature.sizes[dim] for dim in summed))
    table = np.full((size, points, len(taken)), _NO_POINT, np.int32)
    extra = np.full((size, len(rest)), _LEFT_OUT, np.int32)
    for n, i in enumerate(taken):
        table[element, :, n] = _reads(signature, i, places).reshape(count, points)
    for n, i in enumerate(rest):
        extra[element, n] = _reads(signature, i, outer)
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


def _lone_value(meant: Applied) -> Fraction | None:
    """What an operator gives that reads no element, and gives one number beside zero."""
    signature = meant.signature
    if not meant.op.body_knows_place or signature.summed_dims:
        return None
    values = set[Fraction]()
    for place in _points(signature, list(signature.sizes)):
        value = _number(meant.op.body_meaning(signature, place, meant.attrs))
        if value is None:
            return None
        values.add(value)
    beside = values - {0}
    return beside.pop() if len(beside) == 1 else None


def _number(expression: scalar.Scalar) -> Fraction | None:
    """The number that a quotient of numbers is, and no other expression."""
    if expression.op == "const":
        return Fraction(float(expression.args[0]))
    parts = [_number(arg) for arg in expression.args] if expression.op == "div" else [None]
    return None if None in parts else parts[0] / parts[1]  # type: ignore[operator]


def _add_constant(bank: TermBank, meant: Applied, size: int, value: Fraction) -> int:
    """A sum of that value alone, over no point where the constant is zero."""
    signature = meant.signature
    table = np.full((size, 1, 1), _NO_POINT, np.int32)
    for place in _points(signature, list(signature.sizes)):
        if _number(meant.op.body_meaning(signature, place, meant.attrs)):
            table[_position(signature.outputs[0], signature.output_shapes[0], place)] = 0
    return bank.add_program(
        arity=1,
        size=size,
        points=1,
        combine=_COMBINE["sum"],
        outside=0,
        gather=table.ravel(),
        body=[(1, value.numerator * pow(value.denominator, -1, PRIME) % PRIME)],
        extra=0,
        finish_gather=np.zeros(0, np.int32),
        finish=[],
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


Places = dict[str, npt.NDArray[np.int64]]
"""The coordinates of points along each dim."""


def _grid(signature: Signature, dims: Sequence[str]) -> Places:
    """All points of some dims, the last changing fastest; all other dims are at their first."""
    shape = [signature.sizes[dim] for dim in dims]
    count = prod(shape)
    every = np.unravel_index(np.arange(count), shape) if dims else ()
    return {dim: np.zeros(count, np.int64) for dim in signature.sizes} | dict(zip(dims, every, strict=True))


def _flat(access: Access, shape: Sequence[int], places: Places) -> npt.NDArray[np.int64]:
    """The positions of elements; out of bounds they are -1, and where an axis has no index -2."""
    count = len(next(iter(places.values()))) if places else 1
    found = np.zeros(count, np.int64)
    is_outside, is_none = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for axis, size in zip(access, shape, strict=True):
        at = np.full(count, axis.const, np.int64)
        for dim, step in axis.terms:
            at += step * places[dim]
        is_none |= at % axis.divisor != 0
        at //= axis.divisor
        is_outside |= (at < 0) | (at >= size)
        found = found * size + at
    return np.where(is_none, _NO_POINT, np.where(is_outside, _LEFT_OUT, found))


def _reads(signature: Signature, operand: int, places: Places) -> npt.NDArray[np.int64]:
    access, shape = signature.operands[operand], signature.shapes[operand]
    assert access is not None
    assert shape is not None
    return _flat(access, shape, places)


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
    points = prod(signature.sizes[dim] for dim in walked)
    places = _grid(signature, [*fixed, *walked])
    outer = _grid(signature, fixed)
    reads = [_reads(signature, i, places).reshape(-1, points) for i in operands]
    table = np.full((size, points, len(operands)), _LEFT_OUT, np.int32)
    salt = [0] * size
    for own in _points(signature, shown):
        here = outer | {dim: np.full_like(next(iter(outer.values())), at) for dim, at in own.items()}
        element = _flat(signature.outputs[0], signature.output_shapes[0], here)
        for n, read in enumerate(reads):
            table[element, :, n] = read
        for each in element.tolist():
            salt[each] = (name << 24) + sum(value << 4 * n for n, value in enumerate(own.values()))
    return bank.add_program(
        arity=len(operands),
        size=size,
        points=points,
        combine=_CHAIN,
        outside=0,
        gather=table.ravel(),
        body=[],
        extra=0,
        finish_gather=np.zeros(0, np.int32),
        finish=[],
        salt=salt,
    )
