"""Rules as text: one line each, shipped with the package and readable by anyone.

    # comment
    NAME | VARIABLES | LEFT | RIGHT | STATUS

A book is a directory of `.rules` files, one for each family of the enumeration and one for the rules that
operators' definitions give. Only rules whose status is `proved` are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from soapstone.errors import OpError, RuleError
from soapstone.files import replace_text
from soapstone.subst.layout import is_parallel
from soapstone.subst.term import Rule, calls, parse_rule
from soapstone.subst.words import check_words

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".rules"


@dataclass(frozen=True)
class Entry:
    """A rule of a book, the file it stands in, and its status."""

    rule: Rule
    family: str
    status: str


@dataclass(frozen=True)
class Book:
    """Rules by name."""

    entries: Mapping[str, Entry]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that may be used."""
        return tuple(entry.rule for entry in self.entries.values() if entry.status == "proved")

    def entry(self, name: str) -> Entry:
        """The rule of that name."""
        found = self.entries.get(name)
        if found is None:
            close = get_close_matches(name, self.entries, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise RuleError(f"there is no rule '{name}'{hint}")
        return found


def named(rules: Iterable[Rule], taken: Iterable[str] = ()) -> list[Rule]:
    """The rules with names that tell them apart: their operators, and a number where those are not enough."""
    counts = Counter(taken)
    found = []
    for rule in rules:
        base = rule.name or _base_name(rule)
        counts[base] += 1
        number = counts[base]
        found.append(replace(rule, name=base if number == 1 else f"{base}.{number}"))
    return found


def _base_name(rule: Rule) -> str:
    """The operators of both sides, those that compute first."""
    words = dict.fromkeys(call.word for call in calls(rule.left + rule.right))
    return "-".join(sorted(words, key=lambda word: (is_parallel(word), word)))


def text(entries: Sequence[Entry], heading: str) -> str:
    """A file of a book."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines += [f"{entry.rule.name} | {entry.rule} | {entry.status}" for entry in entries]
    return "\n".join(lines) + "\n"


def write(path: Path, entries: Sequence[Entry], heading: str) -> None:
    """Write one file of a book."""
    try:
        replace_text(path, text(entries, heading))
    except OSError as error:
        raise RuleError(f"cannot write {path}: {error.strerror}") from error


def read(place: Path) -> Book:
    """A book from a directory of `.rules` files, or from one file."""
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not files:
        raise RuleError(f"{place} holds no {SUFFIX} file")
    entries: dict[str, Entry] = {}
    places: dict[str, str] = {}
    for file in files:
        for number, entry in _entries(file):
            name, here = entry.rule.name, f"{file}, line {number}"
            if name in entries:
                raise RuleError(f"{here}: there is a rule '{name}' already, in {places[name]}; rename one")
            entries[name], places[name] = entry, here
    return Book(entries)


def _entries(file: Path) -> Iterable[tuple[int, Entry]]:
    """The rules of a file, with their lines."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            rule, status = parse_rule(line)
            check_words(rule.left + rule.right)
        except (OpError, RuleError) as error:
            raise RuleError(f"{file}, line {number}: {error}") from error
        yield number, Entry(rule, file.stem, status)


@cache
def shipped() -> Book:
    """The book that comes with the package."""
    return read(SHIPPED)
