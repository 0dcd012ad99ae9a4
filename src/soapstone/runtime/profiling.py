"""Measuring operators by several ranks at once: what ranks share is in the times, as it is in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Profile, document_of, mean_of, profile_from
from soapstone.cost.profiler import Profiler
from soapstone.runtime.wire import Wire

IN_STEP = 8
"""[choice] After so many measurements ranks wait for each other, so that all are busy with the same."""

ROUNDS, MOST_ROUNDS = 3, 16
STEADY = 0.02
"""[choice] How often each shape is measured, as far as time goes; and more often, until half of the times are
told so well (one standard error, as a part of them)."""


def measured_at_once(
    profiler: Profiler,
    todo: Sequence[Candidate],
    wire: Wire,
    budget_s: float,
    show: Callable[[int, str], None],
) -> int:
    """Measure the same things on all ranks; how many were done when time was up, by rank 0's clock. With time
    to spare all are measured again, more shortly, every second time in the opposite order: a moment at which
    the computer was busy is then one of several, and not always the same one's. The more they differ the more
    often."""
    start = monotonic()

    def is_over() -> bool:
        return _is_over(monotonic() - start > budget_s, wire)

    ran: list[tuple[Candidate, bool]] = []
    for candidate in todo:
        if len(ran) % IN_STEP == 0 and is_over():
            return len(ran)
        ran.append((candidate, profiler.measure(candidate)))
        show(len(ran), candidate.node.op_name)
    for number in range(1, MOST_ROUNDS):
        if _is_over(number >= ROUNDS and profiler.doubt <= STEADY, wire):
            break
        for done, (candidate, can_run) in enumerate(ran[::-1] if number % 2 else ran):
            if done % IN_STEP == 0 and is_over():
                return len(ran)
            if can_run:
                profiler.measure(candidate, again=True)
            show(len(ran), f"{candidate.node.op_name}, round {number + 1}")
    return len(ran)


def _is_over(own: bool, wire: Wire) -> bool:
    told = wire.shared(torch.tensor([int(own)]) if wire.rank == 0 else None, (1,), torch.int64, 0, "time")
    return bool(told.item())


def profile_of_all(profile: Profile, wire: Wire) -> Profile:
    """The mean of what ranks have measured, on every rank: one of them may have had a slower core."""
    if wire.size == 1:
        return profile
    told = wire.told_by_all(json.dumps(document_of(profile)), "profiles")
    return mean_of([profile_from(json.loads(each), f"rank {i}'s profile") for i, each in enumerate(told)])
