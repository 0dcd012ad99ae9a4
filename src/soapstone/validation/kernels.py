"""What kernels of a GPU take longer in a step than over and over again.

A GPU's operators are measured in batches of runs, launched ahead. Their kernels find in caches what the run
before left there, and nothing comes between them; in a step other operators do, and kernels that belong to
none of them (gradients that are put into buckets, tensors that are zeroed). None of that is seen task by
task, since who asks a GPU when a task is done stops it. But a step alone has an end: its time, until all is
done, is held against the prediction of the same step with nobody at the other ends of its messages, and what
it takes longer is put down to all kernels alike ([measured] AlexNet on four quarters of an H200, data
parallelism alone: 12.5 ms with all at work and 10.5 with one, where 10.9 and 10.4 were said).

Where the thread that launches kernels is what a step waits for, its time says nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_TIMES, MOST_TIMES = 1.0, 1.6
"""[choice] Kernels take no less and no more than so many times as long in a step ([measured] AlexNet, one
rank at work: by data parallelism's small batches 0.96 times, by one device's large one 1.03)."""

FEW = 0.5
"""[choice] A step tells of its kernels where at least this part of it is theirs."""

HALVINGS = 24
"""[choice] How often what lies between the two is halved."""


def longer_in_step(said_s: Callable[[float], float], seen_s: float) -> float:
    """How many times as long kernels take in a step that takes so long, by what is said of a step whose
    kernels take so many times as long; once where it tells nothing of them."""
    most_s, least_s = said_s(MOST_TIMES), said_s(LEAST_TIMES)
    if most_s - least_s < FEW * (MOST_TIMES - LEAST_TIMES) * said_s(1.0):
        return 1.0
    low, high = LEAST_TIMES, MOST_TIMES
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if said_s(middle) > seen_s else (middle, high)
    return float(f"{(low + high) / 2:.3g}")
