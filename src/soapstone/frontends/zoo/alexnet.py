"""AlexNet: the CNN of FlexFlow's Table 4 with few layers and most of its weights at the end.

The layout is torchvision's (Krizhevsky 2014, "One weird trick for parallelizing convolutional
neural networks", one tower): 61,100,840 parameters, under torchvision's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import dropout
from soapstone.frontends.zoo.synthetic import Synthetic


@dataclass(frozen=True)
class AlexNetSizes:
    """Square colour images; the last pooling makes a `grid` x `grid` map of the last channels."""

    image: int = 224
    channels: tuple[int, ...] = (64, 192, 384, 256, 256)
    grid: int = 6
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if len(self.channels) != 5:
            raise ValueError("AlexNet has five convolutions")


class AlexNet(nn.Module):
    """Five convolutions, three of them followed by pooling, then three linear layers."""

    def __init__(self, sizes: AlexNetSizes) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = sizes.channels
        self.features = nn.Sequential(
            nn.Conv2d(3, c1, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c1, c2, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c2, c3, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c3, c4, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c4, c5, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((sizes.grid, sizes.grid))
        self.classifier = nn.Sequential(
            dropout(sizes.dropout),
            nn.Linear(c5 * sizes.grid * sizes.grid, sizes.hidden),
            nn.ReLU(),
            dropout(sizes.dropout),
            nn.Linear(sizes.hidden, sizes.hidden),
            nn.ReLU(),
            nn.Linear(sizes.hidden, sizes.classes),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        x = self.avgpool(self.features(images)).flatten(1)
        return F.cross_entropy(self.classifier(x), labels)


def _inputs(sizes: AlexNetSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.normal(batch, 3, sizes.image, sizes.image), data.integers(sizes.classes, batch)


ALEXNET = entry(
    "alexnet",
    "AlexNet image classifier, 61.1M parameters (FlexFlow, Table 4)",
    256,  # [paper] FlexFlow 8
    module=AlexNet,
    inputs=_inputs,
    full=AlexNetSizes(),
    # 99 pixels become maps of 24, 11, 5 and 2: the last one is what the average pooling keeps, as in full.
    tiny=AlexNetSizes(image=99, channels=(8, 16, 32, 16, 16), grid=2, hidden=64, classes=16),
)
