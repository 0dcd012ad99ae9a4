"""Rules on random tensors: both sides executed device by device, at several sizes, and compared.

A proof rests on the axioms, on the layouts and on our reading of an operator's notation. This rests on none
of them but the layouts: it runs the operators' own torch functions. What differs here is `Refuted`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soapstone.ops import Shape, lookup
from soapstone.ops.examples import Tensor
from soapstone.ops.proof import Refuted, Unknown
from soapstone.subst.executing import Array, executed, spread
from soapstone.subst.layout import Objection, is_parallel
from soapstone.subst.sizes import Setting, Shapes, at_degree, settings, types_for, varied
from soapstone.subst.term import Call, Rule, Term, Var, calls
from soapstone.subst.words import ABBREVIATIONS, Context, Typed

_TOLERANCE = 1e-8
ROUNDS = 2


def refutation(rule: Rule, seed: int = 0, rounds: int = ROUNDS) -> Refuted | Unknown | None:
    """A counterexample, if random tensors show one for any choice of what `[*]` stands for; None if they do
    not; Unknown if torch refuses them, or no sizes that were tried fit."""
    found = settings(rule)
    if isinstance(found, Objection):
        return misfit(found)
    doubts = []
    for setting in found:
        shown = _refutation_at(rule, setting, seed, rounds)
        if isinstance(shown, Refuted):
            return shown
        doubts += [shown] if shown is not None else []
    return doubts[0] if len(doubts) == len(found) else None


def misfit(objection: Objection) -> Refuted | Unknown:
    """The verdict on a rule that no sizes that were tried fit: refuted, if no others could."""
    if objection.of_sizes:
        return Unknown(f"none of the sizes tried fits: {objection.reason}")
    return Refuted(objection.reason)


def _refutation_at(rule: Rule, setting: Setting, seed: int, rounds: int) -> Refuted | Unknown | None:
    shapes, context = setting
    for number in range(rounds):
        here = (shapes, context) if number == 0 else varied(rule, shapes, context, seed + number)
        try:
            shown = differs(rule, *here, seed + number)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if number > 0:
                continue  # torch asks for more than the notation says, and the first sizes met it
            return Unknown(f"it could not be executed on random tensors: {_refusal(error)}")
        if shown is not None:
            return shown
    return None


def _refusal(error: Exception) -> str:
    """What torch says, in a line; what Python says means nothing to a reader of rules."""
    if isinstance(error, RuntimeError) and str(error):
        return str(error).splitlines()[0]
    return "an operator has no operands, or does not take these"


def differs(rule: Rule, shapes: Shapes, context: Context, seed: int) -> Refuted | None:
    """A counterexample at these shapes, if one random choice of elements shows it."""
    rng = np.random.default_rng(seed)
    types = types_for(rule, shapes, context)
    if isinstance(types, Objection):
        return Refuted(types.reason)
    degree = context.degree
    assert isinstance(degree, int)
    values = {}
    for name, layout in rule.variables.items():
        kind = Typed(shapes[name], at_degree(layout, degree))
        values[name] = spread(_random(rule, name, shapes[name], rng), kind, rng)
    left, right = (executed(side, values, types, context) for side in (rule.left, rule.right))
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        for copy in range(2):
            a, b = one.whole(copy), two.whole(copy)
            scale = _TOLERANCE * (1.0 + float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
            wrong = ~np.isclose(a, b, rtol=0.0, atol=scale, equal_nan=True)
            if wrong.any():
                index = tuple(int(i) for i in np.argwhere(wrong)[0])
                where = f"with {_listed(shapes, context)} and seed {seed}"
                return Refuted(f"output {number} at {list(index)} is {_apart(a[index], b[index])}, {where}")
    return None


def _apart(left: float, right: float) -> str:
    """Two numbers that differ, and by how much where that is not seen."""
    one, two = f"{left:.6g}", f"{right:.6g}"
    if one == two:
        one, two = f"{left:.17g}", f"{right:.17g}"
    return f"{one} on the left and {two} on the right"


def _listed(shapes: Mapping[str, Shape], context: Context) -> str:
    """The shapes, and what `[*]` stands for."""
    found = [f"{name} of {list(shape)}" for name, shape in shapes.items()]
    meant = [Call(word, (), tuple(attrs.items())) for word, attrs in context.attrs.items() if attrs]
    return ", ".join([*found, *(str(call).removesuffix("()") for call in meant)])


def _random(rule: Rule, name: str, shape: Shape, rng: np.random.Generator) -> Array:
    """Elements such as the operators that read a variable take: floats of either sign, unless an example of
    an operator shows integers, a mask, or floats above zero."""
    shown = _described(rule, name, len(shape))
    if shown is None:
        return rng.standard_normal(shape)
    if shown.mask:
        return rng.random(shape) < 0.5
    if shown.below is not None:
        return rng.integers(0, min(shown.below, 2), shape)
    if shown.positive or shown.probability:
        return rng.uniform(0.1, 0.9, shape)
    return rng.standard_normal(shape)


def _described(rule: Rule, name: str, rank: int) -> Tensor | None:
    """What the examples say of the operand that a variable is; parallel operators are passed over."""
    named: set[Term] = {Var(name)}
    for call in calls(rule.left + rule.right):
        if named & set(call.args) and is_parallel(call.word):
            named.add(call)
            continue
        if call.word in ABBREVIATIONS:
            continue
        for position, arg in enumerate(call.args):
            if arg not in named:
                continue
            for example in lookup(call.word).examples:
                given = example.operands[position] if position < len(example.operands) else None
                if (
                    isinstance(given, Tensor)
                    and len(given.shape) == rank
                    and len(example.operands) >= len(call.args)
                ):
                    return given
    return None
