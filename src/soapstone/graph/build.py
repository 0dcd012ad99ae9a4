"""Building a graph node by node: shapes follow from the operators, names are kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.graph.graph import FLOATS, Graph, Node, Operand, Role, Value
from soapstone.graph.verify import verify
from soapstone.ops import Attr, Shape, lookup


class GraphBuilder:
    """A graph in the making. Values are referred to by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []

    def input(self, name: str, shape: Shape, dtype: str = "f32", samples: int | None = 0) -> str:
        """Declare an input, counting samples along its first axis unless told otherwise."""
        return self.declare(Value(name, shape, dtype, Role.INPUT, samples=samples))

    def weight(self, name: str, shape: Shape, dtype: str = "f32") -> str:
        """Declare a weight, called the same in the module."""
        return self.declare(Value(name, shape, dtype, Role.WEIGHT, (name,)))

    def declare(self, value: Value) -> str:
        """Add a value that no node writes; its name."""
        self.values[value.name] = value
        return value.name

    def add(
        self,
        op_name: str,
        operands: Sequence[Operand],
        attrs: Mapping[str, Attr] | None = None,
        *,
        name: str | None = None,
        dtypes: Sequence[str] | None = None,
        scope: str = "",
    ) -> tuple[str, ...]:
        """Add a node; the names of the values it writes. Attributes at their defaults are left out.

        Without `dtypes` the outputs have the dtype of the first float operand, or of the first.
        """
        op, given = lookup(op_name), dict(attrs or {})
        shapes = op.signature([self._shape(operand) for operand in operands], given).output_shapes
        if dtypes is None:
            known = [self.values[operand].dtype for operand in operands if isinstance(operand, str)]
            dtypes = [next((d for d in known if d in FLOATS), known[0] if known else "f32")] * len(shapes)
        names = self.fresh(name or op_name, len(shapes))
        stated = {k: v for k, v in given.items() if k not in op.attrs or op.attrs[k] != v}
        self.nodes.append(Node(names[0], op_name, tuple(operands), names, stated, scope))
        for output, shape, dtype in zip(names, shapes, dtypes, strict=True):
            self.values[output] = Value(output, shape, dtype)
        return names

    def fresh(self, base: str, count: int = 1) -> tuple[str, ...]:
        """Names that no value has yet: `base`, `base.1`, `base.2`, ..."""
        names: list[str] = []
        number = 0
        while len(names) < count:
            name = base if number == 0 else f"{base}.{number}"
            if name not in self.values:
                names.append(name)
            number += 1
        return tuple(names)

    def _shape(self, operand: Operand) -> Shape | None:
        if operand is None:
            return None
        return self.values[operand].shape if isinstance(operand, str) else ()

    def graph(
        self,
        loss: str | None = None,
        outputs: Sequence[str] = (),
        updates: Mapping[str, str] | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> Graph:
        """The finished graph, verified."""
        return verify(
            Graph(
                self.name,
                dict(self.values),
                tuple(self.nodes),
                loss,
                tuple(outputs),
                dict(updates or {}),
                dict(counters or {}),
            )
        )
