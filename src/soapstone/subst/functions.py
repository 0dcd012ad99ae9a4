"""Words as functions of a proof: a symbol, sizes and conditions for each word at given ranks.

A `Function` is a word with its attributes and the ranks of its operands. Which axes must measure the same,
and what the axes of the result measure, is read off the operator's notation at sample shapes: an axis
indexed by one dim alone, from end to end, measures what that dim does. What cannot be read off so is an
unknown function of all the operands' sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import z3

from soapstone.ops import Affine, Shape, Signature
from soapstone.subst.term import Call, Term, Var
from soapstone.subst.words import CUTS, Applied, Context, applied

TENSOR = z3.DeclareSort("Tensor")
FACTOR = z3.Real("factor")
_SIZE = [z3.Function(f"size{axis}", TENSOR, z3.IntSort()) for axis in range(8)]


def size(tensor: Any, axis: int) -> Any:
    """What an axis of a tensor measures, in Z3."""
    return _SIZE[axis](tensor)


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
            special = self._special_size(axis, args, cut)
            window = self._window_size(dim, args) if special is None else None
            if special is not None:
                yield special
            elif window is not None:
                yield window
            elif dim is not None and dim in self.places:
                operand, at = self.places[dim][0]
                yield size(args[operand], at)
            else:
                given = [
                    size(arg, i) for arg, rank in zip(args, self.ranks, strict=True) for i in range(rank)
                ]
                unknown = z3.Function(
                    f"size of {self.symbol.name()} {axis}", *[z3.IntSort()] * (len(given) + 1)
                )
                yield unknown(*given)

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


SIZES: Mapping[str, Any] = {
    "concat": lambda args, axis, _: z3.Sum([size(arg, axis) for arg in args]),
    "head": lambda _, __, cut: cut,
    "tail": lambda args, axis, cut: size(args[0], axis) - cut,
}
"""What the axis of a concat or of a cut measures: the three words whose notation depends on sizes."""
