"""The index notation in which operators are written, as text and as a tree.

    matmul      m k, k n -> m n
    conv2d      b (g c) h*sh+r*dh-ph w*sw+q*dw-pw, (g o) c r! q!, [(g o)] -> b (g o) h w
    softmax     ... s! -> ... s!
    reshape     (a:4 b:8) c -> a (b c)

Operands are separated by commas, the axes of one by blanks. An axis is indexed by

    h               a dim
    h*s+r-p         a sum of dims, attributes and integers; a product may hold one dim
    (h+p-r)/s       the same, divided: only points where the division is exact count
    (g o)           factored: the axis runs over all pairs, `o` fastest
    0               a constant; an axis of size one
    ...             as many leading axes as the operand has left; operands broadcast over them

A dim of the output is parallel, a dim absent from it is summed. `h!` says that a dim must stay
whole, `b:8` states its size where no operand shows it, and `[...]` marks an operand that may be
left out. `docs/notation.md` is the reader's page about all of this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from soapstone.errors import OpError


@dataclass(frozen=True)
class Term:
    """`coefficient` times the product of `attrs` times `dim` (or times one)."""

    coefficient: int
    attrs: tuple[str, ...]
    dim: str | None


@dataclass(frozen=True)
class Sum:
    """An axis indexed by an affine expression, divided exactly by an attribute if `divisor`."""

    terms: tuple[Term, ...]
    divisor: str | int | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(term.dim for term in self.terms if term.dim is not None)


@dataclass(frozen=True)
class Factored:
    """An axis that runs over all combinations of `dims`, the last one fastest."""

    dims: tuple[str, ...]


@dataclass(frozen=True)
class Prefix:
    """`...`: the leading axes that the rest of the operand does not name."""


Axis = Sum | Factored | Prefix


@dataclass(frozen=True)
class Notation:
    """A parsed notation: the axes of every operand and output, and what was said about dims."""

    text: str
    operands: tuple[tuple[Axis, ...], ...]
    optional: tuple[bool, ...]
    outputs: tuple[tuple[Axis, ...], ...]
    whole: frozenset[str]
    sizes: Mapping[str, int]


_TOKEN = re.compile(r"\s*(?:(?P<word>\.\.\.|[A-Za-z_][A-Za-z_0-9]*|\d+)|(?P<sign>[-+*/()!:]))")


@cache
def parse(text: str, attrs: frozenset[str] = frozenset()) -> Notation:
    """The tree of a notation. `attrs` are the names that are attributes and not dims."""
    sides = text.split("->")
    if len(sides) != 2:
        raise OpError(f"notation '{text}' needs exactly one '->' between operands and outputs")
    reader = _Reader(text, attrs)
    operands, optional = [], []
    for part in sides[0].split(",") if sides[0].strip() else []:
        part = part.strip()
        left_out = part.startswith("[") and part.endswith("]")
        operands.append(reader.axes(part[1:-1] if left_out else part))
        optional.append(left_out)
    outputs = tuple(reader.axes(part) for part in sides[1].split(","))
    return Notation(text, tuple(operands), tuple(optional), outputs, frozenset(reader.whole), reader.sizes)


class _Reader:
    """Reads the axes of one operand at a time, collecting what `!` and `:` say about dims."""

    def __init__(self, text: str, attrs: frozenset[str]) -> None:
        self.text = text
        self.attrs = attrs
        self.whole: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.tokens: list[str] = []

    def axes(self, part: str) -> tuple[Axis, ...]:
        found: list[Axis] = []
        for chunk in _chunks(part):
            self.tokens = self._tokens(chunk)
            found.append(self._axis())
            if self.tokens:
                raise self._error(f"did not expect '{self.tokens[0]}' in '{chunk}'")
        return tuple(found)

    def _tokens(self, chunk: str) -> list[str]:
        tokens, position = [], 0
        while position < len(chunk):
            match = _TOKEN.match(chunk, position)
            if match is None:
                raise self._error(f"cannot read '{chunk[position:]}'")
            tokens.append(match["word"] or match["sign"])
            position = match.end()
        return tokens

    def _axis(self) -> Axis:
        if self.tokens[0] == "...":
            self.tokens.pop(0)
            return Prefix()
        if self.tokens[0] != "(":
            return Sum(self._terms())
        self.tokens.pop(0)
        if any(token in "+-*" for token in self.tokens):
            terms = self._terms()
            self._expect(")")
            self._expect("/")
            divisor = self._word()
            return Sum(terms, int(divisor) if divisor.isdigit() else divisor)
        dims = []
        while self.tokens and self.tokens[0] != ")":
            dims.append(self._dim(self._word()))
        self._expect(")")
        return Factored(tuple(dims))

    def _terms(self) -> tuple[Term, ...]:
        terms, sign = [], 1
        if self.tokens and self.tokens[0] == "-":
            self.tokens.pop(0)
            sign = -1
        while True:
            terms.append(self._term(sign))
            if not self.tokens or self.tokens[0] not in "+-":
                return tuple(terms)
            sign = 1 if self.tokens.pop(0) == "+" else -1

    def _term(self, coefficient: int) -> Term:
        attrs: list[str] = []
        dim: str | None = None
        while True:
            word = self._word()
            if word.isdigit():
                coefficient *= int(word)
            elif word in self.attrs:
                attrs.append(word)
            elif dim is None:
                dim = self._dim(word)
            else:
                raise self._error(f"a product may hold one dim, not both '{dim}' and '{word}'")
            if not self.tokens or self.tokens[0] != "*":
                return Term(coefficient, tuple(attrs), dim)
            self.tokens.pop(0)

    def _dim(self, name: str) -> str:
        if name.isdigit() or name == "...":
            raise self._error(f"'{name}' is not the name of a dim")
        while self.tokens and self.tokens[0] in "!:":
            if self.tokens.pop(0) == "!":
                self.whole.add(name)
            else:
                size = int(self._word())
                if self.sizes.setdefault(name, size) != size:
                    raise self._error(f"dim '{name}' is given two sizes, {self.sizes[name]} and {size}")
        return name

    def _word(self) -> str:
        if not self.tokens or self.tokens[0] in "-+*/()!:":
            raise self._error(f"expected a name or a number before '{' '.join(self.tokens)}'")
        return self.tokens.pop(0)

    def _expect(self, sign: str) -> None:
        if not self.tokens or self.tokens.pop(0) != sign:
            raise self._error(f"expected '{sign}'")

    def _error(self, what: str) -> OpError:
        return OpError(f"notation '{self.text}': {what}")


def _chunks(part: str) -> list[str]:
    """The blank-separated axes of one operand; blanks inside parentheses do not separate."""
    chunks, depth, current = [], 0, ""
    for character in part:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character.isspace() and depth == 0:
            chunks.append(current)
            current = ""
        else:
            current += character
    return [chunk for chunk in [*chunks, current] if chunk]
