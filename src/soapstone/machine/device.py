"""What a device can do: memory, rates and bandwidth, one `DeviceKind` for each sort of device.

The figures are those of the vendors' datasheets: peaks of dense arithmetic (no sparsity), with the
tensor cores where the device has them. They are upper bounds; a cost model says how much of them an
operator reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from soapstone.errors import MachineError
from soapstone.machine.checks import check_name, check_number, did_you_mean, shown

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8")
"""The arithmetics a device may have a rate for; tf32 is f32 data multiplied in 19 bits."""


@dataclass(frozen=True)
class DeviceKind:
    """A sort of device. Equal kinds have equal names and figures. `message_overhead_s` is what a message
    takes of the devices at its two ends, all of which the one that it comes to has to do."""

    name: str
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    message_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        check_name("device kind", self.name)
        where = f"device kind {self.name!r}:"
        if not isinstance(self.memory_bytes, int) or isinstance(self.memory_bytes, bool):
            raise MachineError(
                f"{where} memory_bytes must be a whole number, not {shown(self.memory_bytes)}; round it."
            )
        check_number(f"{where} memory_bytes", self.memory_bytes, above_zero=True)
        bandwidth = check_number(
            f"{where} memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, above_zero=True
        )
        overhead = check_number(f"{where} launch_overhead_s", self.launch_overhead_s, above_zero=False)
        object.__setattr__(self, "peak_flops_per_s", _checked_peaks(where, self.peak_flops_per_s))
        object.__setattr__(self, "memory_bandwidth_bytes_per_s", bandwidth)
        object.__setattr__(self, "launch_overhead_s", overhead)
        message = check_number(f"{where} message_overhead_s", self.message_overhead_s, above_zero=False)
        object.__setattr__(self, "message_overhead_s", message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by rebuilding: a read-only mapping can do neither itself."""
        peaks = dict(self.peak_flops_per_s)
        rates = peaks, self.memory_bandwidth_bytes_per_s
        overheads = self.launch_overhead_s, self.message_overhead_s
        return (DeviceKind, (self.name, self.memory_bytes, *rates, *overheads))

    def peak_flops_per_s_in(self, dtype: str) -> float:
        """The peak rate in `dtype`, a name as graphs use it; f32's where there is no rate of its own.

        The two forms of f8 share a rate; integers and flags run at f32's.
        """
        rate = "f8" if dtype.startswith("f8") else dtype
        return self.peak_flops_per_s.get(rate, self.peak_flops_per_s["f32"])


def _checked_peaks(where: str, peaks: Mapping[str, float]) -> Mapping[str, float]:
    """A read-only copy of `peaks` in the order of `DTYPES`, with an f32 rate for certain."""
    if not isinstance(peaks, Mapping):
        raise MachineError(f"{where} peak_flops_per_s must map dtypes to rates, not be {shown(peaks)}.")
    for dtype in peaks:
        if dtype not in DTYPES:
            raise MachineError(
                f"{where} peak_flops_per_s has the unknown dtype {shown(dtype)}{did_you_mean(dtype, DTYPES)}"
            )
    if "f32" not in peaks:
        raise MachineError(
            f"{where} peak_flops_per_s has no 'f32' rate; give one, for others fall back to it."
        )
    rates = {
        dtype: check_number(f"{where} peak_flops_per_s[{dtype!r}]", peaks[dtype], above_zero=True)
        for dtype in DTYPES
        if dtype in peaks
    }
    return MappingProxyType(rates)


GIB = 2**30
TERA = 1e12
GIGA = 1e9

GPU_LAUNCH_S = 5e-6
"""[typical] From the call of an eager PyTorch operator to the start of its kernel."""

K80 = DeviceKind(  # Tesla K80 board specification, halved: a board is two GK210 dies; boost clock
    "k80", 12 * GIB, {"f64": 1.455 * TERA, "f32": 4.37 * TERA}, 240 * GIGA, GPU_LAUNCH_S
)
P100 = DeviceKind(  # Tesla P100 SXM2 datasheet
    "p100", 16 * GIB, {"f64": 5.3 * TERA, "f32": 10.6 * TERA, "f16": 21.2 * TERA}, 732 * GIGA, GPU_LAUNCH_S
)
V100 = DeviceKind(  # Tesla V100 SXM2 16 GB datasheet; f16 on tensor cores; Summit's device
    "v100", 16 * GIB, {"f64": 7.8 * TERA, "f32": 15.7 * TERA, "f16": 125 * TERA}, 900 * GIGA, GPU_LAUNCH_S
)
A100 = DeviceKind(  # A100 80 GB SXM datasheet; f64, tf32, bf16, f16 on tensor cores
    "a100",
    80 * GIB,
    {"f64": 19.5 * TERA, "f32": 19.5 * TERA, "tf32": 156 * TERA, "bf16": 312 * TERA, "f16": 312 * TERA},
    2039 * GIGA,
    GPU_LAUNCH_S,
)
_HOPPER_PEAKS = {  # H100 SXM datasheet without sparsity (the sheet prints twice these from tf32 on)
    "f64": 67 * TERA,
    "f32": 67 * TERA,
    "tf32": 494.7 * TERA,
    "bf16": 989.4 * TERA,
    "f16": 989.4 * TERA,
    "f8": 1978.9 * TERA,
}
H100 = DeviceKind("h100", 80 * GIB, _HOPPER_PEAKS, 3350 * GIGA, GPU_LAUNCH_S)  # H100 SXM datasheet
H200 = DeviceKind("h200", 141 * GIB, _HOPPER_PEAKS, 4800 * GIGA, GPU_LAUNCH_S)  # H200 SXM datasheet
CPU = DeviceKind(
    "cpu",
    4 * GIB,  # [typical] main memory per core of a server
    # [typical] one AVX2 core at 3 GHz: 2 multiply-adds of 8 f32 (4 f64) a cycle
    {"f64": 48 * GIGA, "f32": 96 * GIGA},
    10 * GIGA,  # [typical] what one core draws from main memory
    6e-6,  # [measured] calling F.linear on next to no data, torch 2.13
)

KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {kind.name: kind for kind in (K80, P100, V100, A100, H100, H200, CPU)}
)
"""The built-in kinds by name: what a machine file may refer to without defining it."""
