"""A model's forward pass as capture can take it: fixed options, every layer, a loss of fixed shapes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Where a forward pass offers these, it is called with them.
_OPTIONS: Mapping[str, bool] = {"return_loss": True, "use_cache": False, "use_mems": False}
_NO_LABEL = -100  # what transformers and torch ignore

# Modules with a backward pass of their own that is no more than the derivative of this function.
_PLAIN: Mapping[str, str] = {"BloomGelu": "bloom_gelu_forward"}


def traceable(model: nn.Module) -> nn.Module:
    """The model, its forward pass replaced by one that a graph can hold."""
    forward = model.forward
    taken = inspect.signature(forward).parameters
    options = {name: value for name, value in _OPTIONS.items() if name in taken}
    is_ctc = type(model).__name__.endswith("ForCTC")
    for part in model.modules():
        plain = _PLAIN.get(type(part).__name__)
        if plain is not None:
            part.forward = getattr(sys.modules[type(part).__module__], plain)

    @functools.wraps(forward)
    def settled(**inputs: Any) -> Any:
        with _Steady(), _unchecked():
            if not is_ctc or "labels" not in inputs:
                return forward(**inputs, **options)
            labels = inputs.pop("labels")
            return {"loss": _ctc_loss(model, forward(**inputs, **options).logits, labels)}

    model.forward = settled
    return model


class _Steady(TorchFunctionMode):
    """The same branches in every step.

    For LayerDrop, models draw one number per layer and compare it with their rate, which the
    configuration has set to zero: no layer is dropped. Where not all values are finite, they clamp
    them to what their dtype holds: here always, which leaves finite values as they are.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.rand and args and args[0] in ([], ()):
            return 1.0
        if func is torch.isfinite:
            return _NotAll()
        return func(*args, **(kwargs or {}))


class _NotAll:
    """A mask that is not true everywhere."""

    def all(self) -> bool:
        return False


@contextmanager
def _unchecked() -> Iterator[None]:
    """Without the checks of transformers that compare values: they would be branches in the graph."""
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# -- connectionist temporal classification ----------------------------------------------------------


@torch.library.custom_op("soapstone::ctc_loss", mutates_args=())
def ctc_loss(
    x: Tensor, target: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The loss of each sequence. torch's own operator keeps a tensor whose shape follows from the
    lengths, so it has no place in a graph of fixed shapes; this one keeps nothing."""
    return F.ctc_loss(x, target, frames, lengths, blank, "none", zero_infinity)


@ctc_loss.register_fake
def _(x: Tensor, target: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    del target, frames, lengths, blank, zero_infinity
    return x.new_empty(x.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    x, target, frames, lengths = ctx.saved_tensors
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        loss = F.ctc_loss(again, target, frames, lengths, ctx.blank, "none", ctx.zero_infinity)
    return *torch.autograd.grad(loss, again, gradient), None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_keep)


def _ctc_loss(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss, for labels whose padding stands at the end: its own code first collects
    all labels that are no padding, whose number no graph can know."""
    config = model.config
    lengths = ((labels != _NO_LABEL) & (labels != config.pad_token_id)).sum(-1)
    frames = torch.full((logits.shape[0],), logits.shape[1], device=labels.device)
    x = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).transpose(0, 1)
    losses = ctc_loss(x, labels, frames, lengths, config.pad_token_id, config.ctc_zero_infinity)
    return losses.sum() if config.ctc_loss_reduction == "sum" else (losses / lengths.clamp(min=1)).mean()
