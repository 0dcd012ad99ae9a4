"""All graphs of a family in the native core: types worked out here, elements and graphs there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from soapstone.native import TermBank
from soapstone.subst.commuting import commutes
from soapstone.subst.compiling import add_program
from soapstone.subst.families import Family, Template
from soapstone.subst.layout import Layout, Objection, whole
from soapstone.subst.term import Call, Side, Term, Var
from soapstone.subst.words import Context, Typed, applied, typed

_SEED = 20_220_711
_SPARE = 3
"""How many variables of each type exist beside the enumerated ones, to ask whether a rule is more general."""


@dataclass(frozen=True)
class Class:
    """Graphs that compute the same, the smallest first. Outputs of all are in the same order."""

    graphs: tuple[Side, ...]


class Enumeration:
    """The terms of one family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.bank = TermBank(_SEED)
        self.context = Context(degree=2)
        self.types: dict[Typed, int] = {}
        self.layouts: dict[str, Layout] = {}
        self.variables: dict[int, Var] = {}
        self.values: dict[Term, int] = {}
        self.spare: dict[Typed, list[Var]] = {}
        self.operators: dict[tuple[int, tuple[int, ...]], int] = {}
        self.templates: list[Template] = []
        self._programs: dict[object, int] = {}
        self._shapes: dict[object, bool] = {}
        self._terms: dict[int, Term] = {}
        for shape, layout, count in family.variables:
            self._declare(Typed(shape, layout), count, enumerated=True)
        self._add_operators()
        for kind in list(self.types):
            self._declare(kind, _SPARE, enumerated=False)

    def _declare(self, kind: Typed, count: int, enumerated: bool) -> None:
        number = self.types.setdefault(kind, len(self.types))
        for _ in range(count):
            var = Var(f"v{len(self.variables)}")
            value = self.bank.add_variable(number, prod(kind.shape), enumerated)
            self.variables[value], self.values[var], self.layouts[var.name] = var, value, kind.layout
            self._terms[value] = var
            if not enumerated:
                self.spare.setdefault(kind, []).append(var)

    def _fits(self, kind: Typed) -> bool:
        parts, pieces = kind.layout.parts, prod(n for n in kind.layout.pieces if isinstance(n, int))
        cells = zip(kind.shape, kind.layout.degrees, kind.layout.pieces, strict=True)
        return (
            isinstance(parts, int)
            and parts <= self.family.most_parts
            and pieces <= 2
            and all(size in self.family.sizes for size in kind.shape)
            and all(isinstance(d, int) and isinstance(p, int) and size % (d * p) == 0 for size, d, p in cells)
        )

    def _add_operators(self) -> None:
        """Every template at every combination of types that can come up."""
        tried: set[tuple[int, tuple[int, ...]]] = set()
        for _ in range(self.family.most_nodes):
            known = dict(self.types)
            by_number = {number: kind for kind, number in known.items()}
            for index, template in enumerate(self.family.templates):
                for numbers in itertools.product(range(len(known)), repeat=len(template[0].args)):
                    if (index, numbers) in tried:
                        continue
                    tried.add((index, numbers))
                    args = [by_number[n] for n in numbers]
                    if self._shapes_fit(index, template, args):
                        self._add_operator(index, template, numbers, args)

    def _shapes_fit(self, index: int, template: Template, args: list[Typed]) -> bool:
        """Whether the operator takes such shapes, and operands that lie on equally many devices."""
        if len({arg.layout.parts for arg in args}) > 1:
            return False
        taken = self.family.takes.get(template[0].word)
        if taken is not None and any(a.shape not in own for a, own in zip(args, taken, strict=True)):
            return False
        key = (index, tuple(arg.shape for arg in args))
        found = self._shapes.get(key)
        if found is None:
            plain = [Typed(arg.shape, whole(len(arg.shape))) for arg in args]
            kinds = [typed(call, plain, self.context) for call in template]
            found = self._shapes[key] = not any(
                isinstance(kind, Objection) or not self._fits(kind) for kind in kinds
            )
        return found

    def _add_operator(
        self, index: int, template: Template, numbers: tuple[int, ...], args: list[Typed]
    ) -> None:
        outputs, programs = [], []
        for call in template:
            kind = typed(call, args, self.context)
            if isinstance(kind, Objection) or not self._fits(kind):
                return
            outputs.append(self.types.setdefault(kind, len(self.types)))
            programs.append(self._program(call, args))
        is_symmetric = (
            len(args) == 2 and numbers[0] == numbers[1] and commutes(template[0].word, template[0].attrs)
        )
        op = self.bank.add_operator(list(numbers), outputs, programs, is_symmetric)
        self.operators[index, numbers] = op
        assert op == len(self.templates)
        self.templates.append(template)

    def _program(self, call: Call, args: list[Typed]) -> int:
        key = (call, tuple(arg.shape for arg in args))
        found = self._programs.get(key)
        if found is None:
            meant = applied(call, [arg.shape for arg in args], self.context)
            found = self._programs[key] = add_program(self.bank, meant)
        return found

    def term(self, value: int) -> Term:
        """The term of a value."""
        found = self._terms.get(value)
        if found is None:
            node = self.bank.node_of(value)
            template = self.templates[self.bank.operator_of(node)]
            call = template[self.bank.output_of(value)]
            args = tuple(self.term(operand) for operand in self.bank.operands_of(node))
            found = self._terms[value] = Call(call.word, args, call.attrs)
        return found

    def value(self, term: Term) -> int | None:
        """The value of a term; None where its types do not fit."""
        found = self.values.get(term)
        if found is not None or isinstance(term, Var):
            return found
        operands = [self.value(arg) for arg in term.args]
        numbers = tuple(self.bank.type(operand) for operand in operands if operand is not None)
        if len(numbers) < len(operands):
            return None
        for index, template in enumerate(self.family.templates):
            for output, call in enumerate(template):
                if (call.word, call.attrs) == (term.word, term.attrs):
                    op = self.operators.get((index, numbers))
                    if op is None:
                        return None
                    first = self.bank.apply(op, [operand for operand in operands if operand is not None])
                    self.values[term] = first + output
                    return first + output
        return None

    def type_of(self, term: Term) -> Typed | None:
        """The type of a term."""
        value = self.value(term)
        if value is None:
            return None
        number = self.bank.type(value)
        return next(kind for kind, known in self.types.items() if known == number)

    def are_equal(self, left: Side, right: Side) -> bool:
        """Whether two sides have the same fingerprints, output by output."""
        values = [self.value(term) for term in (*left, *right)]
        if any(value is None for value in values):
            return False
        prints = [self.bank.fingerprint(value) for value in values if value is not None]
        return prints[: len(left)] == prints[len(left) :]

    def classes(self) -> Iterator[Class]:
        """All classes of equal graphs."""
        table = self.bank.equal_graphs(self.family.most_nodes, self.family.most_outputs)
        starts = np.flatnonzero(np.diff(table[:, 0], prepend=-1))
        for begin, end in itertools.pairwise([*starts.tolist(), len(table)]):
            graphs = [
                tuple(self.term(int(value)) for value in row[2:] if value >= 0) for row in table[begin:end]
            ]
            yield Class(tuple(graphs))
