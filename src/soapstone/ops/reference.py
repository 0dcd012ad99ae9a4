"""The meaning of an operator with a body, point by point: its specification.

`meaning` walks an iteration box, reads operand elements, applies the body, combines the summed
points and finishes. It does so over any algebra: floats give the reference result that torch is
held against, Z3 terms give the formulas of `proof`. Slow and plain on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from soapstone.ops import scalar
from soapstone.ops.op import Attrs, Op
from soapstone.ops.signature import IterationBox, Signature

Index = tuple[int, ...]
Read = Callable[[int, Index], Any]


@dataclass(frozen=True)
class Algebra:
    """What expressions are read as: how to evaluate one, lift a number, and combine two values."""

    evaluate: Callable[[scalar.Scalar, dict[str, Any]], Any]
    number: Callable[[float], Any]


FLOATS = Algebra(scalar.evaluate, float)
Z3_REALS = Algebra(scalar.evaluate_z3, scalar.z3_number)


def meaning(
    op: Op, signature: Signature, attrs: Attrs, read: Read, algebra: Algebra, box: IterationBox | None = None
) -> dict[Index, Any]:
    """The elements of the first output that a shard writes, by index; partial if sums are split."""
    shard = box or signature.points
    first = all(shard[dim].lo == 0 for dim in signature.summed_dims)
    parallel = [dim for dim in signature.sizes if dim in signature.output_dims]
    outside_name = op.outside
    outside = op.complete(attrs)[outside_name] if isinstance(outside_name, str) else outside_name
    assert isinstance(outside, int | float)

    def element(operand: int, point: Mapping[str, int]) -> Any:
        access, shape = signature.operands[operand], signature.shapes[operand]
        assert access is not None
        assert shape is not None
        index = [axis.at(point) for axis in access]
        if any(i is None for i in index):
            return None
        exact = tuple(i for i in index if i is not None)
        if any(not 0 <= i < size for i, size in zip(exact, shape, strict=True)):
            return algebra.number(outside)
        return read(operand, exact)

    taken = [i for i in range(op.body_arity(signature)) if signature.shapes[i] is not None]
    fixed = None if op.body_knows_place else op.body_meaning(signature, {}, attrs)

    def body(point: Mapping[str, int]) -> Any:
        values = {f"x{i}": element(i, point) for i in taken}
        if any(value is None for value in values.values()):
            return None
        return algebra.evaluate(
            fixed if fixed is not None else op.body_meaning(signature, point, attrs), values
        )

    results: dict[Index, Any] = {}
    for at in itertools.product(*(range(shard[dim].lo, shard[dim].hi) for dim in parallel)):
        place = dict(zip(parallel, at, strict=True))
        total: Any = None
        for inner in itertools.product(*(range(shard[d].lo, shard[d].hi) for d in signature.summed_dims)):
            value = body({**place, **dict(zip(signature.summed_dims, inner, strict=True))})
            if value is not None:
                total = value if total is None else _combine(op, algebra, total, value)
        total = algebra.number(0.0) if total is None else total
        index = tuple(axis.at(place) or 0 for axis in signature.outputs[0])
        results[index] = _finished(op, signature, attrs, algebra, total, place, element, first)
    return results


def _combine(op: Op, algebra: Algebra, a: Any, b: Any) -> Any:
    name = {"sum": "add", "max": "max", "min": "min"}[op.reduce]
    return algebra.evaluate(scalar.apply(name, scalar.var("a"), scalar.var("b")), {"a": a, "b": b})


def _finished(
    op: Op,
    signature: Signature,
    attrs: Attrs,
    algebra: Algebra,
    total: Any,
    place: Mapping[str, int],
    element: Callable[[int, Mapping[str, int]], Any],
    first: bool,
) -> Any:
    expression = op.finish_meaning(signature, attrs)
    if expression is None:
        return total
    symbols = {"sum": total}
    for i in range(op.body_arity(signature), len(signature.shapes)):
        if signature.shapes[i] is not None:
            symbols[f"x{i}"] = element(i, place) if first or not signature.summable else algebra.number(0.0)
    return algebra.evaluate(expression, symbols)


def reference(op: Op, signature: Signature, attrs: Attrs, operands: Sequence[Any]) -> npt.NDArray[np.float64]:
    """The whole result over floats. Operands are arrays, numbers, or None when left out."""

    def read(operand: int, index: Index) -> Any:
        return np.asarray(operands[operand])[index].item()

    result = np.zeros(signature.output_shapes[0])
    for index, value in meaning(op, signature, attrs, read, FLOATS).items():
        result[index] = value
    return result
