"""Where one side of a rule occurs in a graph.

A variable matches any value, the same one wherever it occurs; a word matches a node of its operator with the
same attributes. `k`, cuts, the factor of `scale` and `[*]` are bound by what is found. Operands that commute
with the node's attributes match in both orders. A node that broadcasts an operand matches nothing: rules are
proved for those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soapstone.graph import Graph, Node
from soapstone.graph.graph import Operand
from soapstone.ops.op import Attr
from soapstone.subst.commuting import commutes
from soapstone.subst.term import ANY, Call, Rule, Side, Term, Var
from soapstone.subst.words import BORDER, CUTS, broadcasts

Symbols = Mapping[Any, Any]


@dataclass(frozen=True)
class Match:
    """An occurrence: the value of every matched subterm, and what the rule left open."""

    rule: Rule
    is_reversed: bool
    values: Mapping[Term, str]
    symbols: Symbols = field(default_factory=dict)

    @property
    def sides(self) -> tuple[Side, Side]:
        """What was found, and what may take its place."""
        return (self.rule.right, self.rule.left) if self.is_reversed else (self.rule.left, self.rule.right)


def matches(
    graph: Graph, rule: Rule, is_reversed: bool = False, among: frozenset[str] | None = None
) -> Iterator[Match]:
    """Every occurrence of the left side of a rule (of the right one, if reversed), all of it `among` the
    nodes of these names, if any are given.

    A side that is a variable alone matches everywhere, and is not looked for.
    """
    side = rule.right if is_reversed else rule.left
    if any(isinstance(term, Var) for term in side):
        return
    seen = set()
    nodes = [node for node in graph.nodes if among is None or node.name in among]
    for found in _all(graph, nodes, list(side), Match(rule, is_reversed, {})):
        if among is not None and any(
            isinstance(term, Call) and graph.producers[name].name not in among
            for term, name in found.values.items()
        ):
            continue
        key = tuple(sorted((str(term), name) for term, name in found.values.items()))
        outputs = {found.values[term] for term in side}
        if key not in seen and len(outputs) == len(side):
            seen.add(key)
            yield found


def _all(graph: Graph, nodes: list[Node], terms: list[Term], so_far: Match) -> Iterator[Match]:
    if not terms:
        yield so_far
        return
    for node in nodes:
        if len(node.outputs) == 1:
            for found in _at(graph, terms[0], node.outputs[0], so_far):
                yield from _all(graph, nodes, terms[1:], found)


def _at(graph: Graph, term: Term, value: Operand, so_far: Match) -> Iterator[Match]:
    """The ways in which a term can be a value."""
    if not isinstance(value, str):
        return
    known = so_far.values.get(term)
    if known is not None:
        if known == value:
            yield so_far
        return
    if isinstance(term, Var):
        if len(graph.value(value).shape) == len(so_far.rule.variables[term.name].degrees):
            yield replace(so_far, values={**so_far.values, term: value})
        return
    yield from _call_at(graph, term, value, so_far)


def _call_at(graph: Graph, term: Call, value: str, so_far: Match) -> Iterator[Match]:
    node = graph.producers.get(value)
    if node is None or len(node.outputs) != 1:
        return
    read = READERS.get(term.word, _plain)(graph, node, term)
    if read is None:
        return
    operands, bound = read
    if len(operands) > 1 and broadcasts(graph.signature(node)):
        return  # rules are proved for operands that are not
    symbols = _joined(so_far.symbols, bound)
    if symbols is None or len(operands) != len(term.args):
        return
    orders = [operands]
    if len(operands) == 2 and commutes(term.word, _stated(node)):
        orders.append(operands[::-1])
    for order in orders:
        partial = [replace(so_far, symbols=symbols)]
        for arg, operand in zip(term.args, order, strict=True):
            partial = [found for match in partial for found in _at(graph, arg, operand, match)]
        for match in partial:
            yield replace(match, values={**match.values, term: value})


def _stated(node: Node) -> tuple[tuple[str, Attr], ...]:
    return tuple(sorted(node.attrs.items()))


def _joined(one: Symbols, two: Symbols) -> dict[Any, Any] | None:
    if any(key in one and one[key] != value for key, value in two.items()):
        return None
    return {**one, **two}


Read = tuple[tuple[Operand, ...], dict[Any, Any]]


def _plain(_: Graph, node: Node, term: Call) -> Read | None:
    if node.op_name != term.word:
        return None
    operands = list(node.operands)
    while operands and operands[-1] is None and len(operands) > len(term.args):
        operands.pop()
    given = node.op.complete(node.attrs)
    if term.attrs == ANY:
        return tuple(operands), {("attrs", term.word): tuple(sorted(given.items()))}
    bound: dict[Any, Any] = {}
    asked = {name: value for name, value in term.attrs if value != "k"}
    if any(value == "k" for _, value in term.attrs):
        bound["k"] = given["degree"]
        given = {name: value for name, value in given.items() if name != "degree"}
        asked = {**{n: v for n, v in node.op.attrs.items() if n != "degree"}, **asked}
    elif node.op.complete(asked) != given:
        return None
    return (
        (tuple(operands), bound)
        if {**node.op.attrs, **asked, **bound_degree(bound)} == node.op.complete(node.attrs)
        else None
    )


def bound_degree(bound: Mapping[Any, Any]) -> dict[str, Attr]:
    """The degree among what was bound, as an attribute."""
    return {"degree": bound["k"]} if "k" in bound else {}


def _part(graph: Graph, node: Node, term: Call) -> Read | None:
    if node.op_name != "slice":
        return None
    given = node.op.complete(node.attrs)
    source = node.operands[0]
    shape = graph.shape(source)
    dim = dict(term.attrs)["dim"]
    assert isinstance(dim, int)
    if shape is None or given["dim"] != dim or given["step"] != 1:
        return None
    cut = given["end"] if term.word == "head" else given["start"]
    expected = {"head": (0, cut), "tail": (cut, shape[dim])}[term.word]
    if (given["start"], given["end"]) != expected or cut in (0, shape[dim]):
        return None
    return (source,), {("cut", source, dim): cut}


def _scaled(_: Graph, node: Node, __: Call) -> Read | None:
    if node.op_name != "mul" or len(node.operands) != 2 or not isinstance(node.operands[1], int | float):
        return None
    return (node.operands[0],), {"factor": node.operands[1]}


def _transposed(graph: Graph, node: Node, _: Call) -> Read | None:
    if node.op_name != "permute":
        return None
    rank = len(graph.shape(node.operands[0]) or ())
    order = [*range(rank - 2), rank - 1, rank - 2]
    return (node.operands, {}) if list(node.op.complete(node.attrs)["dims"]) == order else None  # type: ignore[arg-type]


def _batched(graph: Graph, node: Node, _: Call) -> Read | None:
    if node.op_name != "matmul" or any(len(graph.shape(o) or ()) != 3 for o in node.operands):
        return None
    return node.operands, {}


def _merged(graph: Graph, node: Node, _: Call) -> Read | None:
    if node.op_name != "reshape":
        return None
    before, after = graph.shape(node.operands[0]), graph.shape(node.outputs[0])
    if before is None or after is None or len(before) < 3:
        return None
    return (node.operands, {}) if after == (before[0] * before[1], *before[2:]) else None


def _enlarged(graph: Graph, node: Node, _: Call) -> Read | None:
    if node.op_name != "pad" or len(graph.shape(node.operands[0]) or ()) != 4:
        return None
    given = node.op.complete(node.attrs)
    return (node.operands, {}) if (given["pads"], given["value"]) == (BORDER, 0) else None


READERS: Mapping[str, Callable[[Graph, Node, Call], Read | None]] = {
    **dict.fromkeys(sorted(CUTS), _part),
    "scale": _scaled,
    "transpose": _transposed,
    "batch_matmul": _batched,
    "merge": _merged,
    "enlarge": _enlarged,
}
