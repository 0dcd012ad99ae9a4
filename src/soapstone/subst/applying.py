"""Rewriting a graph by a rule, and what became of its parameters.

The nodes of the other side are added, what was found is replaced by their outputs, and what nobody reads any
more is removed. A rewrite is made only if the result is a graph: shapes and layouts fit and nothing depends
on itself. Weights keep their names and sources: a rule that joins two weights computes the joined one from
both in the graph, so training and checkpoints go on in the original parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from soapstone.errors import GraphError, OpError, RuleError
from soapstone.graph import Graph, Node
from soapstone.graph.graph import FLOATS, Operand, Role, Value
from soapstone.graph.verify import verify
from soapstone.ops import Shape
from soapstone.subst.matching import Match, matches
from soapstone.subst.pcg import pcg
from soapstone.subst.term import Call, Rule, Term, Var, calls, variables_of
from soapstone.subst.words import CUTS, Context, applied, broadcasts


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph; `parameters` has, for every name of a parameter in the original module, the weight
    that stands for it, and `from_weights` the values that are now computed from weights alone."""

    graph: Graph
    rule: Rule
    parameters: Mapping[str, str]
    from_weights: tuple[str, ...]


def rewrites(graph: Graph, rule: Rule, degree: int = 2) -> Iterator[Rewritten]:
    """Every way to apply a rule once, in both directions; `degree` is the `k` of rules that bring one in."""
    for is_reversed in (False, True):
        for found in matches(graph, rule, is_reversed):
            done = apply(graph, found, degree)
            if done is not None:
                yield done


def rewrite(graph: Graph, rule: Rule, degree: int = 2) -> Rewritten:
    """The first way to apply a rule; an error if there is none."""
    done = next(rewrites(graph, rule, degree), None)
    if done is None:
        raise RuleError(f"rule '{rule.name}' applies nowhere in graph '{graph.name}'")
    return done


def apply(graph: Graph, found: Match, degree: int = 2) -> Rewritten | None:
    """The graph with an occurrence replaced; None where sizes or layouts do not allow it."""
    _, right = found.sides
    if not all(isinstance(term, Call) or term in found.values for term in right):
        return None
    for bound in _bound(found):
        for cuts in _cut_choices(graph, bound):
            try:
                rewritten = _replaced(graph, bound, degree, cuts)
            except (OpError, GraphError):
                continue
            if rewritten is not None:
                return rewritten
    return None


def _bound(found: Match) -> Iterator[Match]:
    """The occurrence with values for variables that are on the new side alone. A rule holds whatever they are
    (they say how large a constant is), so those that were found will do, where their shapes fit."""
    free = [name for name in variables_of(found.sides[1]) if Var(name) not in found.values]
    ranks = {name: len(layout.degrees) for name, layout in found.rule.variables.items()}
    known = {term.name: name for term, name in found.values.items() if isinstance(term, Var)}
    choices = [[known[other] for other in known if ranks[other] == ranks[name]] for name in free]
    for chosen in product(*choices):
        yield replace(found, values={**found.values, **dict(zip(map(Var, free), chosen, strict=True))})


def _cut_choices(graph: Graph, found: Match) -> Iterator[dict[tuple[Term, int], int]]:
    """Positions for the cuts of the new side: those found, or sizes that occur in what was found.

    A rule is proved for every position at which both sides agree in shape, so the first that fits will do.
    """
    wanted = list(
        dict.fromkeys(
            (call.args[0], dict(call.attrs)["dim"]) for call in calls(found.sides[1]) if call.word in CUTS
        )
    )
    known: dict[tuple[Term, int], int] = {}
    for term, name in found.values.items():
        for key, cut in found.symbols.items():
            if isinstance(key, tuple) and key[0] == "cut" and key[1] == name:
                known[term, key[2]] = cut
    sizes = {size for name in found.values.values() for size in graph.value(name).shape}
    sizes |= {cut for key, cut in found.symbols.items() if isinstance(key, tuple) and key[0] == "cut"}

    def choose(left: list[Any], so_far: dict[tuple[Term, int], int]) -> Iterator[dict[tuple[Term, int], int]]:
        if not left:
            yield so_far
            return
        options = [known[left[0]]] if left[0] in known else sorted(sizes)
        for cut in options:
            yield from choose(left[1:], {**so_far, left[0]: cut})

    yield from choose(wanted, {})


