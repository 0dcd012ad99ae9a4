"""MODEL, as a user writes it, becomes a captured graph.

lenet                       a model of the zoo
rnnlm:steps=2,tiny          with options
hf:path/to/config.json      a Hugging Face configuration, or a directory with one
path/to/file.py:function    a function that returns (module, example_inputs[, loss])

All may have the option batch_norm=local. The last two may end with options, :loss=NAME,batch_norm=local, the
former with length=TOKENS too, as --loss, --batch-norm and --length add them.
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
from soapstone.frontends import batchnorm, huggingface, pyfile
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.losses import INNER, Loss, WithLoss, with_loss
from soapstone.frontends.zoo import ZOO, zoo_model
from soapstone.graph import Graph, Role

_MOST_SAMPLES = 2**31 - 1
"""[choice] No one trains with more at once, and sizes stay countable."""
_OF_FILES = ("loss", "batch_norm")
_OF_HUGGINGFACE = (*_OF_FILES, "length")
_TAIL = re.compile(rf"(.+):((?:{'|'.join(_OF_HUGGINGFACE)})=[^:/]*)")
"""The options after a path."""
_OWN_LOSS = "model '{}' of the zoo brings its own loss: leave out --loss"
_AT_COMMAS = re.compile(r",(?![^(\[]*[)\]])")
"""Commas between options, and not within a tuple."""


@dataclass(frozen=True)
class Source:
    """A model to be captured: a module that returns its loss (or outputs), and example inputs.

    `prefix` is what wrapping put before the names of the user's parameters; `notes` are what the
    user should know about how the module was made; `samples` is how many samples the inputs hold,
    where that is known; `batch_norm` is over which of them batch norms take statistics.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    prefix: str = ""
    notes: tuple[str, ...] = ()
    samples: int | None = None
    batch_norm: str = batchnorm.WHOLE

    def captured(self) -> Captured:
        """The graph, its constants and what is to be said about it."""
        module = self.module
        names = module.input_names(len(self.inputs)) if isinstance(module, WithLoss) else ()
        captured = capture(
            module,
            self.inputs,
            self.name,
            samples=self.samples,
            prefix=self.prefix,
            input_names=names,
            batch_norm=self.batch_norm,
        )
        about = (*_about_loss(captured.graph), *_about_weights(captured.graph))
        return replace(captured, notes=(*self.notes, *captured.notes, *about))


def _about_loss(graph: Graph) -> Iterator[str]:
    """What stands in the way of training."""
    if graph.loss is None and len(graph.outputs) > 1 and not any(graph.value(n).shape for n in graph.outputs):
        yield (
            f"the model returns {len(graph.outputs)} numbers and not one loss, so it cannot be trained: "
            "let it return their sum"
        )
    elif graph.loss is None:
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


def with_options(
    model: str,
    *,
    tiny: bool = False,
    length: int | None = None,
    loss: str | None = None,
    batch_norm: str | None = None,
) -> str:
    """MODEL with these options in it, so that this text alone says what is to be captured."""
    if not model.startswith("hf:"):
        _refuse(model, length is not None, "--length", "Hugging Face models")
    if not _is_zoo(model):
        _refuse(model, tiny, "--tiny", "models of the zoo")
    elif loss is not None:
        raise CaptureError(_OWN_LOSS.format(model.partition(":")[0]))
    said = {"length": length, "loss": loss, "batch_norm": batch_norm and batchnorm.checked(batch_norm)}
    given = [f"{name}={value}" for name, value in said.items() if value is not None]
    if not given and not tiny:
        return model
    has_options = ":" in model if _is_zoo(model) else _with_tail(model) != (model, {})
    return f"{model}{',' if has_options else ':'}{','.join([*given, *['tiny'] * tiny])}"


def _refuse(model: str, is_given: bool, option: str, meant_for: str) -> None:
    if is_given:
        raise CaptureError(f"{option} is for {meant_for}, and '{model}' is none: leave it out")


