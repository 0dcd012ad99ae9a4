"""Substitution selection (Unity 5.1): cost-based backtracking over rewrites, the cheapest candidate first.

A queue holds candidates by their cost, which is that of their best machine mapping. The best is taken out,
and every rule is applied to it at every place; what costs less than `ALPHA` times the best so far is put in.
A graph is rewritten part by part (`splitting`); parts that look alike and brought nothing are not gone
through again.

The rules are those of the book without parallel operators whose sides cost differently: parallelization is
not brought in by rules here but by the mapping of every candidate, which searches all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph, Role
from soapstone.machine import Machine
from soapstone.search.unity.mapping import Mapped, Mapper
from soapstone.search.unity.splitting import parts
from soapstone.subst.applying import apply
from soapstone.subst.costing import side_costs
from soapstone.subst.matching import matches
from soapstone.subst.rulebook import shipped
from soapstone.subst.term import Call, Rule, calls
from soapstone.subst.words import op_name

ALPHA = 1.05
"""[paper] Unity 5.1: how much worse than the best a candidate may be to be gone on from."""

LEAST_GAIN = 1e-6
"""[choice] A candidate that is not better by this part is not better: sums in another order differ so."""

MOST_OF_A_PART, MOST_CANDIDATES = 60, 400
"""[choice] Candidates that are mapped for one part, and in all."""


@dataclass(frozen=True)
class Direction:
    """A rule to be used from one side to the other, and the operators that it looks for."""

    rule: Rule
    is_reversed: bool
    ops: frozenset[str]


@cache
def _all_directions() -> tuple[Direction, ...]:
    """Both uses of every rule without parallel operators."""
    return tuple(
        Direction(rule, is_reversed, frozenset(op_name(call.word) for call in calls(side)))
        for rule in shipped().rules
        if not rule.is_parallel
        for is_reversed, side in ((False, rule.left), (True, rule.right))
    )


@cache
def _may_pay(direction: Direction) -> bool:
    """Whether, after a use, not everything costs the same or more."""
    costs = side_costs(direction.rule)
    if costs is None:
        return False
    before, after = costs[::-1] if direction.is_reversed else costs
    return not after.is_at_least(before)


def directions(ops: Container[str] | None = None) -> tuple[Direction, ...]:
    """The uses of rules that may pay, of those that look for these operators alone (for any, by default)."""
    return tuple(
        each
        for each in _all_directions()
        if (ops is None or all(name in ops for name in each.ops)) and _may_pay(each)
    )


@dataclass(frozen=True)
class Candidate:
    """A graph that computes the same, its mapping, and the rules that led to it."""

    graph: Graph
    mapped: Mapped
    rules: tuple[str, ...] = ()

    @property
    def cost_s(self) -> float:
        """What its mapping costs."""
        return self.mapped.cost_s


def rewritings(graph: Graph, among: frozenset[str]) -> Iterator[tuple[str, Graph]]:
    """Every graph that one use of a rule among these nodes leads to, and the rule's name."""
    ops = {node.op_name for node in graph.nodes if node.name in among}
    for direction in directions(ops):
        for match in matches(graph, direction.rule, direction.is_reversed, among):
            done = apply(graph, match)
            if done is not None:
                yield direction.rule.name, done.graph


