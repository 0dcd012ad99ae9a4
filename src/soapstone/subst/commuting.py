"""Which words mean the same with their two operands exchanged: shown by Z3 from notation and body.

With which attributes counts: `add` scales its second operand by one of them."""

from __future__ import annotations

from functools import cache

from soapstone.ops import lookup, scalar
from soapstone.ops.lazy import z3
from soapstone.ops.op import Attr
from soapstone.subst.term import ANY
from soapstone.subst.words import ABBREVIATIONS

_TIMEOUT_MS = 1_000


Given = tuple[tuple[str, Attr], ...]


@cache
def commutes(word: str, attrs: Given = ()) -> bool:
    """Whether an operator of two operands has a symmetric notation and a symmetric body with these
    attributes; with any (`[*]`), only if it has none."""
    if word in ABBREVIATIONS:
        return False
    op = lookup(word)
    if attrs == ANY and op.attrs:
        return False
    given = op.complete({} if attrs == ANY else dict(attrs))
    if op.body is None or op.finish is not None or not isinstance(op.notation, str):
        return False
    operands = [part.strip() for part in op.notation.split("->")[0].split(",")]
    if len(operands) != 2 or operands[0] != operands[1]:
        return False
    body = op.body_meaning(op.signature([(2,), (2,)], given), {}, given)
    a, b = z3.Reals("a b")
    there, back = scalar.evaluate_z3(body, {"x0": a, "x1": b}), scalar.evaluate_z3(body, {"x0": b, "x1": a})
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(there != back)
    return bool(solver.check() == z3.unsat)
