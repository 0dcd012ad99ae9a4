"""One way to write each rule: variables named in order, commuting operands and outputs sorted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from soapstone.subst.commuting import commutes
from soapstone.subst.layout import Layout
from soapstone.subst.term import Call, Rule, Side, Term, Var, node_count, substituted, variables_of

_NAMES = "xyzwuvabcdefgh"


def blind(term: Term) -> str:
    """The term's text without the names of its variables, commuting operands sorted."""
    if isinstance(term, Var):
        return "_"
    args = [blind(arg) for arg in term.args]
    if len(args) == 2 and commutes(term.word, term.attrs):
        args.sort()
    return f"{term.word}{term.attrs or ''}({','.join(args)})"


def _orders(term: Term) -> Iterator[Term]:
    """The term with commuting operands sorted; in every order where nothing tells them apart."""
    if isinstance(term, Var):
        yield term
        return
    for args in itertools.product(*(tuple(_orders(arg)) for arg in term.args)):
        if len(args) == 2 and commutes(term.word, term.attrs):
            first, second = blind(args[0]), blind(args[1])
            if first <= second:
                yield Call(term.word, args, term.attrs)
            if second <= first and args[0] != args[1]:
                yield Call(term.word, args[::-1], term.attrs)
        else:
            yield Call(term.word, args, term.attrs)


def _renamed(left: Side, right: Side) -> tuple[Side, Side, dict[str, str]]:
    names = dict(zip(variables_of(left + right), _NAMES, strict=False))
    by: dict[Term, Term] = {Var(old): Var(new) for old, new in names.items()}
    return tuple(substituted(t, by) for t in left), tuple(substituted(t, by) for t in right), names


def _writings(left: Side, right: Side) -> Iterator[tuple[str, Side, Side, dict[str, str]]]:
    pairs = sorted(zip(left, right, strict=True), key=lambda pair: (blind(pair[0]), blind(pair[1])))
    keys = [(blind(a), blind(b)) for a, b in pairs]
    for order in itertools.permutations(range(len(pairs))):
        if [keys[i] for i in order] != keys:
            continue
        chosen = [pairs[i] for i in order]
        terms = [*(a for a, _ in chosen), *(b for _, b in chosen)]
        for written in itertools.product(*(tuple(_orders(term)) for term in terms)):
            one, two, names = _renamed(written[: len(chosen)], written[len(chosen) :])
            yield f"{', '.join(map(str, one))} | {', '.join(map(str, two))}", one, two, names


def canonical(left: Side, right: Side, layouts: Mapping[str, Layout]) -> Rule:
    """The rule without a name, the larger side on the left."""
    size = [
        (node_count(side), sum(len(blind(t)) for t in side), [blind(t) for t in side])
        for side in (left, right)
    ]
    if size[0] < size[1]:
        left, right = right, left
    sides = [(left, right), (right, left)] if size[0] == size[1] else [(left, right)]
    _, one, two, names = min(
        (writing for a, b in sides for writing in _writings(a, b)), key=lambda writing: writing[0]
    )
    return Rule("", {new: layouts[old] for old, new in names.items()}, one, two)
