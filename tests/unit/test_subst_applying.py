"""Rules are applied where they were proved, and nowhere else: not to what is broadcast, nor to operands that
only commute with other attributes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from soapstone.graph import Graph
from soapstone.graph.build import GraphBuilder
from soapstone.graph.graph import Role
from soapstone.ops.op import Shard
from soapstone.subst import rewrites, shipped, without_parallel_nodes
from soapstone.subst.commuting import commutes
from soapstone.subst.term import ANY

WHOLE, SMALL = (2, 4, 8, 8), (2, 4, 1, 1)


def outputs(graph: Graph) -> list[Tensor]:
    """What a graph makes of random numbers that follow from the names of its values."""
    values: dict[str, Tensor] = {}
    for value in graph.values.values():
        if value.role is not Role.COMPUTED:
            generator = torch.Generator().manual_seed(sum(map(ord, value.name)))
            values[value.name] = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    for node in graph.nodes:
        signature = graph.signature(node)
        shard = Shard(signature, signature.points)
        operands = node.op.slices([values[o] if isinstance(o, str) else o for o in node.operands], shard)
        values |= zip(node.outputs, node.op.run(operands, node.attrs, shard), strict=True)
    return [values[name] for name in graph.outputs]


def rewritten(graph: Graph, name: str) -> Sequence[Graph]:
    return [without_parallel_nodes(each.graph) for each in rewrites(graph, shipped().entry(name).rule)]


def sum_of_convolutions(shape: tuple[int, ...]) -> Graph:
    b = GraphBuilder("convolutions")
    w = b.weight("w", (6, 4, 3, 3))
    made = [
        b.add("conv2d", [b.input(name, given), w, None], {"ph": 1, "pw": 1})[0]
        for name, given in (("x", WHOLE), ("y", shape))
    ]
    return b.graph(outputs=b.add("add", made))


def convolution_of_sum(shape: tuple[int, ...]) -> Graph:
    b = GraphBuilder("sum")
    (added,) = b.add("add", [b.input("x", WHOLE), b.input("y", shape)])
    return b.graph(outputs=b.add("conv2d", [added, b.weight("w", (6, 4, 3, 3)), None], {"ph": 1, "pw": 1}))


def sum_of_pools(shape: tuple[int, ...]) -> Graph:
    b, attrs = GraphBuilder("pools"), {"kernel": 3, "stride": 1, "padding": 1}
    made = [
        b.add("avg_pool2d", [b.input(name, given)], attrs)[0] for name, given in (("x", WHOLE), ("y", shape))
    ]
    return b.graph(outputs=b.add("add", made))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (sum_of_convolutions, "add-conv2d.2"),
        (convolution_of_sum, "add-conv2d.2"),
        (sum_of_pools, "add-avg_pool2d"),
    ],
)
def test_what_is_broadcast_is_not_rewritten(make: object, name: str) -> None:
    """Convolving a sum is adding convolutions, but at the borders of an image that is repeated it is not."""
    assert callable(make)
    whole = make(WHOLE)
    found = rewritten(whole, name)
    assert found
    for each in found:
        torch.testing.assert_close(outputs(each), outputs(whole))
    assert not rewritten(make(SMALL), name)


def test_an_addition_that_scales_does_not_commute() -> None:
    """With `alpha` its second operand is not its first."""
    assert commutes("add")
    assert commutes("mul", ANY)
    assert not commutes("add", (("alpha", 2),))
    assert not commutes("add", ANY)
    b = GraphBuilder("scaled")
    (cut,) = b.add("partition", [b.input("y", (4, 6))], {"dim": 0, "degree": 2})
    (whole,) = b.add("combine", [cut], {"dim": 0, "degree": 2})
    graph = b.graph(outputs=b.add("add", [b.input("x", (4, 6)), whole], {"alpha": 2}))
    assert not rewritten(graph, "add-meet")  # that is for a first operand
    for name in ("add-meet.2", "add-split"):
        (found,) = rewritten(graph, name)
        torch.testing.assert_close(outputs(found), outputs(without_parallel_nodes(graph)))


def test_what_reads_nothing_is_no_part_of_a_pattern() -> None:
    """Every shipped rule is looked for in a graph with a value that is made of no other."""
    b = GraphBuilder("state")
    (state,) = b.add("full", [], {"shape": (4, 8), "value": 0.0, "dtype": "f32"})
    graph = b.graph(outputs=b.add("add", [b.input("x", (4, 8)), state]))
    for name in shipped().entries:
        for found in rewritten(graph, name):
            assert graph.nodes[0] in found.nodes
