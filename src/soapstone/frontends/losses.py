"""A training loss around any module: the one it computes itself, or one added to its output."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node as FxNode

from soapstone.errors import CaptureError
from soapstone.frontends.program import exported

Loss = Callable[[Any, Tensor], Tensor]
INNER = "inner."
"""What the wrapper puts before the names of the wrapped module's parameters."""


def _by_class(function: Callable[..., Tensor]) -> Loss:
    """A loss over classes: on the last axis of an output, on axis 1 of a batch of images."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        _agree(output, _label_shape(output), target)
        if output.ndim > 3:
            return function(output, target)
        return function(output.flatten(0, -2), target.flatten())

    return loss


def _label_shape(output: Tensor) -> torch.Size:
    return torch.Size((output.shape[0], *output.shape[2:])) if output.ndim > 3 else output.shape[:-1]


def _elementwise(function: Callable[..., Tensor]) -> Loss:
    """A loss of a target like the output: torch would broadcast any other."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        _agree(output, output.shape, target)
        return function(output, target)

    return loss


def _agree(output: Tensor, wanted: Sequence[int], target: Tensor) -> None:
    if target.shape != wanted:
        raise CaptureError(
            f"for an output of shape {list(output.shape)} this loss needs a target of shape {list(wanted)},"
            f" not {list(target.shape)}"
        )


_BY_CLASS: Mapping[str, Loss] = {"cross_entropy": _by_class(F.cross_entropy), "nll": _by_class(F.nll_loss)}
LOSSES: Mapping[str, Loss] = {
    **_BY_CLASS,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "smooth_l1": _elementwise(F.smooth_l1_loss),
    "bce_with_logits": _elementwise(F.binary_cross_entropy_with_logits),
}


class WithLoss(nn.Module):
    """A module that returns its training loss.

    Without `loss`: the wrapped module's own (a scalar, the `loss` of a Hugging Face output, or the
    only scalar of several outputs); outputs without any are returned as they are. With `loss`: that
    of the output and the last input, called `target`. `names` are the names of the module's inputs
    where they are passed by name.
    """

    def __init__(
        self, inner: nn.Module, loss: Loss | None = None, names: Sequence[str] = (), target: str = "target"
    ) -> None:
        super().__init__()
        self.inner = inner
        self.loss = loss
        self.names, self.target = tuple(names), target
        self.training = inner.training

    def forward(self, *inputs: Tensor) -> Any:
        """The loss on inputs in the order of the example."""
        given = inputs[:-1] if self.loss is not None else inputs
        output = _plain(_called(self.inner, self.names, given))
        if self.loss is not None:
            return self.loss(_prediction(output), inputs[-1])
        own = _own_loss(output)
        return output if own is None else own

    def input_names(self, count: int) -> tuple[str, ...]:
        """What each of so many inputs is called."""
        given = count - (self.loss is not None)
        names = self.names or _positional_names(self.inner, given)
        return (*names, self.target) if self.loss is not None else tuple(names)


def _called(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> Any:
    return module(**dict(zip(names, inputs, strict=True))) if names else module(*inputs)


def _plain(output: Any) -> Any:
    """An output as tensors in tuples, lists and dicts; a dataclass becomes the dict of its fields."""
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping | type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if output is None or isinstance(output, Tensor | tuple | list | Mapping):
        return output
    fields = {name: v for name, v in getattr(output, "__dict__", {}).items() if isinstance(v, Tensor)}
    if not fields:
        raise CaptureError(
            f"the model returns {_shown(output)}: a model returns its loss, or tensors in tuples or dicts"
        )
    return fields


def _own_loss(output: Any) -> Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    several = output if isinstance(output, tuple | list) else ()
    scalars = [part for part in several if isinstance(part, Tensor) and not part.shape]
    return scalars[0] if len(scalars) == 1 and scalars[0].is_floating_point() else None


def _prediction(output: Any) -> Any:
    """The tensor a loss is taken of: the output itself, its `logits`, or the first of several."""
    if isinstance(output, Mapping):
        return output.get("logits", next(iter(output.values()), None))
    return output[0] if isinstance(output, tuple | list) and output else output


def _positional_names(module: nn.Module, count: int) -> list[str]:
    """What the module's `forward` calls its first inputs."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def with_loss(
    module: nn.Module, inputs: Sequence[Tensor], loss: str | Loss | None, name: str, names: Sequence[str] = ()
) -> tuple[WithLoss, tuple[Tensor, ...]]:
    """A module that returns a loss, and its inputs: with a target added where none was given."""
    if loss is None:
        return WithLoss(module, names=names), tuple(inputs)
    if isinstance(loss, str) and loss not in LOSSES:
        raise CaptureError(f"there is no loss '{loss}': choose one of {', '.join(LOSSES)}")
    function = LOSSES[loss] if isinstance(loss, str) else loss
    if not callable(function) or isinstance(function, type):
        raise CaptureError(
            f"model '{name}': a loss is a name or a function of (output, target), not {_shown(loss)}"
        )
    if names and not _takes(module, names[-1]):
        return WithLoss(module, function, names[:-1], names[-1]), tuple(inputs)
    if not names and _has_target(module, len(inputs), isinstance(loss, str)):
        return WithLoss(module, function), tuple(inputs)
    if not isinstance(loss, str):
        raise CaptureError(
            f"model '{name}': its loss function needs a target; add one to the end of the example inputs"
        )
    return WithLoss(module, function, names), (*inputs, _target(module, inputs, loss, name, names))


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the module has an input of that name."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _has_target(module: nn.Module, count: int, may_be_made_up: bool) -> bool:
    """Whether the last of so many inputs is the target and not the module's.

    Where a target can be made up, that is so only if the module cannot take all the inputs.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if may_be_made_up:
        return len(positional) < count and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return count > 1 and count > len([p for p in positional if p.default is p.empty])


def _target(
    module: nn.Module, inputs: Sequence[Tensor], loss: str, name: str, names: Sequence[str]
) -> Tensor:
    """A synthetic target of the shape that the loss needs for the module's output, found by tracing."""
    program = exported(_Prediction(module, names), inputs, name, [], prefix=INNER)
    (made,) = program.graph.find_nodes(op="output")[0].args[0][-1:] or (None,)
    output = made.meta["val"] if isinstance(made, FxNode) else made
    by_class = loss in _BY_CLASS
    if not isinstance(output, Tensor) or output.ndim < 1 + by_class:
        needed = "a batch and classes" if by_class else "a batch"
        already = ", which looks like a loss already" if getattr(output, "shape", None) == () else ""
        raise CaptureError(
            f"model '{name}': loss '{loss}' needs an output with {needed}, not {_shown(output)}{already}"
        )
    if by_class:
        return torch.zeros(_label_shape(output), dtype=torch.int64, device=output.device)
    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)


class _Prediction(nn.Module):
    """A module that returns the one output that a loss is taken of."""

    def __init__(self, inner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.inner, self.names = inner, tuple(names)
        self.training = inner.training

    def forward(self, *inputs: Tensor) -> Any:
        """The output on inputs in the order of the example."""
        return _prediction(_plain(_called(self.inner, self.names, inputs)))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
