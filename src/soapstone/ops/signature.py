"""A notation bound to shapes: sizes, legal splits, and the boxes a shard reads and writes.

Everything a planner needs to know about one node is arithmetic on the affine index maps held
here. Writing an operator's iteration space as a box (an interval for each dim, summed dims
included), a shard is a sub-box, and

    reads        an operand's box is the interval image of the shard under the operand's index
                 map, cut off at the operand's borders; what was cut off is padding -> `read`
    writes       the image under the output's index map                            -> `write`
    partial sums a split dim that an output lacks leaves partial outputs           -> `partial_dims`
    gradients    an operand's gradient is summed over the split dims that it lacks -> `gradient_dims`

FlexFlow 4 (parallelizable dims, Table 2) -> `kinds`, `splits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, product
from math import prod
from types import MappingProxyType

from soapstone.errors import OpError
from soapstone.ops.box import Box, Interval, volume
from soapstone.ops.notation import Axis, Factored, Notation, Prefix, Sum, Term

Shape = tuple[int, ...]
Degrees = Mapping[str, int]
IterationBox = Mapping[str, Interval]


class Kind(StrEnum):
    """What splitting a dim means: the letters of SOAP, and the sums that SOAP leaves whole."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    REDUCTION = "reduction"


@dataclass(frozen=True)
class Affine:
    """`(const + sum of coefficient * dim) / divisor`, over integers."""

    const: int
    terms: tuple[tuple[str, int], ...]
    divisor: int = 1

    def image(self, box: IterationBox) -> Interval:
        """The smallest interval that holds the index of every point of the box."""
        low = high = self.const
        for dim, coefficient in self.terms:
            lo, hi = box[dim]
            first, last = coefficient * lo, coefficient * (hi - 1)
            if first > last:
                first, last = last, first
            low, high = low + first, high + last
        if self.divisor == 1:
            return Interval(low, high + 1)
        return Interval(-(-low // self.divisor), high // self.divisor + 1)

    def at(self, point: Mapping[str, int]) -> int | None:
        """The index at one point, or None where the division leaves a remainder."""
        value = self.const + sum(coefficient * point[dim] for dim, coefficient in self.terms)
        return value // self.divisor if value % self.divisor == 0 else None

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dim for dim, _ in self.terms)


@dataclass(frozen=True)
class Region:
    """What a shard reads of an operand: a box of it, and how far it reaches past each border."""

    box: Box
    pads: tuple[tuple[int, int], ...]

    @property
    def is_empty(self) -> bool:
        return volume(self.box) == 0

    @property
    def is_padded(self) -> bool:
        return any(lo or hi for lo, hi in self.pads)


Access = tuple[Affine, ...]


@dataclass(frozen=True)
class Signature:
    """One operator at one set of shapes. Built by `bind`; immutable.

    `operands[i]` is None where an optional operand was left out. `summable` says whether a summed
    dim may be split at all (its partial results add up); dims in `shared` are those over which an
    operator takes statistics: outputs that lack them are equal on every shard, not partial.
    Operands in `finishing` (a bias) enter after the sum: only the first shard along the summed
    dims reads them, so that a split sum adds them once.
    """

    name: str
    notation: Notation
    sizes: Mapping[str, int]
    shapes: tuple[Shape | None, ...]
    operands: tuple[Access | None, ...]
    outputs: tuple[Access, ...]
    output_shapes: tuple[Shape, ...]
    factored: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    shared: frozenset[str]
    summable: bool
    finishing: frozenset[int]

    @cached_property
    def output_dims(self) -> frozenset[str]:
        """The dims that index some output: the parallel ones."""
        return frozenset(dim for access in self.outputs for axis in access for dim in axis.dims)

    @cached_property
    def summed_dims(self) -> tuple[str, ...]:
        """The dims that no output shows."""
        return tuple(dim for dim in self.sizes if dim not in self.output_dims)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The dims that may be split, in the order of the notation."""
        return tuple(
            dim
            for dim, size in self.sizes.items()
            if size > 1 and dim not in self.whole and (self.summable or dim in self.output_dims)
        )

    def kinds(self, weights: Sequence[int] = (), batch: str | None = None) -> dict[str, Kind]:
        """The kind of every dim that may be split.

        `weights` are the positions of operands that are weights, `batch` the dim that runs over
        samples: the leading dim of the first output unless that indexes a weight (axes that must stay
        whole, as the time of a recurrent layer, do not lead).
        """
        in_weights = {dim for i in weights for axis in self.operands[i] or () for dim in axis.dims}
        if batch is None:
            axes = (axis.dims for access in self.outputs for axis in access)
            leading = next((dims for dims in axes if not self.whole.issuperset(dims)), ())
            batch = next((dim for dim in leading if dim not in in_weights), None)

        def kind(dim: str) -> Kind:
            if dim not in self.output_dims:
                return Kind.REDUCTION
            if dim in in_weights:
                return Kind.PARAMETER
            return Kind.SAMPLE if dim == batch else Kind.ATTRIBUTE

        return {dim: kind(dim) for dim in self.splits}

    def objection(self, degrees: Degrees) -> str | None:
        """Why these degrees are not a legal split, in one clause; None when they are."""
        for dim, degree in degrees.items():
            if dim not in self.sizes:
                return f"there is no dim '{dim}' (dims: {', '.join(self.sizes)})"
            if degree == 1:
                continue
            if dim not in self.splits:
                return f"dim '{dim}' must stay whole"
            if degree < 1 or self.sizes[dim] % degree:
                return f"dim '{dim}' of size {self.sizes[dim]} does not divide into {degree} equal parts"
        for group in self.factored:
            for outer, inner in pairwise(group):
                if degrees.get(inner, 1) > 1 and degrees.get(outer, 1) != self.sizes[outer]:
                    return f"in the axis ({' '.join(group)}), '{inner}' splits only after all of '{outer}'"
        return None

    def legal_degrees(self, parts: int) -> Iterator[dict[str, int]]:
        """Every legal assignment of degrees to dims whose product is `parts`."""

        def assign(dims: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
            if not dims:
                if left == 1:
                    yield {}
                return
            for degree in range(1, min(left, self.sizes[dims[0]]) + 1):
                if left % degree == 0 and self.sizes[dims[0]] % degree == 0:
                    for rest in assign(dims[1:], left // degree):
                        yield {dims[0]: degree, **rest} if degree > 1 else rest

        return (degrees for degrees in assign(self.splits, parts) if self.objection(degrees) is None)

    @cached_property
    def points(self) -> IterationBox:
        """The whole iteration space."""
        return MappingProxyType({dim: Interval(0, size) for dim, size in self.sizes.items()})

    def shards(self, degrees: Degrees) -> list[IterationBox]:
        """The iteration boxes of all shards, the dims' parts counted in row-major order."""
        objection = self.objection(degrees)
        if objection is not None:
            raise OpError(f"{self.name} cannot be split so: {objection}")
        return [
            {
                dim: self.points[dim].part(at, degrees.get(dim, 1))
                for dim, at in zip(self.sizes, index, strict=True)
            }
            for index in product(*(range(degrees.get(dim, 1)) for dim in self.sizes))
        ]

    def read(self, operand: int, shard: IterationBox) -> Region:
        """The part of an operand that a shard reads; an operand left out is an empty region."""
        access, shape = self.operands[operand], self.shapes[operand]
        if access is None or shape is None:
            return Region((Interval(0, 0),), ((0, 0),))
        if operand in self.finishing and any(shard[dim].lo for dim in self.summed_dims):
            return Region(tuple(Interval(0, 0) for _ in shape) or (Interval(0, 0),), ())
        box, pads = [], []
        for axis, size in zip(access, shape, strict=True):
            reach = axis.image(shard)
            if 0 <= reach.lo < reach.hi <= size:
                box.append(reach)
                pads.append((0, 0))
                continue
            kept = Interval(min(max(reach.lo, 0), size), max(min(reach.hi, size), 0))
            if kept.hi <= kept.lo:
                kept = Interval(min(kept.lo, size), min(kept.lo, size))
            before = min(max(0, kept.lo - reach.lo), reach.length)
            box.append(kept)
            pads.append((before, reach.length - before - kept.length))
        return Region(tuple(box), tuple(pads))

    def write(self, output: int, shard: IterationBox) -> Box:
        """The part of an output that a shard writes."""
        return tuple(axis.image(shard) for axis in self.outputs[output])

    def partial_dims(self, output: int) -> tuple[str, ...]:
        """The dims whose split leaves partial sums of this output."""
        shown = {dim for axis in self.outputs[output] for dim in axis.dims}
        return tuple(dim for dim in self.splits if dim not in shown and dim not in self.shared)

    def gradient_dims(self, operand: int) -> tuple[str, ...]:
        """The dims over whose split this operand's gradient is summed: those it lacks."""
        shown = {dim for axis in self.operands[operand] or () for dim in axis.dims}
        return tuple(dim for dim in self.splits if dim not in shown)

    @property
    def point_count(self) -> int:
        """How many points the iteration space has."""
        return prod(self.sizes.values())


def bind(
    name: str,
    notation: Notation,
    shapes: Sequence[Shape | None],
    attrs: Mapping[str, object],
    *,
    shared: frozenset[str] = frozenset(),
    summable: bool = True,
    finishing: frozenset[int] = frozenset(),
) -> Signature:
    """The signature of an operator for operands of these shapes, or an error that says both."""
    return _Binder(name, notation, tuple(shapes), attrs).signature(shared, summable, finishing)


class _Binder:
    """Solves for the sizes of all dims, then turns every axis into an integer affine map."""

    def __init__(
        self, name: str, notation: Notation, shapes: tuple[Shape | None, ...], attrs: Mapping[str, object]
    ) -> None:
        self.name, self.notation, self.shapes, self.attrs = name, notation, shapes, attrs
        self.sizes: dict[str, int] = dict(notation.sizes)
        self._check_operands()
        self.prefix = self._prefix_dims()

    def signature(self, shared: frozenset[str], summable: bool, finishing: frozenset[int]) -> Signature:
        operands = [self._expanded(i) for i in range(len(self.shapes))]
        self._solve(operands)
        outputs = [self._expanded_output(axes) for axes in self.notation.outputs]
        accesses = tuple(
            None if axes is None else tuple(self._affine(axis) for axis in axes) for axes in operands
        )
        written = tuple(tuple(self._affine(axis) for axis in axes) for axes in outputs)
        ordered = self._ordered([axes for axes in operands if axes is not None], outputs)
        return Signature(
            name=self.name,
            notation=self.notation,
            sizes=MappingProxyType(ordered),
            shapes=self.shapes,
            operands=accesses,
            outputs=written,
            output_shapes=tuple(tuple(self._extent(axis) for axis in axes) for axes in outputs),
            factored=tuple(
                sorted(
                    {
                        axis.dims
                        for axes in [*operands, *outputs]
                        for axis in axes or ()
                        if isinstance(axis, Factored) and len(axis.dims) > 1
                    }
                )
            ),
            whole=self.notation.whole,
            shared=shared,
            summable=summable,
            finishing=finishing,
        )

    def _check_operands(self) -> None:
        expected, given = len(self.notation.operands), len(self.shapes)
        if expected != given:
            raise self._error(f"takes {expected} operands, not {given}")
        for i, (axes, optional) in enumerate(
            zip(self.notation.operands, self.notation.optional, strict=True)
        ):
            shape = self.shapes[i]
            if shape is None:
                if not optional:
                    raise self._error(f"needs its operand {i}")
                continue
            named = sum(not isinstance(axis, Prefix) for axis in axes)
            if len(shape) < named or (len(shape) > named and named == len(axes)):
                raise self._error(f"operand {i} has {len(shape)} axes where the notation shows {named}")

    def _prefix_dims(self) -> tuple[str, ...]:
        """The dims that `...` stands for, with their broadcast sizes."""
        parts: list[Shape] = []
        for axes, shape in zip(self.notation.operands, self.shapes, strict=True):
            if shape is not None and any(isinstance(axis, Prefix) for axis in axes):
                parts.append(shape[: len(shape) - (len(axes) - 1)])
        rank = max((len(part) for part in parts), default=0)
        names = tuple("b" if i == 0 else f"b{i}" for i in range(rank))
        for i, name in enumerate(names):
            at_end = rank - i
            sizes = {part[-at_end] for part in parts if len(part) >= at_end} - {1}
            if len(sizes) > 1:
                raise self._error(
                    f"the leading axes do not broadcast: {' against '.join(map(str, sorted(sizes)))}"
                )
            self.sizes[name] = sizes.pop() if sizes else 1
        return names

    def _expanded(self, operand: int) -> tuple[Axis, ...] | None:
        """The operand's axes with `...` written out; an axis broadcast over is the constant 0."""
        shape = self.shapes[operand]
        if shape is None:
            return None
        axes: list[Axis] = []
        for axis in self.notation.operands[operand]:
            if not isinstance(axis, Prefix):
                axes.append(axis)
                continue
            count = len(shape) - (len(self.notation.operands[operand]) - 1)
            for name, size in zip(self.prefix[len(self.prefix) - count :], shape, strict=False):
                axes.append(_single(name) if size == self.sizes[name] else Sum(()))
        return tuple(axes)

    def _expanded_output(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        expanded: list[Axis] = []
        for axis in axes:
            expanded.extend([_single(name) for name in self.prefix] if isinstance(axis, Prefix) else [axis])
        return tuple(expanded)

    def _solve(self, operands: Sequence[tuple[Axis, ...] | None]) -> None:
        """Find every dim's size: stated ones, bare axes, factored axes, then affine ones."""
        axes = [
            (i, j, axis, size)
            for i, (row, shape) in enumerate(zip(operands, self.shapes, strict=True))
            if row is not None and shape is not None
            for j, (axis, size) in enumerate(zip(row, shape, strict=True))
        ]
        for name in self._unknown([axis for _, _, axis, _ in axes]):
            stated = self.attrs.get(name)
            if isinstance(stated, int) and not isinstance(stated, bool):
                self.sizes[name] = stated
        for i, j, axis, size in axes:
            dim = _bare(axis)
            if dim is not None and self.sizes.setdefault(dim, size) != size:
                raise self._error(
                    f"axis {j} of operand {i} has size {size} where dim '{dim}' has size {self.sizes[dim]}"
                )
        for _ in range(2):
            for i, j, axis, size in axes:
                if isinstance(axis, Factored):
                    self._solve_factored(i, j, axis, size)
            for i, j, axis, size in axes:
                if isinstance(axis, Sum) and _bare(axis) is None:
                    self._solve_sum(i, j, axis, size)
        unknown = self._unknown([axis for _, _, axis, _ in axes])
        if unknown:
            raise self._error(f"the size of dim '{unknown[0]}' does not follow from the operands")

    def _unknown(self, axes: Sequence[Axis]) -> list[str]:
        named = [dim for axis in axes for dim in _dims(axis)]
        named += [dim for row in self.notation.outputs for axis in row for dim in _dims(axis)]
        return [dim for dim in dict.fromkeys(named) if dim not in self.sizes]

    def _solve_factored(self, operand: int, position: int, axis: Factored, size: int) -> None:
        unknown = [dim for dim in axis.dims if dim not in self.sizes]
        known = prod(self.sizes[dim] for dim in axis.dims if dim in self.sizes)
        if len(unknown) == 1 and known and size % known == 0:
            self.sizes[unknown[0]] = size // known
        elif len(unknown) == 1 or (not unknown and known != size):
            factors = " * ".join(f"{dim}={self.sizes.get(dim, '?')}" for dim in axis.dims)
            raise self._error(f"axis {position} of operand {operand} has size {size}, which is not {factors}")

    def _solve_sum(self, operand: int, position: int, axis: Sum, size: int) -> None:
        unknown = [dim for dim in axis.dims if dim not in self.sizes]
        if len(unknown) != 1 or axis.divisor is not None:
            return
        affine = self._affine(axis)
        coefficient = dict(affine.terms)[unknown[0]]
        others = sum(c * (self.sizes[dim] - 1) for dim, c in affine.terms if dim != unknown[0])
        border = max(0, -affine.const)
        count = (size - 1 + border - affine.const - others) // coefficient + 1 if coefficient > 0 else 0
        if count < 1:
            raise self._error(
                f"axis {position} of operand {operand} has size {size}, less than a window of {others + 1}"
                f" padded by {border}"
            )
        self.sizes[unknown[0]] = count

    def _affine(self, axis: Axis) -> Affine:
        match axis:
            case Sum(terms, divisor):
                const, coefficients = 0, dict[str, int]()
                for term in terms:
                    value = term.coefficient * prod(self._attr(name) for name in term.attrs)
                    if term.dim is None:
                        const += value
                    elif value:
                        coefficients[term.dim] = coefficients.get(term.dim, 0) + value
                by = divisor if isinstance(divisor, int) else 1 if divisor is None else self._attr(divisor)
                return Affine(const, tuple(coefficients.items()), by)
            case Factored(dims):
                strides = [prod(self.sizes[inner] for inner in dims[i + 1 :]) for i in range(len(dims))]
                return Affine(0, tuple(zip(dims, strides, strict=True)))
            case Prefix():
                raise self._error("'...' was not expanded")

    def _attr(self, name: str) -> int:
        value = self.attrs.get(name)
        if not isinstance(value, int):
            raise self._error(f"attribute '{name}' must be an integer, not {value!r}")
        return value

    def _extent(self, axis: Axis) -> int:
        match axis:
            case Factored(dims):
                return prod(self.sizes[dim] for dim in dims)
            case _:
                return self._affine(axis).image({dim: Interval(0, n) for dim, n in self.sizes.items()}).hi

    def _ordered(
        self, operands: Sequence[tuple[Axis, ...]], outputs: Sequence[tuple[Axis, ...]]
    ) -> dict[str, int]:
        """Sizes in the order of first appearance, outputs first: the order shards are counted in."""
        named = [dim for row in [*outputs, *operands] for axis in row for dim in _dims(axis)]
        return {dim: self.sizes[dim] for dim in dict.fromkeys(named)}

    def _error(self, what: str) -> OpError:
        shapes = ", ".join("none" if shape is None else str(list(shape)) for shape in self.shapes)
        return OpError(f"{self.name} '{self.notation.text}' on shapes {shapes}: {what}")


def _single(dim: str) -> Sum:
    return Sum((Term(1, (), dim),))


def _bare(axis: Axis) -> str | None:
    """The dim of an axis that is nothing but a dim."""
    if isinstance(axis, Sum) and axis.divisor is None and len(axis.terms) == 1:
        term = axis.terms[0]
        return term.dim if term.coefficient == 1 and not term.attrs else None
    return axis.dims[0] if isinstance(axis, Factored) and len(axis.dims) == 1 else None


def _dims(axis: Axis) -> tuple[str, ...]:
    return () if isinstance(axis, Prefix) else axis.dims
