"""ViT-L/16 at 224 pixels (Dosovitskiy et al. 2021): 304,326,632 parameters.

Layout and names are torchvision's `vit_l_16`. Like there, dropout is off unless asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import attention, dropout, merge_heads, split_heads
from soapstone.frontends.zoo.synthetic import Synthetic

NORM_EPSILON = 1e-6  # torchvision's


@dataclass(frozen=True)
class ViTSizes:
    """Square images are cut into `patch` x `patch` pixels, each a token."""

    image: int = 224
    patch: int = 16
    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    feed_forward: int = 4096
    classes: int = 1000
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"patches of {self.patch} pixels do not divide an image of {self.image}")
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")

    @property
    def tokens(self) -> int:
        """The patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


class SelfAttention(nn.Module):
    """Every token looks at every token; the three projections are one weight."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * sizes.hidden, sizes.hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * sizes.hidden))
        self.out_proj = nn.Linear(sizes.hidden, sizes.hidden)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = (split_heads(part, self.heads) for part in projected.chunk(3, dim=-1))
        y: Tensor = self.out_proj(merge_heads(attention(query, key, value)))
        return y


class EncoderBlock(nn.Module):
    """Attention and linear layers, each normalized before and added to its shortcut."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON)
        self.self_attention = SelfAttention(sizes)
        self.dropout = dropout(sizes.dropout)
        self.ln_2 = nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.hidden, sizes.feed_forward),
            nn.GELU(),
            dropout(sizes.dropout),
            nn.Linear(sizes.feed_forward, sizes.hidden),
            dropout(sizes.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        x = x + self.dropout(self.self_attention(self.ln_1(x)))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Encoder(nn.Module):
    """Learned positions, blocks, and a last normalization."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, sizes.tokens, sizes.hidden))
        self.dropout = dropout(sizes.dropout)
        self.layers = nn.Sequential(
            OrderedDict((f"encoder_layer_{index}", EncoderBlock(sizes)) for index in range(sizes.layers))
        )
        self.ln = nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON)
        nn.init.normal_(self.pos_embedding, std=0.02)  # torchvision's

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        y: Tensor = self.ln(self.layers(self.dropout(x + self.pos_embedding)))
        return y


class ViT(nn.Module):
    """Patches and a class token, the encoder, and one linear layer on the class token."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.hidden))
        self.conv_proj = nn.Conv2d(3, sizes.hidden, kernel_size=sizes.patch, stride=sizes.patch)
        self.encoder = Encoder(sizes)
        self.heads = nn.ModuleDict({"head": nn.Linear(sizes.hidden, sizes.classes)})

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(images.shape[0], -1, -1)
        x = self.encoder(torch.cat([first, patches], dim=1))
        return F.cross_entropy(self.heads["head"](x[:, 0]), labels)


def _inputs(sizes: ViTSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.normal(batch, 3, sizes.image, sizes.image), data.integers(sizes.classes, batch)


VIT_L = entry(
    "vit_l",
    "ViT-L/16 image classifier at 224 pixels, 304M parameters (Dosovitskiy et al. 2021)",
    64,  # ours
    module=ViT,
    inputs=_inputs,
    full=ViTSizes(),
    tiny=ViTSizes(image=32, patch=8, hidden=32, layers=2, heads=4, feed_forward=64, classes=16),
)
