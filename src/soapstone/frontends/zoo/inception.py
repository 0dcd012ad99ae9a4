"""Inception-v3 (FlexFlow, Table 4; Unity, Table 1): many parallel branches, hence many placements.

Layout and names are torchvision's (Szegedy et al. 2016, "Rethinking the Inception architecture"):
27,161,264 parameters with the auxiliary classifier, 23,834,568 without (`auxiliary=False`). The loss
adds the auxiliary classifier's with weight 0.4.

A block is a table of its branches, so that the tables at the end can be read beside the figures of
that paper: figure 5 is `_grid35`, figure 10 the two reductions, figure 6 `_grid17`, figure 7 `_grid8`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import dropout
from soapstone.frontends.zoo.synthetic import Synthetic

# The reference TensorFlow model and PyTorch's tutorial both train Inception-v3 with this weight.
AUXILIARY_WEIGHT = 0.4


@dataclass(frozen=True)
class InceptionSizes:
    """Channel counts are the paper's divided by `narrowing`, in multiples of 4.

    `auxiliary_kernel` covers the whole map that the auxiliary classifier pools from the image.
    """

    image: int = 299
    narrowing: int = 1
    auxiliary: bool = True
    auxiliary_kernel: int = 5
    classes: int = 1000
    dropout: float = 0.5

    def channels(self, published: int) -> int:
        """The channel count here of a layer that has `published` channels in the paper."""
        if self.narrowing == 1:
            return published
        return max(4, round(published / self.narrowing / 4) * 4)


class BasicConv2d(nn.Module):
    """A convolution without bias, normalized over the batch and rectified."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)  # [paper] the reference model's epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The rectified map."""
        return F.relu(self.bn(self.conv(x)))


