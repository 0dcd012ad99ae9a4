"""Layers that several models of the zoo share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(rate: float) -> nn.Module:
    """A dropout layer, or the identity at rate 0, which leaves no operator in the captured graph."""
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


def tower(widths: Sequence[int], *, bias: bool = True) -> nn.Sequential:
    """Linear layers from width to width with rectifiers between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, sequence, heads * size) as (batch, heads, sequence, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, dropout: nn.Module | None = None
) -> Tensor:
    """Scaled dot-product attention over (batch, heads, sequence, size).

    Without dropout it is torch's one fused operator. With dropout it is written out: the fused
    operator draws its mask inside, where a run over several devices could not reproduce it.
    """
    if dropout is None or isinstance(dropout, nn.Identity):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
    if causal:
        size = (query.shape[-2], key.shape[-2])
        future = torch.ones(size, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return torch.matmul(dropout(scores.softmax(dim=-1)), value)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens of logits (batch, sequence, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_normal_weights(module: nn.Module, deviation: float) -> None:
    """Initialize linear and embedding layers as the GPT and BERT papers do; biases become 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=deviation)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
