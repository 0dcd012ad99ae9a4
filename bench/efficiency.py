"""How much of its peak a device reaches, by the size of the work: the constants of `cost.analytic`.

Times matrix products, convolutions and elementwise operators from tiny to large on the device at
hand, forward, and fits

    seconds = launch + (ideal + half) / most

where `ideal` is flops / peak (or bytes / bandwidth), `most` the fraction of the peak that large
work reaches and `half` the ideal time at which half of `most` is reached. Prints the table, the fit
and its error on every second size, which the fit did not see.

    python bench/efficiency.py --device cuda --peak-flops 67e12 --bandwidth 4.8e12 --dtype f32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Sample:
    """One operator at one size."""

    name: str
    flops: float
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The constants, and the median relative error on sizes that were not fitted."""

    launch_s: float
    most: float
    half_s: float
    held_out_error: float


def timed(run: Callable[[], object], device: str, least_s: float) -> float:
    """The median seconds of a call, measured in batches of calls after a warm-up."""
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    run()
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    once = max(time.perf_counter() - started, 1e-6)
    calls = max(1, min(200, int(least_s / once / 5)))
    medians = []
    for _ in range(5):
        synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize()
        medians.append((time.perf_counter() - started) / calls)
    return statistics.median(medians)


def products(device: str, dtype: torch.dtype, largest: int, least_s: float) -> list[Sample]:
    """Square matrix products."""
    samples, n = [], 32
    while n <= largest:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        seconds = timed(lambda a=a, b=b: a @ b, device, least_s)
        samples.append(Sample(f"matmul {n}", 2.0 * n**3, 3.0 * n * n * a.element_size(), seconds))
        n = n * 3 // 2 if n % 3 else n * 4 // 3
    return samples


def convolutions(device: str, dtype: torch.dtype, largest: int, least_s: float) -> list[Sample]:
    """3x3 convolutions of 56 x 56 images, from few channels and samples to many."""
    samples = []
    for batch, channels in ((1, 16), (2, 32), (4, 64), (8, 64), (16, 128), (32, 128), (64, 256), (128, 256)):
        if batch * channels > largest:
            break
        x = torch.randn(batch, channels, 56, 56, device=device, dtype=dtype)
        w = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
        seconds = timed(lambda x=x, w=w: F.conv2d(x, w, padding=1), device, least_s)
        flops = 2.0 * x.numel() * channels * 9
        samples.append(Sample(f"conv {batch}x{channels}", flops, 2.0 * x.numel() * x.element_size(), seconds))
    return samples


def elementwise(device: str, dtype: torch.dtype, largest: int, least_s: float) -> list[Sample]:
    """A sum of two tensors."""
    samples, n = [], 1 << 10
    while n <= largest:
        a, b = (torch.randn(n, device=device, dtype=dtype) for _ in range(2))
        seconds = timed(lambda a=a, b=b: a + b, device, least_s)
        samples.append(Sample(f"add {n}", float(n), 3.0 * n * a.element_size(), seconds))
        n *= 2
    return samples


def fitted(samples: list[Sample], ideal: Callable[[Sample], float]) -> Fit:
    """The fit to every other size. The launch is the time of the smallest work; `most` and `half`
    minimise the relative error over a grid."""
    launch_s = min(sample.seconds for sample in samples)
    seen, held_out = samples[::2], samples[1::2]

    def error(most: float, half_s: float, over: list[Sample]) -> float:
        predicted = [launch_s + (ideal(s) + half_s) / most for s in over]
        return statistics.median(abs(p - s.seconds) / s.seconds for p, s in zip(predicted, over, strict=True))

    choices = [(m / 100, launch_s * h / 20) for m in range(20, 101, 2) for h in range(41)]
    most, half_s = min(choices, key=lambda c: error(*c, seen))
    return Fit(launch_s, most, half_s, error(most, half_s, held_out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--peak-flops", type=float, required=True, help="of the datasheet, in that dtype")
    parser.add_argument("--bandwidth", type=float, required=True, help="of memory, bytes per second")
    parser.add_argument("--least", type=float, default=0.05, help="seconds to spend on each size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtype, large = DTYPES[options.dtype], options.device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    arguments = (options.device, dtype)
    families = {
        "products": products(*arguments, 12000 if large else 1500, options.least),
        "convolutions": convolutions(*arguments, 1 << 16 if large else 512, options.least),
        "elementwise": elementwise(*arguments, 1 << 29 if large else 1 << 24, options.least),
    }
    fits = {
        name: fitted(
            samples,
            (lambda s: s.size_bytes / options.bandwidth)
            if name == "elementwise"
            else (lambda s: s.flops / options.peak_flops),
        )
        for name, samples in families.items()
    }
    if options.json:
        print(
            json.dumps(
                {
                    "fits": {k: asdict(v) for k, v in fits.items()},
                    "samples": {k: [asdict(s) for s in v] for k, v in families.items()},
                }
            )
        )
        return
    for name, samples in families.items():
        for sample in samples:
            rate = sample.flops / sample.seconds / options.peak_flops
            traffic = sample.size_bytes / sample.seconds / options.bandwidth
            print(
                f"{sample.name:20} {sample.seconds * 1e6:12.1f} us"
                f"  {rate:6.1%} of flops  {traffic:6.1%} of bandwidth"
            )
        print(f"  {name}: {fits[name]}")


if __name__ == "__main__":
    main()