@dataclass
class Selection:
    """A search for a better graph. `is_over` tells when to end it early."""

    mapper: Mapper
    is_over: Callable[[], bool]
    show: Callable[[int, float], None]
    alpha: float = ALPHA
    seen: dict[int, Candidate] = field(default_factory=dict)
    tried: int = 0
    terms: dict[Hashable, int] = field(default_factory=dict)

    @property
    def is_better(self) -> bool:
        """Whether some graph costs less than the one that was given, which was seen first."""
        given, *others = self.seen.values()
        return any(each.cost_s < given.cost_s * (1 - LEAST_GAIN) for each in others)

    def see(self, graph: Graph, rules: tuple[str, ...]) -> Candidate:
        """Map a graph that was made elsewhere, unless it is known."""
        identity = self.identity(graph)
        if identity not in self.seen:
            self.seen[identity] = Candidate(graph, self.mapper.mapped(graph), rules)
        return self.seen[identity]

    def run(self, graph: Graph) -> None:
        """Rewrite every part of a graph in turn, keeping what is better."""
        best = self.see(graph, ())
        fruitless: set[Hashable] = set()
        for part in parts(graph, _spans(graph)):
            own = frozenset(node.name for node in best.graph.nodes if node.name in part)
            key = _looks(best.graph, own)
            if key in fruitless or self.is_over() or self.tried >= MOST_CANDIDATES:
                continue
            found = self._improved(best, own)
            if found is best:
                fruitless.add(key)
            best = found

    def _improved(self, start: Candidate, part: frozenset[str]) -> Candidate:
        best, number, last = start, 0, self.tried + MOST_OF_A_PART
        queue: list[tuple[float, int, Candidate, frozenset[str]]] = [(start.cost_s, 0, start, part)]
        while queue and not self.is_over():
            _, _, candidate, own = heappop(queue)
            for name, graph in rewritings(candidate.graph, own):
                identity = self.identity(graph)
                if identity in self.seen:
                    continue
                if self.is_over() or self.tried >= min(last, MOST_CANDIDATES):
                    return best
                self.tried += 1
                found = Candidate(graph, self.mapper.mapped(graph), (*candidate.rules, name))
                self.seen[identity] = found
                if found.cost_s < best.cost_s * (1 - LEAST_GAIN):
                    best = found
                    self.show(self.tried, best.cost_s)
                if found.cost_s < self.alpha * best.cost_s:
                    number += 1
                    old = {node.name for node in candidate.graph.nodes}
                    inside = {node.name for node in graph.nodes if node.name in own or node.name not in old}
                    heappush(queue, (found.cost_s, number, found, frozenset(inside)))
        return best

    def identity(self, graph: Graph) -> int:
        """A number that two graphs have in common if they differ in names of nodes alone."""
        known: dict[str, int] = {}
        for value in graph.values.values():
            if value.role is not Role.COMPUTED:
                known[value.name] = self._number(("value", value.name))
        for node in graph.nodes:
            operands = tuple(known[o] if isinstance(o, str) else ("number", o) for o in node.operands)
            whole = (node.op_name, tuple(sorted(node.attrs.items())), operands)
            for i, name in enumerate(node.outputs):
                known[name] = self._number((whole, i))
        wanted = [name for name in (graph.loss, *graph.outputs) if name is not None]
        updates = sorted((buffer, known[name]) for buffer, name in graph.updates.items())
        return self._number((tuple(known[name] for name in wanted), tuple(updates)))

    def _number(self, term: Hashable) -> int:
        return self.terms.setdefault(term, len(self.terms))


def fastest_alone(
    graph: Graph, machine: Machine, costs: AnalyticCosts, is_over: Callable[[], bool]
) -> Candidate:
    """The graph that takes least on the first device of a machine by itself: what a graph optimizer makes of
    it that knows no parallelism."""
    alone = Machine("one device", machine.devices[:1], (), ())
    selection = Selection(Mapper(alone, costs), is_over, lambda *_: None)
    selection.run(graph)
    least_s = min(each.cost_s for each in selection.seen.values())
    # Of graphs that differ by rounding alone, the one with the fewest rewrites.
    equal = [each for each in selection.seen.values() if each.cost_s <= least_s * (1 + LEAST_GAIN)]
    return min(equal, key=lambda each: (len(each.rules), each.cost_s))


def _spans(graph: Graph) -> Iterator[list[str]]:
    """The nodes that each possible application of a rule takes in."""
    everything = frozenset(node.name for node in graph.nodes)
    ops = {node.op_name for node in graph.nodes}
    for direction in directions(ops):
        for match in matches(graph, direction.rule, direction.is_reversed, everything):
            yield [graph.producers[n].name for t, n in match.values.items() if isinstance(t, Call)]


def _looks(graph: Graph, part: frozenset[str]) -> Hashable:
    """What a part looks like, its names left out."""
    place = {
        name: i for i, name in enumerate(n for node in graph.nodes if node.name in part for n in node.outputs)
    }
    return tuple(
        (
            node.op_name,
            tuple(sorted(node.attrs.items())),
            tuple(
                (place.get(o, -1), graph.value(o).role, graph.value(o).shape) if isinstance(o, str) else o
                for o in node.operands
            ),
        )
        for node in graph.nodes
        if node.name in part
    )
