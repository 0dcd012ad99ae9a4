"""Measuring operators by several ranks at once: what ranks share is in the times, as it is in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Profile, document_of, profile_from
from soapstone.cost.profiler import Profiler
from soapstone.runtime.wire import Wire

IN_STEP = 8
"""[choice] After so many measurements ranks wait for each other, so that all are busy with the same."""

ROUNDS = 3
"""[choice] How often each shape is measured, as far as time goes."""


def measured_at_once(
    profiler: Profiler,
    todo: Sequence[Candidate],
    wire: Wire,
    budget_s: float,
    show: Callable[[int, str], None],
) -> int:
    """Measure the same things on all ranks; how many were done when time was up, by rank 0's clock. With time
    to spare all are measured again, every second time in the opposite order: a moment at which the computer
    was busy is then one of several, and not always the same one's."""
    start = monotonic()
    for done, candidate in enumerate(todo):
        if done % IN_STEP == 0 and _is_over(monotonic() - start > budget_s, wire):
            return done
        profiler.measure(candidate)
        show(done + 1, candidate.node.op_name)
    once_s = monotonic() - start
    for again in range(1, ROUNDS):
        if _is_over(monotonic() - start + once_s > budget_s, wire):
            break
        for number, candidate in enumerate(todo[::-1] if again % 2 else todo):
            if number % IN_STEP == 0:
                wire.meet("measuring")
            profiler.measure(candidate)
    return len(todo)


def _is_over(own: bool, wire: Wire) -> bool:
    told = wire.shared(torch.tensor([int(own)]) if wire.rank == 0 else None, (1,), torch.int64, 0, "time")
    return bool(told.item())


def shared_profile(profile: Profile, wire: Wire) -> Profile:
    """Rank 0's profile, on every rank."""
    if wire.size == 1:
        return profile
    own = torch.frombuffer(bytearray(json.dumps(document_of(profile)).encode()), dtype=torch.uint8)
    is_first = wire.rank == 0
    length = wire.shared(torch.tensor([own.numel()]) if is_first else None, (1,), torch.int64, 0, "profile")
    text = wire.shared(own if is_first else None, (int(length),), torch.uint8, 0, "profile")
    return profile_from(json.loads(bytes(text.cpu().numpy())), "rank 0's profile")
