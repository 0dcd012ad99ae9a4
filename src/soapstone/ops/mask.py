"""Random numbers that depend on where they are used and not on who computes them.

Every element of an operator's iteration space has its own number, a hash of the seed and of the
element's coordinates over all shards. So a dropout mask is the same for every split, and a shard
draws its part of it alone.

The last dim is hashed apart from those before it: a row of elements gets 64 bits (splitmix64 of
the seed and the row's linear index), and an element mixes them with its place in the row in 32-bit
arithmetic, half the memory traffic of 64. torch's integers wrap around and its right shift keeps the
sign, hence the masks after each shift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from soapstone.ops.box import Interval
from soapstone.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def _signed(value: int, width: int) -> int:
    """The integer that these bits are to a signed type."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


# The odd number nearest to 2**n divided by the golden ratio spreads consecutive numbers evenly
# (Knuth, The Art of Computer Programming 6.4).
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)

# Shifts and multipliers under which a changed input bit changes every output bit about half the
# time: Steele, Lea and Flood 2014 (splitmix64), and Wellons' search over 32-bit mixers.
_MIX_64 = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)), (31, 1))
_MIX_32 = ((16, _signed(0x7FEB352D, 32)), (15, _signed(0x846CA68B, 32)), (16, 1))


def _mixed_number(x: int) -> int:
    """splitmix64's output for a number."""
    for shift, factor in _MIX_64:
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x


def _mixed(x: Tensor, rounds: Sequence[tuple[int, int]], width: int) -> Tensor:
    """`x`, mixed in place."""
    for shift, factor in rounds:
        x ^= (x >> shift).bitwise_and_((1 << (width - shift)) - 1)
        if factor != 1:
            x *= factor
    return x


def bits(
    seed: int, sizes: Sequence[int], box: Sequence[Interval], device: torch.device | None = None
) -> Tensor:
    """32 random bits, as signed integers, for each element of a box in a space of these sizes."""
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, interval in zip(sizes[:-1], box[:-1], strict=True):
        place = torch.arange(*interval, device=rows.device)
        rows = rows.unsqueeze(-1) * size + place
    keys = _mixed(rows * _GOLDEN_64 + _signed(_mixed_number((seed + _GOLDEN_64) % 2**64), 64), _MIX_64, 64)
    if not sizes:
        return keys.to(torch.int32)
    columns = torch.arange(*box[-1], dtype=torch.int32, device=rows.device) * _GOLDEN_32
    x = columns ^ (keys >> 32).to(torch.int32).unsqueeze(-1)
    return _mixed(x, _MIX_32, 32) ^ keys.to(torch.int32).unsqueeze(-1)


def kept(drawn: Tensor, probability: float) -> Tensor:
    """Which elements to keep, given their bits; each is kept with this probability."""
    limit = round(probability * 2**32) - 2**31
    return drawn < limit if limit < 2**31 else torch.ones_like(drawn, dtype=torch.bool)


def uniform(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), given their bits: as many as a single-precision fraction holds."""
    return ((drawn >> 8).bitwise_and_(0xFFFFFF).to(torch.float32) * 2.0**-24).to(dtype)


def normal(drawn: Tensor, again: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of the standard normal distribution, given bits drawn twice (Box and Muller 1958)."""
    radius = (-2 * (1 - uniform(drawn, torch.float64)).log()).sqrt()
    return (radius * (2 * math.pi * uniform(again, torch.float64)).cos()).to(dtype)
