"""What a module means is what its graph computes: operators, inputs, outputs, precision and chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.capturecases import CASES, shown
from oracles.capturing import CLOSE, SPLITS, Formula, agrees, formula, x
from oracles.interpreter import at_random, interpreted, loss_and_gradients, tensors_of
from torch import Tensor, nn

from soapstone.frontends.capture import capture
from soapstone.graph import Graph, Role, Value


@pytest.mark.parametrize("case", CASES)
def test_graph_computes_what_the_module_computes(case: str) -> None:
    shown(case)


# -- inputs and outputs ------------------------------------------------------------------------------


def declared(graph: Graph) -> list[Value]:
    return list(graph.with_role(Role.INPUT))


def test_inputs_count_samples_along_their_first_axis() -> None:
    graph = shown("integers, a scalar, an unused input").graph
    assert [(v.shape, v.dtype, v.samples) for v in declared(graph)] == [
        ((3,), "i64", 0),
        ((), "f64", None),
        ((7, 7), "f64", None),
    ]
    assert graph.sample_count == 3


@pytest.mark.parametrize(
    ("samples", "axes"), [(None, [0, None]), (5, [0, None]), (2, [1, 0]), (9, [None, None])]
)
def test_samples_along_another_axis(samples: int | None, axes: list[int | None]) -> None:
    """Said how many there are, an input counts them along the only axis of that size."""
    graph = capture(
        Formula(lambda p, a, b: (a @ p.w) * b[:, None], w=(3, 4)),
        (torch.randn(5, 2, 3), torch.randn(2)),
        samples=samples,
    ).graph
    assert [value.samples for value in declared(graph)] == axes


@pytest.mark.parametrize(
    "output",
    [
        lambda h: (h, h.sum(0), {"more": [h * 2]}),
        lambda h: {"logits": h, "hidden": h.tanh()},
        lambda h: h,
    ],
)
def test_outputs_without_a_loss(output: Callable[[Tensor], Any]) -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, a: Tensor) -> Any:
            return output(self.layer(a))

    module, a = Outputs().double(), x(2, 3)
    captured = capture(module, (a,))
    assert captured.graph.loss is None
    values = interpreted(captured.graph, tensors_of(captured, module, (a,)), at_random(seed=1))
    expected = torch.utils._pytree.tree_leaves(module(a))
    assert len(captured.graph.outputs) == len(expected)
    for name, tensor in zip(captured.graph.outputs, expected, strict=True):
        torch.testing.assert_close(values[name], tensor)


# -- precision, chance, and what nobody knows --------------------------------------------------------


def test_autocast_region_becomes_casts() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.second(self.first(a).relu())
            return h.float().square().sum()

    torch.manual_seed(0)
    module, a = Mixed(), torch.randn(4, 8)
    captured = capture(module, (a,))
    graph = captured.graph
    assert [graph.value(n.outputs[0]).dtype for n in graph.nodes if n.op_name == "linear"] == ["bf16", "bf16"]
    assert all(value.dtype == "f32" for value in graph.with_role(Role.WEIGHT))
    expected = module(a)
    expected.backward()
    loss, gradients = loss_and_gradients(graph, tensors_of(captured, module, (a,)))
    assert torch.equal(loss, expected.detach())
    assert torch.equal(gradients["first.weight"], module.first.weight.grad)  # type: ignore[arg-type]


def test_dropout_masks_are_the_graphs_own() -> None:
    """They keep the right part, and do not depend on how nodes are cut."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25), nn.Flatten(0)).double()
    a = x(128, 64)
    captured = capture(module, (a,))
    given = tensors_of(captured, module, (a,))
    (output,) = captured.graph.outputs
    runs = [interpreted(captured.graph, given, split)[output].detach() for split in SPLITS]
    torch.testing.assert_close(runs[0], runs[1], **CLOSE)
    kept = runs[0] != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    undropped = module[0](a).flatten().detach()
    torch.testing.assert_close(runs[0][kept], undropped[kept] / 0.75)


def test_unknown_operators_stay_whole_and_right() -> None:
    def unknown(p: Any, a: Tensor) -> list[Tensor]:
        factor = torch.linalg.cholesky(p.w @ p.w.T + torch.eye(3, dtype=a.dtype))
        return [
            factor @ torch.special.bessel_j0(torch.special.bessel_j0(a)),
            torch.fft.rfft(a @ p.w[:2]).abs(),
        ]

    torch.manual_seed(0)
    captured = agrees(formula(unknown, x(3, 2), w=(3, 4)))
    assert len(captured.graph.opaque_nodes) == 4
    assert all(not captured.graph.kinds(node) for node in captured.graph.opaque_nodes)
    assert captured.notes == tuple(
        f"operator {name} is not known to Soapstone: it will run whole, on one device"
        for name in (
            "aten.linalg_cholesky.default",
            "aten.special_bessel_j0.default (2 times)",
            "aten.fft_rfft.default",
        )
    )


def test_a_persons_own_operator_keeps_its_backward() -> None:
    """Registered with torch.library, unlike a plain autograd.Function."""

    @torch.library.custom_op("soapstone_tests::scaled", mutates_args=())
    def scaled(a: Tensor, by: float) -> Tensor:
        return a * by

    @scaled.register_fake
    def _(a: Tensor, by: float) -> Tensor:
        del by
        return torch.empty_like(a)

    scaled.register_autograd(lambda _, gradient: (gradient * 3, None))
    torch.manual_seed(0)
    captured = agrees(formula(lambda p, a: scaled(a @ p.w, 2.0), x(2, 3), w=(3, 4)))
    assert "soapstone_tests.scaled.default" in captured.notes[0]
