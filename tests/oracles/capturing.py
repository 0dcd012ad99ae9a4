"""What a module means is what its graph computes: a captured graph held against its module.

A module in double precision. Its graph, interpreted with the module's own tensors, whole and with every node
cut at random, gives the module's loss, the gradient of every parameter and the buffers after the step; and
both of its written forms read back as the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oracles.interpreter import Split, at_random, interpreted, loss_and_gradients, tensors_of, whole
from soapstone.frontends.capture import Captured, capture
from soapstone.graph import Graph, Role, from_document, parsed, printed, to_document

CLOSE = {"rtol": 1e-8, "atol": 1e-10}
SPLITS: list[Split] = [whole, at_random(seed=1)]


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


def score(output: Any) -> Tensor:
    """A loss that depends differently on every element of every output."""
    if output is None:
        return torch.zeros((), dtype=torch.float64)
    if isinstance(output, Tensor):
        slopes = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        return (output.tanh() * slopes).sum()
    parts = output.values() if isinstance(output, dict) else output
    return sum((score(part) for part in parts), torch.zeros((), dtype=torch.float64))


class Formula(nn.Module):
    """The score of a function of some parameters and the inputs."""

    def __init__(self, formula: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.formula = formula
        self.p = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})

    def forward(self, *inputs: Tensor) -> Tensor:
        return score(self.formula(self.p, *inputs))


class Scored(nn.Module):
    """The score of another module's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return score(self.inner(*inputs))


@dataclass(frozen=True)
class Made:
    """A module to be captured."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


def formula(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Made:
    return Made(Formula(function, **shapes), inputs)


def scored(module: nn.Module, *inputs: Tensor) -> Made:
    return Made(Scored(module), inputs)


def agrees(made: Made) -> Captured:
    """The captured graph, after it has shown that it computes what the module computes."""
    module, inputs = made.module.double(), made.inputs
    captured = capture(module, inputs)
    graph = captured.graph
    assert parsed(printed(graph)) == graph
    assert from_document(to_document(graph)) == graph
    given = {name: tensor.clone() for name, tensor in tensors_of(captured, module, inputs).items()}
    runs = [loss_and_gradients(graph, given, split) for split in SPLITS]
    values = interpreted(graph, given, at_random(seed=3)) if graph.updates else {}
    before = {name: tensor.clone() for name, tensor in kept(module)}
    expected = module(*(tensor.clone() for tensor in inputs))
    expected.backward()
    for loss, gradients in runs:
        torch.testing.assert_close(loss, expected.detach(), **CLOSE)
        _check_gradients(graph, module, gradients)
    _check_buffers(graph, module, before, values)
    return captured


def kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module keeps from step to step without training it."""
    frozen = [(name, tensor) for name, tensor in module.named_parameters() if not tensor.requires_grad]
    return [*module.named_buffers(), *frozen]


def _check_gradients(graph: Graph, module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert {name for value in graph.with_role(Role.WEIGHT) for name in value.sources} == trained
    for name, found in gradients.items():
        value = graph.value(name)
        separate = {id(parameters[source]): parameters[source].grad for source in value.sources}
        known = [gradient for gradient in separate.values() if gradient is not None]
        if not known:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        torch.testing.assert_close(found, sum(known).reshape(value.shape), **CLOSE)


def _check_buffers(
    graph: Graph, module: nn.Module, before: dict[str, Tensor], values: dict[str, Tensor]
) -> None:
    after = dict(kept(module))
    for name, value in graph.updates.items():
        torch.testing.assert_close(values[value], after[name], **CLOSE)
    for name, step in graph.counters.items():
        assert int(after[name]) == int(before[name]) + step
    changed = {name for name, buffer in after.items() if not torch.equal(buffer, before[name])}
    assert changed == set(graph.updates) | set(graph.counters)