def _is_zoo(model: str) -> bool:
    path = model.rpartition(":")[0]
    is_file = path.endswith(".py") or "/" in path or ".py:" in model or model.endswith(".py")
    return not model.startswith("hf:") and not is_file


def _with_tail(model: str) -> tuple[str, dict[str, Any]]:
    """A path, and the options after it."""
    found = _TAIL.fullmatch(model)
    if found is None:
        return model, {}
    options = _options(found[2], model)
    known = _OF_HUGGINGFACE if model.startswith("hf:") else _OF_FILES
    for name in options:
        if name not in known:
            raise CaptureError(f"model '{model}' has no option '{name}'; choose from {', '.join(known)}")
    return found[1], options


def load(  # noqa: PLR0913, one parameter for each thing a user may decide
    model: str,
    *,
    batch: int | None = None,
    devices: int = 1,
    tiny: bool = False,
    loss: str | Loss | None = None,
    length: int | None = None,
    batch_norm: str | None = None,
    weights: bool = False,
    insist: bool = True,
) -> Source:
    """The model that MODEL names; what is given here goes before what MODEL says.

    `batch` is the number of samples of a whole step (default: the model's own per device times
    `devices`). Without `weights` the zoo's and Hugging Face's models are built without memory, on
    the meta device: enough for planning. `insist` refuses a function of a file that takes no batch, where
    one is given; else the function decides.
    """
    if batch is not None and not 1 <= batch <= _MOST_SAMPLES:
        raise CaptureError(f"a batch has at least one sample and at most {_MOST_SAMPLES:,}, not {batch}")
    model = with_options(model, tiny=tiny, length=length, batch_norm=batch_norm)
    if not _is_zoo(model):
        path, given = _with_tail(model)
        chosen = _batch_norm(given, model)
        loss = given.get("loss") if loss is None else loss
        if path.startswith("hf:"):
            length = _length(given, model)
            made = _from_huggingface(path, batch or 8 * devices, length, loss, weights)
            return replace(made, batch_norm=chosen)
        file, _, function = path.rpartition(":")
        if file:
            return replace(_from_file(Path(file), function, batch, loss, insist), batch_norm=chosen)
    if model.endswith(".py"):
        raise CaptureError(f"'{model}' names a file but no function in it: write {model}:function")
    name, _, options = model.partition(":")
    if name not in ZOO and ("/" in model or Path(model).exists()):
        raise CaptureError(
            f"'{model}' is not a model: write a zoo name, hf:CONFIG, or path/to/file.py:function"
        )
    given = _options(options, model)
    chosen = _batch_norm(given, model)
    return replace(_from_zoo(name, given, batch, devices, loss, weights), batch_norm=chosen)


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


def _batch_norm(given: dict[str, Any], model: str) -> str:
    """The option of every sort of model, taken out of the others."""
    return batchnorm.checked(given.pop("batch_norm", batchnorm.WHOLE), f"model '{model}': ")


def _length(given: dict[str, Any], model: str) -> int | None:
    length = given.get("length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise CaptureError(f"model '{model}': a length is a number of tokens, at least 1, not {length!r}")
    return length


def _from_zoo(
    name: str,
    options: dict[str, Any],
    batch: int | None,
    devices: int,
    loss: str | Loss | None,
    weights: bool,
) -> Source:
    model = zoo_model(name)
    if loss is not None:
        raise CaptureError(_OWN_LOSS.format(name))
    small = options.pop("tiny", False)
    if not isinstance(small, bool):
        raise CaptureError(f"{name}:tiny is the small variant and takes no number: leave out '={small}'")
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


def _from_file(path: Path, function: str, batch: int | None, loss: str | Loss | None, insist: bool) -> Source:
    made = pyfile.called(path, function, batch, insist)
    chosen = made.loss if loss is None else loss
    wrapped, tensors = with_loss(made.module, made.inputs, chosen, path.stem, made.names)
    known = made.batch is not None and any(made.batch in tensor.shape for tensor in tensors)
    return Source(path.stem, wrapped, tensors, INNER, samples=made.batch if known else None)
