"""Hugging Face models from a configuration: random weights, offline, with inputs made up to fit.

`hf:DIR` or `hf:config.json` names the configuration. The class is the first of its `architectures`
that the installed transformers has; failing that, a head that suits the model type. Inputs are
synthesised from the names the class's `forward` takes and the sizes its configuration states.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.errors import CaptureError

# In order of preference: the head trained by the commonest objective that computes its own loss.
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForSemanticSegmentation",
    "AutoModelForPreTraining",
    "AutoModel",
)
_DEFAULT_LENGTH = 128
_DEFAULT_CLASSES = 2


def built(path: Path, name: str, batch: int, length: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a configuration, on torch's default device, and named example inputs."""
    config = _config(path)
    model = _model(config, path)
    inputs = _inputs(model, config, batch, length, name)
    return model, inputs


def _config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaptureError(f"there is no Hugging Face configuration at {file}") from None
    except (ValueError, OSError) as error:
        raise CaptureError(f"{file} is not a Hugging Face configuration: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise CaptureError(f"{file} has no field 'model_type': it is not a Hugging Face configuration")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CaptureError(
            "Hugging Face models need the package transformers: pip install 'soapstone[hf]'"
        ) from error
    kind = str(fields.pop("model_type"))
    try:
        config = AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise CaptureError(
            f"{file}: transformers has no model type '{kind}', or not with these fields: {_first(error)}"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _model(config: Any, path: Path) -> nn.Module:
    import transformers

    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if found is not None:
            return _constructed(found, config, path)
    for head in _HEADS:
        auto = getattr(transformers, head)
        if type(config) in auto._model_mapping:
            return _constructed(auto.from_config, config, path)
    raise CaptureError(f"{path}: transformers has no model class for the type '{config.model_type}'")


def _constructed(build: Any, config: Any, path: Path) -> nn.Module:
    try:
        model = build(config)
    except Exception as error:
        raise CaptureError(
            f"{path}: the model cannot be built: {type(error).__name__}: {_first(error)}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _first(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _inputs(model: nn.Module, config: Any, batch: int, length: int | None, name: str) -> dict[str, Tensor]:
    """Inputs by name: the model's main input, what else it needs, and labels where it takes any."""
    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator(device="cpu").manual_seed(0)
    text = getattr(config, "text_config", None) or config
    vision = getattr(config, "vision_config", None) or config

    def integers(below: int, *shape: int) -> Tensor:
        drawn = torch.randint(max(1, below), shape, generator=generator, device="cpu")
        return drawn.to(torch.get_default_device())

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())

    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    tokens = min(length or _DEFAULT_LENGTH, _longest(text))
    inputs: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = _size(getattr(vision, "image_size", 224))
        inputs[main] = floats(batch, int(getattr(vision, "num_channels", 3)), *side)
        if "input_ids" in taken and vocabulary and taken["input_ids"].default is not inspect.Parameter.empty:
            inputs["input_ids"] = integers(vocabulary, batch, tokens)
    elif main == "input_values":
        inputs[main] = floats(batch, length or 4000)
    elif main == "input_features":
        mels = int(getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80)))
        frames = 2 * int(getattr(config, "max_source_positions", length or 200))
        shape = (batch, mels, frames) if config.model_type == "whisper" else (batch, frames, mels)
        inputs[main] = floats(*shape)
    elif vocabulary:
        inputs[main] = integers(vocabulary, batch, tokens)
    else:
        raise CaptureError(
            f"model '{name}': no example can be made up for its input '{main}'; describe it in a Python file"
        )
    if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = integers(vocabulary, batch, tokens)
    if "labels" in taken:
        inputs["labels"] = _labels(model, config, inputs, vocabulary, integers)
    return inputs


def _labels(
    model: nn.Module, config: Any, inputs: dict[str, Tensor], vocabulary: int, integers: Any
) -> Tensor:
    kind = type(model).__name__
    first = next(iter(inputs.values()))
    classes = int(getattr(config, "num_labels", _DEFAULT_CLASSES))
    if "TokenClassification" in kind:
        return integers(classes, *first.shape[:2])
    if "Segmentation" in kind:
        return integers(classes, first.shape[0], *first.shape[-2:])
    if "Classification" in kind or "MultipleChoice" in kind:
        return integers(classes, first.shape[0])
    return integers(vocabulary, *inputs.get("decoder_input_ids", inputs.get("input_ids", first)).shape[:2])


def _longest(config: Any) -> int:
    """The longest sequence the model's positions allow."""
    fields = (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_target_positions",
        "max_sequence_length",
    )
    found = [getattr(config, field, None) for field in fields]
    return min((int(n) for n in found if isinstance(n, int) and n > 0), default=1 << 20)


def _size(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[-1])
    return int(size), int(size)
