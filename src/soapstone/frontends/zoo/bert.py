"""BERT-Large (Devlin et al. 2019), the language model of Unity's Table 1, with its pre-training loss.

The encoder with embeddings and pooler (`bert`) has 335,141,888 parameters, the published model's;
the heads for masked words and for the next sentence (`cls`) add 1,084,220, so that the whole has
336,226,108. The projection to words has the weight of the word embedding and is counted once. Names
are those of Hugging Face's `BertForPreTraining`.

Sequences are full (512 tokens), so there is no padding mask. Masked words are marked by their labels;
all other labels are -100 and are left out of the mean.
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

NORM_EPSILON = 1e-12  # the published configuration's layer_norm_eps
INITIAL_DEVIATION = 0.02  # the published configuration's initializer_range
SEGMENTS = 2  # [paper] Devlin et al. 2019, 3.1: sentence A and sentence B
MASKED_IN = 7  # [paper] Devlin et al. 2019, 3.1 masks 15% of the words: one in seven
NOT_MASKED = -100  # the label that torch's cross-entropy ignores


@dataclass(frozen=True)
class BertSizes:
    """`positions` is the longest sequence the embeddings can hold."""

    vocabulary: int = 30_522
    positions: int = 512
    sequence: int = 512
    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    feed_forward: int = 4096
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.sequence > self.positions:
            raise ValueError(f"a sequence of {self.sequence} is longer than {self.positions} positions")


class BertEmbeddings(nn.Module):
    """Words, positions and segments, added and normalized."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.hidden)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON)
        self.dropout = dropout(sizes.dropout)

    def forward(self, words: Tensor, segments: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        positions = torch.arange(words.shape[1], device=words.device)
        x = self.word_embeddings(words) + self.token_type_embeddings(segments)
        y: Tensor = self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))
        return y


class BertSelfAttention(nn.Module):
    """Every token looks at every token."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.hidden, sizes.hidden)
        self.key = nn.Linear(sizes.hidden, sizes.hidden)
        self.value = nn.Linear(sizes.hidden, sizes.hidden)
        self.dropout = dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The heads' results side by side."""
        query, key, value = (
            split_heads(project(x), self.heads) for project in (self.query, self.key, self.value)
        )
        return merge_heads(attention(query, key, value, dropout=self.dropout))


class BertOutput(nn.Module):
    """A projection with dropout, added to the shortcut and normalized."""

    def __init__(self, inputs: int, sizes: BertSizes) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON)
        self.dropout = dropout(sizes.dropout)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        y: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + shortcut)
        return y


class BertLayer(nn.Module):
    """Attention and two linear layers, each with a shortcut."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": BertSelfAttention(sizes), "output": BertOutput(sizes.hidden, sizes)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(sizes.hidden, sizes.feed_forward)})
        self.output = BertOutput(sizes.feed_forward, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        x = self.attention["output"](self.attention["self"](x), x)
        y: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return y


class BertEncoder(nn.Module):
    """The layers, one after another."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden)."""
        for layer in self.layer:
            x = layer(x)
        return x


class BertModel(nn.Module):
    """Embeddings, encoder and pooler: what is usually called BERT-Large."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(sizes)
        self.encoder = BertEncoder(sizes)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(sizes.hidden, sizes.hidden)})

    def forward(self, words: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """The encoded tokens, and the first one pooled to stand for the whole."""
        x = self.encoder(self.embeddings(words, segments))
        return x, torch.tanh(self.pooler["dense"](x[:, 0]))


class BertMaskedWordHead(nn.Module):
    """Scores of all words for each token, with the word embedding's weight."""

    def __init__(self, sizes: BertSizes, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.ModuleDict(
            {
                "dense": nn.Linear(sizes.hidden, sizes.hidden),
                "LayerNorm": nn.LayerNorm(sizes.hidden, eps=NORM_EPSILON),
            }
        )
        self.decoder = nn.Linear(sizes.hidden, sizes.vocabulary)
        self.decoder.weight = words.weight
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, vocabulary)."""
        x = self.transform["LayerNorm"](F.gelu(self.transform["dense"](x)))
        scores: Tensor = self.decoder(x)
        return scores


class BertForPreTraining(nn.Module):
    """BERT with the losses it is pre-trained on: masked words, and whether sentence B follows A."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.bert = BertModel(sizes)
        draw_normal_weights(self.bert, INITIAL_DEVIATION)
        words = self.bert.embeddings.word_embeddings
        self.cls = nn.ModuleDict(
            {
                "predictions": BertMaskedWordHead(sizes, words),
                "seq_relationship": nn.Linear(sizes.hidden, 2),
            }
        )
        draw_normal_weights(self.cls, INITIAL_DEVIATION)

    def forward(self, words: Tensor, segments: Tensor, labels: Tensor, follows: Tensor) -> Tensor:
        """The mean cross-entropy of the masked words plus that of `follows`, one per sample."""
        tokens, pooled = self.bert(words, segments)
        masked = token_loss(self.cls["predictions"](tokens), labels)
        return masked + F.cross_entropy(self.cls["seq_relationship"](pooled), follows)


def _inputs(sizes: BertSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    words = data.integers(sizes.vocabulary, batch, sizes.sequence)
    positions = torch.arange(sizes.sequence)
    segments = (positions >= sizes.sequence // 2).long().repeat(batch, 1)
    masked = data.integers(MASKED_IN, batch, sizes.sequence) == 0
    masked |= positions == 0  # at least one word, or the mean would be over none
    labels = torch.where(masked, data.integers(sizes.vocabulary, batch, sizes.sequence), NOT_MASKED)
    return words, segments, labels, data.integers(2, batch)


BERT_LARGE = entry(
    "bert_large",
    "BERT-Large pre-training, 336M parameters (Unity, Table 1)",
    4,  # [paper] Unity 6.1
    module=BertForPreTraining,
    inputs=_inputs,
    full=BertSizes(),
    tiny=BertSizes(vocabulary=128, positions=16, sequence=16, hidden=32, layers=2, heads=4, feed_forward=64),
)
