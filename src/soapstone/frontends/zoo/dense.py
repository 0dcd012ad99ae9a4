"""CANDLE-Uno and MLP, the models of Unity's Table 1 that are made of linear layers only.

CANDLE-Uno predicts a tumour's response to a pair of drugs. Its sizes are those of FlexFlow's example
program: eight layers of 4192 on each of the five large features, the two doses as they are, then four
layers of 4192 on all of them concatenated; 821 million parameters. As in that program each feature
has weights of its own, and no layer has a bias.

MLP is 16 linear layers of 8192 ([paper] Unity 6.1) on synthetic data, with 2^30 parameters. With
`towers=2` they are two towers of eight whose outputs are added, as in FlexFlow's example program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.frontends.zoo.entry import entry
from soapstone.frontends.zoo.layers import tower
from soapstone.frontends.zoo.synthetic import Synthetic


@dataclass(frozen=True)
class CandleUnoSizes:
    """The lengths of the features of a cell line and of a drug, and the linear layers on them."""

    expression: int = 942
    descriptors: int = 5270
    fingerprints: int = 2048
    hidden: int = 4192
    feature_layers: int = 8
    layers: int = 4

    def features(self) -> dict[str, int]:
        """The encoded inputs and their lengths, in the order of the module's inputs."""
        return {
            "cell_expression": self.expression,
            "drug1_descriptors": self.descriptors,
            "drug1_fingerprints": self.fingerprints,
            "drug2_descriptors": self.descriptors,
            "drug2_fingerprints": self.fingerprints,
        }


class CandleUno(nn.Module):
    """One tower per feature, then one over all of them."""

    def __init__(self, sizes: CandleUnoSizes) -> None:
        super().__init__()
        features = sizes.features()
        doses = 2
        self.encoders = nn.ModuleDict(
            {
                name: nn.Sequential(
                    *tower((length, *[sizes.hidden] * sizes.feature_layers), bias=False), nn.ReLU()
                )
                for name, length in features.items()
            }
        )
        joined = doses + len(features) * sizes.hidden
        self.regressor = tower((joined, *[sizes.hidden] * sizes.layers, 1), bias=False)

    def forward(self, response: Tensor, doses: Tensor, *features: Tensor) -> Tensor:
        """The mean squared error of `response` (batch, 1), given doses (batch, 2) and the features."""
        encoded = [
            encoder(feature) for encoder, feature in zip(self.encoders.values(), features, strict=True)
        ]
        return F.mse_loss(self.regressor(torch.cat([doses, *encoded], dim=1)), response)


def _candle_inputs(sizes: CandleUnoSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    features = (data.normal(batch, length) for length in sizes.features().values())
    return data.normal(batch, 1), data.normal(batch, 2), *features


@dataclass(frozen=True)
class MLPSizes:
    """`layers` linear layers of `hidden` units, shared out evenly among `towers`."""

    features: int = 8192
    hidden: int = 8192
    layers: int = 16
    towers: int = 1

    def __post_init__(self) -> None:
        if self.layers % self.towers:
            raise ValueError(f"{self.layers} layers do not share out evenly among {self.towers} towers")


class MLP(nn.Module):
    """Towers of linear layers with rectifiers between them; their outputs are added."""

    def __init__(self, sizes: MLPSizes) -> None:
        super().__init__()
        widths = (sizes.features, *[sizes.hidden] * (sizes.layers // sizes.towers))
        self.towers = nn.ModuleList(tower(widths, bias=False) for _ in range(sizes.towers))

    def forward(self, targets: Tensor, *features: Tensor) -> Tensor:
        """The mean squared error of `targets` (batch, hidden), given features for each tower."""
        first, *rest = (tower(x) for tower, x in zip(self.towers, features, strict=True))
        return F.mse_loss(sum(rest, start=first), targets)


def _mlp_inputs(sizes: MLPSizes, batch: int, data: Synthetic) -> tuple[Tensor, ...]:
    targets = data.normal(batch, sizes.hidden)
    return targets, *(data.normal(batch, sizes.features) for _ in range(sizes.towers))


CANDLE_UNO = entry(
    "candle_uno",
    "CANDLE-Uno drug response, 44 layers of 4192, 821M parameters (Unity, Table 1)",
    256,  # [paper] Unity 6.1
    module=CandleUno,
    inputs=_candle_inputs,
    full=CandleUnoSizes(),
    tiny=CandleUnoSizes(expression=16, descriptors=32, fingerprints=8, hidden=32, feature_layers=2, layers=2),
)

MLP_MODEL = entry(
    "mlp",
    "Multi-layer perceptron, 16 layers of 8192, 1.07B parameters (Unity, Table 1)",
    256,  # [paper] Unity 6.1
    module=MLP,
    inputs=_mlp_inputs,
    full=MLPSizes(),
    tiny=MLPSizes(features=32, hidden=32, layers=4),
)
