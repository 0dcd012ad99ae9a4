"""Sizes at which a rule is well formed: where it is looked at with numbers in hand.

A rule leaves sizes open. `shapes_for` finds shapes for its variables by trying those of its operators'
examples and a few usual ones; `varied` changes the sizes of axes that hang together, at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache

from soapstone.ops import Shape, Signature, lookup
from soapstone.ops.examples import Tensor
from soapstone.subst.degree import Degree
from soapstone.subst.layout import Layout, Objection
from soapstone.subst.term import ANY, Call, Rule, Term, Var, calls
from soapstone.subst.words import ABBREVIATIONS, Context, Typed, applied, types_of

_USUAL: Mapping[int, tuple[Shape, ...]] = {
    1: ((4,),),
    2: ((4, 4), (8, 4), (4, 8), (16, 4)),
    3: ((4, 4, 4),),
    4: ((4, 4, 4, 4), (4, 4, 3, 3), (4, 4, 1, 1)),
}
_TRIES = 400

Shapes = dict[str, Shape]


def at_degree(layout: Layout, degree: int) -> Layout:
    """The layout with a number for every symbol."""

    def number(found: Degree) -> Degree:
        return found if isinstance(found, int) else degree ** len(found.symbols)

    return Layout(
        tuple(map(number, layout.degrees)),
        number(layout.partials),
        number(layout.copies),
        tuple(map(number, layout.pieces)),
    )


def types_for(rule: Rule, shapes: Mapping[str, Shape], context: Context) -> dict[Term, Typed] | Objection:
    """The types of all subterms of both sides, if these shapes and this degree fit and the sides agree."""
    degree = context.degree
    assert isinstance(degree, int)
    variables = {}
    for name, layout in rule.variables.items():
        variables[name] = Typed(shapes[name], at_degree(layout, degree))
        if variables[name].is_uneven:
            return Objection(f"a size of '{name}' does not divide into its parts")
    found = types_of(rule.left + rule.right, variables, context)
    if isinstance(found, Objection):
        return found
    for one, two in zip(rule.left, rule.right, strict=True):
        if found[one] != found[two]:
            return Objection(f"{one} is {found[one]}, and {two} is {found[two]}")
    return found


@cache
def example_attrs(word: str) -> tuple[Mapping[str, object], ...]:
    """Attributes that the examples of an operator have, each once."""
    found: list[Mapping[str, object]] = []
    for example in lookup(word).examples:
        if dict(example.attrs) not in [dict(known) for known in found]:
            found.append(example.attrs)
    return tuple(found) or ({},)


def contexts(rule: Rule, degree: int = 2) -> Iterator[Context]:
    """Contexts for a rule: every example's attributes for the words that may have any."""
    free = sorted({call.word for call in calls(rule.left + rule.right) if call.attrs == ANY})
    for chosen in itertools.product(*(example_attrs(word) for word in free)):
        yield Context(degree=degree, attrs=dict(zip(free, chosen, strict=True)))  # type: ignore[arg-type]


def candidates(rule: Rule) -> dict[str, list[Shape]]:
    """For each variable the shapes to try."""
    words = {call.word for call in calls(rule.left + rule.right)} - ABBREVIATIONS.keys()
    shown: list[Shape] = []
    for word in sorted(words):
        for example in lookup(word).examples:
            shown += [o.shape for o in example.operands if isinstance(o, Tensor) and o.shape not in shown]
    found = {}
    for name, layout in rule.variables.items():
        rank = len(layout.degrees)
        usual = _USUAL.get(rank, ())
        found[name] = [*usual, *(shape for shape in shown if len(shape) == rank and shape not in usual)]
    return found


