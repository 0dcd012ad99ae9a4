"""Which words mean the same with their two operands exchanged: shown by Z3 from notation and body."""

from __future__ import annotations

from functools import cache

from soapstone.ops import lookup, scalar
from soapstone.ops.lazy import z3
from soapstone.subst.words import ABBREVIATIONS

_TIMEOUT_MS = 1_000


@cache
def commutes(word: str) -> bool:
    """Whether an operator of two operands has a symmetric notation and a symmetric body."""
    if word in ABBREVIATIONS:
        return False
    op = lookup(word)
    if op.body is None or op.finish is not None or not isinstance(op.notation, str):
        return False
    operands = [part.strip() for part in op.notation.split("->")[0].split(",")]
    if len(operands) != 2 or operands[0] != operands[1]:
        return False
    body = op.body_meaning(op.signature([(2,), (2,)], {}), {}, {})
    a, b = z3.Reals("a b")
    there, back = scalar.evaluate_z3(body, {"x0": a, "x1": b}), scalar.evaluate_z3(body, {"x0": b, "x1": a})
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(there != back)
    return bool(solver.check() == z3.unsat)
