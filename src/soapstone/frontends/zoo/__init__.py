"""The models that come with Soapstone: those of the FlexFlow and Unity papers, and some of today's.

Each is a plain `nn.Module` whose `forward` takes a batch with its targets and returns the scalar loss;
parameter names and shapes follow the published module where there is one, so that its checkpoints
fit. Each has a `tiny` variant with the same operators and sizes that divide by 4, for tests.

    model = zoo_model("rnnlm")
    module = model.build(steps=2)
    loss = module(*model.inputs(model.batch_per_device, steps=2))

`ZooModel.options` lists what can be changed; the sizes class in the model's file says what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from soapstone.errors import CaptureError
from soapstone.frontends.zoo.alexnet import ALEXNET
from soapstone.frontends.zoo.bert import BERT_LARGE
from soapstone.frontends.zoo.dense import CANDLE_UNO, MLP_MODEL
from soapstone.frontends.zoo.entry import ZooModel, did_you_mean
from soapstone.frontends.zoo.gpt2 import GPT2_SMALL
from soapstone.frontends.zoo.inception import INCEPTION_V3
from soapstone.frontends.zoo.lenet import LENET
from soapstone.frontends.zoo.llama import LLAMA_1B, LLAMA_8B
from soapstone.frontends.zoo.moe import MOE
from soapstone.frontends.zoo.nmt import NMT_MODEL
from soapstone.frontends.zoo.recommender import DLRM_MODEL, XDL_MODEL
from soapstone.frontends.zoo.recurrent import RNNLM, RNNTC
from soapstone.frontends.zoo.resnet import RESNET101, RESNEXT50
from soapstone.frontends.zoo.unet import UNET
from soapstone.frontends.zoo.vit import VIT_L

__all__ = ["ZOO", "ZooModel", "zoo_model"]

_FLEXFLOW = (LENET, ALEXNET, INCEPTION_V3, RESNET101, RNNTC, RNNLM, NMT_MODEL)
_UNITY = (RESNEXT50, BERT_LARGE, DLRM_MODEL, XDL_MODEL, CANDLE_UNO, MLP_MODEL)
_TODAY = (GPT2_SMALL, LLAMA_1B, LLAMA_8B, VIT_L, MOE, UNET)

ZOO: Mapping[str, ZooModel] = MappingProxyType(
    {model.name: model for model in (*_FLEXFLOW, *_UNITY, *_TODAY)}
)


def zoo_model(name: str) -> ZooModel:
    """The built-in model of that name."""
    if name not in ZOO:
        raise CaptureError(f"there is no built-in model {name!r}; {did_you_mean(name, ZOO)}")
    return ZOO[name]
