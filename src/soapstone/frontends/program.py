"""A module, traced by `torch.export`, as a functional program of fixed shapes.

What tracing would lose without a word is the matter of `fidelity`; here, whatever a graph cannot hold
ends in one sentence: what, where in the user's code, and what to do.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node as FxNode

from soapstone.errors import CaptureError, SoapstoneError
from soapstone.frontends.fidelity import TAKES_NUMBER, VARIES, complaint_about, faithful, replaced
from soapstone.frontends.places import place_in_trace, place_of_error


def exported(
    module: nn.Module,
    inputs: Sequence[Any],
    name: str,
    notes: list[str],
    *,
    prefix: str = "",
    train: bool = True,
) -> ExportedProgram:
    """The functional ATen program of a module's forward pass; what the user should know goes to `notes`.

    `prefix` is cut off the names of parameters where they are told to the user. With `train`, a module
    in evaluation mode is put into training mode; one that trains already may have parts that do not,
    and is taken as it is. Either way it is left as it was.
    """
    _refuse_mixed_devices(module, inputs, name)
    with _in_mode(module, train), _quiet():
        try:
            with faithful(module, name, notes, prefix):
                program = torch.export.export(module, tuple(inputs), strict=False)
            program = program.run_decompositions(_BY_STRIDES)
        except SoapstoneError:
            raise
        except Exception as error:
            raise CaptureError(_sentence(name, error)) from error
    _refuse_what_a_graph_cannot_hold(program, name)
    _refuse_changed_weights(program, module, name, prefix)
    return program


@contextmanager
def _in_mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Training or evaluation for a while; parts that are in another mode than the whole stay so."""
    modes = {part: part.training for part in module.modules()}
    if module.training != train:
        module.train(train)
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own words about a trace that fails: it prints the graph so far."""
    from torch.export import _trace

    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), replaced(_trace, "print", lambda *_, **__: None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _refuse_mixed_devices(module: nn.Module, inputs: Sequence[Any], name: str) -> None:
    held = {tensor.device for tensor in module.parameters()}
    given = {tensor.device for tensor in inputs if isinstance(tensor, Tensor) and tensor.ndim}
    if held and given - held:
        raise CaptureError(
            f"model '{name}' has its parameters on {_listed(held)} and example inputs on"
            f" {_listed(given - held)}: put both on one device"
        )


def _listed(devices: set[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))


# -- tensors as memory -------------------------------------------------------------------------------
#
# A graph's values have no memory layout, so reads and writes by strides become reads and writes by
# index.


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    return x.reshape(-1).index_select(0, _places(x, size, stride, storage_offset)).reshape(size)


def _as_strided_scatter(
    x: Tensor, values: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    places = _places(x, size, stride, storage_offset)
    return x.reshape(-1).index_put((places,), values.reshape(-1)).reshape(x.shape)


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The positions, in a contiguous tensor's flat order, of the elements that strides name."""
    first = 0 if offset is None else offset - x.storage_offset()
    last = first + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not x.is_contiguous() or first < 0 or last >= x.numel():
        raise _NotContiguousError
    places = torch.full((), int(first), device=x.device)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + step * torch.arange(length, device=x.device)
    return places.reshape(-1)


class _NotContiguousError(Exception):
    """Strides name elements that the tensor does not hold, or not in the order of its memory."""


_BY_STRIDES = {
    torch.ops.aten.as_strided.default: _as_strided,
    torch.ops.aten.as_strided_scatter.default: _as_strided_scatter,
}


# -- what a graph cannot hold ------------------------------------------------------------------------


def _refuse_what_a_graph_cannot_hold(program: ExportedProgram, name: str) -> None:
    for node in program.graph.nodes:
        at = place_in_trace(node.meta.get("stack_trace"))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(_NESTED.format(name=name, at=at))
        for value in _values(node):
            complaint = complaint_about(value)
            if complaint is not None:
                raise CaptureError(complaint.format(name=name, at=at))


def _refuse_changed_weights(program: ExportedProgram, module: nn.Module, name: str, prefix: str) -> None:
    """Refuse to train what the forward pass writes too; a frozen parameter may be written."""
    for spec in program.graph_signature.output_specs:
        target = str(spec.target)
        if spec.kind is OutputKind.PARAMETER_MUTATION and module.get_parameter(target).requires_grad:
            raise CaptureError(
                f"model '{name}' changes its parameter '{target.removeprefix(prefix)}' in its forward pass"
                " (as nn.Embedding does with max_norm), which is left to the optimizer: do it between steps"
            )


def _values(node: FxNode) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, list | tuple) else (value,)


_NESTED = (
    "model '{name}' holds a graph within its graph{at}, as torch.cond makes it, which cannot be split: write"
    " it with plain operators, a branch with torch.where"
)
_STRIDES = (
    "model '{name}' calls as_strided{at} on a tensor that is not contiguous, and a graph knows no memory"
    " layout: call contiguous() first, or use slices"
)
_DECIDES = (
    "model '{name}' decides something from the values of a tensor{at}, which no graph can hold: compute"
    " both ways and choose with torch.where, or take the decision outside of the model"
)


def _sentence(name: str, error: BaseException) -> str:
    """What went wrong in tracing, and where in the user's code."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    kinds, message = f"{type(error).__name__} {type(root).__name__}", str(root)
    at = place_of_error(root) or place_of_error(error) or place_in_trace(message)
    if isinstance(root, _NotContiguousError):
        return _STRIDES.format(name=name, at=at)
    if "HigherOrderOp" in kinds:
        return _NESTED.format(name=name, at=at)
    if "DynamicOutputShape" in kinds:
        return VARIES.format(name=name, at=at)
    if "FakeTensor" in message and isinstance(root, TypeError):
        return TAKES_NUMBER.format(name=name, at=at)
    if "DataDependent" in kinds or "data-dependent" in message.lower():
        return _DECIDES.format(name=name, at=at)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    said = f": {first.rstrip('.')}" if first else ""
    return (
        f"model '{name}' cannot be traced on its example inputs: {type(root).__name__}{at}{said}"
        " (does it run on them by itself?)"
    )
