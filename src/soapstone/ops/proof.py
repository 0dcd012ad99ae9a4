"""Proofs, by Z3, that the splits an operator offers are sound.

On a small box of symbolic elements, the whole operator and its shards are written out as
formulas. A split is sound when every shard stays within the boxes it declares to read, when the
shards together write every element, and when writing (or adding, where partial) their results
gives the whole result for all values of all elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soapstone.ops.box import Interval
from soapstone.ops.op import Attrs, Op
from soapstone.ops.reference import Z3_REALS, Index, meaning
from soapstone.ops.signature import Signature


@dataclass(frozen=True)
class Proved:
    """It holds for all values."""


@dataclass(frozen=True)
class Refuted:
    """It does not hold; the counterexample says where."""

    counterexample: str


@dataclass(frozen=True)
class Unknown:
    """Neither was shown."""

    reason: str


Verdict = Proved | Refuted | Unknown


class _OutsideBox(Exception):
    """A shard read an element that its declared box does not hold."""


def prove_split(
    op: Op, signature: Signature, attrs: Attrs, degrees: Mapping[str, int], timeout_ms: int = 10_000
) -> Verdict:
    """Whether computing the shards of this split and joining them is the operator itself."""
    z3 = importlib.import_module("z3")

    def symbol(operand: int, index: Index) -> Any:
        return z3.Real(f"x{operand}[{','.join(map(str, index))}]")

    whole = meaning(op, signature, attrs, symbol, Z3_REALS)
    joined: dict[Index, Any] = {}
    for shard in signature.shards(degrees):
        boxes = [signature.read(i, shard).box for i in range(len(signature.shapes))]

        def read(operand: int, index: Index, boxes: list[tuple[Interval, ...]] = boxes) -> Any:
            if not all(axis.lo <= i < axis.hi for i, axis in zip(index, boxes[operand], strict=True)):
                raise _OutsideBox(
                    f"a shard reads element {list(index)} of operand {operand}, outside its box"
                )
            return symbol(operand, index)

        try:
            part = meaning(op, signature, attrs, read, Z3_REALS, shard)
        except _OutsideBox as outside:
            return Refuted(str(outside))
        for index, value in part.items():
            joined[index] = joined[index] + value if index in joined else value
    if joined.keys() != whole.keys():
        missing = min(whole.keys() ^ joined.keys())
        return Refuted(f"element {list(missing)} of the output is not written by any shard")
    return _all_equal(z3, whole, joined, timeout_ms)


def _all_equal(z3: Any, whole: dict[Index, Any], joined: dict[Index, Any], timeout_ms: int) -> Verdict:
    for index, expected in whole.items():
        same = z3.simplify(expected == joined[index], som=True)
        if z3.is_true(same):
            continue
        solver = z3.Solver()
        solver.set("timeout", timeout_ms)
        solver.add(z3.Not(same))
        match solver.check():
            case z3.unsat:
                continue
            case z3.sat:
                return Refuted(f"output {list(index)} differs when {solver.model()}")
            case _:
                return Unknown(f"Z3 gave up on output {list(index)}: {solver.reason_unknown()}")
    return Proved()
