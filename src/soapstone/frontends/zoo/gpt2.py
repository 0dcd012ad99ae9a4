"""GPT-2, the smallest one (Radford et al. 2019): 124,439,808 parameters, the head tied to the embedding.

Names and weight layouts are those of Hugging Face's `GPT2LMHeadModel`, whose linear layers keep their
weights as (inputs, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import (
    attention,
    draw_normal_weights,
    dropout,
    merge_heads,
    split_heads,
    token_loss,
)
from soapstone.frontends.zoo.synthetic import Synthetic

INITIAL_DEVIATION = 0.02  # the published configuration's initializer_range


@dataclass(frozen=True)
class GPT2Sizes:
    """`positions` is the longest sequence the embeddings can hold."""

    vocabulary: int = 50_257
    positions: int = 1024
    sequence: int = 1024
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.sequence > self.positions:
            raise ValueError(f"a sequence of {self.sequence} is longer than {self.positions} positions")


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2's checkpoints have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, outputs)."""
        return torch.matmul(x, self.weight) + self.bias


class GPT2Attention(nn.Module):
    """Every token looks at itself and those before it."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.c_attn = Conv1D(sizes.hidden, 3 * sizes.hidden)
        self.c_proj = Conv1D(sizes.hidden, sizes.hidden)
        self.attn_dropout = dropout(sizes.dropout)
        self.resid_dropout = dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        query, key, value = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))
        mixed = attention(query, key, value, causal=True, dropout=self.attn_dropout)
        y: Tensor = self.resid_dropout(self.c_proj(merge_heads(mixed)))
        return y


class GPT2MLP(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.c_fc = Conv1D(sizes.hidden, 4 * sizes.hidden)
        self.c_proj = Conv1D(4 * sizes.hidden, sizes.hidden)
        self.dropout = dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        y: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return y


class GPT2Block(nn.Module):
    """Attention and linear layers, each normalized before and added to its shortcut."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.hidden)
        self.attn = GPT2Attention(sizes)
        self.ln_2 = nn.LayerNorm(sizes.hidden)
        self.mlp = GPT2MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT2Model(nn.Module):
    """Word and position embeddings, blocks, and a last normalization."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.wpe = nn.Embedding(sizes.positions, sizes.hidden)
        self.drop = dropout(sizes.dropout)
        self.h = nn.ModuleList(GPT2Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.hidden)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        positions = torch.arange(words.shape[1], device=words.device)
        x = self.drop(self.wte(words) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        y: Tensor = self.ln_f(x)
        return y


class GPT2(nn.Module):
    """The model with its tied head."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.transformer = GPT2Model(sizes)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        draw_normal_weights(self, INITIAL_DEVIATION)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next words `targets` (batch, sequence)."""
        return token_loss(self.lm_head(self.transformer(words)), targets)


def _inputs(sizes: GPT2Sizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    words = data.integers(sizes.vocabulary, batch, sizes.sequence + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


GPT2_SMALL = entry(
    "gpt2",
    "GPT-2 language model, 124M parameters (Radford et al. 2019)",
    8,  # ours
    module=GPT2,
    inputs=_inputs,
    full=GPT2Sizes(),
    tiny=GPT2Sizes(vocabulary=128, positions=16, sequence=16, hidden=32, layers=2, heads=4),
)
