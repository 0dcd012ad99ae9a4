"""U-Net: image segmentation with long skip connections (Ronneberger et al. 2015).

Five levels of two convolutions, max pooling down, transposed convolutions up, and the map of the same
level concatenated on the way. As in most of today's versions the convolutions are padded and
normalized over the batch, so that no map is cropped. Names are those of the widely used
`Pytorch-UNet` (its `bilinear=False` variant): 31,037,698 parameters for 3 channels and 2 classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.synthetic import Synthetic


@dataclass(frozen=True)
class UNetSizes:
    """`channels` of the first level double with each of the four levels below it."""

    image: int = 256  # ours: the paper's 572 serves unpadded convolutions
    channels: int = 64
    classes: int = 2

    def __post_init__(self) -> None:
        if self.image % 16:
            raise ValueError(f"the image is halved four times, so {self.image} must be a multiple of 16")


class DoubleConv(nn.Module):
    """Two 3 x 3 convolutions, each normalized over the batch and rectified."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A map of the same size."""
        y: Tensor = self.double_conv(x)
        return y


class Down(nn.Module):
    """To the next level: half the size, twice the channels."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, 2 * inputs))

    def forward(self, x: Tensor) -> Tensor:
        """The map of the level below."""
        y: Tensor = self.maxpool_conv(x)
        return y


class Up(nn.Module):
    """Back from a level: twice the size, half the channels, joined with the level's own map."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(inputs, inputs // 2)

    def forward(self, below: Tensor, skipped: Tensor) -> Tensor:
        """The map of the level above."""
        y: Tensor = self.conv(torch.cat([skipped, self.up(below)], dim=1))
        return y


class OutConv(nn.Module):
    """The class scores of every pixel."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, one channel per class."""
        y: Tensor = self.conv(x)
        return y


class UNet(nn.Module):
    """Four levels down and four up."""

    def __init__(self, sizes: UNetSizes) -> None:
        super().__init__()
        base = sizes.channels
        self.inc = DoubleConv(3, base)
        self.down1 = Down(base)
        self.down2 = Down(2 * base)
        self.down3 = Down(4 * base)
        self.down4 = Down(8 * base)
        self.up1 = Up(16 * base)
        self.up2 = Up(8 * base)
        self.up3 = Up(4 * base)
        self.up4 = Up(2 * base)
        self.outc = OutConv(base, sizes.classes)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """The mean cross-entropy of the pixels' classes."""
        level1 = self.inc(images)
        level2 = self.down1(level1)
        level3 = self.down2(level2)
        level4 = self.down3(level3)
        x = self.up1(self.down4(level4), level4)
        x = self.up4(self.up3(self.up2(x, level3), level2), level1)
        return F.cross_entropy(self.outc(x), masks)


def _inputs(sizes: UNetSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    images = data.normal(batch, 3, sizes.image, sizes.image)
    return images, data.integers(sizes.classes, batch, sizes.image, sizes.image)


UNET = entry(
    "unet",
    "U-Net image segmentation, 31.0M parameters (Ronneberger et al. 2015)",
    16,  # ours
    module=UNet,
    inputs=_inputs,
    full=UNetSizes(),
    tiny=UNetSizes(image=32, channels=4, classes=4),
)
