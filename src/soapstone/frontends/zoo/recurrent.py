"""FlexFlow's unrolled recurrent models of one stack: RNNTC and RNNLM (Table 4).

RNNTC classifies texts with four LSTM layers of 1024 after Kim 2014; RNNLM predicts the next word with
two layers of 2048 after Zaremba et al. 2014, and with two steps (`steps=2`) it is the small problem
whose global optimum FlexFlow looks for (8.3). FlexFlow 8 gives layers, hidden sizes and 40 unrolled
steps; embeddings as wide as the hidden layers are Zaremba's, and the vocabularies are the data sets'.

Layers are unrolled as in FlexFlow's Figure 13: every step has its own embedding lookup, LSTM cells,
projection and loss, all with the same weights, so that a planner can place steps and layers apart.
That figure has no dropout; `dropout` adds Zaremba's, between layers and not between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import dropout
from soapstone.frontends.zoo.synthetic import Synthetic

State = tuple[Tensor, Tensor] | None


class LSTMStack(nn.Module):
    """LSTM layers that advance one step per call: one cell per layer, the same at every step."""

    def __init__(self, layers: int, hidden: int, rate: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))
        self.dropout = dropout(rate)

    def start(self) -> list[State]:
        """The states before the first step, which the cells take as zeros."""
        return [None] * len(self.cells)

    def forward(self, x: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """The top layer's output at this step, and the states after it."""
        after: list[State] = []
        for cell, state in zip(self.cells, states, strict=True):
            hidden, memory = cell(self.dropout(x), state)
            after.append((hidden, memory))
            x = hidden
        return self.dropout(x), after


@dataclass(frozen=True)
class TextClassifierSizes:
    """Layers, hidden size and unrolled `steps` are [paper] FlexFlow 8.

    Kim 2014, table 1, counts 18,765 words in Movie Reviews.
    """

    vocabulary: int = 18_768  # the next multiple of 16
    hidden: int = 1024
    layers: int = 4
    steps: int = 40
    classes: int = 2
    dropout: float = 0.0


class TextClassifier(nn.Module):
    """RNNTC: the top layer's last output decides the class."""

    def __init__(self, sizes: TextClassifierSizes) -> None:
        super().__init__()
        self.steps = sizes.steps
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.lstm = LSTMStack(sizes.layers, sizes.hidden, sizes.dropout)
        self.classifier = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels, for words (batch, steps)."""
        states = self.lstm.start()
        top, states = self.lstm(self.embedding(words[:, 0]), states)
        for step in range(1, self.steps):
            top, states = self.lstm(self.embedding(words[:, step]), states)
        return F.cross_entropy(self.classifier(top), labels)


def _classifier_inputs(sizes: TextClassifierSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.integers(sizes.vocabulary, batch, sizes.steps), data.integers(sizes.classes, batch)


@dataclass(frozen=True)
class LanguageModelSizes:
    """Layers, hidden size and unrolled `steps` are [paper] FlexFlow 8.

    Penn Treebank is distributed with 10,000 distinct words.
    """

    vocabulary: int = 10_000
    hidden: int = 2048
    layers: int = 2
    steps: int = 40
    dropout: float = 0.0


class LanguageModel(nn.Module):
    """RNNLM: the top layer's output predicts the next word at every step."""

    def __init__(self, sizes: LanguageModelSizes) -> None:
        super().__init__()
        self.steps = sizes.steps
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.lstm = LSTMStack(sizes.layers, sizes.hidden, sizes.dropout)
        self.decoder = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over all words (batch, steps): steps have equally many words."""
        states = self.lstm.start()
        losses: list[Tensor] = []
        for step in range(self.steps):
            top, states = self.lstm(self.embedding(words[:, step]), states)
            losses.append(F.cross_entropy(self.decoder(top), targets[:, step]))
        return torch.stack(losses).mean()


def _language_inputs(sizes: LanguageModelSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    words = data.integers(sizes.vocabulary, batch, sizes.steps + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


RNNTC = entry(
    "rnntc",
    "RNN text classifier, 4 LSTM layers of 1024, 40 unrolled steps (FlexFlow, Table 4)",
    64,  # [paper] FlexFlow 8
    module=TextClassifier,
    inputs=_classifier_inputs,
    full=TextClassifierSizes(),
    tiny=TextClassifierSizes(vocabulary=64, hidden=16, layers=4, steps=3),
)

RNNLM = entry(
    "rnnlm",
    "RNN language model, 2 LSTM layers of 2048, 40 unrolled steps (FlexFlow, Table 4)",
    64,  # [paper] FlexFlow 8
    module=LanguageModel,
    inputs=_language_inputs,
    full=LanguageModelSizes(),
    tiny=LanguageModelSizes(vocabulary=64, hidden=16, layers=2, steps=3),
)
