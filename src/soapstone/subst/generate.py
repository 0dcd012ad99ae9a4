"""Candidate rules out of equal graphs (Unity 4, "substitution generation").

In each class of equal graphs every graph is paired with the smallest. A pair is dropped when a smaller rule
implies it in one step:

    both sides are the same operator applied to operands that are equal already    -> `_is_context`
    two different parts, one in each side, are equal and could be anything         -> `_meets_halfway`
    its outputs have nothing to do with each other            -> `_falls_apart`, `_is_roundabout`
    a part inside of one side equals something smaller                             -> `_has_detour`
    the two sides share a subgraph that could be anything: it becomes a variable   -> `_generalised`
    it is another rule with variables renamed, or with two variables made one      -> `canonical`, `_merged`
    an operator takes the same value twice: an instance of a rule with one variable more, perhaps too
    large to be enumerated                                                         -> `_repeats`
    a constant is given more than a variable, of which it takes but the shape      -> `_is_idle`
    it is another rule whose variables lie otherwise: layouts are looked at where a rule is applied
                                                                                   -> `_distinct`

What is left are candidates: nothing is proved yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from soapstone.ops import lookup
from soapstone.subst.canonical import canonical
from soapstone.subst.degree import Degree, Symbolic
from soapstone.subst.enumerating import Enumeration
from soapstone.subst.families import FAMILIES, Family
from soapstone.subst.layout import Layout
from soapstone.subst.term import (
    Call,
    Rule,
    Side,
    Term,
    Var,
    calls,
    node_count,
    substituted,
    variables_of,
)
from soapstone.subst.words import ABBREVIATIONS

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Generated:
    """What a family gave: its candidates, and how many graphs and equal pairs they were sifted from."""

    family: str
    graphs: int
    pairs: int
    rules: tuple[Rule, ...]


def generate(families: Iterable[Family] = FAMILIES, progress: Progress | None = None) -> list[Generated]:
    """The candidate rules of some families; a rule is found by the first family that has it."""
    known: set[str] = set()
    found = []
    for family in families:
        if progress is not None:
            progress(family.name)
        found.append(_of_family(family, known))
    return found


def _of_family(family: Family, known: set[str]) -> Generated:
    enumeration = Enumeration(family)
    classes = list(enumeration.classes())
    smallest = _smallest(enumeration)
    pairs, kept = 0, dict[tuple[Side, Side], None]()
    for found in classes:
        for graph in found.graphs[1:]:
            pairs += 1
            sides = _sifted(enumeration, smallest, graph, found.graphs[0])
            if sides is not None:
                kept[sides] = None
    rules = _distinct(kept, enumeration.layouts, known)
    return Generated(family.name, enumeration.bank.graph_count, pairs, rules)


def _smallest(enumeration: Enumeration) -> dict[int, int]:
    """How many nodes the smallest term of each fingerprint has, over all terms that were built."""
    found: dict[int, int] = {}
    for value in range(enumeration.bank.value_count):
        term = enumeration.term(value)
        count = node_count((term,))
        key = enumeration.bank.fingerprint(value)
        if count < found.get(key, count + 1):
            found[key] = count
    return found


def _sifted(
    enumeration: Enumeration, smallest: Mapping[int, int], left: Side, right: Side
) -> tuple[Side, Side] | None:
    """The pair, made as general as its shared parts allow; None if a smaller rule implies it."""
    if any(a == b for a, b in zip(left, right, strict=True)) or len(set(left)) < len(left):
        return None
    if any(_repeats(call) or _is_idle(call) for call in calls(left + right)):
        return None
    if _is_context(enumeration, left, right) or _has_detour(enumeration, smallest, (left, right)):
        return None
    if _falls_apart(left) and _falls_apart(right):
        return None
    left, right = _generalised(enumeration, left, right)
    if len(left) > 1 and all(_is_roundabout(enumeration, smallest, side) for side in (left, right)):
        return None
    return None if _meets_halfway(enumeration, left, right) else (left, right)


def _repeats(call: Call) -> bool:
    return len(set(call.args)) < len(call.args)


def _is_idle(call: Call) -> bool:
    """Whether something is computed for a word that no gradient passes, and that reads shapes alone."""
    is_constant = call.word not in ABBREVIATIONS and not lookup(call.word).needs_grad
    return is_constant and any(isinstance(arg, Call) for arg in call.args)


def _falls_apart(side: Side) -> bool:
    """Whether several outputs share no node."""
    return len(side) > 1 and node_count(side) == sum(node_count((term,)) for term in side)


def _is_roundabout(enumeration: Enumeration, smallest: Mapping[int, int], side: Side) -> bool:
    """Whether computing each of several outputs on its own takes fewer nodes."""
    values = [enumeration.value(term) for term in side]
    prints = [enumeration.bank.fingerprint(value) for value in values if value is not None]
    return sum(smallest.get(key, node_count(side)) for key in prints) < node_count(side)


def _meets_halfway(enumeration: Enumeration, left: Side, right: Side) -> bool:
    """Whether a part of the left equals a different part of the right, and the rest holds whatever it is."""
    by_print: dict[int, list[Call]] = {}
    for call in calls(right):
        value = enumeration.value(call)
        if value is not None:
            by_print.setdefault(enumeration.bank.fingerprint(value), []).append(call)
    for one in calls(left):
        value = enumeration.value(one)
        others = [] if value is None else by_print.get(enumeration.bank.fingerprint(value), [])
        for other in others:
            if one == other or (one in left and other in right):
                continue
            kind = enumeration.type_of(one)
            assert kind is not None
            used = set(variables_of(left + right))
            fresh = next((var for var in enumeration.spare[kind] if var.name not in used), None)
            if fresh is None:
                continue
            first = tuple(substituted(term, {one: fresh}) for term in left)
            second = tuple(substituted(term, {other: fresh}) for term in right)
            if enumeration.are_equal(first, second):
                return True
    return False


def _is_context(enumeration: Enumeration, left: Side, right: Side) -> bool:
    """Whether each output is the same operator of operands that are equal one by one."""
    return all(
        isinstance(a, Call)
        and isinstance(b, Call)
        and (a.word, a.attrs, len(a.args)) == (b.word, b.attrs, len(b.args))
        and enumeration.are_equal(a.args, b.args)
        for a, b in zip(left, right, strict=True)
    )


def _has_detour(enumeration: Enumeration, smallest: Mapping[int, int], sides: Iterable[Side]) -> bool:
    """Whether a part inside of a side equals a smaller term."""
    for side in sides:
        for call in calls(side):
            if call in side:
                continue
            value = enumeration.value(call)
            assert value is not None
            least = smallest.get(enumeration.bank.fingerprint(value))
            if least is not None and least < node_count((call,)):
                return True
    return False


def _generalised(enumeration: Enumeration, left: Side, right: Side) -> tuple[Side, Side]:
    """The pair with every shared subterm that may be anything replaced by a variable, large ones first."""
    free: dict[object, int] = {}
    for _ in range(4):
        shared = set(calls(left)) & set(calls(right))
        for term in sorted(shared, key=lambda t: -node_count((t,))):
            kind = enumeration.type_of(term)
            assert kind is not None
            if free.get(kind, 0) >= len(enumeration.spare[kind]):
                continue
            by: Mapping[Term, Term] = {term: enumeration.spare[kind][free.get(kind, 0)]}
            one = tuple(substituted(t, by) for t in left)
            two = tuple(substituted(t, by) for t in right)
            if enumeration.are_equal(one, two):
                free[kind] = free.get(kind, 0) + 1
                left, right = one, two
                break
        else:
            break
    return left, right


def _distinct(
    pairs: Iterable[tuple[Side, Side]], layouts: Mapping[str, Layout], known: set[str]
) -> tuple[Rule, ...]:
    """The pairs as rules, without those that are others with variables renamed or made one."""
    symbolic = {name: _symbolic(layout) for name, layout in layouts.items()}
    rules: dict[str, Rule] = {}
    for left, right in pairs:
        rule = canonical(left, right, symbolic)
        text = sides_text(rule)
        if text not in rules or _spread(rule) < _spread(rules[text]):
            rules[text] = rule
    merged = {text for rule in rules.values() for text in _merged(rule)}
    fresh = [
        rule
        for text, rule in rules.items()
        if text not in merged
        and text not in known
        and (rule.is_parallel or all(layout.is_whole for layout in rule.variables.values()))
    ]
    known.update(rules, merged)
    return tuple(sorted(fresh, key=lambda rule: (rule.size, str(rule))))


def sides_text(rule: Rule) -> str:
    """Both sides of a rule, without the layouts of its variables."""
    return f"{', '.join(map(str, rule.left))} | {', '.join(map(str, rule.right))}"


def _spread(rule: Rule) -> tuple[int, str]:
    """Orders rules by how much of their variables is laid out in some way."""
    laid_out = sum(
        len([d for d in (*layout.degrees, *layout.pieces, layout.partials, layout.copies) if d != 1])
        for layout in rule.variables.values()
    )
    return laid_out, str(rule)


def _merged(rule: Rule) -> Iterator[str]:
    """The rule with two variables of one layout made one, in every way; and those again."""
    for first, second in itertools.combinations(rule.variables, 2):
        if rule.variables[first] != rule.variables[second]:
            continue
        by: Mapping[Term, Term] = {Var(second): Var(first)}
        left = tuple(substituted(t, by) for t in rule.left)
        right = tuple(substituted(t, by) for t in rule.right)
        if left == right:
            continue
        smaller = canonical(left, right, rule.variables)
        yield sides_text(smaller)
        yield from _merged(smaller)


def _symbolic(layout: Layout) -> Layout:
    """The layout with `k` for every degree that is not one."""

    def lifted(degree: Degree) -> Degree:
        return (
            degree
            if degree == 1 or not isinstance(degree, int)
            else Symbolic(("k",) * (degree.bit_length() - 1))
        )

    return Layout(
        tuple(map(lifted, layout.degrees)),
        lifted(layout.partials),
        lifted(layout.copies),
        tuple(map(lifted, layout.pieces)),
    )
