"""Operators one after the other on a GPU, as a step has them, and not one of them over and over again: what
launching them takes, and how far ahead of the GPU a thread can be."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

CYCLES_PER_S = 2e9
"""[choice] A GPU that is to wait for so long does so for no less than so many cycles in a second."""

ROUNDS = 6
"""[choice] How often each operator has its turn."""

TRIES = 3
STILL_S, STUCK_S = 0.5, 0.05
"""[choice] How often and how long a GPU is kept from what is launched, and what launching one operator takes
when it has to wait for that."""


class Launchable(Protocol):
    """An operator that can be launched."""

    has_backward: bool

    def leaves(self) -> list[Any]:
        """Operands to launch it with."""

    def forward(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Launch it."""


def ahead_s(runs: Sequence[Launchable]) -> float | None:
    """For how long a thread launches one operator after the other on a GPU that does none of it yet, until it
    has to wait: what a GPU is to do has a list of limited length. None if it never has to."""
    own = [each for each in runs if not _waits_for_its_gpu(each)]
    found = sorted(_still_s(own) for _ in range(TRIES)) if own else []
    return found[len(found) // 2] if found and found[-1] < STILL_S / 2 else None


def in_turn_s(runs: Sequence[Launchable]) -> float:
    """Seconds of asking for one more run of each operator on a GPU, forward and backward, where each follows
    another."""
    return max(0.0, _rounds_s(runs, ROUNDS) - _rounds_s(runs, 1)) / (ROUNDS - 1)


def _rounds_s(runs: Sequence[Launchable], rounds: int) -> float:
    """Seconds until so many runs of each operator have been asked for, in turn."""
    import torch

    given = [(own, own.leaves()) for _ in range(rounds) for own in runs]
    torch.cuda.synchronize()
    start = perf_counter()
    made = [own.forward(operands) for own, operands in given]
    taken_s = perf_counter() - start
    roots = [
        out
        for (own, _), outputs in zip(given, made, strict=True)
        for out in outputs
        if own.has_backward and out is not None and out.requires_grad
    ]
    if roots:
        gradients = [torch.ones_like(root) for root in roots]
        torch.cuda.synchronize()
        start = perf_counter()
        torch.autograd.backward(roots, gradients)
        taken_s += perf_counter() - start
    torch.cuda.synchronize()
    return taken_s


def _waits_for_its_gpu(own: Launchable) -> bool:
    """Whether an operator by itself waits until the GPU has come to it."""
    import torch

    operands = own.leaves()
    with torch.no_grad():
        own.forward(operands)  # the first time its kernels are loaded
        torch.cuda.synchronize()
        torch.cuda._sleep(int(CYCLES_PER_S * STUCK_S))
        start = perf_counter()
        own.forward(operands)
        taken_s = perf_counter() - start
        torch.cuda.synchronize()
    return taken_s > STUCK_S / 2


def _still_s(runs: Sequence[Launchable]) -> float:
    """Seconds of launching operators in turn, before the thread waits for a GPU that stands still."""
    import torch

    given = [(own, own.leaves()) for own in runs]
    taken_s = 0.0
    with torch.no_grad():
        torch.cuda.synchronize()
        torch.cuda._sleep(int(CYCLES_PER_S * STILL_S))
        while taken_s < STILL_S / 2:
            for own, operands in given:
                start = perf_counter()
                own.forward(operands)
                asking_s = perf_counter() - start
                if asking_s > STUCK_S:
                    torch.cuda.synchronize()
                    return taken_s
                taken_s += asking_s
    torch.cuda.synchronize()
    return taken_s
