"""What this computer's devices and links can do, measured by ranks that run at the same time.

Messages go through the wire that training uses, so what torch.distributed, staging and Python cost is in
them. All ranks compute at once while rates are taken, as they do in training: what they share (memory, a
cache, a core) is in the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.distributed as dist

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.links import ALL_REDUCE, ALONE, AT_ONCE, Message
from soapstone.machine.cores import usable_cores
from soapstone.machine.device import KINDS, DeviceKind
from soapstone.runtime.wire import Wire

SIZES = tuple(4**i for i in range(5, 13))
"""[choice] Bytes of the messages: 1 KiB to 16 MiB, by factors of four."""

REPEATS = 15
LONGEST_S = 0.4
"""[choice] Seconds for one size, but at least `LEAST_REPEATS`."""
LEAST_REPEATS = 4

PRODUCT = {"cpu": 768, "cuda": 4096}
"""[choice] Rows of the matrices whose product shows the arithmetic rate: far out of the caches of a core,
and enough for all multiprocessors of a GPU."""

STREAM_BYTES = 64 * 2**20


def usual_ranks(device: str) -> int:
    """How many ranks this computer would train with: one for each GPU, or one for each of up to 8 cores."""
    return max(1, torch.cuda.device_count()) if device == "cuda" else min(8, usable_cores())


def backend_name(wire: Wire) -> str:
    """What carries messages between the ranks."""
    if wire.belts is not None:
        return "belts in pinned memory"
    if wire.mailbox is None:
        return str(dist.get_backend())
    return "shared memory" if wire.backend == "memory" else "gloo, shared memory within a computer"


def measured_messages(wire: Wire) -> list[Message]:
    """Messages of all kinds and sizes; the same list on every rank is rank 0's."""
    wire.prepare([tuple(range(wire.size))])
    found: list[Message] = []
    for size_bytes in SIZES:
        tensor = torch.zeros(size_bytes // 4, device=wire.device)
        pairs = [(a, b) for a in range(wire.size) for b in range(a + 1, wire.size)]
        for a, b in pairs[:: max(1, len(pairs) // 8)]:  # eight pairs stand for all of a large computer
            seconds, spread = timed(wire, partial(_there_and_back, wire, tensor, a, b))
            found.append(Message(ALONE, size_bytes, seconds / 2, spread))
        seconds, spread = timed(wire, partial(_round, wire, tensor))
        found.append(Message(AT_ONCE, size_bytes, seconds, spread))
        seconds, spread = timed(wire, partial(_sum, wire, tensor))
        found.append(Message(ALL_REDUCE, size_bytes, seconds, spread))
    return found


def measured_pair(wire: Wire, a: int, b: int, small_bytes: int, large_bytes: int) -> tuple[float, float]:
    """Latency and bandwidth between two ranks, from a small and a large message; all ranks ask at once."""
    times = []
    for size_bytes in (small_bytes, large_bytes):
        tensor = torch.zeros(size_bytes // 4, device=wire.device)
        seconds, _ = timed(wire, partial(_there_and_back, wire, tensor, a, b))
        times.append(seconds / 2)
    latency_s, whole_s = times
    return latency_s, (large_bytes - small_bytes) / max(whole_s - latency_s, 1e-9)


def _there_and_back(wire: Wire, tensor: torch.Tensor, a: int, b: int) -> None:
    if wire.rank not in (a, b):
        return
    other = b if wire.rank == a else a
    if wire.rank == a:
        wire.send(tensor, other, 1, "message")
    wire.receive(tensor.shape, tensor.dtype, other, 1, "message").wait()
    if wire.rank == b:
        wire.send(tensor, other, 1, "message")
    wire.settle()


def _round(wire: Wire, tensor: torch.Tensor) -> None:
    wire.send(tensor, (wire.rank + 1) % wire.size, 2, "message")
    wire.receive(tensor.shape, tensor.dtype, (wire.rank - 1) % wire.size, 2, "message").wait()
    wire.settle()


def _sum(wire: Wire, tensor: torch.Tensor) -> None:
    wire.sum_up(tensor, range(wire.size), "sum").wait()


def timed(wire: Wire, act: Callable[[], object], *, to_the_end: bool = True) -> tuple[float, float]:
    """The faster quartile of times and their relative spread, each time that of the slowest rank: what else
    runs on a computer makes messages only slower. Two runs are not counted. Times are those of all that is
    done, or of asking GPUs for it."""
    times: list[float] = []
    spent_s = 0.0
    for number in range(REPEATS + 2):
        dist.barrier()
        start = perf_counter()
        act()
        asked_s = perf_counter() - start
        if wire.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s = perf_counter() - start if to_the_end else asked_s
        longest = torch.tensor([taken_s], dtype=torch.float64, device=wire.host)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if number >= 2:
            times.append(float(longest))
            spent_s += times[-1]
        if spent_s > LONGEST_S and len(times) >= LEAST_REPEATS:  # the same on all: it follows from maxima
            break
    low, middle, high = quantiles(times, n=4)
    return low, (high - low) / 2 / middle


def measured_kind(wire: Wire) -> DeviceKind:
    """The device of a rank. A GPU whose datasheet is known is that; else rates are measured, and are such
    that analytic costs reach what was reached here."""
    name = "cpu"
    if wire.device.type == "cuda":
        from soapstone.cost.at_hand import kind_named

        name = kind_named(torch.cuda.get_device_name())
        if name in KINDS:
            return KINDS[name]
    costs = AnalyticCosts()
    peak = {
        short: _flops_per_s(wire, dtype) / costs.most_flops
        for short, dtype in (("f64", torch.float64), ("f32", torch.float32))
    }
    stream = _bytes_per_s(wire) / costs.most_bandwidth
    return DeviceKind(
        name,
        memory_bytes(wire),
        {short: float(f"{rate:.4g}") for short, rate in peak.items()},
        float(f"{stream:.4g}"),
        float(f"{_launch_s(wire):.3g}"),
    )


def memory_bytes(wire: Wire) -> int:
    """This rank's share of memory."""
    if wire.device.type == "cuda":
        sharing = -(-wire.size // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(wire.device).total_memory) // sharing
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // wire.size


def _together(wire: Wire, act: Callable[[], object], calls: int = 1) -> float:
    """Median seconds of a call while all ranks do the same; the mean over ranks."""
    times = []
    for number in range(REPEATS + 2):
        if wire.size > 1:
            dist.barrier()
        start = perf_counter()
        for _ in range(calls):
            act()
        if wire.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append((perf_counter() - start) / calls)
    own = torch.tensor([median(times)], dtype=torch.float64, device=wire.host)
    if wire.size > 1:
        dist.all_reduce(own)
    return float(own) / wire.size


def _flops_per_s(wire: Wire, dtype: torch.dtype) -> float:
    rows = PRODUCT[wire.device.type]
    a = torch.rand(rows, rows, dtype=dtype, device=wire.device)
    return 2.0 * rows**3 / _together(wire, lambda: a @ a)


def _bytes_per_s(wire: Wire) -> float:
    a = torch.rand(STREAM_BYTES // 4, device=wire.device)
    out = torch.empty_like(a)
    return 3.0 * STREAM_BYTES / _together(wire, lambda: torch.add(a, a, out=out))


def _launch_s(wire: Wire) -> float:
    x, w = torch.rand(1, 4, device=wire.device), torch.rand(4, 4, device=wire.device)
    return _together(wire, lambda: torch.nn.functional.linear(x, w), calls=200)
