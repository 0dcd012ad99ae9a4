"""Terms, rules, and how they are written.

    products | x:[1 1] y:[1 1] z:[1 1] | add(matmul(x, y), matmul(x, z)) | matmul(x, add(y, z)) | proved

A term is a variable or a word applied to terms; most words are names of operators, `words` has the rest.
A rule says that two graphs compute the same: its two sides are lists of terms, one for each output, in the
same order. Subterms that are written twice are one node. A variable is declared with its layout, a number
for each axis: `x:[k 1]` has two axes, the first split into k parts; `+k` is k partial sums, `*k` k copies,
`t k` after a degree (`1tk`) an axis cut into k pieces in time. `k` is any degree, the same throughout a
rule, and sizes are any for which both sides are well formed and agree in shape.
In square brackets stand attributes; `[*]` is any attributes, the same wherever the word occurs in the rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from soapstone.errors import RuleError
from soapstone.ops.op import Attr
from soapstone.subst.degree import Degree, Symbolic
from soapstone.subst.layout import Layout, is_parallel

ANY = (("*", "*"),)
"""The attributes of a word that may have any."""

MOST_NESTED = 64
"""[choice] How deep words may stand in each other: terms are walked by recursion."""


@dataclass(frozen=True)
class Var:
    """A value that a rule says nothing about but its layout."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """A word applied to terms."""

    word: str
    args: tuple[Term, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.word, self.args, self.attrs))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.attrs == ANY:
            said = "[*]"
        else:
            said = f"[{', '.join(f'{k}={_literal(v)}' for k, v in self.attrs)}]" if self.attrs else ""
        return f"{self.word}{said}({', '.join(map(str, self.args))})"


Term = Var | Call
Side = tuple[Term, ...]


@dataclass(frozen=True)
class Rule:
    """Two graphs that compute the same, as named terms over declared variables."""

    name: str
    variables: Mapping[str, Layout]
    left: Side
    right: Side

    def __str__(self) -> str:
        declared = " ".join(f"{name}:{layout}" for name, layout in self.variables.items())
        return f"{declared} | {', '.join(map(str, self.left))} | {', '.join(map(str, self.right))}"

    def __hash__(self) -> int:
        return hash((self.name, self.left, self.right))

    @property
    def size(self) -> int:
        """How many nodes both sides have."""
        return node_count(self.left) + node_count(self.right)

    @property
    def is_parallel(self) -> bool:
        """Whether a parallel operator occurs in it."""
        return any(is_parallel(call.word) for call in calls(self.left + self.right))


def subterms(side: Side) -> Iterator[Term]:
    """Every subterm, each once, operands before what reads them."""
    seen: set[Term] = set()

    def visit(term: Term) -> Iterator[Term]:
        if term in seen:
            return
        seen.add(term)
        if isinstance(term, Call):
            for arg in term.args:
                yield from visit(arg)
        yield term

    for term in side:
        yield from visit(term)


def calls(side: Side) -> Iterator[Call]:
    """Every application in a side, each once."""
    return (term for term in subterms(side) if isinstance(term, Call))


def variables_of(side: Side) -> tuple[str, ...]:
    """The names of the variables, in the order in which they first occur."""
    return tuple(term.name for term in subterms(side) if isinstance(term, Var))


def node_count(side: Side) -> int:
    """How many nodes a side is; the two halves of one cut are one."""
    return len({(call.args, call.attrs) if call.word in ("head", "tail") else call for call in calls(side)})


def erased(term: Term) -> Term:
    """The term without its parallel operators."""
    if isinstance(term, Var):
        return term
    args = tuple(erased(arg) for arg in term.args)
    return args[0] if is_parallel(term.word) else Call(term.word, args, term.attrs)


def substituted(term: Term, by: Mapping[Term, Term]) -> Term:
    """The term with every occurrence of some subterms replaced."""
    found = by.get(term)
    if found is not None:
        return found
    if isinstance(term, Var):
        return term
    return Call(term.word, tuple(substituted(arg, by) for arg in term.args), term.attrs)


def _literal(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"({' '.join(_literal(v) for v in value)})"
    return str(value)


def _value(text: str) -> Attr:
    if text.startswith("("):
        return tuple(_value(part) for part in text[1:-1].split())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "true": True, "False": False, "false": False, "None": None}.get(text, text)


_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9.]*|\[[^\]]*\]|[(),])")


def parse_side(text: str) -> Side:
    """The terms that a text lists."""
    tokens = _tokens(text)
    terms = [_term(tokens, text)]
    while tokens and tokens[0] == ",":
        tokens.pop(0)
        terms.append(_term(tokens, text))
    if tokens:
        raise RuleError(f"did not expect '{tokens[0]}' in '{text.strip()}'")
    return tuple(terms)


def _tokens(text: str) -> list[str]:
    tokens, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise RuleError(f"cannot read '{text[at:]}' in '{text}'")
        tokens.append(match[1])
        at = match.end()
    return tokens


def _term(tokens: list[str], text: str, depth: int = 0) -> Term:
    if depth > MOST_NESTED:
        raise RuleError(
            f"words are nested more than {MOST_NESTED} deep in '{_short(text)}'; write a smaller rule"
        )
    if not tokens or (not tokens[0][0].isalpha() and tokens[0][0] != "_"):
        raise RuleError(f"a name is missing in '{text.strip()}'")
    name = tokens.pop(0)
    attrs: tuple[tuple[str, Attr], ...] = ()
    if tokens and tokens[0].startswith("["):
        attrs = _attrs(tokens.pop(0)[1:-1], text)
    if not tokens or tokens[0] != "(":
        if attrs:
            raise RuleError(f"'{name}' has attributes but no operands in '{text.strip()}'")
        return Var(name)
    tokens.pop(0)
    args = [] if tokens and tokens[0] == ")" else [_term(tokens, text, depth + 1)]
    while tokens and tokens[0] == ",":
        tokens.pop(0)
        args.append(_term(tokens, text, depth + 1))
    if not tokens or tokens.pop(0) != ")":
        raise RuleError(f"a ')' is missing in '{text.strip()}'")
    return Call(name, tuple(args), attrs)


def _attrs(text: str, whole: str) -> tuple[tuple[str, Attr], ...]:
    if text.strip() == "*":
        return ANY
    found: list[tuple[str, Attr]] = []
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise RuleError(f"'{part.strip()}' is no attribute (name=value) in '{whole.strip()}'")
        if key.strip() in dict(found):
            raise RuleError(f"attribute '{key.strip()}' is given twice in '{_short(whole)}'; leave one out")
        found.append((key.strip(), _value(value.strip())))
    return tuple(found)


def _short(text: str) -> str:
    """The beginning of a text, for a sentence."""
    return text.strip() if len(text.strip()) <= 80 else f"{text.strip()[:77]}..."


def _degree(text: str) -> Degree:
    if re.fullmatch(r"[1-9][0-9]{0,5}", text):
        return int(text)
    if not re.fullmatch(r"[a-z](·[a-z])*", text):
        raise RuleError(f"'{_short(text)}' is no degree; write a whole number from 1, or k")
    return Symbolic(tuple(text.split("·")))


def parse_layout(text: str) -> Layout:
    """The layout that `[k 1 +k *k]` writes."""
    degrees: list[Degree] = []
    pieces: list[Degree] = []
    partials: Degree = 1
    copies: Degree = 1
    for part in text.strip("[]").split():
        if part.startswith("+"):
            partials = _degree(part[1:])
        elif part.startswith("*"):
            copies = _degree(part[1:])
        else:
            degree, _, piece = part.partition("t")
            degrees.append(_degree(degree))
            pieces.append(_degree(piece or "1"))
    return Layout(tuple(degrees), partials, copies, tuple(pieces))


_DECLARATION = re.compile(r"\s*([A-Za-z_]\w*):(\[[^\]]*\])")


def parse_variables(text: str) -> dict[str, Layout]:
    """The declarations that a text lists."""
    found, at, text = {}, 0, text.rstrip()
    while at < len(text):
        match = _DECLARATION.match(text, at)
        if match is None:
            raise RuleError(f"'{text[at:].strip()}' declares no variable (name:[degrees])")
        if match[1] in found:
            raise RuleError(f"variable '{match[1]}' is declared twice; leave one out")
        found[match[1]] = parse_layout(match[2])
        at = match.end()
    return found


def parse_rule(line: str) -> tuple[Rule, str]:
    """A rule and its status, from one line."""
    fields = [field.strip() for field in line.split("|")]
    if len(fields) not in (4, 5):
        raise RuleError(
            f"a rule is 'name | variables | left | right | status', which '{line.strip()[:80]}' is not"
        )
    name, declared, left, right = fields[:4]
    if not name:
        raise RuleError("a rule has no name; write 'name | variables | left | right'")
    rule = Rule(name, parse_variables(declared), parse_side(left), parse_side(right))
    if len(rule.left) != len(rule.right):
        raise RuleError(
            f"rule '{name}' has {len(rule.left)} outputs on the left, {len(rule.right)} on the right"
        )
    for used in variables_of(rule.left + rule.right):
        if used not in rule.variables:
            raise RuleError(f"rule '{name}' uses '{used}', which it does not declare")
    return rule, fields[4] if len(fields) == 5 else "new"
