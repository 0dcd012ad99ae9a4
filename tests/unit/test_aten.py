"""From ATen's calls to our operators: what torch records for an expression, we compute.

Expressions are captured a family at a time; the graph, every node cut into random shards, must give
what torch gives, and no call may be left to torch alone.
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
from soapstone.ops import Op, all_ops

Expression = Callable[..., Tensor]
"""A function of some of: x, numbers; i, indices below 4; m, a mask like x."""


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3] = 0.0
    y[:, 3] = 1.0
    y[0] = x[1]
    return y


ELEMENTWISE: dict[str, Expression] = {
    "number first": lambda x: 1 - x,
    "scaled": lambda x: x.add(x, alpha=2) - x.sub(1, alpha=3),
    "floor division": lambda x: x // 2 + torch.div(x, 0.3, rounding_mode="trunc"),
    "integer division": lambda i: i // 2 + i % 3,
    "remainders": lambda x: x % 0.7 + x.fmod(0.7),
    "powers": lambda x: x**2 + 2**x + x.exp() ** x,
    "clamped": lambda x: (
        x.clamp(-1, 1) + x.clamp(min=0.0) + x.clamp(max=0.5) + F.relu6(x) + x.clamp(-x, x.abs())
    ),
    "chosen": lambda x, m: torch.where(m, x, 0.0) + torch.where(m, 1.0, x) + torch.where(m, 1.0, 0.0),
    "masked": lambda x, m: x.masked_fill(m, -1e9),
    "mixed": lambda x: x.lerp(2 * x, 0.5) + torch.addcmul(x, x, x, value=2),
    "compared": lambda i: (i == 2) & (i != i.flip(0)) | (i >= 1) ^ ~(i < 3),
    "logical": lambda x, m: m.logical_or(x > 0).logical_and(~m).logical_xor(m.logical_not()),
    "questions": lambda x: x.isnan() | x.isinf() | ~x.isfinite(),
    "cast": lambda x, i, m: x.float().to(torch.bfloat16).type_as(x) + i.double().sum() + m.to(x.dtype),
    "kept": lambda x: x.clone().contiguous().detach(),
    "largest": lambda x: torch.maximum(x, x.flip(1)) - torch.minimum(x, x.flip(1)),
}
ACTIVATIONS: dict[str, Expression] = {
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.5) + F.selu(x) + F.celu(x, 2.0),
    "hard": lambda x: F.hardtanh(x) + F.hardswish(x) + F.hardsigmoid(x),
    "soft": lambda x: F.softplus(x, 2.0) + F.logsigmoid(x) + F.mish(x) + F.silu(x),
    "leaky": lambda x: F.leaky_relu(x, 0.2) + F.prelu(x, x[0, :, 0]) + F.relu(x),
    "gated": lambda x: F.glu(x, 1),
}
REDUCTIONS: dict[str, Expression] = {
    "sums": lambda x: x.sum() + x.sum((0, 1))[0] + x.mean(1, keepdim=True)[0, 0, 0] + x.mean(),
    "counts": lambda x, m: m.sum(1) + x.sum(1, dtype=torch.float32).long(),
    "extremes": lambda x: x.max() + x.amax((0, 1))[0] + x.max(1).values[0, 0] + x.min(1).indices[0, 0],
    "places": lambda x: x.argmax() + x.argmin(1, keepdim=True),
    "spread": lambda x: x.var(1, keepdim=True) + x.std() + x.var((0, 2), unbiased=False).sum(),
    "norms": lambda x: x.norm() + x.norm(p=1, dim=1) + F.normalize(x, dim=-1).sum(),
    "truths": lambda m: m.any(1) & m.all() | m.any(2, keepdim=True)[0, 0, 0],
    "products": lambda x: x.prod(1) + x.prod() + x.logsumexp(1),
}
SHAPES: dict[str, Expression] = {
    "views": lambda x: x.view(24, 8).reshape(-1).unflatten(0, (6, -1)).flatten(),
    "unaligned": lambda x: x.transpose(0, 1).reshape(16, 12).reshape(-1, 64),
    "ones": lambda x: x[:, None].unsqueeze(0).squeeze().squeeze(0).unsqueeze(-1).squeeze(-1),
    "orders": lambda x: x.permute(2, 0, 1).transpose(-1, 0).movedim(0, 1).mT,
    "pieces": lambda x: x[:, 1:-1:2] + x[:, -2:] + x.narrow(1, 2, 2) + x[:, 2:4].select(1, -1)[:, None],
    "joined": lambda x: torch.cat([x, x[:, :1], torch.stack([x[:, 0], x[:, 1]], 1)], 1),
    "padded": lambda x: F.pad(x, (1, 2)) + F.pad(F.pad(x, (-1, 0, 2, 1), value=2.0), (2, 2, -2, -1)),
    "bordered": lambda x: (
        F.pad(x, (1, 1), mode="reflect")
        + F.pad(x, (2, 0), mode="replicate")
        + F.pad(x, (0, 2), mode="circular")
    ),
    "expanded": lambda x: x[:1].expand(4, -1, -1) + x[:, :1].broadcast_to(2, 4, 6, 8),
    "repeated": lambda x: x.repeat(2, 1, 3) + x.tile(2, 1, 3) + x.repeat_interleave(2, 0).repeat(1, 1, 3),
    "turned": lambda x: x.flip(1, 2) + x.roll(2, 1) + x.roll((1, -1), (0, 2)),
    "triangles": lambda x: x.tril() + x.triu(1) + x.diagonal(1, 1, 2).sum(),
    "images": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.view(1, 4, 6, 8), 2), 2),
    "channels": lambda x: F.channel_shuffle(x.view(2, 4, 6, 4), 2),
    "larger": lambda x: F.interpolate(x.view(1, 4, 6, 8), scale_factor=2) + F.interpolate(x[None], (12, 16)),
    "windows": lambda x: x.unfold(1, 3, 2).sum() + F.unfold(x.view(1, 4, 6, 8), 3, padding=2, stride=2),
    "differences": lambda x: x.diff(dim=1),
}
PLACES: dict[str, Expression] = {
    "indexed": lambda x, i: x[i - 4] + x[:, i].sum() + x[i[:, None] % 4, i].sum(),
    "apart": lambda x, i: x[i, :, i],
    "selected": lambda x, i: x.index_select(1, i) + x.gather(1, i.view(1, 4, 1).expand(4, 4, 8)),
    "hot": lambda i: F.one_hot(i, 5),
    "running": lambda x: x.cumsum(1) + x.cumprod(-1),
    "ordered": lambda x: x.topk(2, 1).values + x.sort(1, descending=True)[0][:, :2] + x.argsort(1)[:, :2],
    "scattered": lambda x, i: (
        x.scatter(1, i.view(4, 1, 1), 1.0) + x.scatter(0, i.view(4, 1, 1), x[:, :1, :1])
    ),
    "added": lambda x, i: x.scatter_add(1, i.view(4, 1, 1), x[:, :1, :1]) + x.index_add(0, i, x, alpha=2),
    "put": lambda x, i: x.index_put((i,), x, accumulate=True),
    "made": lambda x: torch.zeros_like(x) + x.new_ones(8) + torch.full_like(x, 2) + x.new_full((1,), 3),
    "assigned": _assigned,
}


class _Family(nn.Module):
    def __init__(self, expressions: dict[str, Expression]) -> None:
        super().__init__()
        self.expressions = expressions

    def forward(self, x: Tensor, i: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        given = {"x": x, "i": i, "m": m}
        return tuple(
            expression(**{name: given[name] for name in inspect.signature(expression).parameters})
            for expression in self.expressions.values()
        )


@pytest.mark.parametrize("family", [ELEMENTWISE, ACTIVATIONS, REDUCTIONS, SHAPES, PLACES])
def test_what_torch_records_is_what_we_compute(family: dict[str, Expression]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    inputs = (x, torch.tensor([3, 0, 2, 3]), x.abs() > 0.6)
    module = _Family(family)
    captured = capture(module, inputs)
    assert not captured.notes
    graph = captured.graph
    expected = dict(zip(family, module(*inputs), strict=True))
    given = tensors_of(captured, module, inputs)
    for seed in range(3):
        values = interpreted(graph, given, at_random(seed))
        for node in graph.nodes:
            for name in node.outputs:
                assert short(values[name].dtype) == graph.value(name).dtype, node
        for (name, want), made in zip(expected.items(), graph.outputs, strict=True):
            torch.testing.assert_close(values[made], want, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("op", list(all_ops()), ids=lambda op: op.name)
def test_claimed_overloads_exist(op: Op) -> None:
    for overload in op.aten:
        packet, _, name = overload.partition(".")
        assert name in getattr(torch.ops.aten, packet).overloads(), overload
