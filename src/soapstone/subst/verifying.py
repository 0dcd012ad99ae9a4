"""The verdict on rules: random tensors first, which may refute; then Z3, which may prove.

Only `Proved` rules are shipped. A rule with parallel operators also rests on the splits of its operators
being sound; `ops.proof` proves those from the bodies, and `unsound_split` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from soapstone.errors import OpError
from soapstone.ops import Shape
from soapstone.ops.proof import Proved, Refuted, Unknown, Verdict, prove_split
from soapstone.subst.axioms import Axiom
from soapstone.subst.checking import refutation
from soapstone.subst.functions import Function
from soapstone.subst.layout import Objection, carriers, is_parallel
from soapstone.subst.proving import TIMEOUT_MS, Prover, erased, functions_in
from soapstone.subst.sizes import shapes_for, types_for
from soapstone.subst.term import Rule, Term, calls
from soapstone.subst.words import Applied, Context, Typed, applied

_SMALL = 64
"""Splits are proved where an operator has at most so many points: more take long and show nothing more."""


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
    given = list(rules)
    provers = _Provers(given, timeout_ms)
    for number, rule in enumerate(given):
        if progress is not None:
            progress(number)
        yield Judged(rule, provers.verdict(rule))


class _Provers:
    """One prover for each set of functions that rules have in common, made when first asked for."""

    def __init__(self, rules: Iterable[Rule], timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self.placed: dict[int, _Placed | Objection] = {}
        self.functions: dict[object, Function] = {}
        self.provers: dict[frozenset[int], Prover] = {}
        self.splits: dict[object, Refuted | None] = {}
        for rule in rules:
            self.placed[id(rule)] = found = _placed(rule)
            if not isinstance(found, Objection):
                for function in functions_in(rule.left + rule.right, found.types, found.context):
                    self.functions.setdefault(function.key, function)

    def verdict(self, rule: Rule) -> Verdict:
        found = self.placed[id(rule)]
        if isinstance(found, Objection):
            return Refuted(f"there are no sizes at which both sides are well formed and agree: {found.reason}")
        shown = refutation(rule)
        if shown is not None:
            return shown
        unsound = self._unsound_split(found)
        if unsound is not None:
            return unsound
        return self._prover(rule).prove(rule, found.shapes, found.context)

    def _prover(self, rule: Rule) -> Prover:
        ranks = frozenset(len(layout.degrees) for layout in rule.variables.values())
        is_syntactic = _skeleton(rule.left) == _skeleton(rule.right)
        key = frozenset({-1}) if is_syntactic else ranks
        found = self.provers.get(key)
        if found is None:
            related = [f for f in self.functions.values() if is_syntactic or set(f.ranks) <= ranks]
            axioms: Iterable[Axiom] | None = () if is_syntactic else None
            found = self.provers[key] = Prover(related, axioms, self.timeout_ms)
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


def _skeleton(side: tuple[Term, ...]) -> object:
    """The side without its parallel operators, names kept."""
    return tuple(erased(term) for term in side)


def _placed(rule: Rule) -> _Placed | Objection:
    found = shapes_for(rule)
    if isinstance(found, Objection):
        return found
    shapes, context = found
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
