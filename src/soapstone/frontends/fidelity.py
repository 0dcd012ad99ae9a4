"""What tracing would lose without a word is kept, noted or refused.

`torch.export` records the operators that a module calls and nothing of how autograd was told to treat
them. While `faithful` lasts:

    in the module                       traced as it is                     here
    torch.no_grad(), x.data             gradients flow through              detached
    x.data = y                          forgotten                           a write like any other
    instance norm's running statistics  never updated                       updated
    nn.SyncBatchNorm, in a rank         exchanges statistics, or fails      a batch norm like any other
    checks of distributions' arguments  a branch on values: no graph        left out
    torch.utils.checkpoint              vanishes, or fails when reentrant   vanishes, with a note
    a generator of random numbers       an argument that no graph holds     left out, with a note
    a custom autograd.Function          its own backward is forgotten       refused
    a gradient hook                     forgotten                           refused
    a backward pass within forward      leaves traced gradients behind      refused
    a write under no_grad or through    differentiated, or cut off          refused
    x.data into a computed tensor

A number taken out of a tensor and a shape that depends on values are refused here too, where the call
that makes them is still known. Names are replaced in torch for that long, so one model is traced at a
time in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from soapstone.errors import CaptureError
from soapstone.frontends.places import place_of_call

CHECKPOINTING = "activation checkpointing (torch.utils.checkpoint) is not kept: activations are stored"
GENERATORS = "the model's own random generators are not used: Soapstone draws random numbers by itself"

TAKES_NUMBER = (
    "model '{name}' takes a number out of a tensor{at}, which no graph can hold: compute with the tensor"
    " itself, and take sizes from shapes"
)
VARIES = (
    "model '{name}' makes a tensor whose shape depends on values{at}, and a plan needs fixed shapes: choose"
    " elements with torch.where or a product with the mask instead"
)
_HOOKED = (
    "model '{name}' registers a gradient hook{at}, which would be lost: compute what it does to the gradient"
    " with torch operators"
)
_BACKWARD = (
    "model '{name}' runs a backward pass within its forward pass{at}, which no graph can hold: take the"
    " gradient with torch.autograd.grad, or leave it to the training step"
)
_WRITTEN = (
    "model '{name}' writes unseen by autograd into a tensor that carries a gradient{at}, which no graph can"
    " hold: write into a copy of it, made with detach().clone()"
)
_UNTRACEABLE_GRADIENT = (
    "model '{name}' takes a gradient in its forward pass{at}, through operators of which torch cannot trace"
    " it: write that gradient out as a formula"
)

_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_DETACH = (Tensor.detach, torch.detach)
_WRITE_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_NUMBERS = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__)
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
_NO_WRITES = ("requires_grad_", "detach_", "share_memory_")


@contextmanager
def faithful(module: nn.Module, name: str, notes: list[str], prefix: str = "") -> Iterator[None]:
    """Trace within: gradients as the module means them, or a CaptureError that says why not."""
    _refuse_unfinished(module, name, prefix)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *given = args
            _note(notes, CHECKPOINTING)
            return function(*given)
        if cls.__module__.partition(".")[0] == "torch":
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]
        raise CaptureError(
            f"model '{name}' calls the custom autograd.Function {cls.__qualname__}{place_of_call()}, whose"
            " backward would be lost: write it with differentiable torch operators, or register it as a"
            " torch.library custom op"
        )

    def checkpointed(*_: Any, **__: Any) -> Iterator[None]:
        _note(notes, CHECKPOINTING)
        yield

    watch = _Watch(name, notes)
    with ExitStack() as during:
        # The names that the public ones go through, which a module may have imported long ago.
        during.enter_context(replaced(_SingleLevelFunction, "apply", classmethod(apply)))
        during.enter_context(
            replaced(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpointed)
        )
        during.enter_context(replaced(Distribution, "_validate_args", False))
        during.enter_context(replaced(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward))
        during.enter_context(torch.enable_grad())
        during.enter_context(watch)
        during.enter_context(watch.within(module))
        try:
            yield
        except RuntimeError as error:
            if watch.gradient_at is None or "fake tensor in the exported program" not in str(error):
                raise
            raise CaptureError(_UNTRACEABLE_GRADIENT.format(name=name, at=watch.gradient_at)) from error


@contextmanager
def replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """An attribute with another value for a while."""
    absent = object()
    before = vars(owner).get(attribute, absent)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


class _Watch(TorchFunctionMode):
    """Sees every torch call of the module, once it is told which `within`.

    `gradient_at` is where the module last took a gradient.
    """

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.gradient_at: str | None = None
        self.is_within = False
        self.bare: list[Tensor] = []

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Watch while the module's forward pass runs, and not the tracer around it."""
        start = module.register_forward_pre_hook(lambda *_: setattr(self, "is_within", True), prepend=True)
        end = module.register_forward_hook(lambda *_: setattr(self, "is_within", False))
        try:
            yield
        finally:
            start.remove()
            end.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if not self.is_within:
            return func(*args, **kwargs)
        if func in _HOOKS:
            raise self._refusal(_HOOKED)
        if func is Tensor.backward:
            raise self._refusal(_BACKWARD)
        if isinstance(kwargs.get("generator"), torch.Generator):
            _note(self.notes, GENERATORS)
            del kwargs["generator"]
        if func is F.instance_norm:
            return _instance_norm(*args, **kwargs)
        if func is torch.autograd.grad:
            self.gradient_at = place_of_call()
            return func(*args, **kwargs)
        if func == _READ_DATA or func in _DETACH:
            return self._bare(args[0])
        if args and _writes(func) and self._bypasses_autograd(func, args[0]):
            raise self._refusal(_WRITTEN)
        if func == _WRITE_DATA:
            return args[0].detach().copy_(args[1].detach())
        if torch.is_grad_enabled() or not any(map(_carries, (*args, *kwargs.values()))):
            return self._fixed(func, args, kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return _detached(func(*args, **kwargs))
        return self._fixed(func, _detached(args), {key: _detached(item) for key, item in kwargs.items()})

    def _bare(self, tensor: Tensor) -> Tensor:
        """The tensor without its gradient; whether it is written to will matter."""
        made = tensor.detach()
        if _carries(tensor) and not tensor.is_leaf:
            self.bare.append(made)
        return made

    def _bypasses_autograd(self, func: Any, written: Tensor) -> bool:
        """Whether a write goes unseen by autograd into a tensor whose gradient it should have changed."""
        if any(tensor is written for tensor in self.bare):
            return True
        unseen = func == _WRITE_DATA or not torch.is_grad_enabled()
        return unseen and _carries(written) and not written.is_leaf

    def _fixed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the call gives, if that is a matter of shapes and not of values."""
        try:
            result = func(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if func not in _NUMBERS:
                raise
            raise self._refusal(TAKES_NUMBER) from error
        for part in result if isinstance(result, list | tuple) else (result,):
            complaint = complaint_about(part)
            if complaint is not None:
                raise self._refusal(complaint)
        return result

    def _refusal(self, complaint: str) -> CaptureError:
        self.is_within = False  # the tracer still looks at the tensors when a trace fails
        return CaptureError(complaint.format(name=self.name, at=place_of_call()))


def complaint_about(value: Any) -> str | None:
    """What is to be said of a number or a shape that only the data can tell; None of any other value."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return TAKES_NUMBER if free_unbacked_symbols(value) else None
    if isinstance(value, Tensor) and any(free_unbacked_symbols(size) for size in value.shape):
        return VARIES
    return None


def _carries(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return any(map(_carries, item))
    return isinstance(item, Tensor) and item.requires_grad


def _detached(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach() if item.requires_grad else item
    if isinstance(item, list | tuple):
        parts = [_detached(part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _NO_WRITES:
        return False
    return func == _WRITE_DATA or name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Instance norm that updates its running statistics in the open: torch's call does not say that
    it writes them."""
    if use_input_stats and running_mean is not None and running_var is not None:
        axes = tuple(range(2, x.dim()))
        for running, found in ((running_mean, x.mean(axes)), (running_var, x.var(axes))):
            running.mul_(1 - momentum).add_(found.detach().mean(0), alpha=momentum)
        running_mean = running_var = None
    return F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _refuse_unfinished(module: nn.Module, name: str, prefix: str) -> None:
    """Refuse lazy parameters and hooks, which are seen before tracing."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            inner = f"{path}.".removeprefix(prefix).rstrip(".")
            what = f"'{inner}'" if inner else "the module"
            raise CaptureError(
                f"model '{name}' has a backward hook on {what}, which would be lost: remove it first"
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise CaptureError(
                f"model '{name}' has the lazy parameter '{path.removeprefix(prefix)}', whose shape nobody"
                " knows yet: run the model once on its inputs first"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"model '{name}' has a gradient hook on its parameter '{path.removeprefix(prefix)}', which"
                " would be lost: remove it first"
            )


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
