"""A training loss around any module: the one it computes itself, or one added to its output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.errors import CaptureError

Loss = Callable[[Any, Tensor], Tensor]
INNER = "inner."
"""What the wrapper puts before the names of the wrapped module's parameters."""


def _by_class(function: Callable[..., Tensor]) -> Loss:
    """A loss over classes on the last axis: one target per position."""
    return lambda output, target: function(output.flatten(0, -2), target.flatten())


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _by_class(F.cross_entropy),
    "nll": _by_class(F.nll_loss),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
_BY_CLASS = ("cross_entropy", "nll")


class WithLoss(nn.Module):
    """A module that returns its training loss.

    Without `loss`: the wrapped module's own (a scalar, or the `loss` of a Hugging Face output); an
    output that is neither is returned as it is. With `loss`: that of the output and the last input.
    """

    def __init__(self, inner: nn.Module, loss: Loss | None = None, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.inner = inner
        self.loss = loss
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Any:
        """The loss on inputs in the order of the example."""
        given = inputs[:-1] if self.loss is not None else inputs
        named = dict(zip(self.names, given, strict=True)) if self.names else {}
        output = self.inner(**named) if named else self.inner(*given)
        if self.loss is not None:
            return self.loss(_prediction(output), inputs[-1])
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return own if isinstance(own, Tensor) else output


def _prediction(output: Any) -> Any:
    """The tensor a loss is taken of: the output itself, its `logits`, or the first of several."""
    if isinstance(output, Mapping):
        return output.get("logits", next(iter(output.values())))
    if isinstance(output, tuple | list):
        return output[0]
    return getattr(output, "logits", output)


def with_loss(
    module: nn.Module, inputs: Sequence[Tensor], loss: str | Loss | None, name: str
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module that returns a loss, and its inputs: with a target added where none was given."""
    if loss is None:
        return WithLoss(module), tuple(inputs)
    if isinstance(loss, str) and loss not in LOSSES:
        raise CaptureError(f"there is no loss '{loss}': choose one of {', '.join(LOSSES)}")
    function = LOSSES[loss] if isinstance(loss, str) else loss
    if not callable(function):
        raise CaptureError(
            f"model '{name}': a loss is a name or a function of (output, target), not {loss!r}"
        )
    if _takes_fewer(module, len(inputs)):
        return WithLoss(module, function), tuple(inputs)
    if not isinstance(loss, str):
        raise CaptureError(
            f"model '{name}': its loss function needs a target; add one to the end of the example inputs"
        )
    return WithLoss(module, function), (*inputs, _target(module, inputs, loss, name))


def _takes_fewer(module: nn.Module, count: int) -> bool:
    """Whether the module cannot take all the inputs, so that the last one must be the target."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) < count


def _target(module: nn.Module, inputs: Sequence[Tensor], loss: str, name: str) -> Tensor:
    """A synthetic target of the shape that the loss needs for the module's output."""
    was_training = module.training
    with torch.no_grad():
        module.eval()
        try:
            output = _prediction(module(*inputs))
        except Exception as error:
            raise CaptureError(
                f"model '{name}' fails on its example inputs: {type(error).__name__}: {error}"
            ) from error
        finally:
            module.train(was_training)
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise CaptureError(
            f"model '{name}': loss '{loss}' needs an output with a batch and classes, not {_shown(output)}"
        )
    if loss in _BY_CLASS:
        return torch.zeros(output.shape[:-1], dtype=torch.int64, device=output.device)
    return torch.zeros_like(output)


def _shown(output: Any) -> str:
    return f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
