"""Parallel computation graphs, and rewriting graphs by rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soapstone.errors import GraphError, RuleError
from soapstone.graph import Graph
from soapstone.graph.build import GraphBuilder
from soapstone.graph.graph import Role
from soapstone.ops.op import Shard
from soapstone.subst import parse_rule, pcg, rewrite, rewrites, shipped, without_parallel_nodes
from soapstone.subst.layout import Layout
from soapstone.subst.term import Rule


def rule(text: str) -> Rule:
    return parse_rule(f"rule | {text}")[0]


FUSE = rule(
    "x:[1 1] y:[1 1] z:[1 1] | head[dim=1](linear(x, concat[dim=0](y, z))), "
    "tail[dim=1](linear(x, concat[dim=0](y, z))) | linear(x, y), linear(x, z)"
)


def two_heads() -> Graph:
    """Two linear layers of different widths on one input, each followed by an activation."""
    b = GraphBuilder("heads")
    x = b.input("x", (8, 16))
    (first,) = b.add("linear", [x, b.weight("a.weight", (4, 16)), None])
    (second,) = b.add("linear", [x, b.weight("b.weight", (6, 16)), None])
    return b.graph(outputs=[b.add("relu", [first])[0], b.add("gelu", [second])[0]])


def mlp() -> Graph:
    b = GraphBuilder("mlp")
    (h,) = b.add("linear", [b.input("x", (8, 16)), b.weight("w1", (32, 16)), None])
    (h,) = b.add("relu", [h])
    return b.graph(outputs=b.add("linear", [h, b.weight("w2", (4, 32)), None]))


def run(graph: Graph, seed: int = 0) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a graph on random inputs, and the gradients of their sum by the weights' sources."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for value in sorted(graph.values.values(), key=lambda value: value.name):
        if value.role is not Role.COMPUTED:
            given = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            values[value.name] = given.requires_grad_(value.role is Role.WEIGHT)
    for node in graph.nodes:
        signature = graph.signature(node)
        operands = [values[o] if isinstance(o, str) else o for o in node.operands]
        shard = Shard(signature, signature.points)
        values |= zip(
            node.outputs, node.op.run(node.op.slices(operands, shard), node.attrs, shard), strict=True
        )
    outputs = [values[name] for name in graph.outputs]
    sum(output.square().sum() for output in outputs).backward()
    weights = {value.sources[0]: values[value.name].grad for value in graph.with_role(Role.WEIGHT)}
    return outputs, weights


def assert_same(one: Graph, two: Graph) -> None:
    (before, grads), (after, new_grads) = run(one), run(two)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)
    assert grads.keys() == new_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], new_grads[name])


def test_layers_that_share_an_input_become_one_and_parameters_keep_their_names() -> None:
    graph = two_heads()
    fused = rewrite(graph, FUSE)
    assert [node.op_name for node in fused.graph.nodes].count("linear") == 1
    assert fused.parameters == {"a.weight": "a.weight", "b.weight": "b.weight"}
    assert len(fused.from_weights) == 1
    assert_same(graph, fused.graph)


def test_a_rule_and_its_reverse_give_the_graph_back() -> None:
    graph = two_heads()
    fused = rewrite(graph, FUSE).graph
    back = next(rewrites(fused, FUSE)).graph
    assert sorted(n.op_name for n in back.nodes) == sorted(n.op_name for n in graph.nodes)
    assert_same(graph, back)


def test_every_shipped_rule_that_applies_leaves_outputs_and_gradients_as_they_were() -> None:
    tried = 0
    for graph in (two_heads(), mlp()):
        for each in shipped().rules:
            for found in rewrites(graph, each):
                tried += 1
                pcg(found.graph)
                assert_same(graph, found.graph)
    assert tried > 20


def test_kernels_are_enlarged_and_pooling_becomes_a_convolution() -> None:
    """TASO's constants in a graph: what they take their shape from gets no gradient from them."""
    b = GraphBuilder("branches")
    x = b.input("x", (2, 4, 6, 6))
    (pool,) = b.add("avg_pool2d", [x], {"kernel": 3, "stride": 1, "padding": 1})
    (wide,) = b.add("conv2d", [x, b.weight("wide", (4, 4, 3, 3)), None], {"ph": 1, "pw": 1})
    (narrow,) = b.add("conv2d", [x, b.weight("narrow", (2, 4, 1, 1)), None])
    (one,), (two,) = b.add("concat", [pool, wide], {"dim": 1}), b.add("concat", [narrow, wide], {"dim": 1})
    graph = b.graph(outputs=[one, two])
    for name, new in (
        ("avg_pool2d-concat-conv2d-mean_kernel", "mean_kernel"),
        ("concat-conv2d-enlarge", "pad"),
    ):
        done = next(rewrites(graph, shipped().entries[name].rule)).graph
        assert new in {node.op_name for node in done.nodes}
        assert_same(graph, done)


