"""In which operands an operator is additive: read off its body, and shown by Z3.

f is additive in a set of operands when adding to all of them adds the results:
f(x + x', y + y', z) = f(x, y, z) + f(x', y', z). Partial sums pass through exactly these sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from soapstone.ops import Op, Signature, scalar
from soapstone.ops.lazy import z3
from soapstone.ops.op import Attrs

_TIMEOUT_MS = 2_000
_MOST_POINTS = 512
_KNOWN: dict[Any, frozenset[frozenset[int]]] = {}


def additive_sets(op: Op, signature: Signature, attrs: Attrs) -> frozenset[frozenset[int]]:
    """The sets of operands in which the operator is additive; none for one without a body."""
    present = tuple(shape is not None for shape in signature.shapes)
    key = (
        op.name,
        op,
        present,
        tuple(sorted(attrs.items())),
        signature.sizes if op.body_knows_place else None,
    )
    hashable = (*key[:4], tuple(key[4].items()) if key[4] is not None else None)
    found = _KNOWN.get(hashable)
    if found is None:
        found = _KNOWN[hashable] = _additive_sets(op, signature, attrs)
    return found


def _additive_sets(op: Op, signature: Signature, attrs: Attrs) -> frozenset[frozenset[int]]:
    if op.body is None or op.reduce != "sum" or op.random:
        return frozenset()
    operands = [i for i, shape in enumerate(signature.shapes) if shape is not None]
    points = [dict.fromkeys(signature.sizes, 0)]
    if op.body_knows_place:
        every = itertools.product(*(range(size) for size in signature.sizes.values()))
        points = [dict(zip(signature.sizes, at, strict=True)) for at in itertools.islice(every, _MOST_POINTS)]
    bodies = {repr(op.body_meaning(signature, at, attrs)): at for at in points}
    subsets = [
        frozenset(chosen)
        for count in range(1, len(operands) + 1)
        for chosen in itertools.combinations(operands, count)
        if count <= 2 or count == len(operands)
    ]
    return frozenset(
        subset
        for subset in subsets
        if all(_is_additive(op, signature, attrs, subset, at) for at in bodies.values())
    )


def _is_additive(
    op: Op, signature: Signature, attrs: Attrs, subset: frozenset[int], at: dict[str, int]
) -> bool:
    taken = [i for i in range(op.body_arity(signature)) if signature.shapes[i] is not None]
    body, finish = op.body_meaning(signature, at, attrs), op.finish_meaning(signature, attrs)
    rest = [i for i, s in enumerate(signature.shapes) if i >= op.body_arity(signature) and s is not None]

    def symbols(operands: Sequence[int], sign: str) -> dict[str, Any]:
        return {f"x{i}": z3.Real(f"x{i}{sign}" if i in subset else f"x{i}") for i in operands}

    def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return {
            name: first[name] + second[name] if int(name[1:]) in subset else first[name] for name in first
        }

    try:
        one, two = symbols(taken, "a"), symbols(taken, "b")
        of_one, of_two = scalar.evaluate_z3(body, one), scalar.evaluate_z3(body, two)
        goal = [scalar.evaluate_z3(body, both(one, two)) == of_one + of_two]
        if finish is not None:
            one, two = symbols(rest, "a"), symbols(rest, "b")
            sums = z3.Real("s"), z3.Real("t")
            joint = scalar.evaluate_z3(finish, {"sum": sums[0] + sums[1], **both(one, two)})
            parts = [
                scalar.evaluate_z3(finish, {"sum": total, **given})
                for total, given in zip(sums, (one, two), strict=True)
            ]
            goal.append(joint == parts[0] + parts[1])
    except (z3.Z3Exception, TypeError):
        return False
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(z3.Not(z3.And(*goal)))
    return bool(solver.check() == z3.unsat)
