"""Terms written out element by element over Z3's reals: what a rule or an axiom says at given sizes.

An operator with a body is its body (`ops.reference`). One without is an unknown function of all that its
notation lets an element of the output depend on, for each place along the dims that must stay whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import z3

from soapstone.errors import OpError
from soapstone.ops import Shape
from soapstone.ops.proof import Proved, Refuted, Unknown, Verdict
from soapstone.ops.reference import Z3_REALS, Index, meaning
from soapstone.subst.layout import is_parallel
from soapstone.subst.term import Side, Term, Var, subterms
from soapstone.subst.words import Applied, Context, applied, is_empty

Elements = npt.NDArray[np.object_]


def symbols(name: str, shape: Shape) -> Elements:
    """A tensor of unknowns."""
    found = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        found[index] = z3.Real(f"{name}{list(index)}")
    return found


def written_out(side: Side, values: Mapping[str, Elements], context: Context) -> list[Elements]:
    """The elements of each output of a side. Raises OpError where shapes do not fit."""
    found: dict[Term, Elements] = {}
    for term in subterms(side):
        if isinstance(term, Var):
            found[term] = values[term.name]
        elif is_parallel(term.word):
            found[term] = found[term.args[0]]
        else:
            args = [found[arg] for arg in term.args]
            found[term] = _result(applied(term, [arg.shape for arg in args], context), args)
    return [found[term] for term in side]


def _result(meant: Applied, args: Sequence[Elements]) -> Elements:
    if meant.op.random:
        raise OpError(f"{meant.op.name} draws random numbers, and is no function of its operands")
    signature = meant.signature
    if is_empty(signature):
        raise OpError(f"the result of {meant.op.name} would have no elements")
    result = np.empty(signature.output_shapes[0], dtype=object)
    if meant.op.body is None:
        return _unknown(meant, args, result)

    def read(operand: int, index: Index) -> Any:
        if operand in meant.numbers:
            return z3.Real("factor")
        return args[operand][index]

    for index, value in meaning(meant.op, signature, meant.attrs, read, Z3_REALS).items():
        result[index] = value
    return result


def _unknown(meant: Applied, args: Sequence[Elements], result: Elements) -> Elements:
    signature = meant.signature
    free = [dim for dim in signature.output_dims if dim not in signature.whole]
    shown = sorted(dim for dim in signature.output_dims if dim in signature.whole)
    walked = [dim for dim in signature.sizes if dim not in free]
    for at in itertools.product(*(range(signature.sizes[dim]) for dim in free)):
        fixed = dict(zip(free, at, strict=True))
        seen = []
        for inner in itertools.product(*(range(signature.sizes[dim]) for dim in walked)):
            place = {**fixed, **dict(zip(walked, inner, strict=True))}
            for i, arg in enumerate(args):
                access = signature.operands[i]
                assert access is not None
                seen.append(arg[tuple(axis.at(place) or 0 for axis in access)])
        for own in itertools.product(*(range(signature.sizes[dim]) for dim in shown)):
            place = {**dict.fromkeys(signature.sizes, 0), **fixed, **dict(zip(shown, own, strict=True))}
            name = f"{meant.op.name}{sorted(meant.attrs.items())}{own}"
            function = z3.Function(name, *[z3.RealSort()] * (len(seen) + 1))
            result[tuple(axis.at(place) or 0 for axis in signature.outputs[0])] = function(*seen)
    return result


def all_equal(left: Sequence[Elements], right: Sequence[Elements], timeout_ms: int = 5_000) -> Verdict:
    """Whether two lists of tensors are equal whatever their unknowns are."""
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        if one.shape != two.shape:
            return Refuted(f"output {number} has shape {list(one.shape)} against {list(two.shape)}")
        for index in np.ndindex(*one.shape):
            if not (z3.is_expr(one[index]) and z3.is_expr(two[index])):
                return Unknown(f"element {list(index)} cannot be written out")
            same = z3.simplify(one[index] == two[index], som=True)
            if z3.is_true(same):
                continue
            solver = z3.Solver()
            solver.set("timeout", timeout_ms)
            solver.add(z3.Not(same))
            result = solver.check()
            if result == z3.sat:
                return Refuted(f"output {number} differs at {list(index)} when {_short(solver.model())}")
            if result != z3.unsat:
                return Unknown(f"Z3 gave up on element {list(index)}: {solver.reason_unknown()}")
    return Proved()


def _short(model: Any) -> str:
    text = ", ".join(f"{known} = {model[known]}" for known in sorted(model.decls(), key=str)[:6])
    return text + (", ..." if len(model.decls()) > 6 else "")
