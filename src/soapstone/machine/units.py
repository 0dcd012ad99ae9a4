"""Quantities as people write them: `12 GB/s`, `100 Gb/s`, `1.5 us`, `16 GiB`, `15.7 TFLOP/s`.

Decimal prefixes are powers of 1000 and binary ones (`Ki`, `Mi`, ...) of 1024; `B` is a byte, `b` a bit.
Reading rounds once, exactly, to the nearest float, and `exact_text` writes only what reads back as the
same float.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from soapstone.machine.checks import shown

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_AMOUNT = re.compile(
    r"\s*([+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?)\s*(.*?)\s*"
)


@dataclass(frozen=True)
class Quantity:
    """One sort of quantity: what to call it, how to write it, and what each of its units is worth."""

    described: str
    example: str
    factors: Mapping[str, Fraction]
    preferred: tuple[str, ...]
    """The units used for writing, largest first."""

    def parse(self, value: object) -> float:
        """`value`, a number in base units or a text with a unit, as a float; ValueError says why not."""
        return float(self.exactly(value))

    def exactly(self, value: object) -> Fraction:
        """Like `parse`, before rounding to a float."""
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return Fraction(value)
            match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
            if match is not None and match[2] in self.factors:
                return Fraction(match[1]) * self.factors[match[2]]
        except (ValueError, OverflowError):  # not a number, or infinite
            pass
        raise ValueError(f"is {shown(value)}, which is not {self.described}; write {self.example}")

    def exact_text(self, value: float) -> str | float:
        """The shortest text with a unit that reads back as `value`, or the number itself if there is none."""
        for digits in (6, 15):
            text = self._text(value, digits)
            read = self.exactly(text)
            if (read if isinstance(value, int) else float(read)) == value:
                return text
        return value

    def short_text(self, value: float) -> str:
        """`value` in the unit that suits it, with up to 4 digits: for tables."""
        return self._text(value, 4)

    def _text(self, value: float, digits: int) -> str:
        unit = next((unit for unit in self.preferred if value >= self.factors[unit]), self.preferred[-1])
        return f"{float(Fraction(value) / self.factors[unit]):.{digits}g} {unit}"


def _scaled(prefixes: Mapping[str, int], unit: str, worth: Fraction = Fraction(1)) -> dict[str, Fraction]:
    return {f"{prefix}{unit}": worth * factor for prefix, factor in prefixes.items()}


_BIT = Fraction(1, 8)

BYTES = Quantity(
    "an amount of memory",
    "a number of bytes or a text such as '16 GiB'",
    {"": Fraction(1), **_scaled(_DECIMAL, "B"), **_scaled(_BINARY, "B")},
    ("TiB", "GiB", "MiB", "KiB", "B"),
)
BYTES_PER_S = Quantity(
    "a bandwidth",
    "a number of bytes per second or a text such as '12 GB/s' or '100 Gb/s'",
    {
        "": Fraction(1),
        **_scaled(_DECIMAL, "B/s"),
        **_scaled(_BINARY, "B/s"),
        **_scaled(_DECIMAL, "b/s", _BIT),
        **_scaled(_DECIMAL, "bit/s", _BIT),
    },
    ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
)
SECONDS = Quantity(
    "a time",
    "a number of seconds or a text such as '1.5 us'",
    {
        "": Fraction(1),
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
    },
    ("s", "ms", "us", "ns"),
)
FLOPS_PER_S = Quantity(
    "a rate of arithmetic",
    "a number of operations per second or a text such as '15.7 TFLOP/s'",
    {"": Fraction(1), **_scaled(_DECIMAL, "FLOP/s")},
    ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),
)


def counted(count: int, thing: str) -> str:
    """So many of a thing, in words: `1 device`, `4 micro-batches`."""
    ending = "" if count == 1 else "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{ending}"
