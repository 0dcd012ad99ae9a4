"""A module, traced by `torch.export` in training mode.

Two things would get lost in tracing without a word, so they are looked for: a custom
`autograd.Function` is traced through and its own backward forgotten (refused), and
`torch.utils.checkpoint` leaves no trace (warned about).
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.export import ExportedProgram

from soapstone.errors import CaptureError

_OURS = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def exported(
    module: nn.Module, inputs: Sequence[Any], name: str, notes: list[str], train: bool = True
) -> ExportedProgram:
    """The functional ATen program of a training step's forward pass. Warnings go to `notes`."""
    was_training = module.training
    module.train(train)
    seen: set[str] = set()
    try:
        with _watched(seen), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, tuple(inputs), strict=False)
    except Exception as error:
        raise CaptureError(_sentence(name, error)) from error
    finally:
        module.train(was_training)
    functions = sorted(item for item in seen if item != _CHECKPOINT)
    if functions:
        raise CaptureError(
            f"model '{name}' uses the custom autograd.Function {functions[0]}, whose backward would be lost:"
            " write it with differentiable torch operators, or register it as a torch.library custom op"
        )
    if _CHECKPOINT in seen:
        notes.append("activation checkpointing (torch.utils.checkpoint) is not kept: activations are stored")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions({})


_CHECKPOINT = "torch.utils.checkpoint"


@contextlib.contextmanager
def _watched(seen: set[str]) -> Iterator[None]:
    """Note the use of what tracing would silently lose."""
    apply = torch.autograd.Function.apply
    checkpoint = torch.utils.checkpoint.checkpoint

    def noted_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            seen.add(f"{cls.__module__}.{cls.__qualname__}")
        return apply.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]

    def noted_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(_CHECKPOINT)
        for option in ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"):
            kwargs.pop(option, None)
        return function(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(noted_apply)  # type: ignore[assignment,method-assign]
    torch.utils.checkpoint.checkpoint = noted_checkpoint
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.utils.checkpoint.checkpoint = checkpoint


def _sentence(name: str, error: BaseException) -> str:
    """What went wrong in tracing, and where in the user's code."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    place = user_place(root) or user_place(error)
    at = f" at {place}" if place else ""
    kind = type(error).__name__ + type(root).__name__
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return (
            f"model '{name}' decides something from the values of a tensor{at}, which no graph can hold:"
            " compute both ways and choose with torch.where, or take the decision outside of the model"
        )
    first = next((line.strip() for line in str(root).splitlines() if line.strip()), type(root).__name__)
    return f"model '{name}' cannot be captured: {type(root).__name__}{at}: {first}"


def user_place(error: BaseException) -> str | None:
    """The innermost line of the user's own code on the way to an error, as `file:line (code)`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if frame.filename.startswith("<") or _TORCH in path.parents or path.parent == _OURS:
            continue
        if "contextlib" in path.name or "runpy" in path.name or "importlib" in frame.filename:
            continue
        code = linecache.getline(frame.filename, frame.lineno or 0).strip()
        return f"{path.name}:{frame.lineno} ({code})"
    return None
