"""A person's own model: `path/to/file.py:function`.

The function takes no arguments (or only optional ones; `batch` is passed if it is among them) and
returns `(module, example_inputs)` or `(module, example_inputs, loss)`. The inputs are a tensor, a
tuple of tensors, or a dict of them by name. The loss is a name (`soapstone graph --help` lists
them) or a function of (output, target); a target may stand at the end of the inputs.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.program import user_place


def called(path: Path, function: str, batch: int | None) -> tuple[nn.Module, Any, Any]:
    """What the function returns, checked: module, inputs, loss (or None)."""
    made = _result(_loaded(path), path, function, batch)
    what = f"{path}:{function}"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CaptureError(f"{what} must return (module, example_inputs[, loss]), not {_kind(made)}")
    module, inputs, loss = made if len(made) == 3 else (*made, None)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"{what} must return an nn.Module first, not {_kind(module)}")
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if (
        not isinstance(tensors, list | tuple)
        or not tensors
        or not all(isinstance(t, Tensor) for t in tensors)
    ):
        raise CaptureError(
            f"{what}: example inputs must be a tensor, or a tuple or dict of tensors, not {_kind(inputs)}"
        )
    return module, inputs, loss


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
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CaptureError(f"{path} cannot be loaded: {_told(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _result(module: ModuleType, path: Path, function: str, batch: int | None) -> Any:
    found = getattr(module, function, None)
    if found is None:
        names = [
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        close = get_close_matches(function, names, n=1)
        known = f"did you mean '{close[0]}'?" if close else f"it defines {', '.join(names) or 'no function'}"
        raise CaptureError(f"{path} has no function '{function}'; {known}")
    if not callable(found):
        raise CaptureError(f"'{function}' of {path} is not a function")
    takes_batch = "batch" in inspect.signature(found).parameters
    if batch is not None and not takes_batch:
        raise CaptureError(f"{path}:{function} takes no argument 'batch': give it one, or leave out --batch")
    try:
        return found(batch=batch) if takes_batch and batch is not None else found()
    except Exception as error:
        raise CaptureError(f"{path}:{function} failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    place = user_place(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{f' at {place}' if place else ''}{f': {first}' if first else ''}"


def _kind(value: object) -> str:
    return (
        f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    )
