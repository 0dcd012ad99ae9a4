"""Words as functions of a proof: a symbol, sizes and conditions for each word at given ranks.

A `Function` is a word with its attributes and the ranks of its operands. Which axes must measure the same,
and what the axes of the result measure, is read off the operator's notation at sample shapes: an axis
indexed by one dim alone, from end to end, measures what that dim does. What cannot be read off so is an
unknown function of all the operands' sizes. Of an *opaque* function nothing is read off: its attributes may
be any (`[*]`), it draws random numbers, or its notation is another at other sizes that its numbers allow, as
that of a reshape is. What holds at one choice need not hold at another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import z3

from soapstone.ops import Affine, Shape, Signature
from soapstone.subst.term import ANY, Call, Term, Var
from soapstone.subst.words import ABBREVIATIONS, CUTS, ILL_FORMED, Applied, Context, applied, is_empty

_AXES = frozenset({"dim", "dims"})
"""Attributes that say along which axes, at all sizes the same."""

TENSOR = z3.DeclareSort("Tensor")
FACTOR = z3.Real("factor")


def size(tensor: Any, axis: int) -> Any:
    """What an axis of a tensor measures, in Z3."""
    return _size(axis)(tensor)


@cache
def _size(axis: int) -> Any:
    return z3.Function(f"size{axis}", TENSOR, z3.IntSort())


@dataclass(frozen=True)
class Function:
    """A word with its attributes, at given ranks, and shapes at which it makes sense."""

    word: str
    attrs: tuple[tuple[str, Any], ...]
    samples: tuple[Shape, ...]
    context: Context

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells functions apart."""
        return (self.word, self.attrs, self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(shape) for shape in self.samples)

    def __call__(self, *args: Term) -> Call:
        return Call(self.word, args, self.attrs)

    @cached_property
    def applied(self) -> Applied:
        call = self(*(Var(str(i)) for i in range(len(self.samples))))
        return applied(call, self.samples, self.context)

    @cached_property
    def is_opaque(self) -> bool:
        """Whether nothing may be used of it but that it is a function: its attributes may be any, it draws
        random numbers, or it is another function at other sizes."""
        return self.attrs == ANY or self.applied.op.random or self._is_of_its_sizes

    @property
    def _is_of_its_sizes(self) -> bool:
        """Whether axes of operands and result meet in other ways at other sizes that its numbers allow."""
        given = self.applied.op.complete(self.applied.attrs).items()
        numbers = [name for name, value in given if _has_numbers(value) and name not in _AXES]
        is_same = isinstance(self.applied.op.notation, str) and not self.signature.factored
        if self.word in ABBREVIATIONS or not numbers or is_same:
            return False
        return any(self._meets_otherwise(other) for other in self._elsewhere())

    def _meets_otherwise(self, other: Function) -> bool:
        """Whether axes that are indexed by one dim here are not so at other samples.

        Where the notation is the same, a dim that has become single is passed over (a group of axes is read
        without it), and axes may be indexed by one dim there that are not so here.
        """
        if self._text != other._text:
            return self._joints != other._joints
        sizes, others = self.signature.sizes, other.signature.sizes
        if any(others[dim] == 1 != sizes[dim] for dim in sizes):
            return False
        return any(dim not in (None, there) for dim, there in zip(self._joints, other._joints, strict=True))

    @property
    def _text(self) -> str:
        op, meant = self.applied.op, self.applied
        return (
            op.notation
            if isinstance(op.notation, str)
            else op.notation(meant.shapes, op.complete(meant.attrs))
        )

    @property
    def _joints(self) -> tuple[str | None, ...]:
        """For each axis of the operands, and of the result, the dim that alone indexes it."""
        return tuple(dim for each in (*range(len(self.samples)), None) for dim in self.plain(each))

    def _elsewhere(self) -> Iterator[Function]:
        """The same word where one operand has other sizes."""
        for operand, shape in enumerate(self.samples):
            for other in _other_shapes(shape):
                found = replace(self, samples=(*self.samples[:operand], other, *self.samples[operand + 1 :]))
                if has_elements(found):
                    yield found

    @property
    def signature(self) -> Signature:
        return self.applied.signature

    @property
    def result(self) -> Shape:
        """The result's shape at the samples."""
        return self.signature.output_shapes[0]

    @property
    def dim(self) -> int:
        """The axis that a concat or a cut is along."""
        found = dict(self.attrs)["dim"]
        assert isinstance(found, int)
        return found

    @cached_property
    def symbol(self) -> Any:
        """The function in Z3; a cut also takes its position."""
        name = f"{self.word}{list(self.attrs) if self.attrs else ''}{list(self.ranks)}"
        cut = [z3.IntSort()] if self.word in CUTS else []
        return z3.Function(name, *cut, *[TENSOR] * len(self.ranks), TENSOR)

    def plain(self, operand: int | None) -> tuple[str | None, ...]:
        """For each axis of an operand (None: of the result) the dim that alone indexes it from end to end."""
        access = self.signature.outputs[0] if operand is None else self.signature.operands[operand]
        shape = self.result if operand is None else self.samples[operand]
        assert access is not None
        return tuple(self._plain_dim(axis, length) for axis, length in zip(access, shape, strict=True))

    def _plain_dim(self, axis: Affine, length: int) -> str | None:
        sizes, terms = self.signature.sizes, axis.terms
        if axis.dims in self.signature.factored:
            # Of a group that has one member, as a convolution without groups, the other dim is the axis.
            terms = tuple(term for term in terms if sizes[term[0]] > 1)
        if len(terms) != 1 or axis.const or axis.divisor != 1:
            return None
        dim, step = terms[0]
        return dim if step == 1 and sizes[dim] == length else None

    @cached_property
    def places(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """For each dim the (operand, axis) places that it alone indexes."""
        found: dict[str, list[tuple[int, int]]] = {}
        for operand in range(len(self.samples)):
            for axis, dim in enumerate(self.plain(operand)):
                if dim is not None:
                    found.setdefault(dim, []).append((operand, axis))
        return {dim: tuple(places) for dim, places in found.items()}

    def conditions(self, args: Sequence[Any], cut: Any) -> Iterator[Any]:
        """What must hold of the operands' sizes."""
        if self.is_opaque:
            return
        for places in self.places.values():
            (operand, axis), *others = places
            for other, at in others:
                yield size(args[operand], axis) == size(args[other], at)
        if self.word in CUTS:
            yield cut > 0
            yield cut < size(args[0], self.dim)

    def sizes(self, args: Sequence[Any], cut: Any) -> Iterator[Any]:
        """What each axis of the result measures."""
        for axis, dim in enumerate(self.plain(None)):
            known = None if self.is_opaque else self._known_size(axis, dim, args, cut)
            yield self._unknown_size(axis, args) if known is None else known

    def _known_size(self, axis: int, dim: str | None, args: Sequence[Any], cut: Any) -> Any:
        """What an axis of the result measures, where notation says it; else None."""
        special = self._special_size(axis, args, cut)
        window = self._window_size(dim, args) if special is None else None
        if special is not None or window is not None:
            return window if special is None else special
        if dim is None or dim not in self.places:
            return None
        operand, at = self.places[dim][0]
        return size(args[operand], at)

    def _unknown_size(self, axis: int, args: Sequence[Any]) -> Any:
        given = [size(arg, i) for arg, rank in zip(args, self.ranks, strict=True) for i in range(rank)]
        name = f"size of {self.symbol.name()} {axis}"
        return z3.Function(name, *[z3.IntSort()] * (len(given) + 1))(*given)

    def _special_size(self, axis: int, args: Sequence[Any], cut: Any) -> Any:
        if self.word == "enlarge":
            return size(args[0], axis) + (2 if axis > 1 else 0)
        rule = SIZES.get(self.word)
        return rule(args, axis, cut) if rule is not None and axis == self.dim else None

    def _window_size(self, dim: str | None, args: Sequence[Any]) -> Any:
        """What an axis measures whose dim moves a window by single steps: the axis it moves along, less the
        window, and as much more or less as at the samples. Only notation that is the same at all sizes says
        so."""
        if dim is None or dim in self.places or not isinstance(self.applied.op.notation, str):
            return None
        for operand, shape in enumerate(self.samples):
            for axis, affine in enumerate(self.signature.operands[operand] or ()):
                windows = [name for name, _ in affine.terms if name != dim]
                steps = {step for _, step in affine.terms}
                if dim not in affine.dims or steps != {1} or affine.divisor != 1:
                    continue
                if any(name not in self.places for name in windows):
                    return None
                found, sizes = size(args[operand], axis), self.signature.sizes
                for name in windows:
                    at, own = self.places[name][0]
                    found = found - size(args[at], own)
                return found + (sizes[dim] - shape[axis] + sum(sizes[name] for name in windows))
        return None


def _other_shapes(shape: Shape) -> Iterator[Shape]:
    """Shapes that differ in one axis, and those with as many elements in other axes."""
    for one, size_before in enumerate(shape):
        for size_after in {1, size_before + 1, 2 * size_before} - {size_before}:
            yield (*shape[:one], size_after, *shape[one + 1 :])
        factors = [n for n in range(2, size_before + 1) if size_before % n == 0]
        for two, factor in itertools.product(range(len(shape)), factors):
            if two != one:
                moved = list(shape)
                moved[one], moved[two] = size_before // factor, shape[two] * factor
                yield tuple(moved)


def _has_numbers(value: object) -> bool:
    return isinstance(value, int | tuple) and not isinstance(value, bool)


def has_elements(function: Function) -> bool:
    """Whether the function is well formed at its samples, and its result is not empty."""
    try:
        return not is_empty(function.signature)
    except ILL_FORMED:
        return False


SIZES: Mapping[str, Any] = {
    "concat": lambda args, axis, _: z3.Sum([size(arg, axis) for arg in args]),
    "head": lambda _, __, cut: cut,
    "tail": lambda args, axis, cut: size(args[0], axis) - cut,
}
"""What the axis of a concat or of a cut measures: the three words whose notation depends on sizes."""
