"""MODEL, as a user writes it, becomes a captured graph.

lenet                       a model of the zoo
rnnlm:steps=2,tiny          with options
hf:path/to/config.json      a Hugging Face configuration, or a directory with one
path/to/file.py:function    a function that returns (module, example_inputs[, loss])
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends import huggingface, pyfile
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.losses import INNER, Loss, WithLoss, with_loss
from soapstone.frontends.zoo import ZOO, zoo_model
from soapstone.graph import Graph, Role

_MOST_SAMPLES = 2**31 - 1
"""[choice] No one trains with more at once, and sizes stay countable."""
_AT_COMMAS = re.compile(r",(?![^(\[]*[)\]])")
"""Commas between options, and not within a tuple."""


@dataclass(frozen=True)
class Source:
    """A model to be captured: a module that returns its loss (or outputs), and example inputs.

    `prefix` is what wrapping put before the names of the user's parameters; `notes` are what the
    user should know about how the module was made; `samples` is how many samples the inputs hold,
    where that is known.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    prefix: str = ""
    notes: tuple[str, ...] = ()
    samples: int | None = None

    def captured(self) -> Captured:
        """The graph, its constants and what is to be said about it."""
        module = self.module
        names = module.input_names(len(self.inputs)) if isinstance(module, WithLoss) else ()
        captured = capture(
            module, self.inputs, self.name, samples=self.samples, prefix=self.prefix, input_names=names
        )
        about = (*_about_loss(captured.graph), *_about_weights(captured.graph))
        return replace(captured, notes=(*self.notes, *captured.notes, *about))


def _about_loss(graph: Graph) -> Iterator[str]:
    """What stands in the way of training."""
    if graph.loss is None:
        yield "the model returns no loss, so it cannot be trained: let it return one, or add one with --loss"
    elif graph.loss not in graph.differentiable:
        yield "the loss depends on no weight, so there is nothing to train"


def _about_weights(graph: Graph) -> Iterator[str]:
    """What would stay as it is in training."""
    weights = [value.name for value in graph.with_role(Role.WEIGHT)]
    read = {name for node in graph.nodes for name in node.reads}
    idle = [name for name in weights if name not in read]
    if idle:
        yield f"{len(idle)} of {len(weights)} weights take no part on these inputs (the first is '{idle[0]}')"


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
    if batch is not None and not 1 <= batch <= _MOST_SAMPLES:
        raise CaptureError(f"a batch has at least one sample and at most {_MOST_SAMPLES:,}, not {batch}")
    is_huggingface = model.startswith("hf:")
    path, _, function = model.rpartition(":")
    is_file = not is_huggingface and (path.endswith(".py") or "/" in path)
    if length is not None and not is_huggingface:
        raise CaptureError(f"--length is for Hugging Face models, and '{model}' is none: leave it out")
    if tiny and (is_huggingface or is_file):
        raise CaptureError(f"--tiny is for models of the zoo, and '{model}' is none: leave it out")
    if is_huggingface:
        return _from_huggingface(model, batch or 8 * devices, length, loss, weights)
    if is_file:
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
    for part in _AT_COMMAS.split(text) if text else []:
        key, given, value = part.partition("=")
        if not key.strip().isidentifier():
            raise CaptureError(f"model '{model}': options are written as name=value, not '{part}'")
        if key.strip() in found:
            raise CaptureError(f"model '{model}' gives the option '{key.strip()}' twice")
        try:
            found[key.strip()] = ast.literal_eval(value.strip()) if given else True
        except (ValueError, SyntaxError, MemoryError, RecursionError):
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
        try:
            module = model.build(tiny=small, **options)
            inputs = model.inputs(count, tiny=small, **options)
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # more than torch can count
            told = next(iter(str(error).splitlines()), type(error).__name__)
            raise CaptureError(
                f"model '{name}' cannot be made with a batch of {count} and these options: {told}"
            ) from error
    return Source(name, module, tuple(inputs))


def _from_huggingface(
    model: str, batch: int, length: int | None, loss: str | Loss | None, weights: bool
) -> Source:
    path = Path(model.removeprefix("hf:"))
    name = path.name if path.is_dir() else path.parent.name or path.stem
    with torch.device("cpu" if weights else "meta"):
        built = huggingface.built(path, name, batch, length)
        given = {key: value for key, value in built.inputs.items() if loss is None or key != "labels"}
        wrapped, tensors = with_loss(built.model, tuple(given.values()), loss, name, tuple(given))
    return Source(name, wrapped, tensors, INNER, built.notes)


def _from_file(path: Path, function: str, batch: int | None, loss: str | Loss | None) -> Source:
    made = pyfile.called(path, function, batch)
    chosen = made.loss if loss is None else loss
    wrapped, tensors = with_loss(made.module, made.inputs, chosen, path.stem, made.names)
    known = made.batch is not None and any(made.batch in tensor.shape for tensor in tensors)
    return Source(path.stem, wrapped, tensors, INNER, samples=made.batch if known else None)
