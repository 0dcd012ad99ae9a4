"""What a captured graph keeps of a module: names, ties, frozen parameters, buffers and constants."""

from __future__ import annotations

import torch
from oracles.capturecases import shown
from torch import nn

from soapstone.frontends.capture import capture
from soapstone.frontends.losses import INNER, LOSSES, WithLoss
from soapstone.graph import Role, parsed, printed


def test_tied_weights_keep_all_their_names() -> None:
    for case in "tied", "tied by storage":
        (weight,) = shown(case).graph.with_role(Role.WEIGHT)
        assert weight.name == "embedding.weight"
        assert weight.sources == ("embedding.weight", "head.weight", "spare.weight")


def test_unused_parameter_is_still_a_weight() -> None:
    weights = {value.name for value in shown("shared").graph.with_role(Role.WEIGHT)}
    assert {"unused.weight", "unused.bias"} <= weights


def test_frozen_parameter_is_a_buffer() -> None:
    graph = shown("frozen").graph
    assert [value.name for value in graph.with_role(Role.WEIGHT)] == [
        "first.bias",
        "last.weight",
        "last.bias",
    ]
    assert graph.value("first.weight").role is Role.BUFFER
    assert graph.value("cell.weight_ih").shape == (12, 3)
    assert not graph.updates


def test_cell_weights_are_seen_by_gate_and_stored_as_they_are() -> None:
    graph = shown("lstm cell").graph
    weight = graph.value("cell.weight_ih")
    assert (weight.shape, weight.stored_shape) == ((4, 4, 3), (16, 3))
    graph = shown("lstm cell, weight used twice").graph
    weight = graph.value("cell.weight_ih")
    assert (weight.shape, weight.stored_shape) == ((16, 3), None), "another reader wants it as it is"
    assert graph.value("cell.weight_hh").shape == (4, 4, 4)


def test_counters_are_no_nodes() -> None:
    graph = shown("shared").graph
    assert graph.counters == {"norm.num_batches_tracked": 2}
    assert set(graph.updates) == {"norm.running_mean", "norm.running_var"}
    assert sum(node.op_name == "batch_norm" for node in graph.nodes) == 2


def test_what_depends_on_no_input_is_a_constant() -> None:
    captured = shown("constants")
    names = [node.op_name for node in captured.graph.nodes]
    assert not {"arange", "eye", "le", "median", "opaque"} & set(names)
    constant = {value.name: value for value in captured.graph.with_role(Role.CONSTANT)}
    assert set(constant) == set(captured.constants)
    filled = [value for value in constant.values() if value.fill is not None]
    assert all(bool((captured.constants[v.name] == v.fill).all()) for v in filled)


def test_table_that_is_not_saved_is_no_parameter_of_the_graph() -> None:
    graph = shown("buffers").graph
    assert graph.value("hidden_table").role is Role.BUFFER
    assert graph.counters == {"steps": 1}
    assert set(graph.updates) == {"average", "assigned", "hidden_state", "vector_steps"}


def test_odd_names_survive_both_written_forms() -> None:
    graph = shown("names").graph
    assert {"p.a-b", "p.c d", "p.x:y;%é", "m.k/é.weight", "add"} <= set(graph.values)
    assert parsed(printed(graph)) == graph
    assert 'weight %"p.x:y;%\\u00e9": f64[3] from "p.x:y;%\\u00e9"' in printed(graph)


def test_names_of_a_wrapped_module_are_its_own() -> None:
    made = WithLoss(nn.Sequential(nn.Linear(3, 5)), LOSSES["mse"])
    captured = capture(
        made, (torch.randn(4, 3), torch.randn(4, 5)), prefix=INNER, input_names=made.input_names(2)
    )
    graph = captured.graph
    assert [value.name for value in graph.values.values() if value.role is not Role.COMPUTED] == [
        "0.weight",
        "0.bias",
        "input",
        "target",
    ]
    assert graph.nodes[0].scope == "0"
