"""DLRM and XDL, the recommendation models of Unity's Table 1: huge tables and small layers.

DLRM (Naumov et al. 2019) joins a dense tower and embedding bags by the dot products of all pairs. Its
linear layers and the width of its tables are MLPerf's (13-512-256-128 and 1024-1024-512-256-1, width
128); its 26 tables are as long as the categories of Criteo Kaggle, the data set Unity trains on. That
makes 4.3 billion parameters, which do not fit on one of the paper's 16 GB devices, as the paper says.
Unity does not print its sizes, so this choice is ours; `rows`, `width`, `bottom` and `top` change it.
Names are those of Facebook's reference implementation. FlexFlow's example program of that name, on which
Unity's experiments rest, joins the features by concatenation and has no biases, which is what `dots=False`
and `bias=False` make; its script for Summit has 8 or 24 tables of a million rows and width 64, and layers of
64-512-512-64 and 1024-1024-1024-1.

XDL (Jiang et al. 2019) concatenates its bags: four tables of a million rows and width 64, then layers
of 256-256-256-2, as in FlexFlow's example program of that name. That program squares the error of a
sigmoid; here the two outputs are a softmax over click and no click.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import tower
from soapstone.frontends.zoo.synthetic import Synthetic

# The number of distinct values of each categorical feature in Criteo's Kaggle data, as DLRM counts them.
CRITEO_KAGGLE_ROWS = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)


@dataclass(frozen=True)
class DLRMSizes:
    """`bottom` starts with the dense features and ends with `width`; `bag` ids are summed per table. Without
    `dots` the features are concatenated instead of multiplied in pairs."""

    rows: tuple[int, ...] = CRITEO_KAGGLE_ROWS
    width: int = 128
    bag: int = 1
    bottom: tuple[int, ...] = (13, 512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    dots: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        if self.bottom[-1] != self.width:
            raise ValueError(
                f"the bottom layers end with {self.bottom[-1]} features, but the tables are {self.width} wide"
            )


class DLRM(nn.Module):
    """Dense tower, embedding bags, dot interaction, and a tower that predicts a click."""

    def __init__(self, sizes: DLRMSizes) -> None:
        super().__init__()
        features = 1 + len(sizes.rows)
        pairs = features * (features - 1) // 2
        joined = sizes.width + pairs if sizes.dots else sizes.width * features
        self.join = _dot_interaction if sizes.dots else _concatenation
        self.emb_l = nn.ModuleList(_bag(rows, sizes.width) for rows in sizes.rows)
        self.bot_l = nn.Sequential(*tower(sizes.bottom, bias=sizes.bias), nn.ReLU())
        self.top_l = tower((joined, *sizes.top), bias=sizes.bias)

    def forward(self, dense: Tensor, clicks: Tensor, *ids: Tensor) -> Tensor:
        """The mean binary cross-entropy of `clicks` (batch, 1), given ids (batch, bag) per table."""
        bottom = self.bot_l(dense)
        bags = [table(rows) for table, rows in zip(self.emb_l, ids, strict=True)]
        top = self.top_l(self.join(bottom, bags))
        return F.binary_cross_entropy_with_logits(top, clicks)


def _dot_interaction(bottom: Tensor, bags: Sequence[Tensor]) -> Tensor:
    """`bottom` itself, then the dot product of each pair among it and the bags."""
    features = torch.stack([bottom, *bags], dim=1)
    products = torch.bmm(features, features.transpose(1, 2))
    count = features.shape[1]
    row, column = torch.tril_indices(count, count, offset=-1, device=features.device).unbind()
    return torch.cat([bottom, products[:, row, column]], dim=1)


def _concatenation(bottom: Tensor, bags: Sequence[Tensor]) -> Tensor:
    """`bottom` and the bags side by side."""
    return torch.cat([bottom, *bags], dim=1)


def _dlrm_inputs(sizes: DLRMSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    dense = data.normal(batch, sizes.bottom[0])
    clicks = data.integers(2, batch, 1).to(dense.dtype)
    return dense, clicks, *(data.integers(rows, batch, sizes.bag) for rows in sizes.rows)


@dataclass(frozen=True)
class XDLSizes:
    """`layers` are the widths after the concatenated bags; the last is the number of classes."""

    rows: tuple[int, ...] = (1_000_000,) * 4
    width: int = 64
    bag: int = 1
    layers: tuple[int, ...] = (256, 256, 2)


class XDL(nn.Module):
    """Embedding bags, concatenated, and a tower that classifies clicks; no layer has a bias."""

    def __init__(self, sizes: XDLSizes) -> None:
        super().__init__()
        self.tables = nn.ModuleList(_bag(rows, sizes.width) for rows in sizes.rows)
        self.layers = tower((len(sizes.rows) * sizes.width, *sizes.layers), bias=False)

    def forward(self, clicks: Tensor, *ids: Tensor) -> Tensor:
        """The mean cross-entropy of `clicks` (batch), given ids (batch, bag) per table."""
        bags = [table(rows) for table, rows in zip(self.tables, ids, strict=True)]
        return F.cross_entropy(self.layers(torch.cat(bags, dim=1)), clicks)


def _xdl_inputs(sizes: XDLSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    clicks = data.integers(sizes.layers[-1], batch)
    return clicks, *(data.integers(rows, batch, sizes.bag) for rows in sizes.rows)


def _bag(rows: int, width: int) -> nn.EmbeddingBag:
    """A table of small random rows, as the reference implementation draws them."""
    table = nn.EmbeddingBag(rows, width, mode="sum")
    nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
    return table


DLRM_MODEL = entry(
    "dlrm",
    "DLRM click prediction, 26 Criteo tables of width 128, 4.3B parameters (Unity, Table 1)",
    1024,  # [paper] Unity 6.1
    module=DLRM,
    inputs=_dlrm_inputs,
    full=DLRMSizes(),
    tiny=DLRMSizes(rows=(256, 128, 64, 32, 16, 8, 4), width=16, bag=2, bottom=(8, 32, 16), top=(32, 16, 1)),
)

XDL_MODEL = entry(
    "xdl",
    "XDL click prediction, 4 tables of a million rows, 256M parameters (Unity, Table 1)",
    1024,  # [paper] Unity 6.1
    module=XDL,
    inputs=_xdl_inputs,
    full=XDLSizes(),
    tiny=XDLSizes(rows=(128, 64, 32, 16), width=16, bag=2, layers=(32, 32, 2)),
)
