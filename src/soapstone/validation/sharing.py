"""What messages and sums that are under way at once take from each other.

Both are measured by themselves, one and several of a kind at once (`traffic`). Which of them are under way
together is seen in the simulated timeline, and what they take decides where they lie in it; so each is worked
out from the other, a few times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soapstone.tasks.exchange import Pattern
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph, TaskKind
from soapstone.validation.crowding import ROUNDS, under_way
from soapstone.validation.ends import devices_between, move_of
from soapstone.validation.traffic import Traffic

Floats = NDArray[np.float64]

BUS_ROUNDS = 8
"""[choice] How often times and what else is under way are worked out from each other, each time half way."""


@dataclass(frozen=True)
class Kinds:
    """Which tasks are messages and which are sums, what carries them, and what they come after."""

    is_message: NDArray[np.bool_]
    is_sum: NDArray[np.bool_]
    resource: NDArray[np.int32]
    after: Sequence[Sequence[int]]

    def ready_s(self, end_s: Floats) -> Floats:
        """When each message and sum could begin."""
        found = np.zeros_like(end_s)
        for number in np.flatnonzero(self.is_message | self.is_sum).tolist():
            found[number] = max((end_s[before] for before in self.after[number]), default=0.0)
        return found

    def waited_s(self, is_compute: NDArray[np.bool_], start_s: Floats, end_s: Floats) -> Floats:
        """How long its device had nothing to do before each compute task."""
        found = np.zeros_like(start_s)
        for each in np.unique(self.resource[is_compute]):
            numbers = np.flatnonzero(is_compute & (self.resource == each))
            numbers = numbers[np.lexsort((end_s[numbers], start_s[numbers]))]
            found[numbers] = start_s[numbers] - np.concatenate([[0.0], end_s[numbers][:-1]])
        return found


@dataclass(frozen=True)
class Going:
    """Of each message and hop of a sum how many there are: messages that a task stands for, where a
    collective is made of messages, or hops of its sum; and which device it comes from. Of all else one, and
    -1."""

    flows: Floats
    senders: NDArray[np.int64]


def going(tasks: TaskGraph) -> Going:
    """What goes from where in a task graph."""
    flows, senders = np.ones(len(tasks.tasks)), np.full(len(tasks.tasks), -1)
    for number, task in enumerate(tasks.tasks):
        if task.kind not in COMPUTE_KINDS:
            move = move_of(tasks, task)
            is_one = move.pattern is Pattern.TRANSFER
            flows[number] = 1 if is_one else len(move.devices) - (task.kind is not TaskKind.ALL_REDUCE)
            senders[number], _ = devices_between(move, task)
    return Going(flows, senders)


def in_traffic(
    wire_s: Floats,
    latency_s: Floats,
    compute_s: Floats,
    kinds: Kinds,
    traffic: Traffic,
    among: Floats,
    simulated: Callable[[Floats], tuple[Floats, Floats]],
) -> tuple[Floats, Floats]:
    """The times of bytes and the latencies, with all that is under way meanwhile. `wire_s` are the times of
    each message or sum by itself, `among` what a sum takes where another is asked for too, as a part of
    that. Where sums are apart, the latency of one passes while it waits for the one before: so several
    at once were measured."""
    levels = [each / traffic.messages[0] for each in traffic.messages]
    places = np.arange(1, len(levels) + 1)
    message, total = kinds.is_message, kinds.is_sum
    factor, left = np.ones_like(wire_s), np.ones_like(wire_s)
    for _ in range(ROUNDS):
        start_s, end_s = simulated(wire_s * factor + latency_s * left + compute_s)
        spans = start_s[message], end_s[message]
        factor[message] = np.interp(under_way(*spans, *spans), places, levels)
        factor[total] = 1.0
        ready_s = kinds.ready_s(end_s)
        if traffic.delay is not None:
            waited_s = (start_s - ready_s)[total]
            left[total] = 1.0 - np.clip(waited_s / np.maximum(latency_s[total], 1e-30), 0.0, 1.0)
        for resource in np.unique(kinds.resource[total]):
            own = total & (kinds.resource == resource)
            asked = under_way(ready_s[own], end_s[own], start_s[own], end_s[own]) - 1.0
            factor[own] -= (1.0 - among[own]) * np.clip(asked, 0.0, 1.0)
        if traffic.delay is not None:
            for some, others in ((message, total), (total, message)):
                count = under_way(start_s[others], end_s[others], start_s[some], end_s[some])
                factor[some] *= 1.0 + traffic.delay * np.clip(count / len(levels), 0.0, 1.0)
    return wire_s * factor, latency_s * left


def on_one_bus(
    wire_s: Floats,
    latency_s: Floats,
    compute_s: Floats,
    kinds: Kinds,
    where: Going,
    traffic: Traffic,
    simulated: Callable[[Floats], tuple[Floats, Floats]],
) -> tuple[Floats, Floats]:
    """The times of bytes and the latencies where all that is under way shares one bus evenly. A message waits
    for sums of other devices, if that was measured, unless it has waited for its turn that long anyway."""
    flows, senders = where.flows, where.senders
    levels = np.array(traffic.messages)
    message, total = kinds.is_message, kinds.is_sum
    sent = message | total
    weight = np.where(message, flows, 1.0)[sent]
    factor, left = np.ones_like(wire_s), np.ones_like(wire_s)
    held_up_s = np.zeros_like(wire_s)
    for _ in range(BUS_ROUNDS):
        start_s, end_s = simulated(wire_s * factor + latency_s * left + held_up_s + compute_s)
        spans = start_s[sent], end_s[sent]
        found = np.ones_like(wire_s)
        found[sent] = np.maximum(under_way(*spans, *spans, weight), weight)
        slower = np.interp(found, np.arange(1, len(levels) + 1), levels)
        slower *= np.maximum(found / len(levels), 1.0)
        now = np.where(message, slower / flows, np.maximum(found / np.maximum(flows, 1.0), 1.0))
        factor[sent] = np.sqrt(factor * now)[sent]
        waited_s = start_s - kinds.ready_s(end_s)
        left[total] = 1.0 - np.clip(waited_s[total] / np.maximum(latency_s[total], 1e-30), 0.0, 1.0)
        for sender in np.unique(senders[message]):
            own, others = message & (senders == sender), total & (senders != sender)
            adding = under_way(start_s[others], end_s[others], start_s[own], end_s[own])
            found_s = np.maximum(0.0, traffic.held_up_s(adding) - waited_s[own])
            held_up_s[own] = (held_up_s[own] + found_s) / 2
    return wire_s * factor, latency_s * left + held_up_s
