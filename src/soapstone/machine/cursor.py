"""A value of a document together with its place, so that whoever refuses it can say where it stands.

`Cursor` walks what a YAML or JSON parser returned. Each step checks a type and either returns Python
values or raises `MachineError`: the source, the place (`nodes[0].links[2].bandwidth`), what was found and
what to write instead, in one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from soapstone.errors import MachineError
from soapstone.machine.checks import LONGEST_NAME, did_you_mean, shown
from soapstone.machine.units import Quantity


@dataclass(frozen=True)
class Cursor:
    """`value` at `place` of `source`; the empty place is the whole document."""

    value: object
    source: str
    place: str = ""

    def refused(self, reason: str) -> MachineError:
        """The error that says `reason` about this place."""
        return MachineError(f"{self.source}: {self.place or 'the document'} {reason}")

    def fields(self, required: Iterable[str] = (), optional: Iterable[str] = ()) -> dict[str, Cursor]:
        """The fields of a mapping, each of which must be known and none of the required missing."""
        required = list(required)
        known = [*required, *optional]
        entries = self.entries()
        for key in entries:
            if key not in known:
                raise self.refused(f"has the unknown field {shown(key)}{did_you_mean(key, known)}")
        missing = [key for key in required if key not in entries]
        if missing:
            raise self.refused(f"lacks the field {missing[0]!r}; add it.")
        return entries

    def entries(self) -> dict[str, Cursor]:
        """The values of a mapping from any text keys."""
        if not isinstance(self.value, dict):
            raise self.refused(
                f"must be a mapping of fields, not {shown(self.value)}; write 'field: value' lines."
            )
        for key in self.value:
            if not isinstance(key, str):
                raise self.refused(f"has the field {shown(key)}, which is not text; put it in quotes.")
        return {
            key: self._below(f"{'.' if self.place else ''}{key}", value) for key, value in self.value.items()
        }

    def items(self) -> list[Cursor]:
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.refused(f"must be a list, not {shown(self.value)}; write one '- ' line per item.")
        return [self._below(f"[{position}]", value) for position, value in enumerate(self.value)]

    def text(self) -> str:
        """Printable text."""
        if not isinstance(self.value, str):
            raise self.refused(f"must be text, not {shown(self.value)}; put it in quotes.")
        if not self.value.strip() or not self.value.isprintable():
            raise self.refused(f"is {shown(self.value)}, which is not printable text; write a name.")
        return self.value

    def name(self) -> str:
        """Text that can name a device, switch, link, node or kind."""
        name = self.text()
        if " " in name or len(name) > LONGEST_NAME:
            raise self.refused(
                f"is {shown(name)}, but a name has no blanks and up to {LONGEST_NAME} characters; change it."
            )
        return name

    def whole_number(self, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not least <= self.value <= most:
            raise self.refused(f"must be a whole number from {least} to {most}, not {shown(self.value)}.")
        return self.value

    def amount(self, quantity: Quantity, *, above_zero: bool = True) -> Fraction:
        """A quantity in base units, more than zero (or at least zero), that fits a float."""
        try:
            exact = quantity.exactly(self.value)
            number = float(exact)
        except ValueError as error:
            raise self.refused(f"{error}.") from None
        except OverflowError:
            raise self.refused(
                f"is {shown(self.value)}, which is too large; write {quantity.example}."
            ) from None
        if number < 0 or (above_zero and number == 0):
            bound = "more than 0" if above_zero else "0 or more"
            raise self.refused(f"must be {bound}, not {shown(self.value)}; write {quantity.example}.")
        return exact

    def _below(self, step: str, value: object) -> Cursor:
        return Cursor(value, self.source, f"{self.place}{step}")
