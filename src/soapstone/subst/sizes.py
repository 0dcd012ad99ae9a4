"""Sizes at which a rule is well formed: where it is looked at with numbers in hand.

A rule leaves sizes open. `settings` finds shapes for its variables by trying those of its operators' examples
and a few usual ones, then shapes that its own numbers suggest (groups, degrees, shapes, ends of slices), for
each choice of what its `[*]` stand for; `varied` changes the sizes of axes that hang together, at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from math import prod

from soapstone.ops import Shape, Signature, lookup
from soapstone.ops.examples import Tensor
from soapstone.subst.degree import Degree, Symbolic
from soapstone.subst.layout import Layout, Objection, is_parallel, whole
from soapstone.subst.term import ANY, Call, Rule, Term, Var, calls, erased
from soapstone.subst.words import ABBREVIATIONS, ILL_FORMED, Context, Typed, applied, reason, types_of

_USUAL: Mapping[int, tuple[Shape, ...]] = {
    0: ((),),
    1: ((4,),),
    2: ((4, 4), (8, 4), (4, 8), (16, 4)),
    3: ((4, 4, 4),),
    4: ((4, 4, 4, 4), (4, 4, 3, 3), (4, 4, 1, 1)),
}
_TRIES = 400
_OWN_TRIES = 2_000
"""[choice] How many shapes are tried that a rule's own numbers suggest: a second's worth."""

_LARGEST = 64
"""[choice] The largest size that a number of a rule makes worth trying: elements are counted one by one."""

_MOST_ELEMENTS = 1_024
_MOST_VARIED = 2**18
"""[choice] How many elements a value has where its sizes come from the rule's numbers, or are drawn."""

_MOST_CONTEXTS = 32
"""[choice] How many ways to fill in `[*]` are tried: a proof does not rest on them, a refutation may."""

Shapes = dict[str, Shape]
Setting = tuple[Shapes, Context]
"""Shapes and a context at which both sides of a rule are well formed and agree."""


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
            return Objection(f"a size of '{name}' does not divide into its parts", of_sizes=True)
    try:
        found = types_of(rule.left + rule.right, variables, context)
    except ILL_FORMED as error:
        return Objection(reason(error), of_sizes=True)
    if isinstance(found, Objection):
        return found if found.of_sizes else Objection(f"it cannot be laid out: {found.reason}")
    for number, (one, two) in enumerate(zip(rule.left, rule.right, strict=True)):
        if found[one] != found[two]:
            return _difference(rule, variables, number, (found[one], found[two]))
    return found


def _difference(
    rule: Rule, variables: Mapping[str, Typed], number: int, kinds: tuple[Typed, Typed]
) -> Objection:
    """That the sides are different kinds of value: at other sizes they may not be, if the rule has numbers
    that make for certain sizes."""
    left, right = kinds
    of_sizes = len(left.shape) == len(right.shape) and left.shape != right.shape and bool(_named(rule))
    side = f"output {number} of the left side" if len(rule.left) > 1 else "the left side"
    given = ", ".join(
        f"{name} {str(kind).removesuffix(' on one device')}" for name, kind in variables.items()
    )
    return Objection(f"with {given}, {side} is {left}, the right side {right}", of_sizes)


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
    every = itertools.product(*(example_attrs(word) for word in free))
    for chosen in itertools.islice(every, _MOST_CONTEXTS):
        yield Context(degree=degree, attrs=dict(zip(free, chosen, strict=True)))  # type: ignore[arg-type]


def _usual(rank: int) -> tuple[Shape, ...]:
    """Shapes of any rank; the last axes are single where there are many."""
    return _USUAL.get(rank) or (tuple(2 if axis < 8 else 1 for axis in range(rank)),)


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
        usual = _usual(rank)
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


def _named(rule: Rule) -> set[int]:
    """The numbers among a rule's attributes, but for axes and degrees."""
    plain = [call for call in calls(rule.left + rule.right) if not is_parallel(call.word)]
    return set(_whole_numbers(v for call in plain for name, v in call.attrs if name not in ("dim", "dims")))


def _degrees(rule: Rule) -> list[int]:
    """The degrees that are numbers, of a rule's parallel operators and of its variables."""
    every: list[object] = [
        dict(call.attrs).get("degree") for call in calls(rule.left + rule.right) if is_parallel(call.word)
    ]
    for layout in rule.variables.values():
        every += [*layout.degrees, *layout.pieces, layout.partials, layout.copies]
    return [degree for degree in _whole_numbers(every) if degree != 1]


def _is_open(rule: Rule) -> bool:
    """Whether a degree of the rule may be any, so that others than the one tried may fit better."""
    given = [dict(call.attrs).get("degree") for call in calls(rule.left + rule.right)]
    return "k" in given or any(isinstance(layout.parts, Symbolic) for layout in rule.variables.values())