@dataclass(frozen=True)
class Conv:
    """One convolution of a branch; it keeps the map's size unless it is strided."""

    name: str
    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1

    def module(self, inputs: int, outputs: int) -> BasicConv2d:
        """The layer it stands for."""
        height, width = self.kernel
        padding = (height // 2, width // 2) if self.stride == 1 else (0, 0)
        return BasicConv2d(inputs, outputs, self.kernel, self.stride, padding)


@dataclass(frozen=True)
class Branch:
    """A pooling or nothing, then convolutions in a row, then the last ones side by side."""

    row: tuple[Conv, ...] = ()
    fork: tuple[Conv, ...] = ()
    pool: Callable[[Tensor], Tensor] | None = None


class Mixed(nn.Module):
    """Parallel branches of convolutions whose outputs are concatenated along the channels."""

    def __init__(self, sizes: InceptionSizes, inputs: int, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = tuple(branches)
        self.outputs = 0
        for branch in branches:
            reached = inputs
            for conv in branch.row:
                outputs = sizes.channels(conv.channels)
                self.add_module(conv.name, conv.module(reached, outputs))
                reached = outputs
            for conv in branch.fork:
                outputs = sizes.channels(conv.channels)
                self.add_module(conv.name, conv.module(reached, outputs))
                self.outputs += outputs
            if not branch.fork:
                self.outputs += reached

    def forward(self, x: Tensor) -> Tensor:
        """All branches' maps, in the order of the table."""
        maps: list[Tensor] = []
        for branch in self.branches:
            y = x if branch.pool is None else branch.pool(x)
            for conv in branch.row:
                y = self.get_submodule(conv.name)(y)
            maps += [self.get_submodule(conv.name)(y) for conv in branch.fork] or [y]
        return torch.cat(maps, dim=1)


class InceptionAux(nn.Module):
    """The auxiliary classifier on the last map of the middle grid."""

    def __init__(self, sizes: InceptionSizes, inputs: int) -> None:
        super().__init__()
        self.conv0 = BasicConv2d(inputs, sizes.channels(128), 1)
        self.conv1 = BasicConv2d(sizes.channels(128), sizes.channels(768), sizes.auxiliary_kernel)
        self.fc = nn.Linear(sizes.channels(768), sizes.classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores."""
        x = self.conv1(self.conv0(F.avg_pool2d(x, kernel_size=5, stride=3)))
        scores: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


class InceptionV3(nn.Module):
    """A stem of five convolutions, eleven mixed blocks on three grids, and one linear layer."""

    def __init__(self, sizes: InceptionSizes) -> None:
        super().__init__()
        stem = [sizes.channels(published) for published in (32, 32, 64, 80, 192)]
        self.Conv2d_1a_3x3 = BasicConv2d(3, stem[0], 3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(stem[0], stem[1], 3)
        self.Conv2d_2b_3x3 = BasicConv2d(stem[1], stem[2], 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(kernel_size=3, stride=2)
        self.Conv2d_3b_1x1 = BasicConv2d(stem[2], stem[3], 1)
        self.Conv2d_4a_3x3 = BasicConv2d(stem[3], stem[4], 3)
        self.maxpool2 = nn.MaxPool2d(kernel_size=3, stride=2)
        reached = stem[4]
        for name, branches in _MIXED:
            block = Mixed(sizes, reached, branches)
            self.add_module(name, block)
            reached = block.outputs
            if name == _AUXILIARY_AFTER and sizes.auxiliary:
                self.AuxLogits = InceptionAux(sizes, reached)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = dropout(sizes.dropout)
        self.fc = nn.Linear(reached, sizes.classes)
        self._has_auxiliary = sizes.auxiliary

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels, with 0.4 of the auxiliary classifier's."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(self.maxpool1(x)))
        x = self.maxpool2(x)
        auxiliary: Tensor | None = None
        for name, _ in _MIXED:
            x = self.get_submodule(name)(x)
            if name == _AUXILIARY_AFTER and self._has_auxiliary:
                auxiliary = self.AuxLogits(x)
        loss = F.cross_entropy(self.fc(self.dropout(self.avgpool(x)).flatten(1)), labels)
        if auxiliary is None:
            return loss
        return loss + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)


_average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1)
_maximum = partial(F.max_pool2d, kernel_size=3, stride=2)


def _grid35(pooled: int) -> tuple[Branch, ...]:
    return (
        Branch((Conv("branch1x1", 64),)),
        Branch((Conv("branch5x5_1", 48), Conv("branch5x5_2", 64, (5, 5)))),
        Branch(
            (
                Conv("branch3x3dbl_1", 64),
                Conv("branch3x3dbl_2", 96, (3, 3)),
                Conv("branch3x3dbl_3", 96, (3, 3)),
            )
        ),
        Branch((Conv("branch_pool", pooled),), pool=_average),
    )


def _grid17(inner: int) -> tuple[Branch, ...]:
    return (
        Branch((Conv("branch1x1", 192),)),
        Branch(
            (
                Conv("branch7x7_1", inner),
                Conv("branch7x7_2", inner, (1, 7)),
                Conv("branch7x7_3", 192, (7, 1)),
            )
        ),
        Branch(
            (
                Conv("branch7x7dbl_1", inner),
                Conv("branch7x7dbl_2", inner, (7, 1)),
                Conv("branch7x7dbl_3", inner, (1, 7)),
                Conv("branch7x7dbl_4", inner, (7, 1)),
                Conv("branch7x7dbl_5", 192, (1, 7)),
            )
        ),
        Branch((Conv("branch_pool", 192),), pool=_average),
    )


_GRID8 = (
    Branch((Conv("branch1x1", 320),)),
    Branch(
        (Conv("branch3x3_1", 384),),
        fork=(Conv("branch3x3_2a", 384, (1, 3)), Conv("branch3x3_2b", 384, (3, 1))),
    ),
    Branch(
        (Conv("branch3x3dbl_1", 448), Conv("branch3x3dbl_2", 384, (3, 3))),
        fork=(Conv("branch3x3dbl_3a", 384, (1, 3)), Conv("branch3x3dbl_3b", 384, (3, 1))),
    ),
    Branch((Conv("branch_pool", 192),), pool=_average),
)

_REDUCTION_TO_17 = (
    Branch((Conv("branch3x3", 384, (3, 3), stride=2),)),
    Branch(
        (
            Conv("branch3x3dbl_1", 64),
            Conv("branch3x3dbl_2", 96, (3, 3)),
            Conv("branch3x3dbl_3", 96, (3, 3), stride=2),
        )
    ),
    Branch(pool=_maximum),
)

_REDUCTION_TO_8 = (
    Branch((Conv("branch3x3_1", 192), Conv("branch3x3_2", 320, (3, 3), stride=2))),
    Branch(
        (
            Conv("branch7x7x3_1", 192),
            Conv("branch7x7x3_2", 192, (1, 7)),
            Conv("branch7x7x3_3", 192, (7, 1)),
            Conv("branch7x7x3_4", 192, (3, 3), stride=2),
        )
    ),
    Branch(pool=_maximum),
)

_AUXILIARY_AFTER = "Mixed_6e"
_MIXED = (
    ("Mixed_5b", _grid35(32)),
    ("Mixed_5c", _grid35(64)),
    ("Mixed_5d", _grid35(64)),
    ("Mixed_6a", _REDUCTION_TO_17),
    ("Mixed_6b", _grid17(128)),
    ("Mixed_6c", _grid17(160)),
    ("Mixed_6d", _grid17(160)),
    ("Mixed_6e", _grid17(192)),
    ("Mixed_7a", _REDUCTION_TO_8),
    ("Mixed_7b", _GRID8),
    ("Mixed_7c", _GRID8),
)


def _inputs(sizes: InceptionSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    return data.normal(batch, 3, sizes.image, sizes.image), data.integers(sizes.classes, batch)


INCEPTION_V3 = entry(
    "inception_v3",
    "Inception-v3 image classifier, 27.2M parameters with its auxiliary head (FlexFlow, Table 4)",
    64,  # [paper] FlexFlow 8, Unity 6.1
    module=InceptionV3,
    inputs=_inputs,
    full=InceptionSizes(),
    # 169 pixels give grids of 18, 8 and 3, of which the auxiliary classifier pools 2 x 2.
    tiny=InceptionSizes(image=169, narrowing=16, auxiliary_kernel=2, classes=16),
)
