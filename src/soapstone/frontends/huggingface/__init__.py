"""Hugging Face models from a configuration: random weights, offline, with inputs made up to fit.

`hf:DIR` or `hf:config.json` names the configuration. The class is the first of its `architectures`
that the installed transformers has; failing that, a head that suits the model type (`heads`). Inputs
are made up from the names that the class's `forward` takes and the sizes that its configuration
states (`inputs`). What a graph cannot hold but a configuration can leave out, is left out, and said
(`configuration`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from soapstone.frontends.huggingface.configuration import read, settled
from soapstone.frontends.huggingface.forward import traceable
from soapstone.frontends.huggingface.heads import constructed
from soapstone.frontends.huggingface.inputs import example_inputs


@dataclass(frozen=True)
class Built:
    """A model, example inputs by name, and what the user should know about both."""

    model: nn.Module
    inputs: dict[str, Tensor]
    notes: tuple[str, ...]


def built(path: Path, name: str, batch: int, length: int | None) -> Built:
    """The model of a configuration, on torch's default device."""
    notes: list[str] = []
    config = settled(read(path), notes)
    model = constructed(config, path, notes)
    # Some modules make their parameters by a call that knows no default device.
    model.to(torch.get_default_device())
    inputs = example_inputs(model, config, batch, length, name, notes)
    return Built(traceable(model), inputs, tuple(notes))
