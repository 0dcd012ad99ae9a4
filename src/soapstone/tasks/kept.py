"""What the backward pass of a node needs of the forward pass, read off the operator's scalar body.

The derivative of `x * w` by `w` needs `x`; that of a sum needs nothing; that of a maximum or an
exponential needs its argument. An operator of one operand that only rises or only falls (relu, tanh,
sigmoid) can do with its output instead: where it is flat the derivative is 0, elsewhere the output
tells the input. An operator without a body keeps all it read. Where torch does otherwise, the operator says
so (`Op.keeps`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise

from soapstone.graph import Graph, Node
from soapstone.ops import scalar
from soapstone.ops.scalar import Scalar
from soapstone.ops.signature import Signature

_SUM = "sum"
"""What `Op.finish_meaning` calls the sum."""

_GRID = tuple(n / 4 + 0.01 for n in range(-16, 17))
"""[choice] Where a function is looked at to see whether it only rises or falls: bends of activations
lie within."""


@dataclass(frozen=True)
class Kept:
    """The operands (by position) that the backward pass needs, and whether it needs the output."""

    operands: frozenset[int] = frozenset()
    output: bool = False


def kept(graph: Graph, node: Node) -> Kept:
    """What a node's backward pass needs; nothing if it has none."""
    if not any(name in graph.differentiable for name in node.outputs):
        return Kept()
    read = [i for i, operand in enumerate(node.operands) if isinstance(operand, str)]
    if node.op.keeps is not None:
        names = node.op.operand_names
        return Kept(frozenset(i for i in read if names[i] in node.op.keeps), "output" in node.op.keeps)
    signature = graph.signature(node)
    if node.op.body is None or (node.op.reduce != "sum" and signature.summed_dims):
        return Kept(frozenset(read))
    flowing = {f"x{i}" for i in read if node.operands[i] in graph.differentiable}
    body = _body(node, signature)
    needed = _needed(body, flowing)
    finish = node.op.finish_meaning(signature, node.attrs)
    if finish is not None:
        needed |= _needed(finish, flowing | {_SUM})
    if needed == flowing and len(needed) == 1 and not signature.summed_dims and _is_monotone(body):
        return Kept(output=True)
    return Kept(frozenset(i for i in read if f"x{i}" in needed), _SUM in needed)


def passes_gradient(graph: Graph, node: Node, operand: int) -> bool:
    """Whether the gradient of an operand is that of the output itself, as autograd passes it on: the node
    only adds to it, element by element."""
    signature = graph.signature(node)
    if node.op.body is None or signature.summed_dims or len(node.outputs) != 1:
        return False
    if node.op.finish_meaning(signature, node.attrs) is not None:
        return False
    name = node.operands[operand]
    if not isinstance(name, str) or graph.value(name).shape != graph.value(node.outputs[0]).shape:
        return False
    return _is_term(_body(node, signature), f"x{operand}")


def _is_term(expression: Scalar, symbol: str) -> bool:
    """Whether an expression is a sum of which a symbol is one term."""
    match expression.op, expression.args:
        case "var", (name,):
            return bool(name == symbol)
        case "add", (a, b):
            return _is_term(a, symbol) or _is_term(b, symbol)
        case "sub", (a, _):
            return _is_term(a, symbol)
        case _:
            return False


def _body(node: Node, signature: Signature) -> Scalar:
    return node.op.body_meaning(signature, dict.fromkeys(signature.sizes, 0), node.attrs)


def _needed(expression: Scalar, flowing: Set[str]) -> set[str]:
    """The symbols that the derivative of an expression by the flowing ones mentions."""
    if expression.op in ("var", "const") or not _symbols(expression) & flowing:
        return set()
    inner = set[str]().union(*(_needed(arg, flowing) for arg in expression.args))
    match expression.op, expression.args:
        case (("add" | "sub" | "neg"), _):
            return inner
        case "mul", (a, b):
            return (
                inner
                | (_symbols(b) if _symbols(a) & flowing else set())
                | (_symbols(a) if _symbols(b) & flowing else set())
            )
        case "div", (a, b):
            return inner | _symbols(b) | (_symbols(a) if _symbols(b) & flowing else set())
        case "where", (condition, _, _):
            return inner | _symbols(condition)
        case _:
            return inner | _symbols(expression)


def _symbols(expression: Scalar) -> set[str]:
    if expression.op == "var":
        return {expression.args[0]}
    if expression.op == "const":
        return set()
    return set[str]().union(*(_symbols(arg) for arg in expression.args))


def _is_monotone(expression: Scalar) -> bool:
    """Whether an expression of one symbol only rises or only falls."""
    (symbol,) = _symbols(expression)
    try:
        values = [scalar.evaluate(expression, {symbol: x}) for x in _GRID]
    except (ArithmeticError, ValueError):
        return False
    return all(a <= b for a, b in pairwise(values)) or all(a >= b for a, b in pairwise(values))
