"""The configuration of a model: read from JSON, and settled for capture.

A configuration may ask for what no graph holds: layers skipped by the toss of a coin (LayerDrop),
inputs masked at random places (SpecAugment), caches of earlier calls. These are switched off; a note
says so where it changes what is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soapstone.errors import CaptureError

LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")
_MASKED_SHARES = ("mask_time_prob", "mask_feature_prob")


def read(path: Path) -> Any:
    """The configuration in a file, or in a directory's `config.json`."""
    file = path / "config.json" if path.is_dir() else path
    fields = _fields(file)
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise CaptureError(
            "Hugging Face models need the package transformers: pip install 'soapstone[hf]'"
        ) from error
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        raise CaptureError(
            f"{file}: the installed transformers has no model type '{kind}': install a version that has,"
            " or write a Python file that returns the model"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise CaptureError(
            f"{file}: these fields make no configuration of the type '{kind}': {_told(error)}"
        ) from error


def _fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaptureError(f"there is no Hugging Face configuration at {file}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CaptureError(f"{file} is not a Hugging Face configuration: {_told(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise CaptureError(
            f"{file} has no field 'model_type': it is not a Hugging Face configuration, whose file is"
            " config.json"
        )
    return fields


def settled(config: Any, notes: list[str]) -> Any:
    """The configuration, changed in place to what can be captured."""
    dropped = False
    for part in parts(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False
        for name in LAYER_DROPS:
            if getattr(part, name, 0):
                setattr(part, name, 0.0)
                dropped = True
    if dropped:
        notes.append("LayerDrop (layers skipped at random) is not kept: every layer runs in every step")
    masking = [part for part in parts(config) if getattr(part, "apply_spec_augment", False)]
    if any(getattr(part, share, 0) for part in masking for share in _MASKED_SHARES):
        notes.append("SpecAugment (inputs masked at random) is not kept: mask them outside of the model")
    for part in masking:
        part.apply_spec_augment = False
    return config


def parts(config: Any) -> Iterator[Any]:
    """The configuration and those within it, outermost first."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__