def _as_shown(rule: Rule) -> Iterator[tuple[Shape, ...]]:
    """The shapes of whole examples, where a rule's variables are the operands of an operator in order."""
    ranks = [len(layout.degrees) for layout in rule.variables.values()]
    words = {call.word for call in calls(rule.left + rule.right) if len(call.args) == len(ranks)}
    for word in sorted(words - ABBREVIATIONS.keys()):
        for example in lookup(word).examples:
            shown = tuple(given.shape for given in example.operands if isinstance(given, Tensor))
            if [len(shape) for shape in shown] == ranks:
                yield shown


@lru_cache(maxsize=8192)
def shapes_for(rule: Rule, degree: int = 2) -> tuple[Shapes, Context] | Objection:
    """Shapes and a context at which both sides of a rule are well formed and agree."""
    last = Objection("it has no variables")
    tries = 0
    for context in contexts(rule, degree):
        for chosen in itertools.chain(_as_shown(rule), itertools.product(*candidates(rule).values())):
            shapes = dict(zip(rule.variables, chosen, strict=True))
            found = types_for(rule, shapes, context)
            if not isinstance(found, Objection):
                return shapes, context
            last, tries = found, tries + 1
            if tries > _TRIES:
                return last
    return last


def _linked(
    rule: Rule, types: Mapping[Term, Typed], context: Context
) -> dict[tuple[str, int], tuple[str, int]]:
    """Axes of variables that must measure the same, by one of each set."""
    parent: dict[tuple[object, int], tuple[object, int]] = {}

    def root(axis: tuple[object, int]) -> tuple[object, int]:
        while parent.setdefault(axis, axis) != axis:
            axis = parent[axis]
        return axis

    def join(one: tuple[object, int], two: tuple[object, int]) -> None:
        parent[root(one)] = root(two)

    for call in calls(rule.left + rule.right):
        signature = applied(call, [types[arg].shape for arg in call.args], context).signature
        for (term, axis), dim in _plain(call, signature):
            join((term, axis), ((id(signature), call, dim), 0))
    for one, two in zip(rule.left, rule.right, strict=True):
        for axis in range(len(types[one].shape)):
            join((one, axis), (two, axis))
    roots: dict[tuple[object, int], tuple[str, int]] = {}
    found = {}
    for name in rule.variables:
        for axis in range(len(rule.variables[name].degrees)):
            found[name, axis] = roots.setdefault(root((Var(name), axis)), (name, axis))
    return found


def _plain(call: Call, signature: Signature) -> Iterator[tuple[tuple[Term, int], str]]:
    """The axes of operands and of the result that a dim alone indexes, from end to end."""
    terms: list[Term] = [*call.args, call]
    accesses = [*signature.operands[: len(call.args)], signature.outputs[0]]
    shapes = [*signature.shapes[: len(call.args)], signature.output_shapes[0]]
    for term, access, shape in zip(terms, accesses, shapes, strict=True):
        for number, axis in enumerate(access or ()):
            if len(axis.terms) == 1 and axis.terms[0][1] == 1 and not axis.const and axis.divisor == 1:
                dim = axis.terms[0][0]
                if shape is not None and signature.sizes[dim] == shape[number]:
                    yield (term, number), dim


def varied(rule: Rule, shapes: Shapes, context: Context, seed: int) -> tuple[Shapes, Context]:
    """Other sizes for the rule, different from each other where they may be; those given if none fit."""
    types = types_for(rule, shapes, context)
    assert not isinstance(types, Objection)
    linked = _linked(rule, types, context)
    rng = random.Random(seed)
    degree = context.degree
    assert isinstance(degree, int)
    for _ in range(12):
        factors = rng.sample((1, 2, 3), 3)
        sizes = {axis: factors[i % 3] * degree**2 for i, axis in enumerate(sorted(set(linked.values())))}
        tried: Shapes = {
            name: tuple(
                sizes[linked[name, axis]] if rng.random() < 0.9 else old
                for axis, old in enumerate(shapes[name])
            )
            for name in shapes
        }
        if not isinstance(types_for(rule, tried, context), Objection):
            return tried, context
    return shapes, context
