"""The verdict on rules: random tensors first, which may refute; then Z3, which may prove.

Only `Proved` rules are shipped. A rule with parallel operators also rests on the splits of its operators
being sound; `ops.proof` proves those from the bodies, and `unsound_split` asks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import z3

from soapstone.errors import OpError
from soapstone.ops import Shape, lookup
from soapstone.ops.proof import Proved, Refuted, Unknown, Verdict, prove_split
from soapstone.subst.checking import misfit, refutation
from soapstone.subst.families import FAMILIES
from soapstone.subst.functions import Function
from soapstone.subst.layout import Objection, carriers, is_parallel, whole
from soapstone.subst.proving import TIMEOUT_MS, Prover, functions_in
from soapstone.subst.sizes import Setting, settings, types_for
from soapstone.subst.term import ANY, Call, Rule, Side, Term, calls, erased
from soapstone.subst.words import (
    ABBREVIATIONS,
    ILL_FORMED,
    Applied,
    Context,
    Typed,
    applied,
    check_words,
    reason,
    typed,
)

_SMALL = 64
"""Splits are proved where an operator has at most so many points: more take long and show nothing more."""


_FAILURES = (*ILL_FORMED, AttributeError, MemoryError, RuntimeError, z3.Z3Exception)
"""What may happen to a rule that a person made up: it is then unknown, and the others are judged."""


@dataclass(frozen=True)
class Judged:
    """A rule and the verdict on it."""

    rule: Rule
    verdict: Verdict


@dataclass(frozen=True)
class _Placed:
    rule: Rule
    shapes: dict[str, Shape]
    context: Context
    types: dict[Term, Typed]


def judge(
    rules: Iterable[Rule], timeout_ms: int = TIMEOUT_MS, progress: Callable[[int], None] | None = None
) -> Iterator[Judged]:
    """The verdict on each rule, in order."""
    provers = _Provers(timeout_ms)
    for number, rule in enumerate(rules):
        if progress is not None:
            progress(number)
        yield Judged(rule, provers.verdict(rule))


@cache
def usual_functions(ranks: frozenset[int]) -> dict[object, Function]:
    """What a proof about values of these ranks may pass through: the operators of families with them."""
    found: dict[object, Function] = {}
    for family in FAMILIES:
        shapes = list(dict.fromkeys(shape for shape, _, _ in family.variables))
        if {len(shape) for shape in shapes} != ranks:
            continue
        for call in (
            call for template in family.templates for call in template if not is_parallel(call.word)
        ):
            for chosen in itertools.product(shapes, repeat=len(call.args)):
                kinds = [Typed(shape, whole(len(shape))) for shape in chosen]
                if not isinstance(typed(call, kinds, Context()), Objection):
                    function = Function(call.word, call.attrs, chosen, Context())
                    found.setdefault(function.key, function)
                    break
    return found


class _Provers:
    """A prover for each set of functions at the shapes they have, made when first asked for: whether a rule
    is proved does not depend on the rules before it."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self.provers: dict[object, Prover] = {}
        self.splits: dict[object, Refuted | None] = {}

    def verdict(self, rule: Rule) -> Verdict:
        try:
            check_words(rule.left + rule.right)
            return self._verdict(rule)
        except _FAILURES as error:
            return Unknown(f"it cannot be written out: {reason(error)}")

    def _verdict(self, rule: Rule) -> Verdict:
        found = settings(rule)
        if isinstance(found, Objection):
            return misfit(found)
        shown = refutation(rule)
        if shown is not None:
            return shown
        places = [_placed_at(rule, setting) for setting in found]
        for placed in places:
            unsound = self._unsound_split(placed)
            if unsound is not None:
                return unsound
        return open_question(rule) or self._prover(places[0]).prove(rule)

    def _prover(self, placed: _Placed) -> Prover:
        rule = placed.rule
        own: dict[object, Function] = {
            f.key: f for f in functions_in(rule.left + rule.right, placed.types, placed.context)
        }
        if _skeleton(rule.left) == _skeleton(rule.right):
            return Prover(own.values(), (), self.timeout_ms)
        ranks = frozenset(len(layout.degrees) for layout in rule.variables.values())
        usual = usual_functions(ranks)
        others = sorted((f for f in own.values() if f.key not in usual), key=_written)
        key = (ranks, tuple(map(_written, others)))
        found = self.provers.get(key)
        if found is None:
            # What is usual has its usual shapes: those that this rule has would be another rule's, too.
            found = self.provers[key] = Prover([*usual.values(), *others], None, self.timeout_ms)
        return found

    def _unsound_split(self, placed: _Placed) -> Refuted | None:
        if not placed.rule.is_parallel:
            return None
        for call in calls(placed.rule.left + placed.rule.right):
            if is_parallel(call.word):
                continue
            meant = applied(call, [placed.types[arg].shape for arg in call.args], placed.context)
            key = (meant.op.name, meant.shapes, tuple(sorted(meant.attrs.items())))
            layouts = [placed.types[arg].layout for arg in call.args]
            split = {
                dim: int(str(degree))
                for i, layout in enumerate(layouts)
                for dim, degree in zip(carriers(meant.signature, i), layout.degrees, strict=True)
                if dim is not None and degree != 1
            }
            if not split:
                continue
            where = (*key, tuple(sorted(split.items())))
            if where not in self.splits:
                self.splits[where] = unsound_split(meant, split)
            found = self.splits[where]
            if found is not None:
                return found
        return None


