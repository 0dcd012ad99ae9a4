"""The class of a model: what its configuration names, or what suits its type."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from soapstone.errors import CaptureError
from soapstone.frontends.huggingface.configuration import parts
from soapstone.frontends.huggingface.experts import EXPERTS, register_experts

# In order of preference: the head trained by the commonest objective that computes its own loss.
_HEADS = (
    "ImageTextToText",
    "MultimodalLM",
    "CausalLM",
    "MaskedLM",
    "ZeroShotImageClassification",
    "ImageClassification",
    "VideoClassification",
    "CTC",
    "AudioClassification",
    "SequenceClassification",
    "SemanticSegmentation",
    "TimeSeriesPrediction",
    "PreTraining",
    "MaskedImageModeling",
)


def constructed(config: Any, path: Path, notes: list[str]) -> nn.Module:
    """The model of a configuration, with random weights."""
    found = _class(config, path, notes)
    register_experts()
    for part in parts(config):
        part._experts_implementation = EXPERTS
    try:
        model = found._from_config(config)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise CaptureError(
            f"{path}: {found.__name__} cannot be built from this configuration:"
            f" {type(error).__name__}: {first.rstrip('.:')}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _class(config: Any, path: Path, notes: list[str]) -> Any:
    import transformers

    named = getattr(config, "architectures", None) or ()
    for architecture in named:
        found = getattr(transformers, str(architecture), None)
        if found is not None:
            return found
    suitable = next((c for c in _suitable(config) if c is not None), None)
    if suitable is None:
        raise CaptureError(
            f"{path}: transformers has no model that can be built from the type '{config.model_type}' alone"
        )
    if named:
        notes.append(f"transformers has no class {named[0]}: {suitable.__name__} was taken instead")
    return suitable


def _suitable(config: Any) -> Iterator[Any]:
    import transformers

    for head in _order(config):
        mapping = getattr(transformers, f"AutoModel{head}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            yield found[0] if isinstance(found, tuple) else found
    yield _in_module(config)


def _order(config: Any) -> list[str]:
    """The heads to look for, as auto classes of transformers call them."""
    first: list[str] = []
    if getattr(config, "is_encoder_decoder", False):
        first = ["Seq2SeqLM", "SpeechSeq2Seq"]
    elif not getattr(config, "is_decoder", False):
        first = ["MaskedLM"]
    return [f"For{head}" for head in (*first, *_HEADS)] + [""]


def _in_module(config: Any) -> Any:
    """The last class, in the module of the configuration's models, that is made of this configuration:
    the models of parts (a text tower alone) have no auto class."""
    from transformers import PreTrainedModel

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    made = [
        item
        for item in vars(module).values()
        if inspect.isclass(item)
        and issubclass(item, PreTrainedModel)
        and item.config_class is type(config)
        and item.__module__ == name
        and not item.__name__.endswith("PreTrainedModel")
    ]
    return made[-1] if made else None
