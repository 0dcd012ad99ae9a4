"""Llama-3.2-1B and Llama-3.1-8B: today's dense language models (Grattafiori et al. 2024).

Grouped-query attention, rotary positions, RMS normalization and SwiGLU. The shapes are those of the
published configurations: 1,235,814,400 parameters with a tied head and 8,030,261,248 with a separate
one, under the names of Hugging Face's `LlamaForCausalLM`. Sequences of 2048 tokens are our choice.

Positions are computed in `forward` and not kept in buffers, so that a module built on the meta device
loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import (
    attention,
    draw_normal_weights,
    merge_heads,
    split_heads,
    token_loss,
)
from soapstone.frontends.zoo.synthetic import Synthetic

NORM_EPSILON = 1e-5  # the published configurations' rms_norm_eps
INITIAL_DEVIATION = 0.02  # the published configurations' initializer_range
# The published configurations' rope_scaling: waves that turned less than LOW times over the ORIGINAL context
# are stretched by a factor, those that turned more than HIGH times are kept.
ORIGINAL_CONTEXT, LOW_TURNS, HIGH_TURNS = 8192, 1.0, 4.0


@dataclass(frozen=True)
class LlamaSizes:
    """Each of `key_value_heads` serves equally many of the `heads`."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    tied: bool
    rope_stretch: float
    rope_base: float = 500_000.0
    sequence: int = 2048

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.key_value_heads} key and value heads must divide {self.heads} heads, "
                f"and those a hidden size of {self.hidden}"
            )


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines, (sequence, head size), that encode positions."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """`x` (batch, heads, sequence, head size) with the pairs (i, i + half) turned by position."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat([-second, first], dim=-1) * self.sine


def rotation(x: Tensor, size: int, base: float, stretch: float) -> Rotation:
    """The rotation for heads of `size` over `x` (batch, sequence, hidden), slow waves stretched."""
    waves = base ** (-torch.arange(0, size, 2, device=x.device) / size)
    turns = waves * (ORIGINAL_CONTEXT / (2 * math.pi))
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0.0, 1.0)
    waves = waves * (kept + (1 - kept) / stretch)
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), waves)
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation(angles.cos().to(x.dtype), angles.sin().to(x.dtype))


class LlamaAttention(nn.Module):
    """Every token looks at itself and those before it; several heads share a key and a value."""

    def __init__(self, hidden: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key_value_heads = key_value_heads
        shared = hidden // heads * key_value_heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, shared, bias=False)
        self.v_proj = nn.Linear(hidden, shared, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        """(batch, sequence, hidden)."""
        query = rotate(split_heads(self.q_proj(x), self.heads))
        key = rotate(split_heads(self.k_proj(x), self.key_value_heads))
        value = split_heads(self.v_proj(x), self.key_value_heads)
        mixed = attention(query, self._for_all_heads(key), self._for_all_heads(value), causal=True)
        y: Tensor = self.o_proj(merge_heads(mixed))
        return y

    def _for_all_heads(self, shared: Tensor) -> Tensor:
        """Keys or values repeated for the heads that share them."""
        repeats = self.heads // self.key_value_heads
        if repeats == 1:
            return shared
        return shared.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


class LlamaMLP(nn.Module):
    """SwiGLU: a gate and a linear layer, multiplied and projected back."""

    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, feed_forward, bias=False)
        self.up_proj = nn.Linear(hidden, feed_forward, bias=False)
        self.down_proj = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class LlamaLayer(nn.Module):
    """Attention and SwiGLU, each normalized before and added to its shortcut."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(sizes.hidden, sizes.heads, sizes.key_value_heads)
        self.mlp = LlamaMLP(sizes.hidden, sizes.feed_forward)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        """(batch, sequence, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), rotate)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class LlamaModel(nn.Module):
    """Embedding, layers, and a last normalization."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        sizes = self.sizes
        head_size = sizes.hidden // sizes.heads
        x = self.embed_tokens(words)
        rotate = rotation(x, head_size, sizes.rope_base, sizes.rope_stretch)
        for layer in self.layers:
            x = layer(x, rotate)
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """The model with its head, tied to the embedding or not."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.model = LlamaModel(sizes)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        draw_normal_weights(self, INITIAL_DEVIATION)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next words `targets` (batch, sequence)."""
        return token_loss(self.lm_head(self.model(words)), targets)


def _inputs(sizes: LlamaSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    words = data.integers(sizes.vocabulary, batch, sizes.sequence + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _tiny(tied: bool) -> LlamaSizes:
    return LlamaSizes(
        vocabulary=128,
        hidden=32,
        layers=2,
        heads=8,
        key_value_heads=4,
        feed_forward=64,
        tied=tied,
        rope_stretch=8.0,
        sequence=16,
    )


LLAMA_1B = entry(
    "llama_1b",
    "Llama-3.2-1B language model, 1.24B parameters, tied head (Grattafiori et al. 2024)",
    4,  # ours
    module=Llama,
    inputs=_inputs,
    full=LlamaSizes(
        vocabulary=128_256,
        hidden=2048,
        layers=16,
        heads=32,
        key_value_heads=8,
        feed_forward=8192,
        tied=True,
        rope_stretch=32.0,
    ),
    tiny=_tiny(tied=True),
)

LLAMA_8B = entry(
    "llama_8b",
    "Llama-3.1-8B language model, 8.03B parameters (Grattafiori et al. 2024)",
    1,  # ours
    module=Llama,
    inputs=_inputs,
    full=LlamaSizes(
        vocabulary=128_256,
        hidden=4096,
        layers=32,
        heads=32,
        key_value_heads=8,
        feed_forward=14_336,
        tied=False,
        rope_stretch=8.0,
    ),
    tiny=_tiny(tied=False),
)
