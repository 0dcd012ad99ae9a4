"""Two layers with many units between them: the network of Unity's Figure 2, at sizes at which two processes
of one computer notice what they send each other.

    soapstone plan examples/two_layers.py:two_layers --machine cpu:1x2 --search unity -o plan.json
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, FEATURES, UNITS, OUTPUTS = 64, 32, 131_072, 32


class TwoLayers(nn.Module):
    """Split along the units between the layers, only the sums of the second are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, UNITS, bias=False)
        self.second = nn.Linear(UNITS, OUTPUTS, bias=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The mean squared error."""
        return F.mse_loss(self.second(F.relu(self.first(x))), wanted)


def two_layers(batch: int = SAMPLES) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network and a batch."""
    torch.manual_seed(0)
    return TwoLayers(), (torch.randn(batch, FEATURES), torch.randn(batch, OUTPUTS))
