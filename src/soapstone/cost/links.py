"""Links fitted to measured messages: the alpha and beta that the simulator's own formulas explain best.

Three things are measured between n ranks of one computer, by size of the message:

    alone       one message between two ranks
    at once     every rank sends to the next, all at the same time
    all-reduce  of all ranks

and two machines are held against them: each rank with a full-duplex link of its own, or one link that all
share. What the simulator says of each measurement is linear in the latency alpha and in beta, the inverse of
the bandwidth, so both follow from least squares of relative errors. Which of the two it is, large messages
tell: their bytes share a link or they do not, while the latencies of small ones hardly ever do, and there are
more small ones ([measured] four slices of a GPU: 16 MiB 0.46 ms alone and 1.6 ms at once, 4 KiB 43 and
66 us). What a single alpha and beta cannot say (collectives may have other constants than messages) is left
as an error, which the fit tells for each of the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from statistics import median

import numpy as np

from soapstone.machine import DeviceKind, Link, Machine, full_duplex
from soapstone.machine.machine import Device

ALONE, AT_ONCE, ALL_REDUCE = "alone", "at once", "all-reduce"

LARGEST = 3
"""[choice] So many sizes are those of the largest messages: of `detecting.SIZES`, 1 to 16 MiB."""

NODE = "here"
LEAST_LATENCY_S = 1e-9
MOST_BANDWIDTH = 1e15
"""[choice] Bounds that keep a fit of next to nothing a machine."""


@dataclass(frozen=True)
class Message:
    """A measured time: what was done, with how many bytes."""

    what: str
    size_bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class LinkFit:
    """Links as the simulator has them; `errors` are median relative errors by what was measured, and
    `large_errors` those of the largest messages."""

    latency_s: float
    bandwidth_bytes_per_s: float
    is_shared: bool
    errors: Mapping[str, float]
    large_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The mean over what was measured."""
        return sum(self.errors.values()) / max(1, len(self.errors))

    @property
    def large_error(self) -> float:
        """The same of the largest messages."""
        return sum(self.large_errors.values()) / max(1, len(self.large_errors))


def fitted(messages: Sequence[Message], count: int) -> LinkFit:
    """The links of `count` ranks that explain the messages best."""
    return min(
        (_fit(messages, count, is_shared) for is_shared in (False, True)), key=lambda fit: fit.large_error
    )


def _fit(messages: Sequence[Message], count: int, is_shared: bool) -> LinkFit:
    alpha, beta = 1e-5, 1e-9
    seconds = np.array([message.seconds for message in messages])
    weights = np.array([1.0 / _number(messages, message.what) ** 0.5 for message in messages])
    for _ in range(6):  # which of a ring and a tree is faster depends on alpha and beta
        terms = np.array([_terms(message, count, is_shared, alpha, beta) for message in messages])
        alpha, beta = _least_squares(terms, seconds, weights)
    errors: dict[str, list[tuple[int, float]]] = {}
    for message in messages:
        per_alpha, per_beta = _terms(message, count, is_shared, alpha, beta)
        off = abs(per_alpha * alpha + per_beta * beta - message.seconds) / message.seconds
        errors.setdefault(message.what, []).append((message.size_bytes, off))
    return LinkFit(
        max(alpha, LEAST_LATENCY_S),
        1.0 / max(beta, 1.0 / MOST_BANDWIDTH),
        is_shared,
        {what: median(off for _, off in found) for what, found in errors.items()},
        {what: median(off for _, off in sorted(found)[-LARGEST:]) for what, found in errors.items()},
    )


def _number(messages: Sequence[Message], what: str) -> int:
    return sum(message.what == what for message in messages)


def _terms(message: Message, count: int, is_shared: bool, alpha: float, beta: float) -> tuple[float, float]:
    """How often alpha and beta are in the simulated time of a message (`cost.analytic`)."""
    size = float(message.size_bytes)
    in_turn = count if is_shared else 1  # tasks of a shared link wait for each other
    match message.what:
        case "alone":
            return 1.0, size
        case "at once":
            return float(in_turn), in_turn * size
        case _:
            steps, depth = 2.0 * (count - 1), 2.0 * ceil(log2(count))
            ring, tree = (steps, steps * size / count), (depth, depth * size)
            is_ring = ring[0] * alpha + ring[1] * beta <= tree[0] * alpha + tree[1] * beta
            per_alpha, per_beta = ring if is_ring else tree
            return in_turn * per_alpha, in_turn * per_beta


def _least_squares(
    terms: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    weights: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> tuple[float, float]:
    """Alpha and beta, neither below zero, with the least relative error."""
    scale = np.maximum(terms.max(axis=0), 1e-30)
    rows = terms / scale / seconds[:, np.newaxis] * weights[:, np.newaxis]
    best, least = (0.0, 0.0), np.inf
    for chosen in ([0, 1], [0], [1]):
        found, *_ = np.linalg.lstsq(rows[:, chosen], weights, rcond=None)
        error = float(np.sum((rows[:, chosen] @ found - weights) ** 2))
        if np.all(found >= 0) and error < least:
            both = np.zeros(2)
            both[chosen] = found / scale[chosen]
            best, least = (float(both[0]), float(both[1])), error
    return best


def local_machine(name: str, kind: DeviceKind, count: int, fit: LinkFit | None) -> Machine:
    """Devices of one computer, joined as a fit says."""
    devices = tuple(Device(i, f"{NODE}/{kind.name}{i}", kind, NODE) for i in range(count))
    if fit is None or count == 1:
        return Machine(name, devices)
    bandwidth, latency_s = _round(fit.bandwidth_bytes_per_s), _round(fit.latency_s)
    links: list[Link] = []
    if not fit.is_shared:
        for device in devices:
            half_s = _round(latency_s / 2)
            links += full_duplex(f"{NODE}/link{device.index}", device.name, f"{NODE}/host", bandwidth, half_s)
        return Machine(name, devices, tuple(links), (f"{NODE}/host",))
    wide, none_s = _round(4 * bandwidth), 0.0
    for device in devices:
        links.append(Link(f"{NODE}/up{device.index}", device.name, f"{NODE}/in", wide, none_s))
        links.append(Link(f"{NODE}/down{device.index}", f"{NODE}/out", device.name, wide, none_s))
    links.append(Link(f"{NODE}/shared", f"{NODE}/in", f"{NODE}/out", bandwidth, latency_s))
    return Machine(name, devices, tuple(links), (f"{NODE}/in", f"{NODE}/out"))


def _round(number: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{number:.4g}")
