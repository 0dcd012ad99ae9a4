"""An exported program becomes a Graph.

Walks torch's ATen nodes in order. Each is, in this order of preference:

    folded      it depends on no input and no weight: its value is a constant
    expanded    it is several of our operators (`expansions`)
    mapped      an Op claims it (`Op.aten`)
    opaque      nobody does: it is kept as torch's own call, runs whole on one device, and a
                warning names it

Nothing is dropped but what provably changes nothing: metadata assertions, and nodes whose result
no one reads.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node as FxNode

from soapstone.errors import CaptureError, OpError
from soapstone.frontends.batchnorm import LOCAL, WHOLE, about_local, checked, local_attrs
from soapstone.frontends.dtypes import SHORT, short
from soapstone.frontends.expansions import EXPANSIONS
from soapstone.frontends.fxnodes import (
    as_tuple,
    has_effect,
    in_order,
    is_empty,
    is_foldable,
    reads_output,
    scope_of,
    target_of,
    user_targets,
)
from soapstone.frontends.program import exported
from soapstone.graph import Graph, GraphBuilder, Node, Operand, Role, Value, verify
from soapstone.ops import Attr, Op, claimants

_ASSERTIONS = frozenset(
    {
        "_assert_tensor_metadata.default",
        "_assert_async.msg",
        "_assert_scalar.default",
        "sym_constrain_range.default",
    }
)


@dataclass(frozen=True)
class Captured:
    """A graph, the data of its constants, and what the user should know about how it came to be."""

    graph: Graph
    constants: Mapping[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Handle:
    """A tensor during capture: what adapters and expansions are given for a tensor argument.

    `data` is the value of a constant whose elements are known; `is_constant` without data is a
    constant of a module without memory (the meta device).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_constant: bool = False
    data: Tensor | None = None
    declared: Value | None = None


def capture(
    module: nn.Module,
    inputs: Sequence[Any],
    name: str = "model",
    *,
    samples: int | None = None,
    prefix: str = "",
    input_names: Sequence[str] = (),
    train: bool = True,
    batch_norm: str = WHOLE,
) -> Captured:
    """The graph of a module's forward pass on inputs like these.

    A scalar float output, if it is the only output, is the loss. `samples` is the number of samples
    in the inputs: an input counts them along its first axis, or along the only one of that size.
    Without it, the first input's leading size is that number, and only leading axes count. `prefix`
    is cut off the names of parameters (a wrapper's attribute). Inputs are called `input_names`, or as
    `forward` calls them. With the `batch_norm` "local", batch norms take each shard's own statistics.
    """
    is_local = checked(batch_norm) == LOCAL
    notes: list[str] = []
    program = exported(module, inputs, name, notes, prefix=prefix, train=train)
    return _Capture(program, module, name, samples, prefix, input_names, notes, is_local).captured()