def test_a_product_with_three_axes_becomes_one_with_two() -> None:
    b = GraphBuilder("sequence")
    x = b.input("x", (2, 4, 6))
    (y,) = b.add("linear", [x, b.weight("w", (8, 6)), None])
    (y,) = b.add("reshape", [y], {"shape": (8, 8)})
    graph = b.graph(outputs=[y])
    found = [r for r in shipped().rules if str(r).endswith("| merge(linear(x, y)) | linear(merge(x), y)")]
    done = next(rewrites(graph, found[0])).graph
    assert [node.op_name for node in done.nodes] == ["reshape", "linear"]
    assert_same(graph, done)


def test_tensor_parallelism_is_reached_by_rules_alone() -> None:
    """The columns of the first layer and the rows of the second are split; one reduce is left (Figure 10)."""
    columns = rule(
        "x:[1 1] y:[1 1] | linear(x, y) | "
        "combine[dim=1, degree=k](linear(replicate[degree=k](x), partition[dim=0, degree=k](y)))"
    )
    through = rule("x:[1 k] | relu(combine[dim=1, degree=k](x)) | combine[dim=1, degree=k](relu(x))")
    rows = rule(
        "x:[1 k] y:[1 1] | linear(combine[dim=1, degree=k](x), y) | "
        "reduce[degree=k](linear(x, partition[dim=1, degree=k](y)))"
    )
    graph = mlp()
    found = graph
    for step in (columns, through, rows):
        found = rewrite(found, step, degree=4).graph
    assert [node.op_name for node in found.nodes] == [
        "replicate", "partition", "linear", "relu", "partition", "linear", "reduce"
    ]  # fmt: skip
    layouts = pcg(found).layouts
    assert layouts[found.nodes[3].outputs[0]] == Layout((1, 4))
    assert layouts[found.nodes[5].outputs[0]] == Layout((1, 1), partials=4)
    assert layouts[found.outputs[0]].is_whole
    assert_same(graph, found)
    plain = without_parallel_nodes(found)
    assert [node.op_name for node in plain.nodes] == ["linear", "relu", "linear"]


def test_a_graph_whose_layouts_do_not_fit_is_refused() -> None:
    b = GraphBuilder("bad")
    x, w = b.input("x", (8, 16)), b.weight("w", (4, 16))
    (split,) = b.add("partition", [x], {"dim": 0, "degree": 2})
    graph = b.graph(outputs=b.add("linear", [split, w, None]))
    with pytest.raises(GraphError, match="different numbers of devices"):
        pcg(graph)


def test_a_rule_that_applies_nowhere_says_so() -> None:
    with pytest.raises(RuleError, match="applies nowhere in graph 'mlp'"):
        rewrite(mlp(), FUSE)


def test_a_rewrite_that_would_depend_on_itself_is_not_made() -> None:
    """The second layer reads the first: they cannot be one, though both read a value of that shape."""
    b = GraphBuilder("chain")
    x = b.input("x", (8, 16))
    (h,) = b.add("linear", [x, b.weight("w1", (16, 16)), None])
    graph = b.graph(outputs=b.add("linear", [h, b.weight("w2", (16, 16)), None]))
    assert not [found for found in rewrites(graph, FUSE) if len(found.graph.nodes) > 2]