def _replaced(
    graph: Graph, found: Match, degree: int, cuts: Mapping[tuple[Term, int], int]
) -> Rewritten | None:
    left, right = found.sides
    context = Context(
        degree=found.symbols.get("k", degree),
        cuts=cuts,
        attrs={key[1]: dict(value) for key, value in found.symbols.items() if key[0] == "attrs"},
        factor=found.symbols.get("factor", 1.0),
    )
    if "factor" not in found.symbols and any(call.word == "scale" for call in calls(right)):
        return None
    scope = graph.producers[found.values[left[0]]].scope
    draft = _Draft(
        graph,
        {Var(name): found.values[Var(name)] for name in found.rule.variables if Var(name) in found.values},
        context,
        scope,
    )
    renamed = {}
    for old, new in zip(left, right, strict=True):
        before, after = graph.value(found.values[old]), draft.value(draft.name(new))
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            return None
        renamed[before.name] = after.name
    done = draft.graph(renamed)
    if done is None:
        return None
    if found.rule.is_parallel:
        layouts, old_layouts = pcg(done), pcg(graph)
        if any(layouts.layouts[new] != old_layouts.layouts[old] for old, new in renamed.items()):
            return None
    weights = {source: value.name for value in done.with_role(Role.WEIGHT) for source in value.sources}
    computed = [name for node in done.nodes for name in node.outputs if name in done.weight_made]
    return Rewritten(done, found.rule, weights, tuple(computed))


class _Draft:
    """A graph with nodes being added to it."""

    def __init__(self, graph: Graph, names: Mapping[Term, str], context: Context, scope: str) -> None:
        self.before = graph
        self.context = context
        self.scope = scope
        self.names: dict[Term, str] = dict(names)
        self.values: dict[str, Value] = dict(graph.values)
        self.added: list[Node] = []

    def value(self, name: str) -> Value:
        return self.values[name]

    def name(self, term: Term) -> str:
        """The value of a term, for which nodes are added where there are none."""
        found = self.names.get(term)
        if found is None:
            assert isinstance(term, Call)
            found = self.names[term] = self._node(term)
        return found

    def _node(self, call: Call) -> str:
        args = [self.name(arg) for arg in call.args]
        shapes: list[Shape] = [self.values[arg].shape for arg in args]
        meant = applied(call, shapes, self.context)
        if len(args) > 1 and broadcasts(meant.signature):
            raise OpError(f"'{call}' would broadcast an operand, for which no rule is proved")
        operands: list[Operand] = list(args)
        operands += [meant.numbers.get(i) for i in range(len(args), len(meant.shapes))]
        name, number = call.word, 0
        while name in self.values:
            number += 1
            name = f"{call.word}.{number}"
        kinds = [self.values[arg].dtype for arg in args]
        dtype = next((kind for kind in kinds if kind in FLOATS), kinds[0])
        self.values[name] = Value(name, meant.signature.output_shapes[0], dtype)
        stated = {k: v for k, v in meant.attrs.items() if k not in meant.op.attrs or meant.op.attrs[k] != v}
        self.added.append(Node(name, meant.op.name, tuple(operands), (name,), stated, self.scope))
        return name

    def graph(self, renamed: Mapping[str, str]) -> Graph | None:
        """The graph in which values have been replaced by others; None if it would depend on itself."""
        before = self.before

        def new(operand: Operand) -> Operand:
            return renamed.get(operand, operand) if isinstance(operand, str) else operand

        nodes = [replace(node, operands=tuple(map(new, node.operands))) for node in before.nodes]
        loss = None if before.loss is None else renamed.get(before.loss, before.loss)
        outputs = tuple(renamed.get(name, name) for name in before.outputs)
        updates = {buffer: renamed.get(name, name) for buffer, name in before.updates.items()}
        wanted = [name for name in (loss, *outputs, *updates.values()) if name is not None]
        kept = _needed([*nodes, *self.added], wanted)
        if kept is None:
            return None
        written = {name for node in kept for name in node.outputs}
        values = {n: v for n, v in self.values.items() if v.role is not Role.COMPUTED or n in written}
        return verify(
            replace(before, values=values, nodes=tuple(kept), loss=loss, outputs=outputs, updates=updates)
        )


def _needed(nodes: list[Node], wanted: list[str]) -> list[Node] | None:
    """The nodes that lead to what is wanted, in an order in which they can run; None if there is none.

    What a node reads comes right before it, if it was not there already. No recursion: graphs are deep.
    """
    producers = {name: node for node in nodes for name in node.outputs}
    ordered: dict[str, Node] = {}
    begun: set[str] = set()
    left = [producers[name] for name in reversed(wanted) if name in producers]
    while left:
        node = left[-1]
        before = [producers[n] for n in node.reads if n in producers and producers[n].name not in ordered]
        if node.name in ordered or not before:
            left.pop()
            ordered[node.name] = node
        elif node.name in begun:
            return None
        else:
            begun.add(node.name)
            left += reversed(before)
    return list(ordered.values())
