"""NMT: FlexFlow's neural machine translation model (Table 4, Figure 13).

An encoder and a decoder of two LSTM layers of 1024 each, 40 unrolled steps, and attention over the
encoder's outputs on top of the last decoder layer. FlexFlow 8 gives these sizes; the attention is
written as in Luong et al. 2015 (general score, then a tanh layer over context and state), which is
the usual form of attention above the last layer. The 32,000 word pieces per language are those of
Wu et al. 2016 for WMT English-German.

Every step has its own embedding, cells, attention, projection and loss, with shared weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.recurrent import LSTMStack
from soapstone.frontends.zoo.synthetic import Synthetic


@dataclass(frozen=True)
class NMTSizes:
    """Encoder and decoder have `layers` layers each; sentences have `steps` word pieces."""

    source_vocabulary: int = 32_000
    target_vocabulary: int = 32_000
    hidden: int = 1024
    layers: int = 2
    steps: int = 40
    dropout: float = 0.0


class Attention(nn.Module):
    """Luong's global attention: one decoder state looks at all encoder outputs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """What states are compared with: (batch, hidden, steps) from memory (batch, steps, hidden)."""
        projected: Tensor = self.score(memory)
        return projected.transpose(1, 2)

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """The state joined with what it found in memory, (batch, hidden)."""
        weights = torch.bmm(state.unsqueeze(1), keys).softmax(dim=-1)
        context = torch.bmm(weights, memory).squeeze(1)
        return torch.tanh(self.combine(torch.cat([context, state], dim=1)))


class NMT(nn.Module):
    """Encoder, decoder that starts from the encoder's last states, attention and projection."""

    def __init__(self, sizes: NMTSizes) -> None:
        super().__init__()
        self.steps = sizes.steps
        self.source_embedding = nn.Embedding(sizes.source_vocabulary, sizes.hidden)
        self.target_embedding = nn.Embedding(sizes.target_vocabulary, sizes.hidden)
        self.encoder = LSTMStack(sizes.layers, sizes.hidden, sizes.dropout)
        self.decoder = LSTMStack(sizes.layers, sizes.hidden, sizes.dropout)
        self.attention = Attention(sizes.hidden)
        self.projection = nn.Linear(sizes.hidden, sizes.target_vocabulary)

    def forward(self, source: Tensor, previous: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over all target words, each given the `previous` ones."""
        states = self.encoder.start()
        outputs: list[Tensor] = []
        for step in range(self.steps):
            top, states = self.encoder(self.source_embedding(source[:, step]), states)
            outputs.append(top)
        memory = torch.stack(outputs, dim=1)
        keys = self.attention.keys(memory)
        losses: list[Tensor] = []
        for step in range(self.steps):
            top, states = self.decoder(self.target_embedding(previous[:, step]), states)
            scores = self.projection(self.attention(top, keys, memory))
            losses.append(F.cross_entropy(scores, targets[:, step]))
        return torch.stack(losses).mean()


def _inputs(sizes: NMTSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    source = data.integers(sizes.source_vocabulary, batch, sizes.steps)
    sentence = data.integers(sizes.target_vocabulary, batch, sizes.steps + 1)
    return source, sentence[:, :-1].contiguous(), sentence[:, 1:].contiguous()


NMT_MODEL = entry(
    "nmt",
    "LSTM translation model with attention, 2 + 2 layers of 1024, 40 unrolled steps (FlexFlow, Table 4)",
    64,  # [paper] FlexFlow 8
    module=NMT,
    inputs=_inputs,
    full=NMTSizes(),
    tiny=NMTSizes(source_vocabulary=64, target_vocabulary=64, hidden=16, steps=3),
)
