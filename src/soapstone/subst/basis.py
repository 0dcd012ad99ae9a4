"""A small set of rules that implies the others.

Rules are taken smallest first. One is implied when rewriting both of its sides by the rules chosen so far, in
both directions, a bounded number of times, leads to a common term; otherwise it is chosen. The bound makes
this an upper bound of the smallest basis. Rules of several outputs are always chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from soapstone.subst.canonical import blind
from soapstone.subst.commuting import commutes
from soapstone.subst.term import Call, Rule, Term, Var, node_count, substituted, subterms

_MOST_TERMS = 60
_GROWTH = 1

Directed = tuple[Term, Term]


def basis(rules: Iterable[Rule]) -> list[Rule]:
    """The chosen rules, smallest first."""
    chosen: list[Rule] = []
    by_word: dict[str, list[Directed]] = {}
    for rule in sorted(rules, key=lambda rule: (rule.size, str(rule))):
        if len(rule.left) == 1 and _is_implied(rule, by_word):
            continue
        chosen.append(rule)
        if len(rule.left) == 1:
            for one, two in ((rule.left[0], rule.right[0]), (rule.right[0], rule.left[0])):
                if isinstance(one, Call):
                    by_word.setdefault(one.word, []).append((one, two))
    return chosen


def _is_implied(rule: Rule, by_word: Mapping[str, list[Directed]]) -> bool:
    limit = max(node_count(rule.left), node_count(rule.right)) + _GROWTH
    reached: list[dict[Term, None]] = [{_sorted(rule.left[0]): None}, {_sorted(rule.right[0]): None}]
    queues = [list(side) for side in reached]
    if reached[0].keys() & reached[1].keys():
        return True
    while any(queues):
        side = 0 if queues[0] and (len(reached[0]) <= len(reached[1]) or not queues[1]) else 1
        for found in _steps(queues[side].pop(0), by_word):
            term = _sorted(found)
            if term in reached[1 - side]:
                return True
            if term not in reached[side] and node_count((term,)) <= limit:
                if len(reached[side]) >= _MOST_TERMS:
                    queues[side].clear()
                    break
                reached[side][term] = None
                queues[side].append(term)
    return False


def _steps(term: Term, by_word: Mapping[str, list[Directed]]) -> Iterator[Term]:
    """The terms that one rewrite somewhere in a term gives."""
    for part in subterms((term,)):
        if isinstance(part, Call):
            for pattern, result in by_word.get(part.word, ()):
                for bound in _bindings(pattern, part, {}):
                    if all(Var(name) in bound for name in _names(result)):
                        yield substituted(term, {part: substituted(result, bound)})


def _names(term: Term) -> list[str]:
    return [part.name for part in subterms((term,)) if isinstance(part, Var)]


def _bindings(pattern: Term, term: Term, bound: Mapping[Term, Term]) -> Iterator[dict[Term, Term]]:
    if isinstance(pattern, Var):
        if bound.get(pattern, term) == term:
            yield {**bound, pattern: term}
        return
    if not isinstance(term, Call) or (pattern.word, pattern.attrs) != (term.word, term.attrs):
        return
    if len(pattern.args) != len(term.args):
        return
    orders = [term.args]
    if len(term.args) == 2 and commutes(term.word, term.attrs):
        orders.append(term.args[::-1])
    for args in orders:
        partial: list[Mapping[Term, Term]] = [bound]
        for one, two in zip(pattern.args, args, strict=True):
            partial = [found for known in partial for found in _bindings(one, two, known)]
        yield from (dict(found) for found in partial)


def _sorted(term: Term) -> Term:
    """The term with commuting operands in one order."""
    if isinstance(term, Var):
        return term
    args = tuple(_sorted(arg) for arg in term.args)
    if len(args) == 2 and commutes(term.word, term.attrs):
        args = tuple(sorted(args, key=lambda arg: (blind(arg), str(arg))))
    return Call(term.word, args, term.attrs)
