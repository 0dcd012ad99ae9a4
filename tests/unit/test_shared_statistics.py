"""Batch norm with shared statistics: its passes are written out, and held against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from soapstone.ops.definitions.shared_statistics import local, merged, normalised, pulled

EPS = 1e-5


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def leaf(*shape: int) -> Tensor:
    return real(*shape).requires_grad_()


@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 5), (2, 3, 2, 4), (2, 2, 2, 3, 2)])
def test_both_passes_are_those_of_numbers_a_little_apart(shape: tuple[int, ...]) -> None:
    x, stats = leaf(*shape), local(real(*shape)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: local(x)[1:], (x,))
    weight, bias = leaf(shape[1]), leaf(shape[1])
    assert torch.autograd.gradcheck(
        # The number of samples has no gradient that anyone reads.
        lambda x, rows, weight, bias: normalised(x, torch.cat([stats[:1].detach(), rows]), weight, bias, EPS),
        (x, stats[1:].detach().requires_grad_(), weight, bias),
    )


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_left_out_is_left_out(has: tuple[bool, bool]) -> None:
    x, weights = leaf(8, 3, 2), real(8, 3, 2)
    weight, bias = (real(3) if each else None for each in has)
    found = normalised(x, local(x), weight, bias, EPS)
    want = functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    torch.testing.assert_close(found, want)
    one, other = (torch.autograd.grad((y * weights).sum(), x) for y in (found, want))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("wants_x", [True, False])
def test_gradients_in_any_layout_whoever_wants_them(layout: torch.memory_format, wants_x: bool) -> None:
    """A first layer's samples have no gradient."""
    x = real(4, 3, 2, 5).to(memory_format=layout).requires_grad_(wants_x)
    weight, bias = leaf(3), leaf(3)
    wanted = [each for each in (x, weight, bias) if each.requires_grad]
    weights = real(4, 3, 2, 5)
    found = torch.autograd.grad((normalised(x, local(x), weight, bias, EPS) * weights).sum(), wanted)
    plain = functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    for one, other in zip(found, torch.autograd.grad((plain * weights).sum(), wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sizes", [(4, 4), (1, 5, 2), (3,)])
def test_the_gradient_of_a_part_is_autograds(sizes: tuple[int, ...]) -> None:
    parts = [local(real(size, 3, size)).detach().requires_grad_() for size in sizes]
    whole = merged(parts)
    gradient = real(3, 3)
    gradient[0] = 0.0
    for part, want in zip(parts, torch.autograd.grad(whole, parts, gradient), strict=True):
        torch.testing.assert_close(pulled(part.detach(), whole.detach(), gradient)[1:], want[1:])


def test_statistics_keep_their_digits_where_the_mean_is_large() -> None:
    """In single precision, with a mean of a thousand deviations; a plain sum of squares would have none."""
    x = real(64, 3, 8, 8) + 1000.0
    count, mean, squares = local(x.float())
    want_var, want_mean = torch.var_mean(x.float().double(), (0, 2, 3), correction=0)
    assert count.tolist() == [64 * 64] * 3
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(squares.double(), want_var * 64 * 64, rtol=1e-5, atol=0.0)


def test_shards_together_are_the_whole() -> None:
    """Of values and of gradients, through statistics that shards of unequal sizes share."""
    x, weight, bias = leaf(7, 3, 4), leaf(3), leaf(3)
    weights = real(7, 3, 4)
    parts = x.split([2, 4, 1])
    stats = merged([local(part) for part in parts])
    y = torch.cat([normalised(part, stats, weight, bias, EPS) for part in parts])
    found = torch.autograd.grad((y * weights).sum(), (x, weight, bias))
    want_y = functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    want = torch.autograd.grad((want_y * weights).sum(), (x, weight, bias))
    for one, other in zip((y, *found), (want_y, *want), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("own", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_single_precision_statistics(
    dtype: torch.dtype, own: torch.dtype | None
) -> None:
    """Parameters are in single precision, as under autocast, or in that of the samples."""
    x = real(16, 3, 2).to(dtype).requires_grad_()
    stats = local(x)
    assert stats.dtype is torch.float32
    own = own or dtype
    weight = torch.ones(3, requires_grad=True, dtype=own)
    bias = torch.zeros(3, requires_grad=True, dtype=own)
    y = normalised(x, stats, weight, bias, EPS)
    y.sum().backward()
    assert y.dtype is dtype
    assert x.grad is not None
    assert x.grad.dtype is dtype
    assert weight.grad is not None
    assert weight.grad.dtype is own
    assert bias.grad is not None
    assert bias.grad.dtype is own
