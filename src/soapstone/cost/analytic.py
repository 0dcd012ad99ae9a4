"""Costs without a device at hand: a roofline for compute, alpha-beta for links.

    compute     the longest of: launching it, flops / (peak * most), bytes / (bandwidth * most)
    transfer    size / bandwidth + latency
    collective  the faster of a ring and a tree of n devices, or sums through one (`collective_s`)

`most` is the fraction of the peak that large operators reach. Launches overlap with the work before
them, so an operator takes the longer of the two and not their sum: a device is kept waiting only by
operators shorter than a launch. `docs/decisions/0005-analytic-costs.md` has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from soapstone.cost.fit import Curve
from soapstone.cost.profile import OpKey
from soapstone.cost.work import Work
from soapstone.machine import DeviceKind
from soapstone.machine.machine import ONE_DEVICE, RING

_KERNELS_BACKWARD = 2
"""[choice] A backward pass launches about one kernel for each of two operands."""


@dataclass(frozen=True)
class AnalyticCosts:
    """A roofline with a launch overhead; see the module's docstring."""

    most_flops: float = 0.6
    """[measured] bench/efficiency.py: 0.64 to 0.79 for matrix products, 0.40 to 0.63 for convolutions."""
    most_bandwidth: float = 0.91
    """[measured] bench/efficiency.py: 0.91 for elementwise operators of 64 MB and more."""
    update_bytes_per_byte: float = 5.0
    """[choice] SGD with momentum reads weight, gradient and momentum and writes two of them."""

    name = "analytic"

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """How long a node's shard takes on a device."""
        arithmetic = work.flops / (kind.peak_flops_per_s_in(work.dtype) * self.most_flops)
        traffic = work.size_bytes / (kind.memory_bandwidth_bytes_per_s * self.most_bandwidth)
        launches = min(work.gradients, _KERNELS_BACKWARD) if work.is_backward else 1
        return max(launches * kind.launch_overhead_s, arithmetic, traffic)

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        """How long updating this much of a weight takes."""
        least_s, bytes_per_s = self.update_rate(kind)
        return max(least_s, size_bytes * self.update_bytes_per_byte / bytes_per_s)

    def update_rate(self, kind: DeviceKind) -> tuple[float, float]:
        """The least time of an update, and the bytes it moves in a second."""
        return kind.launch_overhead_s, kind.memory_bandwidth_bytes_per_s * self.most_bandwidth

    def curve(self, key: OpKey, kind: DeviceKind) -> Curve | None:
        """Measured times of an operator on a kind of device: none."""
        del key, kind
        return None


def transfer_s(size_bytes: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """How long a transfer occupies the narrowest link of its route."""
    return size_bytes / bandwidth_bytes_per_s + latency_s


RING_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How many times a ring of n devices passes (n-1) pieces on."""


def collective_s(
    pattern: str,
    piece_bytes: int,
    count: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    sums: str = RING,
) -> float:
    """How long a collective of `count` devices takes on the slowest link of its ring.

    `piece_bytes` is what one pair of devices exchanges: the whole box of an all-reduce, one device's
    part of an all-gather or reduce-scatter, one pair's part of an all-to-all.
    """
    step_bytes = piece_bytes / count if pattern == "all_reduce" else piece_bytes
    steps = RING_SHARE[pattern] * (count - 1)
    ring = steps * (step_bytes / bandwidth_bytes_per_s + latency_s)
    if pattern != "all_reduce":
        return ring
    if sums == ONE_DEVICE:
        return steps * (piece_bytes / bandwidth_bytes_per_s + latency_s)
    depth = 2 * ceil(log2(count))
    tree = depth * (piece_bytes / bandwidth_bytes_per_s + latency_s)
    return min(ring, tree)
