"""Every model of the zoo: captured whole, and computing what the module computes.

The tiny variants are run: the graph, interpreted with the module's parameters, gives the module's
loss and gradients; so it does when every node is cut into random shards.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from oracles.interpreter import at_random, interpreted, loss_and_gradients, tensors_of
from torch import nn

from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.zoo import ZOO
from soapstone.graph import parsed, printed

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


@cache
def tiny(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Captured]:
    """The tiny model in double precision, without dropout (whose masks are ours alone)."""
    torch.manual_seed(0)
    model = ZOO[name]
    options = {"dropout": 0.0} if "dropout" in model.options else {}
    module = model.build(tiny=True, **options).double()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    inputs = tuple(t.double() if t.is_floating_point() else t for t in model.inputs(4, tiny=True, **options))
    return module, inputs, capture(module, inputs, name)


@pytest.mark.parametrize("name", ZOO)
def test_tiny_model_computes_what_the_module_computes(name: str) -> None:
    module, inputs, captured = tiny(name)
    graph = captured.graph
    assert not graph.opaque_nodes
    assert not captured.notes
    assert graph.loss is not None
    given = tensors_of(captured, module, inputs)
    loss, gradients = loss_and_gradients(graph, given)
    sharded_loss, sharded_gradients = loss_and_gradients(graph, given, at_random(seed=7))
    expected = module.train()(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    torch.testing.assert_close(sharded_loss, expected.detach(), **CLOSE)
    parameters = dict(module.named_parameters())
    for weight, gradient in gradients.items():
        value = graph.value(weight)
        own = next(parameters[s] for s in value.sources if s in parameters)
        if own.grad is None:
            assert gradient is None
            continue
        wanted = own.grad.reshape(value.shape)
        torch.testing.assert_close(gradient, wanted, **CLOSE, msg=lambda m, w=weight: f"{w}: {m}")
        torch.testing.assert_close(
            sharded_gradients[weight], wanted, **CLOSE, msg=lambda m, w=weight: f"{w}, sharded: {m}"
        )


@pytest.mark.parametrize("name", ["inception_v3", "resnet101"])
def test_running_statistics_are_updated_as_by_the_module(name: str) -> None:
    cached, inputs, captured = tiny(name)
    module, graph = deepcopy(cached), captured.graph
    before = dict(deepcopy(cached).named_buffers())
    given = {key: t.detach().clone() for key, t in tensors_of(captured, module, inputs).items()}
    values = interpreted(graph, given, at_random(seed=3))
    module.train()(*inputs)
    buffers = dict(module.named_buffers())
    assert graph.updates
    assert graph.counters
    for buffer, value in graph.updates.items():
        torch.testing.assert_close(values[value], buffers[buffer], **CLOSE)
    for buffer, step in graph.counters.items():
        assert int(buffers[buffer]) == int(before[buffer]) + step


@pytest.mark.parametrize("name", ZOO)
def test_captured_graph_reads_back(name: str) -> None:
    _, _, captured = tiny(name)
    text = printed(captured.graph)
    assert printed(parsed(text)) == text


@pytest.mark.parametrize("name", ZOO)
def test_every_input_axis_of_samples_reaches_the_loss(name: str) -> None:
    """Data parallelism exists: each node that computes on samples knows its sample dim."""
    _, _, captured = tiny(name)
    graph = captured.graph
    heavy = [n for n in graph.nodes if n.op.weights and set(n.reads) & graph.weight_made]
    known = [n for n in heavy if n.name in graph.sample_dims]
    assert len(known) >= 0.8 * len(heavy), [n.name for n in heavy if n not in known]
