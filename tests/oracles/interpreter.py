"""Running a graph with torch, node by node, each node whole or in shards joined by their boxes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracles.operators import joined, statistics
from soapstone.frontends.capture import Captured
from soapstone.graph import Graph, Node, Role
from soapstone.ops.op import Shard

Split = Callable[[Graph, Node], Mapping[str, int]]


def whole(graph: Graph, node: Node) -> Mapping[str, int]:
    """No split at all."""
    del graph, node
    return {}


def at_random(seed: int, most: int = 4) -> Split:
    """For every node a random legal split into at most `most` parts."""
    rng = random.Random(seed)

    def degrees(graph: Graph, node: Node) -> Mapping[str, int]:
        signature = graph.signature(node)
        return rng.choice([d for n in range(1, most + 1) for d in signature.legal_degrees(n)])

    return degrees


def tensors_of(
    captured: Captured, module: nn.Module, inputs: Sequence[Tensor], prefix: str = ""
) -> dict[str, Tensor]:
    """The graph's given values: inputs, the module's own parameters and buffers, constants."""
    named = {
        name.removeprefix(prefix): tensor
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    }
    given: dict[str, Tensor] = {}
    positions = iter(inputs)
    for value in captured.graph.values.values():
        match value.role:
            case Role.INPUT:
                given[value.name] = next(positions)
            case Role.WEIGHT | Role.BUFFER:
                given[value.name] = named[value.sources[0]].reshape(value.shape)
            case Role.CONSTANT:
                given[value.name] = captured.constants[value.name]
            case Role.COMPUTED:
                pass
    return given


def interpreted(graph: Graph, given: Mapping[str, Tensor], split: Split = whole) -> dict[str, Tensor]:
    """Every value of the graph."""
    values: dict[str, Any] = dict(given)
    for node in graph.nodes:
        operands = [values[o] if isinstance(o, str) else o for o in node.operands]
        outputs = _run(graph, node, operands, split(graph, node))
        for name, tensor in zip(node.outputs, outputs, strict=True):
            assert tuple(tensor.shape) == graph.value(name).shape, f"{node.name} made {tuple(tensor.shape)}"
            values[name] = tensor
    return values


def _run(graph: Graph, node: Node, operands: list[Any], degrees: Mapping[str, int]) -> Sequence[Tensor]:
    signature, op = graph.signature(node), node.op
    dtype = graph.value(node.outputs[0]).dtype
    shards = [Shard(signature, box, seed=len(node.name), dtype=dtype) for box in signature.shards(degrees)]
    if len(shards) == 1:
        return op.run(op.slices(operands, shards[0]), node.attrs, shards[0])
    pieces = [op.slices(operands, shard) for shard in shards]
    stats = statistics(op, node.attrs, shards, pieces, degrees)
    parts = [op.run(p, node.attrs, shard, s) for p, shard, s in zip(pieces, shards, stats, strict=True)]
    boxes = [shard.box for shard in shards]
    return [
        joined(signature, i, boxes, [part[i] for part in parts], degrees)
        for i in range(len(signature.outputs))
    ]


def loss_and_gradients(
    graph: Graph, given: Mapping[str, Tensor], split: Split = whole
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and its gradient with respect to every weight (by the graph's name for it)."""
    assert graph.loss is not None
    weights = {v.name: given[v.name] for v in graph.with_role(Role.WEIGHT)}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}
    loss = interpreted(graph, {**given, **leaves}, split)[graph.loss]
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), dict(zip(leaves, found, strict=True))
