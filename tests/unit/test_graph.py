"""The laws of a graph, each broken once, and what a graph knows about itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soapstone.errors import GraphError, SoapstoneError
from soapstone.graph import Graph, GraphBuilder, Node, Role, Value, from_document, parsed, to_document, verify
from soapstone.ops import Kind


def small() -> Graph:
    build = GraphBuilder("small")
    x = build.input("x", (8, 6))
    w = build.weight("fc.weight", (4, 6))
    (h,) = build.add("linear", [x, w, None], name="h", scope="fc")
    (loss,) = build.add("sum", [h], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def with_value(graph: Graph, name: str, **changed: object) -> Graph:
    return replace(graph, values={**graph.values, name: replace(graph.values[name], **changed)})  # type: ignore[arg-type]


def with_node(graph: Graph, name: str, **changed: object) -> Graph:
    nodes = tuple(replace(n, **changed) if n.name == name else n for n in graph.nodes)  # type: ignore[arg-type]
    return replace(graph, nodes=nodes)


BROKEN = {
    "unknown dtype": (lambda g: with_value(g, "x", dtype="f31"), "unknown dtype 'f31'"),
    "negative size": (lambda g: with_value(g, "x", shape=(8, -6)), "negative size"),
    "two nodes of one name": (lambda g: replace(g, nodes=(*g.nodes, g.nodes[0])), "two nodes are called 'h'"),
    "misfiled value": (lambda g: replace(g, values={**g.values, "z": g.values["x"]}), "filed under 'z'"),
    "undeclared output": (
        lambda g: with_node(g, "loss", outputs=("elsewhere",)),
        "writes the undeclared value 'elsewhere'",
    ),
    "written input": (lambda g: with_node(g, "loss", outputs=("x",)), "writes the input 'x'"),
    "unwritten value": (
        lambda g: replace(g, values={**g.values, "lost": Value("lost", (), "f32")}),
        "no node writes the computed value 'lost'",
    ),
    "read before written": (lambda g: replace(g, nodes=g.nodes[::-1]), "reads 'h' before it is written"),
    "undeclared operand": (
        lambda g: with_node(g, "h", operands=("x", "nothing", None)),
        "reads 'nothing' which is not declared",
    ),
    "wrong shape": (lambda g: with_value(g, "h", shape=(8, 5)), "where its operator gives [8, 4]"),
    "operands that do not fit": (
        lambda g: with_value(g, "fc.weight", shape=(4, 7)),
        "axis 1 of operand 1 has size 7 where dim 'i' has size 6",
    ),
    "nameless weight": (lambda g: with_value(g, "fc.weight", sources=()), "has no name in the module"),
    "two values of one source": (
        lambda g: replace(
            g, values={**g.values, "w2": Value("w2", (1,), "f32", Role.WEIGHT, ("fc.weight",))}
        ),
        "both stand for 'fc.weight'",
    ),
    "loss that is no scalar": (lambda g: replace(g, loss="h"), "not a floating-point scalar"),
    "loss that is nowhere": (lambda g: replace(g, loss="gone"), "loss 'gone' is not declared"),
    "output that is nowhere": (lambda g: replace(g, outputs=("gone",)), "ends in 'gone'"),
    "update of a weight": (lambda g: replace(g, updates={"fc.weight": "h"}), "not a buffer"),
    "sample axis that is nowhere": (lambda g: with_value(g, "x", samples=2), "no axis 2"),
    "unknown operator": (lambda g: with_node(g, "h", op_name="linaer"), "did you mean 'linear'?"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_law_is_named(law: str) -> None:
    broken, sentence = BROKEN[law]
    with pytest.raises(SoapstoneError) as raised:
        verify(broken(small()))
    assert sentence in str(raised.value)


def test_inputs_must_agree_on_the_number_of_samples() -> None:
    build = GraphBuilder("g")
    build.input("x", (8, 6))
    build.input("y", (4,))
    with pytest.raises(GraphError, match="input 'y' has 4 samples where 'x' has 8"):
        build.graph()


def test_kinds_follow_from_weights_and_samples() -> None:
    graph = small()
    assert graph.kinds(graph.node("h")) == {"b": Kind.SAMPLE, "o": Kind.PARAMETER, "i": Kind.REDUCTION}


def test_a_transposed_batch_is_still_the_sample_dim() -> None:
    """The sample axis is followed through a permutation and a reshape that merges it."""
    build = GraphBuilder("g")
    x = build.input("x", (8, 3, 4))
    (t,) = build.add("permute", [x], {"dims": (1, 0, 2)}, name="t")
    (r,) = build.add("relu", [t], name="r")
    (back,) = build.add("permute", [r], {"dims": (1, 0, 2)}, name="back")
    build.add("reshape", [back], {"shape": (24, 4)}, name="flat")
    (_,) = build.add("relu", ["flat"], name="end")
    graph = build.graph(outputs=["end"])
    kinds = graph.kinds(graph.node("r"))
    assert kinds == {"b": Kind.ATTRIBUTE, "b1": Kind.SAMPLE, "b2": Kind.ATTRIBUTE}
    assert graph.kinds(graph.node("end"))["b"] is Kind.SAMPLE


def test_what_follows_from_a_graph() -> None:
    graph = small()
    assert graph.parameter_count == 24
    assert graph.sample_count == 8
    assert graph.forward_flops == 2 * 8 * 6 * 4 + 32
    assert graph.differentiable == {"fc.weight", "h", "loss"}
    assert [node.name for node in graph.consumers["h"]] == ["loss"]
    assert graph.producers["h"].scope == "fc"


def test_gradients_flow_only_towards_the_loss() -> None:
    """A branch that the loss does not read has none; without a loss they come from all outputs."""
    build = GraphBuilder("g")
    x, w, v = build.input("x", (4, 2)), build.weight("w", (2, 2)), build.weight("v", (2, 2))
    (h,) = build.add("linear", [x, w, None], name="h")
    build.add("linear", [x, v, None], name="aside")
    (loss,) = build.add("sum", [h], {"dim": (0, 1)}, name="loss")
    assert build.graph(loss=loss, outputs=["aside"]).differentiable == {"w", "h", "loss"}
    assert build.graph(outputs=["aside"]).differentiable == {"v", "aside"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("inptu %x: f32[2]", "not 'inptu'"),
        ("input %x f32[2]", "expected ':'"),
        ("input %x: f32[2, 'a']", "cannot read"),
        ("input %x: f32[2.5]", "expected a shape"),
        ("%y = relu(%x : f32[2]", "expected ','"),
        ("%y = relu(%x)", "expected ':'"),
        ("%y = relu([2]) : f32[2]", "an operand is a value, a number or none"),
        ("loss x", "expected a value such as %x"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, sentence: str) -> None:
    with pytest.raises(GraphError, match=r"g.txt, line 2: ") as raised:
        parsed(f'graph "g"\n{line}\n', "g.txt")
    assert sentence in str(raised.value)


def test_text_without_a_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="does not start with"):
        parsed("input %x: f32[2]\n")


@pytest.mark.parametrize("document", [None, [], {}, {"format": "other"}, "graph"])
def test_foreign_documents_are_refused(document: object) -> None:
    with pytest.raises(GraphError, match="is not a Soapstone graph"):
        from_document(document, "g.json")


def test_damaged_documents_are_refused() -> None:
    good = to_document(small())
    with pytest.raises(GraphError, match="version 99"):
        from_document({**good, "version": 99})
    for key in ("values", "nodes", "loss", "name"):
        with pytest.raises(GraphError, match="damaged"):
            from_document({k: v for k, v in good.items() if k != key})
    with pytest.raises(GraphError, match="damaged"):
        from_document({**good, "values": [{"name": "x"}]})


def test_nodes_read_each_value_once() -> None:
    assert Node("n", "add", ("x", "x", 2.0, None), ("y",)).reads == ("x",)
