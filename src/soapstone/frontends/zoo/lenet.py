"""LeNet: the six-layer CNN on which FlexFlow compares its search with the global optimum (8.3).

The sizes are LeNet-5's (LeCun et al. 1998, "Gradient-based learning applied to document
recognition", figure 2): 61,706 parameters on 32 x 32 digits. As in most of today's versions the
activations are rectified and the subsampling is max pooling, where the original had scaled tanh and
trained averages. Parameter names are those of the PyTorch tutorial's network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.synthetic import Synthetic


@dataclass(frozen=True)
class LeNetSizes:
    """Square grey images; `channels` of the convolutions, `hidden` widths of the linear layers."""

    image: int = 32
    channels: tuple[int, ...] = (6, 16)
    hidden: tuple[int, ...] = (120, 84)
    classes: int = 10

    def __post_init__(self) -> None:
        if len(self.channels) != 2 or len(self.hidden) != 2:
            raise ValueError("LeNet has two convolutions and two hidden linear layers")


class LeNet(nn.Module):
    """Two convolutions with pooling, then three linear layers."""

    def __init__(self, sizes: LeNetSizes) -> None:
        super().__init__()
        first, second = sizes.channels
        grid = ((sizes.image - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(1, first, kernel_size=5)
        self.conv2 = nn.Conv2d(first, second, kernel_size=5)
        self.fc1 = nn.Linear(second * grid * grid, sizes.hidden[0])
        self.fc2 = nn.Linear(sizes.hidden[0], sizes.hidden[1])
        self.fc3 = nn.Linear(sizes.hidden[1], sizes.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return F.cross_entropy(self.fc3(x), labels)


def _inputs(sizes: LeNetSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.normal(batch, 1, sizes.image, sizes.image), data.integers(sizes.classes, batch)


LENET = entry(
    "lenet",
    "LeNet-5 digit classifier, 6 layers (FlexFlow 8.3)",
    64,  # [paper] FlexFlow 8
    module=LeNet,
    inputs=_inputs,
    full=LeNetSizes(),
    tiny=LeNetSizes(image=20, channels=(4, 8), hidden=(32, 16), classes=8),
)