class _Capture:
    """The state of one walk over an exported program."""

    def __init__(
        self,
        program: ExportedProgram,
        module: nn.Module,
        name: str,
        samples: int | None,
        prefix: str,
        input_names: Sequence[str],
        notes: list[str],
        is_local: bool,
    ) -> None:
        self.program, self.module, self.name, self.notes = program, module, name, notes
        self.prefix, self.is_local = prefix, is_local
        self.samples, self.samples_are_known = samples, samples is not None
        self.input_names = list(input_names)
        self.built = GraphBuilder(name)
        self.values = self.built.values
        self.constants: dict[str, Tensor] = {}
        self.constant_names: dict[Handle, str] = {}
        self.env: dict[FxNode, Any] = {}
        self.tied: Mapping[str, str] = {}
        self.opaque: dict[str, int] = {}
        self.current: FxNode | None = None
        self.weight_users: dict[str, set[str]] = {}

    def captured(self) -> Captured:
        self._declare_inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.current = node
                self.env[node] = self._lowered(node)
            elif node.op == "get_attr":
                raise CaptureError(
                    f"model '{self.name}' holds a nested graph ('{node.target}', as torch.cond makes it),"
                    " which Soapstone cannot split: write the branch with torch.where"
                )
        graph = self._finished()
        for target, count in self.opaque.items():
            times = f" ({count} times)" if count > 1 else ""
            self.notes.append(
                f"operator {target}{times} is not known to Soapstone: it will run whole, on one device"
            )
        self.notes += about_local(graph) if self.is_local else ()
        return Captured(verify(graph), self.constants, tuple(self.notes))

    # -- placeholders ---------------------------------------------------------------------------

    def _declare_inputs(self) -> None:
        signature = self.program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
        mutated = set(signature.buffers_to_mutate.values())
        tied = self.tied = self._tied()
        parameters = self.module.named_parameters(remove_duplicate=False)
        trained = {tied[name] for name, parameter in parameters if parameter.requires_grad}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec, value = specs[node.name], node.meta.get("val")
            if not isinstance(value, Tensor):
                self.env[node] = value
                continue
            match spec.kind:
                case InputKind.PARAMETER if tied.get(str(spec.target)) in trained:
                    self.env[node] = self._weight(node, str(spec.target), value, tied)
                case InputKind.PARAMETER:
                    self.env[node] = self._buffer(str(spec.target), value, True, tied)
                case InputKind.BUFFER:
                    kept = bool(spec.persistent) or spec.target in mutated
                    self.env[node] = self._buffer(str(spec.target), value, kept, tied)
                case InputKind.CONSTANT_TENSOR:
                    self.env[node] = self._constant(node.name, self.program.constants[str(spec.target)])
                case InputKind.USER_INPUT:
                    self.env[node] = self._input(node.name, value)
                case other:
                    raise CaptureError(
                        f"model '{self.name}' takes an input of kind {other}, which cannot be captured"
                    )

    def _tied(self) -> dict[str, str]:
        """The name under which each parameter or buffer is kept: the first of those that share it."""
        first: dict[Any, str] = {}
        kept: dict[str, str] = {}
        entries: list[tuple[str, Tensor]] = [*self.module.named_parameters(remove_duplicate=False)]
        entries += self.module.named_buffers(remove_duplicate=False)
        for name, tensor in entries:
            view = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            identity = (
                id(tensor) if tensor.is_meta else (tensor.untyped_storage().data_ptr(), *view, tensor.dtype)
            )
            if not tensor.is_meta and tensor.untyped_storage().nbytes() == 0:
                identity = id(tensor)
            kept[name] = first.setdefault(identity, name)
        return kept

    def _weight(self, node: FxNode, target: str, value: Tensor, tied: Mapping[str, str]) -> Handle:
        kept = tied.get(target, target)
        sources = tuple(name for name, first in tied.items() if first == kept) or (kept,)
        name = self._bare(kept)
        self.weight_users.setdefault(name, set()).update(user_targets(node))
        if name not in self.values:
            self.values[name] = Value(
                name, tuple(value.shape), short(value.dtype), Role.WEIGHT, tuple(map(self._bare, sources))
            )
        return Handle(name, tuple(value.shape), short(value.dtype), declared=self.values[name])

    def _buffer(self, target: str, value: Tensor, kept: bool, tied: Mapping[str, str]) -> Handle:
        name = self._bare(tied.get(target, target))
        sources = tuple(self._bare(n) for n, first in tied.items() if first == tied.get(target, target))
        shape, dtype = tuple(value.shape), short(value.dtype)
        buffer = Value(name, shape, dtype, Role.BUFFER, sources or (name,))
        if kept:
            self.values.setdefault(name, buffer)
            return Handle(name, shape, dtype, declared=buffer)
        real = dict(self.module.named_buffers(remove_duplicate=False))[target]
        data = None if real.is_meta else real.detach().cpu()
        return Handle(name, shape, dtype, True, data, buffer)

    def _bare(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _input(self, name: str, value: Tensor) -> Handle:
        (name,) = self.built.fresh(self.input_names.pop(0) if self.input_names else name)
        shape = tuple(int(size) for size in value.shape)
        if self.samples is None and shape:
            self.samples = shape[0]
        axes = [axis for axis, size in enumerate(shape) if size == self.samples]
        counts = axes[:1] == [0] or (self.samples_are_known and len(axes) == 1)
        declared = Value(name, shape, short(value.dtype), Role.INPUT, samples=axes[0] if counts else None)
        self.values[name] = declared
        return Handle(name, shape, short(value.dtype), declared=declared)

    def _constant(self, name: str, data: Any) -> Handle:
        if not isinstance(data, Tensor):
            raise CaptureError(f"model '{self.name}' holds the constant '{name}', which is not a tensor")
        known = None if data.is_meta or isinstance(data, FakeTensor) else data.detach().cpu()
        return Handle(name, tuple(data.shape), short(data.dtype), True, known)

    # -- calls ----------------------------------------------------------------------------------

    def _lowered(self, node: FxNode) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return self.env[source][index]  # type: ignore[index]
        if not node.users and not has_effect(node):
            return None
        target = target_of(node)
        if target in _ASSERTIONS:
            return None
        if is_empty(node.meta.get("val")):
            return self._constant(
                node.name, torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            )
        args, kwargs = self._arguments(node)
        constants = _handles([*args, *kwargs.values()])
        if all(handle.is_constant for handle in constants) and is_foldable(node):
            return self._folded(node, args, kwargs, constants)
        if target in EXPANSIONS:
            result = EXPANSIONS[target](self, *args, **kwargs)
            if result is not None:
                return result
        for op in claimants(target):
            mapped = self._mapped(node, op, target, args, kwargs)
            if mapped is not None:
                return mapped
        return self._opaque(node, args, kwargs)

    def _arguments(self, node: FxNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def replaced(item: Any) -> Any:
            if isinstance(item, FxNode):
                return self.env[item]
            if isinstance(item, list | tuple):
                return [replaced(part) for part in item]
            return item

        return tuple(replaced(a) for a in node.args), {k: replaced(v) for k, v in node.kwargs.items()}

    def _folded(
        self, node: FxNode, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Sequence[Handle]
    ) -> Any:
        """The constant that a node computes; without data where an operand has none."""
        values = node.meta["val"]
        if any(handle.data is None for handle in constants):
            made = [
                Handle(f"{node.name}.{i}" if i else node.name, tuple(v.shape), short(v.dtype), True)
                for i, v in enumerate(as_tuple(values))
            ]
            return made if isinstance(values, list | tuple) else made[0]

        def real(item: Any) -> Any:
            if isinstance(item, Handle):
                return item.data
            if isinstance(item, list | tuple):
                return [real(part) for part in item]
            return torch.device("cpu") if isinstance(item, torch.device) else item

        with torch.no_grad():
            result = node.target(*map(real, args), **{k: real(v) for k, v in kwargs.items()})  # type: ignore[operator]
        if isinstance(result, Tensor):
            return self._constant(node.name, result)
        return [self._constant(f"{node.name}.{i}", part) for i, part in enumerate(result)]

    def _mapped(
        self, node: FxNode, op: Op, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The node of the operator that claims this call; None if it turns out not to fit."""
        adapter = op.aten[target]
        try:
            call = adapter(*args, **kwargs) if adapter else in_order(node, op, args, kwargs)
        except (TypeError, OpError):
            call = None
        if call is None:
            return None
        values = as_tuple(node.meta["val"])
        chosen = call.outputs or tuple(range(len(values)))
        try:
            shapes = op.signature([_shape(operand) for operand in call.operands], call.attrs).output_shapes
        except OpError:
            return None
        chosen = chosen[: len(shapes)]
        unread = set(range(len(values))) - set(chosen)
        if any(reads_output(node, i) for i in unread):
            return None
        if shapes != tuple(tuple(values[i].shape) for i in chosen):
            return None
        made = self.emit(op.name, call.operands, call.attrs, dtypes=[short(values[i].dtype) for i in chosen])
        if not isinstance(node.meta["val"], list | tuple):
            return made[0]
        return dict(zip(chosen, made, strict=True))

    def _opaque(self, node: FxNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The call as torch makes it."""
        operands: list[Handle] = []

        def plain(item: Any) -> Any:
            if isinstance(item, Handle):
                operands.append(item)
                return {"operand": len(operands) - 1}
            if isinstance(item, list | tuple):
                return [plain(part) for part in item]
            if isinstance(item, torch.dtype | torch.layout | torch.memory_format):
                return {"torch": str(item).removeprefix("torch.")}
            if item is None or isinstance(item, bool | int | float | str):
                return item
            if isinstance(item, torch.device):
                return None
            raise CaptureError(
                f"model '{self.name}' calls {node.target} with an argument of type {type(item).__name__},"
                " which cannot be kept"
            )

        arguments = {
            "positional": [plain(a) for a in args],
            "keywords": {k: plain(v) for k, v in kwargs.items() if k not in ("device", "pin_memory")},
        }
        values = as_tuple(node.meta["val"])
        if any(not isinstance(v, Tensor) for v in values if v is not None):
            raise CaptureError(
                f"model '{self.name}' takes a number out of a tensor with {node.target}: shapes must be fixed"
            )
        kept = [i for i, v in enumerate(values) if v is not None]
        self.opaque[str(node.target)] = self.opaque.get(str(node.target), 0) + 1
        made = self.emit(
            "opaque",
            operands,
            {
                "target": str(node.target),
                "arguments": json.dumps(arguments, sort_keys=True),
                "out_shapes": tuple(tuple(int(n) for n in values[i].shape) for i in kept),
            },
            dtypes=[short(values[i].dtype) for i in kept],
        )
        if not isinstance(node.meta["val"], list | tuple):
            return made[0]
        return dict(zip(kept, made, strict=True))

    # -- what expansions build with -----------------------------------------------------------------

    def emit(
        self,
        op_name: str,
        operands: Sequence[Any],
        attrs: Mapping[str, Attr] | None = None,
        dtypes: Sequence[str] | None = None,
    ) -> list[Handle]:
        """Add a node; its outputs. Output dtypes default to the first float operand's."""
        assert self.current is not None
        local = local_attrs(op_name, self.current, self.module) if self.is_local else {}
        names = self.built.add(
            op_name,
            [self._read(operand) for operand in operands],
            {**(attrs or {}), **local},
            name=self.current.name,
            dtypes=dtypes,
            scope=scope_of(self.current, self.prefix),
        )
        made = [self.values[name] for name in names]
        return [Handle(value.name, value.shape, value.dtype) for value in made]

    def weight_as(self, handle: Handle, shape: tuple[int, ...]) -> Handle:
        """A weight in another shape: stored so if all its readers want it so, else reshaped."""
        declared = self.values.get(handle.name)
        if declared is not None and declared.role is Role.WEIGHT and len(self.weight_users[handle.name]) == 1:
            if declared.stored_shape is None:
                declared = replace(declared, shape=shape, stored_shape=declared.shape)
                self.values[handle.name] = declared
            return Handle(handle.name, shape, handle.dtype, declared=declared)
        return self.emit("reshape", [handle], {"shape": shape})[0]

    def _read(self, operand: Any) -> Operand:
        """The operand as a node reads it; a constant is declared when it is first read."""
        if isinstance(operand, complex):  # which neither JSON nor the text form can write
            assert self.current is not None
            operand = self._constant(f"{self.current.name}.number", torch.tensor(operand))
        if not isinstance(operand, Handle):
            return operand
        if operand.name not in self.values and operand.declared is not None:
            self.values[operand.name] = operand.declared
        elif operand.is_constant and operand.declared is None:
            return self._declared_constant(operand)
        return operand.name

    def _declared_constant(self, handle: Handle) -> str:
        if handle in self.constant_names:
            return self.constant_names[handle]
        (name,) = self.built.fresh(handle.name)
        self.constant_names[handle] = name
        fill = None if handle.data is None else _fill(handle.data)
        self.values[name] = Value(name, handle.shape, handle.dtype, Role.CONSTANT, fill=fill)
        if handle.data is not None:
            self.constants[name] = handle.data.contiguous()
        return name

    # -- the end --------------------------------------------------------------------------------

    def _finished(self) -> Graph:
        signature = self.program.graph_signature
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        updates: dict[str, str] = {}
        outputs: list[str] = []
        for node, spec in zip(output.args[0], signature.output_specs, strict=True):
            if not isinstance(node, FxNode) or not isinstance(self.env.get(node), Handle):
                continue
            handle = self.env[node]
            match spec.kind:
                case OutputKind.BUFFER_MUTATION | OutputKind.PARAMETER_MUTATION:
                    target = str(spec.target)
                    updates[self._bare(self.tied.get(target, target))] = str(self._read(handle))
                case OutputKind.USER_OUTPUT:
                    outputs.append(str(self._read(handle)))
                case OutputKind.USER_INPUT_MUTATION:
                    pass  # a batch is not looked at again after its step
                case other:
                    raise CaptureError(
                        f"model '{self.name}' gives an output of kind {other}, which is not kept"
                    )
        loss = None
        if len(outputs) == 1:
            only = self.values[outputs[0]]
            if only.shape == () and only.is_float and only.role is Role.COMPUTED:
                loss, outputs = outputs[0], []
        nodes, counters = _without_counters(self.built.nodes, self.values, updates)
        updates = {buffer: name for buffer, name in updates.items() if buffer not in counters}
        nodes = _alive(nodes, {name for name in [loss, *outputs, *updates.values()] if name is not None})
        written = {name for node in nodes for name in node.outputs}
        read = {name for node in nodes for name in node.reads} | set(outputs) | set(updates) | set(counters)
        values = {
            name: value
            for name, value in self.values.items()
            if name in written or (value.role not in (Role.COMPUTED, Role.CONSTANT)) or name in read
        }
        self.constants = {name: data for name, data in self.constants.items() if name in values}
        return Graph(self.name, values, tuple(nodes), loss, tuple(outputs), updates, counters)


def _without_counters(
    nodes: Sequence[Node], values: Mapping[str, Value], updates: Mapping[str, str]
) -> tuple[list[Node], dict[str, int]]:
    """The nodes less those that count steps (a batch norm's `num_batches_tracked`), and the counts."""
    producers = {name: node for node in nodes for name in node.outputs}
    counters: dict[str, int] = {}
    for buffer, name in updates.items():
        count = _count(buffer, name, producers)
        if count and values[buffer].shape == () and not values[buffer].is_float:
            counters[buffer] = count
    counting = {updates[buffer] for buffer in counters}
    return [node for node in nodes if not counting & set(node.outputs)], counters


def _count(buffer: str, name: str, producers: Mapping[str, Node]) -> int | None:
    """By how much a value is larger than a buffer, if it is that and a known number."""
    count = 0
    while name != buffer:
        node = producers.get(name)
        if node is None or node.op_name != "add" or node.attrs:
            return None
        before, more = node.operands
        if not isinstance(before, str) or type(more) is not int:
            return None
        name, count = before, count + more
    return count


def _alive(nodes: Sequence[Node], ends: set[str]) -> list[Node]:
    """The nodes on which an end depends."""
    wanted, kept = set(ends), list[Node]()
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            kept.append(node)
            wanted.update(node.reads)
    return kept[::-1]


def _handles(items: Sequence[Any]) -> list[Handle]:
    found: list[Handle] = []
    for item in items:
        if isinstance(item, Handle):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(_handles(item))
    return found


def _shape(operand: Any) -> tuple[int, ...] | None:
    if isinstance(operand, Handle):
        return operand.shape
    return None if operand is None else ()


def _fill(data: Tensor) -> float | int | bool | None:
    """The number that all elements are, if they are all one number."""
    if data.numel() == 0 or data.dtype not in SHORT or data.is_complex():
        return None
    first = data.flatten()[0]
    same = bool((data == first).all()) and not bool(torch.isnan(first))
    return first.item() if same else None
