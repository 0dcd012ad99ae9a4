"""The text form of a graph: for people, for golden tests, and to be read back.

    graph "mlp"
    input %x: f32[64, 784] samples=0
    input %y: i64[64] samples=0
    weight %fc.weight: f32[10, 784] from "fc.weight"
    %h = linear(%x, %fc.weight, none) : f32[64, 10] in "fc"
    %s = cross_entropy_sum(%h, %y; ignore_index=-100) : f32[]
    loss %s

A line that starts with `#` is a comment. `parsed(printed(graph)) == graph`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from soapstone.errors import GraphError
from soapstone.graph.graph import Graph, Node, Operand, Role, Value
from soapstone.graph.verify import verify
from soapstone.ops import Attr, Shape


def printed(graph: Graph) -> str:
    """The text form."""
    lines = [f"graph {json.dumps(graph.name)}"]
    lines += [_declaration(value) for value in graph.values.values() if value.role is not Role.COMPUTED]
    lines += [_assignment(graph, node) for node in graph.nodes]
    if graph.loss is not None:
        lines.append(f"loss {_name(graph.loss)}")
    lines += [f"output {_name(name)}" for name in graph.outputs]
    lines += [f"update {_name(buffer)} = {_name(name)}" for buffer, name in graph.updates.items()]
    lines += [f"count {_name(buffer)} by {step}" for buffer, step in graph.counters.items()]
    return "\n".join(lines) + "\n"


def _declaration(value: Value) -> str:
    line = f"{value.role} {_name(value.name)}: {_type(value)}"
    if value.samples is not None:
        line += f" samples={value.samples}"
    if value.stored_shape is not None:
        line += f" stored={list(value.stored_shape)}"
    if value.fill is not None:
        line += f" fill={_literal(value.fill)}"
    if value.sources:
        line += " from " + ", ".join(json.dumps(source) for source in value.sources)
    return line


def _assignment(graph: Graph, node: Node) -> str:
    operands = ", ".join(_operand(operand) for operand in node.operands)
    attrs = ", ".join(f"{key}={_literal(value)}" for key, value in sorted(node.attrs.items()))
    types = ", ".join(_type(graph.value(name)) for name in node.outputs)
    line = f"{', '.join(_name(name) for name in node.outputs)} = {node.op_name}({operands}"
    line += f"; {attrs})" if attrs else ")"
    line += f" : {types}"
    if node.name != node.outputs[0]:
        line += f" as {json.dumps(node.name)}"
    return line + (f" in {json.dumps(node.scope)}" if node.scope else "")


def _name(name: str) -> str:
    return f"%{name}" if _PLAIN.fullmatch(name) else f"%{json.dumps(name)}"


def _type(value: Value) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _operand(operand: Operand) -> str:
    return _name(operand) if isinstance(operand, str) else _literal(operand)


def _literal(value: Attr) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return (
                repr(value) if math.isfinite(value) else {"inf": "inf", "-inf": "-inf"}.get(str(value), "nan")
            )
        case int():
            return str(value)
        case str():
            return json.dumps(value)
        case tuple():
            return "[" + ", ".join(_literal(item) for item in value) + "]"


_PLAIN = re.compile(r"[A-Za-z_0-9][A-Za-z_0-9.]*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")
      |(?P<value>%(?:[A-Za-z_0-9][A-Za-z_0-9.]*|"(?:[^"\\]|\\.)*"))
      |(?P<number>-?(?:inf\b|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))
      |(?P<word>[A-Za-z_][A-Za-z_0-9.]*)
      |(?P<sign>[=:,;()\[\]]))""",
    re.VERBOSE,
)
_WORDS: dict[str, Attr] = {"none": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan}


def parsed(text: str, origin: str = "graph text") -> Graph:
    """The graph that the text describes, verified. `origin` is named in errors."""
    name = ""
    values: dict[str, Value] = {}
    nodes: list[Node] = []
    loss: str | None = None
    outputs: list[str] = []
    updates: dict[str, str] = {}
    counters: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        reader = _LineReader(line, f"{origin}, line {number}")
        match reader.peek():
            case "":
                continue
            case "graph":
                reader.take("graph")
                name = reader.string()
            case "loss":
                reader.take("loss")
                loss = reader.value_name()
            case "output":
                reader.take("output")
                outputs.append(reader.value_name())
            case "update":
                reader.take("update")
                buffer = reader.value_name()
                reader.take("=")
                updates[buffer] = reader.value_name()
            case "count":
                reader.take("count")
                buffer = reader.value_name()
                reader.take("by")
                counters[buffer] = reader.integer()
            case word if word.startswith("%"):
                node, made = reader.assignment()
                nodes.append(node)
                values |= {value.name: value for value in made}
            case _:
                value = reader.declaration()
                values[value.name] = value
        reader.end()
    if not name:
        raise GraphError(f'{origin} does not start with a line such as: graph "name"')
    return verify(Graph(name, values, tuple(nodes), loss, tuple(outputs), updates, counters))


