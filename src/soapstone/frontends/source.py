"""MODEL, as a user writes it, becomes a captured graph.

lenet                       a model of the zoo
rnnlm:steps=2,tiny          with options
hf:path/to/config.json      a Hugging Face configuration, or a directory with one
path/to/file.py:function    a function that returns (module, example_inputs[, loss])
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends import huggingface, pyfile
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.losses import INNER, Loss, WithLoss, with_loss
from soapstone.frontends.zoo import ZOO, zoo_model


@dataclass(frozen=True)
class Source:
    """A model to be captured: a module that returns its loss (or outputs), and example inputs.

    `prefix` is what wrapping put before the names of the user's parameters.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    prefix: str = ""

    def captured(self) -> Captured:
        """The graph, its constants and what is to be said about it."""
        return capture(self.module, self.inputs, self.name, prefix=self.prefix)


def load(
    model: str,
    *,
    batch: int | None = None,
    devices: int = 1,
    tiny: bool = False,
    loss: str | Loss | None = None,
    length: int | None = None,
    weights: bool = False,
) -> Source:
    """The model that MODEL names.

    `batch` is the number of samples of a whole step (default: the model's own per device times
    `devices`). Without `weights` the zoo's and Hugging Face's models are built without memory, on
    the meta device: enough for planning.
    """
    if batch is not None and batch < 1:
        raise CaptureError(f"a batch needs at least one sample, not {batch}")
    if model.startswith("hf:"):
        return _from_huggingface(model, batch or 8 * devices, length, loss, weights)
    path, _, function = model.rpartition(":")
    if path.endswith(".py") or "/" in path:
        return _from_file(Path(path), function, batch, loss)
    if model.endswith(".py"):
        raise CaptureError(f"'{model}' names a file but no function in it: write {model}:function")
    name, _, options = model.partition(":")
    if name not in ZOO and ("/" in model or Path(model).exists()):
        raise CaptureError(
            f"'{model}' is not a model: write a zoo name, hf:CONFIG, or path/to/file.py:function"
        )
    return _from_zoo(name, _options(options, model), batch, devices, tiny, loss, weights)


def _options(text: str, model: str) -> dict[str, Any]:
    """`steps=2,tiny` as a dict; a bare name means true."""
    found: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        key, given, value = part.partition("=")
        if not key.strip().isidentifier():
            raise CaptureError(f"model '{model}': options are written as name=value, not '{part}'")
        try:
            found[key.strip()] = ast.literal_eval(value) if given else True
        except (ValueError, SyntaxError):
            found[key.strip()] = value
    return found


def _from_zoo(
    name: str,
    options: dict[str, Any],
    batch: int | None,
    devices: int,
    tiny: bool,
    loss: str | Loss | None,
    weights: bool,
) -> Source:
    model = zoo_model(name)
    if loss is not None:
        raise CaptureError(f"model '{name}' of the zoo brings its own loss: leave out --loss")
    small = bool(options.pop("tiny", False)) or tiny
    count = batch or (4 if small else model.batch_per_device) * devices
    with torch.device("cpu" if weights else "meta"):
        module = model.build(tiny=small, **options)
        inputs = model.inputs(count, tiny=small, **options)
    return Source(name, module, tuple(inputs))


def _from_huggingface(
    model: str, batch: int, length: int | None, loss: str | Loss | None, weights: bool
) -> Source:
    path = Path(model.removeprefix("hf:"))
    name = path.name if path.is_dir() else path.parent.name or path.stem
    with torch.device("cpu" if weights else "meta"):
        module, inputs = huggingface.built(path, name, batch, length)
        if loss is None:
            wrapped: nn.Module = WithLoss(module, names=tuple(inputs))
            return Source(name, wrapped, tuple(inputs.values()), INNER)
        given = {key: value for key, value in inputs.items() if key != "labels"}
        wrapped, tensors = _named_with_loss(module, given, loss, name)
    return Source(name, wrapped, tensors, INNER)


def _from_file(path: Path, function: str, batch: int | None, loss: str | Loss | None) -> Source:
    module, inputs, own = pyfile.called(path, function, batch)
    chosen = loss or own
    if isinstance(inputs, Mapping):
        if chosen is None:
            return Source(path.stem, WithLoss(module, names=tuple(inputs)), tuple(inputs.values()), INNER)
        wrapped, tensors = _named_with_loss(module, inputs, chosen, path.stem)
    else:
        wrapped, tensors = with_loss(module, inputs, chosen, path.stem)
    return Source(path.stem, wrapped, tensors, INNER)


def _named_with_loss(
    module: nn.Module, inputs: Mapping[str, Tensor], loss: str | Loss, name: str
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """`with_loss` for a module whose inputs go by name."""
    by_position = _Named(module, tuple(inputs))
    wrapped, tensors = with_loss(by_position, tuple(inputs.values()), loss, name)
    assert isinstance(wrapped, WithLoss)
    return WithLoss(module, wrapped.loss, tuple(inputs)), tensors


class _Named(nn.Module):
    """A module called by position that calls another by name."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, *inputs: Tensor) -> Any:
        return self.inner(**dict(zip(self.names, inputs, strict=True)))
