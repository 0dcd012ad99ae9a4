"""ResNet-101 (FlexFlow, Table 4) and ResNeXt-50 32x4d (Unity, Table 1).

Both are stages of bottleneck blocks with shortcuts (He et al. 2016); ResNeXt makes the middle
convolution grouped and wider (Xie et al. 2017). Layout and names are torchvision's, with the stride
in the 3 x 3 convolution: 44,549,160 and 25,028,904 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.synthetic import Synthetic

# [paper] He et al. 2016, table 1: a block puts out four times the channels its stage is named for.
EXPANSION = 4


@dataclass(frozen=True)
class ResNetSizes:
    """Blocks per stage; channels and inner width of the first stage double with every stage."""

    image: int = 224
    blocks: tuple[int, ...] = (3, 4, 23, 3)
    channels: int = 64
    width: int = 64
    groups: int = 1
    classes: int = 1000

    def __post_init__(self) -> None:
        if len(self.blocks) != 4:
            raise ValueError("a ResNet has four stages of blocks")


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to the shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, rectified."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    """A strided stem, four stages of bottlenecks, and one linear layer."""

    def __init__(self, sizes: ResNetSizes) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, sizes.channels, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(sizes.channels)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(sizes, 0)
        self.layer2 = _stage(sizes, 1)
        self.layer3 = _stage(sizes, 2)
        self.layer4 = _stage(sizes, 3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(_outputs(sizes, 3), sizes.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return F.cross_entropy(self.fc(self.avgpool(x).flatten(1)), labels)


def _outputs(sizes: ResNetSizes, stage: int) -> int:
    return sizes.channels * 2**stage * EXPANSION


def _stage(sizes: ResNetSizes, stage: int) -> nn.Sequential:
    """The blocks of one stage; from the second stage on the first block halves the image."""
    outputs = _outputs(sizes, stage)
    inputs = _outputs(sizes, stage - 1) if stage else sizes.channels
    width = sizes.width * 2**stage
    stride = 2 if stage else 1
    first = Bottleneck(inputs, width, outputs, stride, sizes.groups)
    rest = [Bottleneck(outputs, width, outputs, 1, sizes.groups) for _ in range(sizes.blocks[stage] - 1)]
    return nn.Sequential(first, *rest)


def _inputs(sizes: ResNetSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.normal(batch, 3, sizes.image, sizes.image), data.integers(sizes.classes, batch)


RESNET101 = entry(
    "resnet101",
    "ResNet-101 image classifier, 44.5M parameters (FlexFlow, Table 4)",
    64,  # [paper] FlexFlow 8
    module=ResNet,
    inputs=_inputs,
    full=ResNetSizes(),
    tiny=ResNetSizes(image=64, blocks=(1, 1, 2, 1), channels=4, width=4, classes=16),
)

RESNEXT50 = entry(
    "resnext50",
    "ResNeXt-50 32x4d image classifier, 25.0M parameters (Unity, Table 1)",
    64,  # [paper] Unity 6.1
    module=ResNet,
    inputs=_inputs,
    full=ResNetSizes(blocks=(3, 4, 6, 3), width=128, groups=32),
    tiny=ResNetSizes(image=64, blocks=(1, 1, 2, 1), channels=4, width=8, groups=4, classes=16),
)
