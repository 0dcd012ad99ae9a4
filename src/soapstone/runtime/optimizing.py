"""The user's optimizer on a rank's part of the weights.

An optimizer that treats each element by itself does the same to a part of a weight as it does to that part
within the whole; those are the ones that can be used. The user's own object is kept, so that its learning
rates, its groups and the schedulers attached to it go on working; only its parameters are exchanged for
the parts that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soapstone.errors import TrainingError
from soapstone.machine.checks import did_you_mean
from soapstone.ops.box import Box, slices
from soapstone.runtime.weights import Held, Holding
from soapstone.runtime.wire import Wire

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

NAMED: Mapping[str, tuple[Callable[..., Optimizer], Mapping[str, float]]] = MappingProxyType(
    {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
)
"""What the command line offers: torch's class, and what it is told beside the learning rate."""

OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]


def optimizer_named(name: str, lr: float) -> OptimizerOf:
    """A function that makes the optimizer of a name."""
    if name not in NAMED:
        raise TrainingError(f"there is no optimizer {name!r}{did_you_mean(name, NAMED)}")
    if not 0 <= lr < inf:
        raise TrainingError(f"a learning rate is a number from 0 on, not {lr}")
    kind, arguments = NAMED[name]
    return lambda parameters: kind(parameters, lr=lr, **arguments)


def localized(
    optimizer: Optimizer | OptimizerOf,
    named: Mapping[str, nn.Parameter],
    sources: Mapping[str, str],
    held: Held,
) -> Optimizer:
    """The optimizer with its parameters exchanged for what this rank holds of them.

    `named` are the module's parameters; `sources` says which weight of the graph each name stands for.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(list({id(p): p for p in named.values()}.values()))
    if not isinstance(optimizer, ELEMENTWISE):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TrainingError(
            f"{type(optimizer).__name__} does not treat every element by itself, as far as Soapstone knows:"
            f" choose one of {known}"
        )
    weight_of = {id(p): sources[name] for name, p in named.items() if name in sources}
    known_ids = {id(p) for p in named.values()}
    for group in optimizer.param_groups:
        if any(id(p) not in known_ids for p in group["params"]):
            raise TrainingError("the optimizer has parameters that the model does not have")
        holdings = [
            holding
            for p in group["params"]
            for holding in held.holdings.get(weight_of.get(id(p), ""), [])
            if holding.parameter.requires_grad
        ]
        _move_state(optimizer, group["params"], weight_of, held)
        group["params"] = [holding.parameter for holding in holdings]
    return optimizer


def _move_state(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], weight_of: Mapping[int, str], held: Held
) -> None:
    """Cut what the optimizer remembers of whole parameters into what it remembers of the parts."""
    for parameter in parameters:
        state = optimizer.state.pop(parameter, None)
        for holding in held.holdings.get(weight_of.get(id(parameter), ""), []) if state else []:
            shape = held.weights.graph.value(holding.weight).shape
            optimizer.state[holding.parameter] = {
                key: value.reshape(shape)[slices(holding.box)].clone()
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
                else value
                for key, value in state.items()
            }


def gradient_norm(held: Held, wire: Wire) -> Tensor:
    """The norm of all gradients together, each element counted once."""
    total = torch.zeros(1, dtype=torch.float64, device=wire.device)
    for holding, box in held.owned():
        if holding.parameter.grad is not None:
            total += _square(holding, box)
    return wire.report(total, "gradient norm").wait()[0].sqrt()


def _square(holding: Holding, box: Box) -> Tensor:
    gradient = holding.gradient(box)
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def clip(held: Held, wire: Wire, most: float) -> Tensor:
    """Scale all gradients so that their norm is at most so much, as `clip_grad_norm_` does; the norm
    that they had."""
    norm = gradient_norm(held, wire)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for holding in held:
        if holding.parameter.grad is not None:
            holding.parameter.grad.mul_(factor.to(holding.parameter.grad.dtype))
    return norm
