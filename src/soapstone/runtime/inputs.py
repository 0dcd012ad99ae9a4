"""Free values: what a rank makes for itself from the batch, constants and buffers, without weights.

They are computed whole, by torch's own functions, before the tasks of a step; what depends on no input
and on no buffer that changes is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soapstone.errors import TrainingError
from soapstone.graph import Graph, Node, Role, Value
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.op import Shard
from soapstone.strategy.blocks import free_values

Batch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class FreeValues:
    """The free values of one rank, by name; `buffers` are the module's, kept between steps."""

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        place: torch.device,
    ) -> None:
        self.graph, self.place = graph, place
        self.inputs = list(graph.with_role(Role.INPUT))
        self.buffers = {name: tensor.detach().to(place).clone() for name, tensor in buffers.items()}
        fixed = {value.name: _constant(value, constants, place) for value in graph.with_role(Role.CONSTANT)}
        free = free_values(graph)
        changing = {value.name for value in self.inputs} | {*graph.updates, *graph.counters}
        self._each_step: list[Node] = []
        self._tensors: dict[str, Tensor] = {**fixed, **self.buffers}
        for node in graph.nodes:
            if not all(name in free for name in node.outputs):
                continue
            if any(name in changing for name in node.reads):
                changing.update(node.outputs)
                self._each_step.append(node)
            else:
                self._run(node)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def begin(self, batch: Batch) -> None:
        """Take a batch, and compute what follows from it."""
        for value, tensor in zip(self.inputs, self._ordered(batch), strict=True):
            self._tensors[value.name] = _checked(value, tensor).to(self.place)
        self._tensors.update(self.buffers)
        for node in self._each_step:
            self._run(node)

    def _ordered(self, batch: Batch) -> list[Tensor]:
        """The batch's tensors in the order of the graph's inputs."""
        names = [value.name for value in self.inputs]
        if isinstance(batch, Mapping):
            if set(batch) != set(names):
                raise TrainingError(
                    f"the batch has {', '.join(map(str, batch))} where the model takes {', '.join(names)}"
                )
            return [batch[name] for name in names]
        tensors = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(tensors) != len(names):
            raise TrainingError(
                f"the batch has {len(tensors)} tensors where the model takes {len(names)}: {', '.join(names)}"
            )
        return tensors

    def _run(self, node: Node) -> None:
        signature = self.graph.signature(node)
        shard = Shard(signature, signature.points, dtype=self.graph.value(node.outputs[0]).dtype)
        operands = [self._tensors[o] if isinstance(o, str) else o for o in node.operands]
        with torch.no_grad():
            made = node.op.run(node.op.slices(operands, shard), node.attrs, shard)
        self._tensors.update(zip(node.outputs, made, strict=True))


def _constant(value: Value, constants: Mapping[str, Tensor], place: torch.device) -> Tensor:
    if value.name in constants:
        return constants[value.name].detach().to(place)
    if value.fill is None:
        raise TrainingError(
            f"the elements of constant '{value.name}' are not known: capture the model with its weights"
        )
    return torch.full(value.shape, value.fill, dtype=torch_dtype(value.dtype), device=place)


def _checked(value: Value, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TrainingError(f"input '{value.name}' of the batch is no tensor but {type(tensor).__name__}")
    if tuple(tensor.shape) != value.shape:
        raise TrainingError(
            f"input '{value.name}' of the batch has shape {list(tensor.shape)} where the plan is for"
            f" {list(value.shape)}"
        )
    if tensor.dtype != torch_dtype(value.dtype):
        raise TrainingError(
            f"input '{value.name}' of the batch is {tensor.dtype} where the plan is for"
            f" {torch_dtype(value.dtype)}"
        )
    return tensor
