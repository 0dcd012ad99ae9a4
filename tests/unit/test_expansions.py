"""ATen's calls that are several of our operators, or that networks of transformers brought along.

Each expression is captured, and its graph, every node cut into random shards, must give what torch gives;
no call may be left to torch alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracles.interpreter import at_random, interpreted, tensors_of
from torch import Tensor, nn

from soapstone.frontends.capture import capture
from soapstone.frontends.dtypes import short

SHAPE = (4, 6, 8)
MARKED = torch.arange(24).reshape(4, 6) % 5 == 0
MARKS = 5


def _assigned(x: Tensor, m: Tensor, value: Callable[[Tensor], Tensor | float]) -> Tensor:
    y = x.clone()
    y[m] = value(x)
    return y


def _grouped(x: Tensor, groups: int) -> Tensor:
    whole = x.round().bfloat16()  # small integers, whose sums are exact in any order
    rows, weight = whole.flatten(0, 1), whole.flatten()[: groups * 8 * 8].view(groups, 8, 8)
    ends = torch.tensor([5, 5, 24][:groups], dtype=torch.int32)
    return F.grouped_mm(rows, weight, offs=ends)


EXPRESSIONS: dict[str, Callable[..., Tensor]] = {
    "scattered by elements": lambda x: x.masked_scatter(x > 0, x.flip(0)),
    "scattered by rows": lambda x, m: x.masked_scatter(m.unsqueeze(-1), x.flip(1)),
    "scattered by one mask for all": lambda x, m: x.masked_scatter(m[0].unsqueeze(-1), x.flip(1)),
    "one number where a mask says": lambda x, m: _assigned(x, m, lambda x: x.new_zeros(())),
    "one row where a mask says": lambda x, m: _assigned(x, m, lambda x: x[0, 0]),
    "rows in order where a mask says": lambda x, m: _assigned(x, m, lambda x: x.flatten(0, 1)[:MARKS]),
    "norm of a weight": lambda x: torch._weight_norm(x, x[:, :1, :1].abs(), 0),
    "groups of rows": lambda x: _grouped(x, 3),
    "histogram": lambda x: torch.histc(x.flatten(), 5, -1, 1) + torch.histc((x[0, 0] > 0).float(), 5, 0, 4),
    "bits": lambda i: (i & 3) | (i ^ 5) & i.flip(0),
    "complex numbers": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(4, 6, 4, 2))
        * torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128)
    ),
    "sizes between": lambda x: F.interpolate(x[None], (9, 4), mode="bilinear"),
    "sizes by scales": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="bicubic", align_corners=True),
    "lines between": lambda x: F.interpolate(x, 12, mode="linear"),
    "smoothed": lambda x: F.interpolate(x[None], (3, 4), mode="bilinear", antialias=True),
    "any einsum": lambda x: torch.einsum("...ij,...kj->...ik", x, x),
    "cut off": lambda x: x.clip(-0.5, 0.5) + x.asinh() + torch.multiply(x, x),
    "norms": lambda x: (
        torch.linalg.norm(x, dim=-1) + torch.linalg.norm(x, ord=1, dim=-1) + torch.linalg.norm(x)
    ),
    "nothing": lambda x: torch.concatenate([x[:, :6], x[:, 6:] * 2], 1),
    "heads that share keys": lambda x: F.scaled_dot_product_attention(x[None], x[None, :1], x[None, :1]),
}


class Expression(nn.Module):
    def __init__(self, expression: Callable[..., Tensor]) -> None:
        super().__init__()
        self.expression = expression

    def forward(self, x: Tensor, i: Tensor, m: Tensor) -> Tensor:
        given = {"x": x, "i": i, "m": m}
        return self.expression(
            **{name: given[name] for name in inspect.signature(self.expression).parameters}
        )


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_torch_records_is_what_we_compute(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    inputs = (x, torch.tensor([3, 0, 2, 7]), MARKED)
    module = Expression(EXPRESSIONS[name])
    captured = capture(module, inputs)
    assert not captured.notes
    graph, expected = captured.graph, module(*inputs)
    given = tensors_of(captured, module, inputs)
    for seed in range(3):
        values = interpreted(graph, given, at_random(seed))
        for node in graph.nodes:
            for output in node.outputs:
                assert short(values[output].dtype) == graph.value(output).dtype, node
        torch.testing.assert_close(values[graph.outputs[0]], expected)


def test_random_numbers_between_two() -> None:
    """What is drawn is ours, between the borders and the same for every split."""
    x = torch.zeros(4, 6)
    captured = capture(Expression(lambda x: x + torch.empty_like(x).uniform_(2, 3)), (x, x.long(), x.bool()))
    assert not captured.graph.opaque_nodes
    given = tensors_of(captured, nn.Module(), (x, x.long(), x.bool()))
    first, second = (
        interpreted(captured.graph, given, at_random(seed))[captured.graph.outputs[0]] for seed in (1, 2)
    )
    assert first.min() >= 2
    assert first.max() < 3
    assert first.equal(second)