def _numbers(rule: Rule) -> list[int]:
    """The numbers that a rule names and that sizes may be multiples of; all degrees multiplied are one."""
    degrees = _degrees(rule)
    named = _named(rule) | {*degrees, prod(degrees)}
    return sorted(number for number in named if 1 < number <= _LARGEST)


def _whole_numbers(values: Iterable[object]) -> list[int]:
    found = []
    for value in values:
        if isinstance(value, tuple):
            found += _whole_numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
    return found


def _own_shapes(rule: Rule, rank: int) -> Iterator[Shape]:
    """Shapes of a rank that a rule's numbers suggest: an axis, or a window, of a multiple of each, and shapes
    that hold as many elements as one that an attribute lists."""
    for call in calls(rule.left + rule.right):
        for name, value in call.attrs:
            if name == "shape" and isinstance(value, tuple) and all(n > 0 for n in _whole_numbers([value])):
                yield from _of_rank(tuple(_whole_numbers([value])), rank)
    others, numbers = [2 if rank > 2 else 4] * rank, _numbers(rule)
    if rank > 2:
        yield from ((*others[2:], n * times, n * times) for times in (1, 2) for n in numbers)
    for size in dict.fromkeys(n * times for n in numbers for times in (2, 1, 4)):
        for axis in range(rank):
            yield (*others[:axis], size, *others[axis + 1 :])
        yield (size,) * rank


def _of_rank(shape: Shape, rank: int) -> Iterator[Shape]:
    """As many elements in another number of axes: the first as one, the last as one, or single ones more."""
    more = len(shape) - rank
    if more <= 0:
        yield (*shape, *[1] * -more)
    elif rank > 0:
        yield (prod(shape[: more + 1]), *shape[more + 1 :])
        yield (*shape[: rank - 1], prod(shape[rank - 1 :]))


def _own_candidates(rule: Rule) -> dict[str, list[Shape]]:
    """For each variable the shapes to try when the usual ones do not fit."""
    if not _numbers(rule):
        return {}
    usual = candidates(rule)
    found = {}
    for name, layout in rule.variables.items():
        own = [s for s in _own_shapes(rule, len(layout.degrees)) if prod(s) <= _MOST_ELEMENTS]
        found[name] = list(dict.fromkeys([*own, *usual[name]]))
    return found


def _tried(rule: Rule) -> Iterator[tuple[Shape, ...]]:
    """Shapes for all variables, in the order in which they are tried."""
    usual = itertools.chain(_as_shown(rule), itertools.product(*candidates(rule).values()))
    yield from itertools.islice(usual, _TRIES)
    own = _own_candidates(rule)
    if own:
        yield from itertools.islice(itertools.product(*own.values()), _OWN_TRIES)


def _fitting(rule: Rule, context: Context) -> Setting | Objection:
    """The first shapes tried that fit, or why none do: one that no sizes would mend, if there is one."""
    last, shown = Objection("there are no shapes to try", of_sizes=True), None
    is_mixed = bool(_degrees(rule)) and _is_open(rule)
    for chosen in _tried(rule):
        shapes = dict(zip(rule.variables, chosen, strict=True))
        found = types_for(rule, shapes, context)
        if not isinstance(found, Objection):
            return shapes, context
        last = found
        if (
            shown is None
            and not found.of_sizes
            and not is_mixed
            and _fits_on_one_device(rule, shapes, context)
        ):
            shown = found
    return shown or replace(last, of_sizes=True)


def _fits_on_one_device(rule: Rule, shapes: Shapes, context: Context) -> bool:
    """Whether, parallel operators apart, these sizes are no objection to the rule."""
    variables = {name: whole(len(shape)) for name, shape in shapes.items()}
    sides = (tuple(map(erased, side)) for side in (rule.left, rule.right))
    found = types_for(Rule(rule.name, variables, *sides), shapes, context)
    return not isinstance(found, Objection) or not found.of_sizes


@lru_cache(maxsize=8192)
def settings(rule: Rule, degree: int = 2) -> tuple[Setting, ...] | Objection:
    """Shapes for each choice of what `[*]` stands for, where there are any; or why none of those tried fit:
    `of_sizes` unless other sizes could not fit either."""
    tried = [_fitting(rule, context) for context in contexts(rule, degree)]
    found = tuple(each for each in tried if not isinstance(each, Objection))
    objections = [each for each in tried if isinstance(each, Objection)]
    return found or min(objections, key=lambda objection: objection.of_sizes)


def shapes_for(rule: Rule, degree: int = 2) -> Setting | Objection:
    """Shapes and a context at which both sides of a rule are well formed and agree."""
    found = settings(rule, degree)
    return found if isinstance(found, Objection) else found[0]


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
        is_small = all(prod(shape) <= _MOST_VARIED for shape in tried.values())
        if is_small and not isinstance(types_for(rule, tried, context), Objection):
            return tried, context
    return shapes, context
