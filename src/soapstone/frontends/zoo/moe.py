"""A mixture-of-experts language model: Mixtral (Jiang et al. 2024) at a quarter of its width.

Attention, rotary positions and normalization are Llama's; the linear layers are eight SwiGLU experts
of which a router picks two per token. Mixtral-8x7B's proportions are kept (width 1024 for 4096, 16
layers for 32, 1.52 billion parameters for 46.7); these sizes are ours.

Tokens are dispatched as in GShard (Lepikhin et al. 2021): an expert takes at most `capacity` tokens
of a sequence, in the order of choice and then of position, and the rest skip it. So every shape is
known beforehand, the graph can be captured, and the compute is that of the chosen experts only. The
experts of a layer are one batched product, whose expert dim a planner can split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import draw_normal_weights, token_loss
from soapstone.frontends.zoo.llama import LlamaAttention, Rotation, rotation
from soapstone.frontends.zoo.synthetic import Synthetic

NORM_EPSILON = 1e-5  # the published configuration's rms_norm_eps
INITIAL_DEVIATION = 0.02  # the published configuration's initializer_range
ROPE_BASE = 1_000_000.0  # the published configuration's rope_theta; its waves are not stretched
BALANCE_WEIGHT = 0.02  # the published configuration's router_aux_loss_coef


@dataclass(frozen=True)
class MoESizes:
    """An expert's capacity is its even share of a sequence's choices times `capacity_factor`."""

    vocabulary: int = 32_000
    hidden: int = 1024
    layers: int = 16
    heads: int = 16
    key_value_heads: int = 4
    feed_forward: int = 3584
    experts: int = 8
    chosen: int = 2
    capacity_factor: float = 1.25  # [paper] Fedus et al. 2022, section 2.2
    sequence: int = 1024

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.key_value_heads} key and value heads must divide {self.heads} heads, "
                f"and those a hidden size of {self.hidden}"
            )
        if self.chosen > self.experts:
            raise ValueError(f"a token cannot choose {self.chosen} of {self.experts} experts")

    @property
    def capacity(self) -> int:
        """The most tokens of one sequence that one expert takes."""
        share = self.capacity_factor * self.chosen * self.sequence / self.experts
        return max(1, min(self.sequence, math.ceil(share)))


class Experts(nn.Module):
    """SwiGLU experts as batched products over the expert dim."""

    def __init__(self, sizes: MoESizes) -> None:
        super().__init__()
        inward = (sizes.experts, sizes.hidden, sizes.feed_forward)
        outward = (sizes.experts, sizes.feed_forward, sizes.hidden)
        self.w1 = nn.Parameter(torch.empty(inward))
        self.w2 = nn.Parameter(torch.empty(outward))
        self.w3 = nn.Parameter(torch.empty(inward))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """(experts, tokens, hidden), each expert on its own tokens."""
        return torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MixtureOfExperts(nn.Module):
    """Router and experts. Letters: b batch, s sequence, k choice, e expert, c slot, d hidden."""

    def __init__(self, sizes: MoESizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.count = sizes.experts
        self.capacity = sizes.capacity
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' weighted answers (b s d), and how unevenly the tokens were routed."""
        probabilities = self.gate(x).softmax(dim=-1)
        weights, picks = probabilities.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        assigned = picks.unsqueeze(-1) == torch.arange(self.count, device=x.device)  # b s k e
        slots = self._slots(assigned).to(x.dtype)  # b k s e c
        answers = self._answers(slots.sum(dim=1), x)  # b (e c) d
        shares = weights.transpose(1, 2).unsqueeze(-1).unsqueeze(-1)  # b k s 1 1
        combine = (slots * shares).sum(dim=1).flatten(2)  # b s (e c)
        return torch.bmm(combine, answers), _imbalance(probabilities, assigned)

    def _slots(self, assigned: Tensor) -> Tensor:
        """Which slot of its expert a choice fills, b k s e c; all false where the expert is full."""
        choices = assigned.transpose(1, 2).flatten(1, 2)  # b (k s) e: first choices go first
        queue = choices.cumsum(dim=1) - 1
        free = queue.unsqueeze(-1) == torch.arange(self.capacity, device=assigned.device)
        taken = free & choices.unsqueeze(-1)
        return taken.unflatten(1, (self.chosen, -1))

    def _answers(self, dispatch: Tensor, x: Tensor) -> Tensor:
        """What the experts make of the tokens in their slots, b (e c) d, for dispatch b s e c."""
        gathered = torch.bmm(dispatch.flatten(2).transpose(1, 2), x)  # b (e c) d
        by_expert = gathered.unflatten(1, (self.count, self.capacity)).transpose(0, 1)  # e b c d
        answers = self.experts(by_expert.flatten(1, 2)).unflatten(1, (x.shape[0], self.capacity))
        return answers.transpose(0, 1).flatten(1, 2)


def _imbalance(probabilities: Tensor, assigned: Tensor) -> Tensor:
    """Switch Transformer's balance loss, per sequence and averaged: 1 when routing is even."""
    received = assigned.to(probabilities.dtype).mean(dim=(1, 2))  # b e
    expected = probabilities.mean(dim=1)  # b e
    return (received * expected).sum(dim=-1).mean() * probabilities.shape[-1]


class MoELayer(nn.Module):
    """Attention and experts, each normalized before and added to its shortcut."""

    def __init__(self, sizes: MoESizes) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(sizes.hidden, sizes.heads, sizes.key_value_heads)
        self.block_sparse_moe = MixtureOfExperts(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)

    def forward(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor]:
        """(batch, sequence, hidden), and the router's imbalance."""
        x = x + self.self_attn(self.input_layernorm(x), rotate)
        mixed, imbalance = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + mixed, imbalance


class MoEModel(nn.Module):
    """Embedding, layers, and a last normalization."""

    def __init__(self, sizes: MoESizes) -> None:
        super().__init__()
        self.head_size = sizes.hidden // sizes.heads
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(MoELayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, sequence, hidden), and the layers' mean imbalance."""
        x = self.embed_tokens(words)
        rotate = rotation(x, self.head_size, ROPE_BASE, 1.0)
        imbalances: list[Tensor] = []
        for layer in self.layers:
            x, imbalance = layer(x, rotate)
            imbalances.append(imbalance)
        return self.norm(x), torch.stack(imbalances).mean()


class MoE(nn.Module):
    """The model with its head."""

    def __init__(self, sizes: MoESizes) -> None:
        super().__init__()
        self.model = MoEModel(sizes)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        draw_normal_weights(self, INITIAL_DEVIATION)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next words, with a little of the routers' imbalance."""
        tokens, imbalance = self.model(words)
        return token_loss(self.lm_head(tokens), targets) + BALANCE_WEIGHT * imbalance


def _inputs(sizes: MoESizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    words = data.integers(sizes.vocabulary, batch, sizes.sequence + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


MOE = entry(
    "moe",
    "Mixture-of-experts language model, 2 of 8 experts, 1.5B parameters (after Jiang et al. 2024)",
    8,  # ours
    module=MoE,
    inputs=_inputs,
    full=MoESizes(),
    tiny=MoESizes(
        vocabulary=128,
        hidden=32,
        layers=2,
        heads=8,
        key_value_heads=4,
        feed_forward=32,
        experts=4,
        sequence=16,
    ),
)
