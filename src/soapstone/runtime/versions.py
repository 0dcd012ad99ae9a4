"""Weights in two versions, as PipeDream-2BW has them (Narayanan et al. 2021):

    w(t + 1) = w(t) - lr * gradient at w(t - 1)        with w(-1) = w(0)

so that a pipeline need not drain before the next batch enters: both versions are at hand, and each batch is
computed with one of them throughout. The older version is part of what the optimizer remembers of a
parameter, under the name `older`, and so of checkpoints.

What is here is the training that this rule gives, for any plan. A step still ends before the next begins:
the time that draining takes is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

FLUSH, TWO_BUFFERED = "flush", "2bw"

WEIGHTS = (FLUSH, TWO_BUFFERED)
"""Which weights a gradient is taken at: the newest, or those before the last update."""

OLDER = "older"


class Versions:
    """The two versions of what an optimizer's parameters hold."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def _parameters(self) -> Iterator[Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    @contextmanager
    def older(self) -> Iterator[None]:
        """The parameters as they were before the last update; in place, for what has recorded where they
        are."""
        newer: list[tuple[Parameter, Tensor]] = []
        with torch.no_grad():
            for parameter in self._parameters:
                known = self.optimizer.state.get(parameter, {}).get(OLDER)
                if known is not None:
                    newer.append((parameter, parameter.detach().clone()))
                    parameter.copy_(known)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, tensor in newer:
                    parameter.copy_(tensor)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """An update, before which the parameters become the older version."""
        kept = [(parameter, parameter.detach().clone()) for parameter in self._parameters]
        for parameter in self._parameters:
            # An optimizer that finds something takes it for all that it remembers.
            self.optimizer.state.get(parameter, {}).pop(OLDER, None)
        yield
        for parameter, tensor in kept:
            self.optimizer.state[parameter][OLDER] = tensor


def forget_older(optimizer: Optimizer) -> None:
    """Leave out older versions that a checkpoint held, for a run that keeps none: later checkpoints would
    pass them on as if they were one update old."""
    for state in optimizer.state.values():
        state.pop(OLDER, None)
