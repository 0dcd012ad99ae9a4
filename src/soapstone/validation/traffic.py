"""What bytes take between ranks, beyond what one bandwidth says: many messages at once, and sums.

A machine has one bandwidth for each link. Ranks of one computer share more than links (memory, the threads
that carry messages), so messages that are under way at once slow each other down; and the sums that gradients
need are the backend's own, at a speed of their own. Both are measured beside the strategies, relative to what
the machine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log

import numpy as np
import torch

from soapstone.cost.analytic import collective_s
from soapstone.machine import Machine
from soapstone.runtime.detecting import timed
from soapstone.runtime.wire import Wire
from soapstone.tasks.exchange import Pattern

MESSAGE_BYTES = 2**20, 12 * 2**20
"""[choice] A small and a large message: what the bytes between them take is asked for."""

NO_BYTES = 4096
SUM_BYTES = 2**22, 2**24, 2**26
"""[choice] Sums that stand for those of all sizes, and one that takes next to no time but its latency."""


@dataclass(frozen=True)
class Traffic:
    """Times of bytes relative to the machine's: of messages by how many are under way at once (one, two,
    ...), and of sums by the number of ranks and the bytes."""

    messages: tuple[float, ...] = (1.0,)
    sums: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def of_sum(self, count: int, size_bytes: int) -> float:
        """How much longer than the machine says a sum over so many ranks takes."""
        if not self.sums:
            return 1.0
        nearest = self.sums[min(self.sums, key=lambda known: abs(known - count))]
        sizes, factors = zip(*nearest, strict=True)
        return float(np.interp(log(max(1, size_bytes)), [log(size) for size in sizes], factors))


AS_THE_MACHINE_SAYS = Traffic()


def measured_traffic(wire: Wire, machine: Machine) -> Traffic:
    """Messages and sums among the ranks of a computer, all of which ask at once; the same on every rank."""
    if wire.size == 1 or len(machine.nodes) > 1:
        return AS_THE_MACHINE_SAYS
    messages = [_messages(wire, machine, busy) for busy in range(1, wire.size + 1)]
    counts = sorted({2, max(2, wire.size // 2), wire.size})
    wire.prepare([range(count) for count in counts])
    return Traffic(tuple(messages), {count: tuple(_sums(wire, machine, count)) for count in counts})


def _messages(wire: Wire, machine: Machine, busy: int) -> float:
    """The time of bytes while so many ranks send, relative to the machine's; where all do, to all."""
    tags = range(1, wire.size) if busy == wire.size > 2 else range(1, 2)
    taken = []
    for size_bytes in MESSAGE_BYTES:
        tensor = torch.zeros(size_bytes // 4, device=wire.device)
        seconds, _ = timed(wire, partial(_around, wire, tensor, busy, tags))
        taken.append(seconds / len(tags))
    small, large = MESSAGE_BYTES
    return _digits((taken[1] - taken[0]) / ((large - small) / machine.bandwidth(0, 1)))


def _around(wire: Wire, tensor: torch.Tensor, busy: int, tags: Sequence[int]) -> None:
    """The first ranks send to those that are so many places after them."""
    givers = {tag: (wire.rank - tag) % wire.size for tag in tags}
    coming = [
        wire.receive(tensor.shape, tensor.dtype, giver, tag, "message")
        for tag, giver in givers.items()
        if giver < busy
    ]
    if wire.rank < busy:
        for tag in tags:
            wire.send(tensor, (wire.rank + tag) % wire.size, tag, "message")
    for pending in coming:
        pending.wait()
    wire.settle()


def _sums(wire: Wire, machine: Machine, count: int) -> list[tuple[int, float]]:
    ranks = range(count)

    def act(tensor: torch.Tensor) -> None:
        if wire.rank in ranks:
            wire.sum_up(tensor, ranks, "sum").wait()

    taken = []
    for size_bytes in (NO_BYTES, *SUM_BYTES):
        seconds, _ = timed(wire, partial(act, torch.zeros(size_bytes // 4, device=wire.device)))
        taken.append(seconds)
    bandwidth = machine.bandwidth(0, 1)
    return [
        (size, _digits((seconds - taken[0]) / collective_s(Pattern.ALL_REDUCE, size, count, bandwidth, 0.0)))
        for size, seconds in zip(SUM_BYTES, taken[1:], strict=True)
    ]


def _digits(number: float) -> float:
    """Three digits, and no less than a hundredth: what else runs on a computer may make small messages
    slower than large ones."""
    return float(f"{max(number, 0.01):.3g}")
