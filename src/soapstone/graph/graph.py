"""A computation: values, and the nodes that make them. Immutable.

The whole vocabulary:

    Value   a tensor with a name, a shape, a dtype and a role:
            input       handed in each step; `samples` is the axis that counts samples
            weight      trained; `sources` are the module's names for it (several when tied)
            buffer      kept between steps but not trained (running statistics, tables, frozen parameters)
            constant    the same in every step; `fill` when all its elements are one number
            computed    written by a node
    Node    an operator applied to operands: names of values, plain numbers, or None where an
            optional operand is left out; `scope` is the module it came from
    Graph   nodes in an order in which they can run, the loss, further outputs, which buffers take
            which values after a step (`updates`), and which count steps (`counters`)

A weight may be seen in another shape than it is stored in (`stored_shape`): an LSTM's (4H, I)
matrix is the box-friendly (4, H, I) here and keeps its own shape in checkpoints.
`verify` states the laws; `text` prints and parses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from types import MappingProxyType

from soapstone.errors import GraphError
from soapstone.graph import losses, samples
from soapstone.ops import Attrs, Kind, Op, Shape, Signature, lookup

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "f64": 8,
        "f32": 4,
        "f16": 2,
        "bf16": 2,
        "f8e4m3": 1,
        "f8e5m2": 1,
        "i64": 8,
        "i32": 4,
        "i16": 2,
        "i8": 1,
        "u8": 1,
        "bool": 1,
        "c64": 8,
        "c128": 16,
    }
)
FLOATS = frozenset({"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "c64", "c128"})

Operand = str | int | float | bool | None


class Role(StrEnum):
    """How a value comes to be; see the module's docstring."""

    INPUT = "input"
    WEIGHT = "weight"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COMPUTED = "computed"


@dataclass(frozen=True)
class Value:
    """A tensor of a graph."""

    name: str
    shape: Shape
    dtype: str
    role: Role = Role.COMPUTED
    sources: tuple[str, ...] = ()
    stored_shape: Shape | None = None
    samples: int | None = None
    fill: float | int | bool | None = None

    @property
    def size_bytes(self) -> int:
        """How many bytes its elements take."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether it can carry a gradient."""
        return self.dtype in FLOATS


@dataclass(frozen=True)
class Node:
    """One occurrence of an operator."""

    name: str
    op_name: str
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)
    scope: str = ""

    @property
    def op(self) -> Op:
        """The operator this is an occurrence of."""
        return lookup(self.op_name)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of the values it reads, each once, in the order of the operands."""
        return tuple(dict.fromkeys(operand for operand in self.operands if isinstance(operand, str)))


@dataclass(frozen=True)
class Graph:
    """A computation of one training step's forward pass; the backward pass follows from it."""

    name: str
    values: Mapping[str, Value]
    nodes: tuple[Node, ...]
    loss: str | None = None
    outputs: tuple[str, ...] = ()
    updates: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The value of that name."""
        found = self.values.get(name)
        if found is None:
            raise GraphError(f"graph '{self.name}' has no value '{name}'")
        return found

    def node(self, name: str) -> Node:
        """The node of that name."""
        found = self._nodes.get(name)
        if found is None:
            raise GraphError(f"graph '{self.name}' has no node '{name}'")
        return found

    def signature(self, node: Node) -> Signature:
        """The node's operator at the shapes of its operands."""
        return node.op.signature([self.shape(operand) for operand in node.operands], node.attrs)

    def shape(self, operand: Operand) -> Shape | None:
        """The shape of an operand: () for a number, None for one left out."""
        if operand is None:
            return None
        return self.value(operand).shape if isinstance(operand, str) else ()

    def with_role(self, role: Role) -> Iterator[Value]:
        """The values of one role, in the order of declaration."""
        return (value for value in self.values.values() if value.role is role)

    @cached_property
    def _nodes(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that writes each computed value."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, in order."""
        found: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in node.reads:
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """The values that a gradient flows through: floats between a weight and the loss, through
        operators that can be differentiated. Without a loss, gradients are taken to arrive at the
        outputs."""
        carried = {value.name for value in self.with_role(Role.WEIGHT) if value.is_float}
        for node in self.nodes:
            if node.op.needs_grad and any(name in carried for name in node.reads):
                carried.update(name for name in node.outputs if self.values[name].is_float)
        wanted = set(self.outputs) if self.loss is None else {self.loss}
        for node in reversed(self.nodes):
            if node.op.needs_grad and any(name in wanted for name in node.outputs):
                wanted.update(node.reads)
        return frozenset(name for name in carried if name in wanted)

    @cached_property
    def weight_made(self) -> frozenset[str]:
        """The weights, and all values computed from nothing but weights and numbers."""
        made = {value.name for value in self.with_role(Role.WEIGHT)}
        for node in self.nodes:
            if node.reads and all(name in made for name in node.reads):
                made.update(node.outputs)
        return frozenset(made)

    def kinds(self, node: Node) -> dict[str, Kind]:
        """The kind of each dim along which the node may be split."""
        weights = [i for i, operand in enumerate(node.operands) if operand in self.weight_made]
        return self.signature(node).kinds(weights, self.sample_dims.get(node.name, ""))

    @cached_property
    def sample_dims(self) -> Mapping[str, str]:
        """The dim of each node that counts samples, for the nodes that have one."""
        return samples.sample_dims(self)

    @cached_property
    def loss_tail(self) -> frozenset[str]:
        """The nodes that only add up the terms of the loss; nothing has to be computed for them."""
        return losses.tail(self)

    @cached_property
    def loss_terms(self) -> Mapping[str, float]:
        """The numbers of which the loss is the weighted sum, with their weights."""
        return losses.terms(self)

    @cached_property
    def parameter_count(self) -> int:
        """How many trained numbers the model has; tied weights count once."""
        return sum(prod(value.shape) for value in self.with_role(Role.WEIGHT))

    @cached_property
    def forward_flops(self) -> float:
        """Floating-point operations of one forward pass."""
        return sum(node.op.flop_count(self.signature(node)) for node in self.nodes)

    @cached_property
    def sample_count(self) -> int | None:
        """How many samples one step takes; None when no input has a sample axis."""
        counts = [
            value.shape[value.samples] for value in self.with_role(Role.INPUT) if value.samples is not None
        ]
        return counts[0] if counts else None

    @cached_property
    def opaque_nodes(self) -> tuple[Node, ...]:
        """The nodes whose operator is not known here: they run whole, on one device."""
        return tuple(node for node in self.nodes if node.op.is_opaque)
