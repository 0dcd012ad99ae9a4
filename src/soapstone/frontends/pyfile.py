"""A person's own model: `path/to/file.py:function`.

The function takes no arguments, or only optional ones; `batch`, if it is among them, is the number of
samples. It returns `(module, example_inputs)` or `(module, example_inputs, loss)`. The inputs are a
tensor, a tuple of tensors, or a dict of them by name. The loss is a name (`soapstone graph --help`
lists them) or a function of (output, target); a target may stand at the end of the inputs.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.places import place_of_error

_WANTED = "must return (module, example_inputs) or (module, example_inputs, loss)"


@dataclass(frozen=True)
class Made:
    """What a person's function returned; `batch` is how many samples it was asked for, if known."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    loss: Any
    batch: int | None


def called(path: Path, function: str, batch: int | None, insist: bool = True) -> Made:
    """What the function returns, checked. `insist` refuses one that takes no batch, where one is given."""
    with _importing_from(path.parent):
        found = _function(_loaded(path), path, function)
        what = f"{path}:{function}"
        arguments = _arguments(found, what, batch, insist)
        try:
            returned = found(**arguments)
        except (Exception, SystemExit) as error:
            raise CaptureError(f"{what} failed: {_told(error)}") from error
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise CaptureError(f"{what} {_WANTED}, not {_kind(returned)}")
    module, inputs, loss = returned if len(returned) == 3 else (*returned, None)
    checked = _module(module, what)
    names, tensors = _tensors(inputs, what)
    return Made(checked, tensors, names, loss, arguments.get("batch"))


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """A function of a person's file."""
    with _importing_from(path.parent):
        return _function(_loaded(path), path, function)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Modules beside the file can be imported, and none leaves compiled code beside it."""
    place, writes = str(folder.resolve()), sys.dont_write_bytecode
    sys.path.insert(0, place)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        if place in sys.path:
            sys.path.remove(place)


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise CaptureError(f"there is no file {path}")
    if path.suffix != ".py":
        raise CaptureError(f"{path} is not a Python file: a model is named as path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"soapstone_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise CaptureError(f"{path} cannot be loaded: {_told(error)}") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    found = getattr(module, name, None) if name else None
    if found is None:
        close = get_close_matches(name, own, n=1)
        known = f"did you mean '{close[0]}'?" if close else f"it defines {', '.join(own) or 'no function'}"
        asked = f"has no function '{name}'" if name else "is a file: name a function in it"
        raise CaptureError(f"{path} {asked}; {known}")
    if not callable(found):
        raise CaptureError(f"'{name}' of {path} is {_kind(found)}, not a function that returns a model")
    return found


def _arguments(function: Callable[..., Any], what: str, batch: int | None, insist: bool) -> dict[str, Any]:
    """What to call the function with: `batch` as asked for, or as its default says."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = {}
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in optional]
    if needed and needed != ["batch"]:
        first = next(name for name in needed if name != "batch")
        raise CaptureError(
            f"{what} needs an argument '{first}', which it is not given: let it have a default"
        )
    if "batch" not in parameters:
        if batch is not None and insist:
            raise CaptureError(f"{what} takes no argument 'batch': give it one, or leave out --batch")
        return {}
    default = parameters["batch"].default
    if batch is None and needed:
        raise CaptureError(f"{what} needs to know the batch: say --batch N, or give it a default")
    return {"batch": default if batch is None else batch}


def _module(module: Any, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise CaptureError(f"{what} must return an nn.Module first, not {_kind(module)}")
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(f"{what} returns a TorchScript module: return the nn.Module it was made from")
    original = getattr(module, "_orig_mod", module)  # what torch.compile was given
    assert isinstance(original, nn.Module)
    return original


def _tensors(inputs: Any, what: str) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The names of the inputs, where they have any, and the inputs."""
    names: tuple[Any, ...] = ()
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        names, inputs = tuple(inputs), tuple(inputs.values())
    if not isinstance(inputs, tuple | list) or not inputs:
        raise CaptureError(
            f"{what}: example inputs are a tensor, or a tuple or dict of tensors, not {_kind(inputs)}"
        )
    for place, given in zip(names or range(len(inputs)), inputs, strict=True):
        if not isinstance(given, Tensor):
            raise CaptureError(f"{what}: example input {place!r} is not a tensor but {_kind(given)}")
        if names and not isinstance(place, str):
            raise CaptureError(f"{what}: the names of example inputs are strings, not {place!r}")
    return names, tuple(inputs)


def _told(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        at = f" at {Path(error.filename).name}:{error.lineno}" if error.filename else ""
        return f"{error.msg}{at}"
    if isinstance(error, SystemExit):
        return (
            f"it ends the program{place_of_error(error)}: keep what starts a run under"
            " if __name__ == '__main__'"
        )
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{place_of_error(error)}{f': {first}' if first else ''}"


def _kind(value: object) -> str:
    """A value as a sentence names it."""
    if value is None:
        return "nothing (None)"
    name = type(value).__name__
    if isinstance(value, tuple | list | dict):
        return f"a {name} of {len(value)}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