class _LineReader:
    """Reads one line from left to right."""

    def __init__(self, line: str, place: str) -> None:
        self.place = place
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(line.rstrip()):
            match = _TOKEN.match(line, position)
            if match is None:
                raise GraphError(f"{place}: cannot read '{line[position:].strip()}'")
            self.tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
            position = match.end()

    def peek(self) -> str:
        return self.tokens[0][1] if self.tokens else ""

    def next(self, kind: str, what: str) -> str:
        if not self.tokens or self.tokens[0][0] != kind:
            raise GraphError(f"{self.place}: expected {what} before '{self.peek() or 'the end of the line'}'")
        return self.tokens.pop(0)[1]

    def take(self, text: str) -> None:
        if self.peek() != text:
            raise GraphError(
                f"{self.place}: expected '{text}' before '{self.peek() or 'the end of the line'}'"
            )
        self.tokens.pop(0)

    def takes(self, text: str) -> bool:
        if self.peek() != text:
            return False
        self.tokens.pop(0)
        return True

    def end(self) -> None:
        if self.tokens:
            raise GraphError(f"{self.place}: did not expect '{self.peek()}'")

    def string(self) -> str:
        return str(json.loads(self.next("string", "a string in double quotes")))

    def value_name(self) -> str:
        name = self.next("value", "a value such as %x")[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def integer(self) -> int:
        literal = self.literal()
        if not isinstance(literal, int) or isinstance(literal, bool):
            raise GraphError(f"{self.place}: expected an integer, not {literal!r}")
        return literal

    def literal(self) -> Attr:
        if self.takes("["):
            items: list[Attr] = []
            while not self.takes("]"):
                items.append(self.literal())
                if self.peek() != "]":
                    self.take(",")
            return tuple(items)
        kind, text = self.tokens.pop(0) if self.tokens else ("", "")
        if kind == "string":
            return str(json.loads(text))
        if kind == "number" and "inf" not in text:
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if kind == "number":
            return float(text)
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        raise GraphError(
            f"{self.place}: expected a number, a string, a list, true, false or none, not '{text}'"
        )

    def shape(self) -> Shape:
        literal = self.literal()
        if not isinstance(literal, tuple) or not all(type(size) is int for size in literal):
            raise GraphError(f"{self.place}: expected a shape such as [64, 10], not {literal!r}")
        return literal

    def declaration(self) -> Value:
        word = self.next("word", "a declaration")
        roles = [role.value for role in Role if role is not Role.COMPUTED]
        if word not in roles:
            raise GraphError(
                f"{self.place}: a line starts with graph, {', '.join(roles)}, a value, loss, output, update"
                f" or count, not '{word}'"
            )
        name = self.value_name()
        self.take(":")
        dtype, shape = self.next("word", "a dtype"), self.shape()
        samples = self.integer() if self._option("samples") else None
        stored = self.shape() if self._option("stored") else None
        filled = self.literal() if self._option("fill") else None
        if filled is not None and not isinstance(filled, int | float):
            raise GraphError(f"{self.place}: a constant is filled with a number, not {filled!r}")
        sources = self._strings() if self.takes("from") else ()
        return Value(name, shape, dtype, Role(word), sources, stored, samples, filled)

    def _option(self, name: str) -> bool:
        if not self.takes(name):
            return False
        self.take("=")
        return True

    def _strings(self) -> tuple[str, ...]:
        found = [self.string()]
        while self.takes(","):
            found.append(self.string())
        return tuple(found)

    def assignment(self) -> tuple[Node, Sequence[Value]]:
        outputs = [self.value_name()]
        while self.takes(","):
            outputs.append(self.value_name())
        self.take("=")
        op = self.next("word", "the name of an operator")
        self.take("(")
        operands: list[Operand] = []
        while self.peek() not in (")", ";"):
            operands.append(self._operand())
            if self.peek() not in (")", ";"):
                self.take(",")
        attrs: dict[str, Attr] = {}
        if self.takes(";"):
            while self.peek() != ")":
                key = self.next("word", "the name of an attribute")
                self.take("=")
                attrs[key] = self.literal()
                if self.peek() != ")":
                    self.take(",")
        self.take(")")
        self.take(":")
        made = [Value(outputs[0], *self._typed())]
        for output in outputs[1:]:
            self.take(",")
            made.append(Value(output, *self._typed()))
        name = self.string() if self.takes("as") else outputs[0]
        scope = self.string() if self.takes("in") else ""
        return Node(name, op, tuple(operands), tuple(outputs), attrs, scope), made

    def _typed(self) -> tuple[Shape, str]:
        dtype = self.next("word", "a dtype")
        return self.shape(), dtype

    def _operand(self) -> Operand:
        if self.peek().startswith("%"):
            return self.value_name()
        literal = self.literal()
        if isinstance(literal, str | tuple):
            raise GraphError(f"{self.place}: an operand is a value, a number or none, not {literal!r}")
        return literal
