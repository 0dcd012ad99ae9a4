"""Terms executed device by device, as a run would: pieces of tensors, and nothing else.

A value is held as its pieces: one for each cell of its grid, each partial sum and each copy. An operator
computes each of its shards with its own torch function, from what the shard's boxes read of the pieces; a
parallel operator cuts, joins, copies or adds pieces. So this shares nothing with the proofs but the layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from soapstone.ops import Box, Interval, Shape, Shard
from soapstone.ops.box import intersection, relative_to, shape_of, slices
from soapstone.ops.lazy import torch
from soapstone.ops.signature import IterationBox
from soapstone.subst.layout import Layout, carriers, is_parallel, output_carriers
from soapstone.subst.term import Side, Term, Var, subterms
from soapstone.subst.words import Applied, Context, Typed, applied

Array = npt.NDArray[Any]
Place = tuple[tuple[int, ...], int, int]
"""A cell of the grid, a partial sum, and a copy."""


@dataclass(frozen=True)
class Spread:
    """A value in pieces."""

    kind: Typed
    pieces: Mapping[Place, Array]

    def whole(self, copy: int = 0) -> Array:
        """The value put together from one set of copies, partial sums added."""
        layout = self.kind.layout
        total = np.zeros(self.kind.shape, dtype=next(iter(self.pieces.values())).dtype)
        for (cell, _, at), piece in self.pieces.items():
            if at == copy % _number(layout.copies):
                total[slices(_box(self.kind.shape, layout, cell))] += piece
        return total


def _number(degree: object) -> int:
    assert isinstance(degree, int)
    return degree


def _grid(layout: Layout) -> list[int]:
    return [_number(d) * _number(p) for d, p in zip(layout.degrees, layout.pieces, strict=True)]


def _box(shape: Shape, layout: Layout, cell: Sequence[int]) -> Box:
    axes = zip(shape, _grid(layout), cell, strict=True)
    return tuple(Interval(0, size).part(at, parts) for size, parts, at in axes)


def _places(layout: Layout) -> itertools.product[Any]:
    cells = itertools.product(*(range(n) for n in _grid(layout)))
    return itertools.product(cells, range(_number(layout.partials)), range(_number(layout.copies)))


def spread(value: Array, kind: Typed, rng: np.random.Generator) -> Spread:
    """A tensor in pieces; partial sums are random numbers that add up to it."""
    count = _number(kind.layout.partials)
    parts = [rng.standard_normal(value.shape) for _ in range(count - 1)]
    parts.append(value - sum(parts) if parts else value)
    return Spread(
        kind,
        {
            (cell, partial, copy): parts[partial][slices(_box(kind.shape, kind.layout, cell))]
            for cell, partial, copy in _places(kind.layout)
        },
    )


def executed(
    side: Side, values: Mapping[str, Spread], types: Mapping[Term, Typed], context: Context
) -> list[Spread]:
    """The outputs of a side, in pieces."""
    found: dict[Term, Spread] = {}
    for term in subterms(side):
        if isinstance(term, Var):
            found[term] = values[term.name]
            continue
        args = [found[arg] for arg in term.args]
        meant = applied(term, [arg.kind.shape for arg in args], context)
        if is_parallel(term.word):
            found[term] = _MOVES[term.word](args[0], types[term], meant)
        else:
            found[term] = _computed(meant, args, types[term])
    return [found[term] for term in side]


def _recut(before: Spread, after: Typed, _: Applied) -> Spread:
    """Other cells: each is put together from the pieces that overlap it."""
    return Spread(
        after,
        {
            (cell, partial, copy): _read(before, _box(after.shape, after.layout, cell), partial, copy)
            for cell, partial, copy in _places(after.layout)
        },
    )


def _copied(before: Spread, after: Typed, _: Applied) -> Spread:
    old = _number(before.kind.layout.copies)
    return Spread(after, {(c, p, n): before.pieces[c, p, n % old] for c, p, n in _places(after.layout)})


def _added(before: Spread, after: Typed, meant: Applied) -> Spread:
    degree = _number(meant.attrs["degree"])
    return Spread(
        after,
        {
            (c, p, n): np.sum([before.pieces[c, p * degree + i, n] for i in range(degree)], axis=0)
            for c, p, n in _places(after.layout)
        },
    )


_MOVES: Mapping[str, Callable[[Spread, Typed, Applied], Spread]] = {
    "partition": _recut,
    "combine": _recut,
    "pipeline": _recut,
    "batch": _recut,
    "replicate": _copied,
    "reduce": _added,
}


def _read(value: Spread, box: Box, partial: int, copy: int) -> Array:
    """A box of a value from the pieces of one partial sum and one set of copies."""
    copies = _number(value.kind.layout.copies)
    result = np.zeros(shape_of(box), dtype=next(iter(value.pieces.values())).dtype)
    for (cell, p, n), piece in value.pieces.items():
        if p == partial and n == copy % copies:
            own = _box(value.kind.shape, value.kind.layout, cell)
            shared = intersection(own, box)
            if shared is not None:
                result[slices(relative_to(shared, box))] = piece[slices(relative_to(shared, own))]
    return result


def _computed(meant: Applied, args: Sequence[Spread], after: Typed) -> Spread:
    signature = meant.signature
    split = {
        dim: parts
        for i, arg in enumerate(args)
        for dim, parts in zip(carriers(signature, i), _grid(arg.kind.layout), strict=True)
        if dim is not None
    }
    shown = output_carriers(signature, 0)
    summed = [dim for dim in split if dim not in shown]
    shards = signature.shards({dim: n for dim, n in split.items() if n > 1})
    passed = max(_number(arg.kind.layout.partials) for arg in args)
    pieces: dict[Place, Array] = {}
    for number, shard in enumerate(shards):
        at = {dim: shard[dim].lo * n // signature.sizes[dim] for dim, n in split.items()}
        cell = tuple(0 if dim is None else at.get(dim, 0) for dim in shown)
        own = 0
        for dim in summed:
            own = own * split[dim] + at[dim]
        for partial in range(passed):
            result = _shard(meant, args, shard, partial, number)
            for copy in range(_number(after.layout.copies)):
                pieces[cell, own * passed + partial, copy] = result
    return Spread(after, pieces)


def _shard(meant: Applied, args: Sequence[Spread], shard: IterationBox, partial: int, number: int) -> Array:
    signature = meant.signature
    given: list[Any] = [None] * len(meant.shapes)
    for i, number_given in meant.numbers.items():
        given[i] = number_given
    for i, arg in enumerate(args):
        region = signature.read(i, shard)
        at = partial if _number(arg.kind.layout.partials) > 1 else 0
        given[i] = None if region.is_empty else torch.from_numpy(_read(arg, region.box, at, number))
    result = meant.op.run(given, meant.attrs, Shard(signature, shard, dtype="f64"))
    return np.asarray(result[0])
