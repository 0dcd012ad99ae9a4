"""The checks every part of a machine shares: what a name may be and what a quantity may be.

Each raises `MachineError` with one sentence that starts with `where`, names the offending value
and says what to write instead.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable

from soapstone.errors import MachineError

LONGEST_NAME = 200
"""[choice] Longer names are files read by mistake, and would make tables and traces unreadable."""


MOST_LISTED = 12
"""[choice] The most names a sentence lists."""


def check_name(where: str, name: object) -> None:
    """Refuse what is not a printable name without blanks."""
    if not isinstance(name, str):
        raise MachineError(f"{where}: a name must be text, not {shown(name)}; put it in quotes.")
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or " " in name:
        raise MachineError(
            f"{where}: the name {shown(name)} must have 1 to {LONGEST_NAME} printable characters, "
            "none of them blank; choose one such as 'gpu0'."
        )


def check_number(where: str, value: object, *, above_zero: bool) -> float:
    """`value` as a finite float that is more than zero, or at least zero."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MachineError(f"{where} must be a finite number, not {shown(value)}; give it in base units.")
    if number < 0 or (above_zero and number == 0):
        bound = "more than 0" if above_zero else "0 or more"
        raise MachineError(f"{where} must be {bound}, not {shown(value)}; correct its value.")
    return number


def shown(value: object) -> str:
    """`value` as a short quotation that fits in a sentence, whatever its size."""
    return " ".join(reprlib.repr(value).split())


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if one is like it at all."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known name, or `"; choose one of ..."` when none is near."""
    options = list(known)
    near = nearest(name, options)
    if near:
        return f"; did you mean {near!r}?"
    more = f" and {len(options) - MOST_LISTED} more" if len(options) > MOST_LISTED else ""
    return f"; choose one of {', '.join(options[:MOST_LISTED])}{more}."