def _written(function: Function) -> str:
    """All that axioms about a function are derived from."""
    return repr((function.word, function.attrs, function.samples, function.context))


def unsound_split(meant: Applied, split: dict[str, int]) -> Refuted | None:
    """A counterexample to a split of an operator that has a body, at these shapes if they are small."""
    signature = meant.signature
    if meant.op.body is None or meant.numbers or signature.point_count > _SMALL:
        return None
    try:
        verdict = prove_split(meant.op, signature, meant.attrs, split, timeout_ms=1_000)
    except OpError as error:
        return Refuted(str(error))
    return verdict if isinstance(verdict, Refuted) else None


def open_question(rule: Rule) -> Unknown | None:
    """Why a proof would say nothing: a value is drawn more often than another, or its rank is not known."""
    if any(_draws(side) != _draws(_skeleton(side)) for side in (rule.left, rule.right)):
        return Unknown("it draws random numbers, and one value that is drawn would stand for two")
    if _skeleton(rule.left) == _skeleton(rule.right):
        return None
    if _draws(rule.left + rule.right):
        return Unknown("it draws random numbers: only how such an operator lies over devices is proved")
    for call in calls(_skeleton(rule.left + rule.right)):
        for arg in call.args:
            if isinstance(arg, Call) and arg.attrs == ANY and not isinstance(lookup(arg.word).notation, str):
                return Unknown(f"what [*] stands for could change how many axes {arg} has")
    return None


def _draws(side: Side) -> int:
    """How many random operators a side has."""
    return sum(lookup(call.word).random for call in calls(side) if call.word not in ABBREVIATIONS)


def _skeleton(side: Side) -> Side:
    """The side without its parallel operators, names kept."""
    return tuple(erased(term) for term in side)


def _placed(rule: Rule) -> _Placed | Objection:
    found = settings(rule)
    return found if isinstance(found, Objection) else _placed_at(rule, found[0])


def _placed_at(rule: Rule, setting: Setting) -> _Placed:
    shapes, context = setting
    types = types_for(rule, shapes, context)
    assert not isinstance(types, Objection)
    return _Placed(rule, shapes, context, types)


def status(verdict: Verdict) -> str:
    """The verdict in a word."""
    match verdict:
        case Proved():
            return "proved"
        case Refuted():
            return "refuted"
        case Unknown():
            return "unknown"
