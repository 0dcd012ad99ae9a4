"""How a value lies over devices, and what operators do to it (Unity 3.1 and 3.3).

A `Layout` has a degree for each axis, a number of partial sums and a number of copies: Unity's replica
dim, split into its two meanings, so that parallel operators are the identity on the value itself. It also
has a number of pieces for each axis, which are processed one after the other (Pipeline).

What a parallel operator does to a layout is a line of `EFFECTS`. What any other does follows from its
notation (`output_layouts`):

    an axis's degree is the degree of the dim that indexes it, so operands that share a dim must agree;
    all operands lie on equally many devices: one that lacks a split dim has a copy for each part of it;
    a split dim that the output lacks leaves partial sums;
    partial sums pass through the operands in which the operator is additive, and through no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from soapstone.ops import Op, Signature
from soapstone.ops.op import Attrs
from soapstone.subst.degree import Degree, divides, product, quotient
from soapstone.subst.linearity import additive_sets


@dataclass(frozen=True)
class Layout:
    """A degree and a number of pieces for each axis, partial sums and copies."""

    degrees: tuple[Degree, ...]
    partials: Degree = 1
    copies: Degree = 1
    pieces: tuple[Degree, ...] = ()

    def __post_init__(self) -> None:
        if not self.pieces:
            object.__setattr__(self, "pieces", (1,) * len(self.degrees))

    @property
    def parts(self) -> Degree:
        """How many devices hold something of it."""
        return product((*self.degrees, self.partials, self.copies))

    @property
    def is_whole(self) -> bool:
        """Whether one device holds all of it, at once."""
        return self.parts == 1 and product(self.pieces) == 1

    def __str__(self) -> str:
        axes = [str(degree) for degree in self.degrees]
        axes = [
            f"{axis}t{piece}" if piece != 1 else axis for axis, piece in zip(axes, self.pieces, strict=True)
        ]
        sums = f" +{self.partials}" if self.partials != 1 else ""
        copies = f" *{self.copies}" if self.copies != 1 else ""
        return f"[{' '.join(axes)}{sums}{copies}]"


@dataclass(frozen=True)
class Objection:
    """Why an operator cannot be applied to values laid out so; `of_sizes` if at other sizes it might."""

    reason: str
    of_sizes: bool = False


def whole(rank: int) -> Layout:
    """The layout of a value that one device holds."""
    return Layout((1,) * rank)


Effect = Callable[[Layout, int, Degree], Layout | Objection]


def _multiplied(numbers: tuple[Degree, ...], at: int, factor: Degree) -> tuple[Degree, ...]:
    return (*numbers[:at], product((numbers[at], factor)), *numbers[at + 1 :])


def _divided(numbers: tuple[Degree, ...], at: int, factor: Degree) -> tuple[Degree, ...]:
    return (*numbers[:at], quotient(numbers[at], factor), *numbers[at + 1 :])


def _partition(before: Layout, dim: int, degree: Degree) -> Layout | Objection:
    return replace(before, degrees=_multiplied(before.degrees, dim, degree))


def _combine(before: Layout, dim: int, degree: Degree) -> Layout | Objection:
    if not divides(degree, before.degrees[dim]):
        return Objection(f"axis {dim} is not split into {degree} parts")
    return replace(before, degrees=_divided(before.degrees, dim, degree))


def _replicate(before: Layout, _: int, degree: Degree) -> Layout | Objection:
    return replace(before, copies=product((before.copies, degree)))


def _reduce(before: Layout, _: int, degree: Degree) -> Layout | Objection:
    if not divides(degree, before.partials):
        return Objection(f"there are no {degree} partial sums to add")
    return replace(before, partials=quotient(before.partials, degree))


def _pipeline(before: Layout, dim: int, degree: Degree) -> Layout | Objection:
    return replace(before, pieces=_multiplied(before.pieces, dim, degree))


def _batch(before: Layout, dim: int, degree: Degree) -> Layout | Objection:
    if not divides(degree, before.pieces[dim]):
        return Objection(f"axis {dim} is not cut into {degree} pieces in time")
    return replace(before, pieces=_divided(before.pieces, dim, degree))


EFFECTS: Mapping[str, Effect] = {
    "partition": _partition,
    "combine": _combine,
    "replicate": _replicate,
    "reduce": _reduce,
    "pipeline": _pipeline,
    "batch": _batch,
}


def is_parallel(op_name: str) -> bool:
    """Whether an operator changes only layouts."""
    return op_name in EFFECTS


_CARRIERS: dict[tuple[int, int, bool], tuple[Signature, tuple[str | None, ...]]] = {}


def _carriers(signature: Signature, access: int, is_output: bool) -> tuple[str | None, ...]:
    """What `_found_carriers` finds; kept with the signature, since that has no hash but its identity."""
    key = (id(signature), access, is_output)
    known = _CARRIERS.get(key)
    if known is None:
        known = _CARRIERS[key] = (signature, _found_carriers(signature, access, is_output))
    return known[1]


def _found_carriers(signature: Signature, access: int, is_output: bool) -> tuple[str | None, ...]:
    axes = (signature.outputs if is_output else signature.operands)[access]
    shape = (signature.output_shapes if is_output else signature.shapes)[access]
    assert axes is not None
    assert shape is not None
    found: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        free = [(dim, step) for dim, step in axis.terms if dim not in signature.whole]
        if axis.dims in signature.factored:
            # The outermost dim that is more than one: those inside it split only after all of it.
            free = [term for term in axis.terms if signature.sizes[term[0]] > 1][:1]
        is_plain = len(axis.terms) > 1 or (
            bool(free) and signature.sizes[free[0][0]] == size and not axis.const
        )
        fits = len(free) == 1 and free[0][1] > 0 and axis.divisor == 1 and is_plain
        found.append(free[0][0] if fits and free[0][0] in signature.splits else None)
    return tuple(found)


def carriers(signature: Signature, operand: int) -> tuple[str | None, ...]:
    """For each axis of an operand the dim whose degree it has; None where the axis must be whole."""
    return _carriers(signature, operand, is_output=False)


def output_carriers(signature: Signature, output: int) -> tuple[str | None, ...]:
    """The same for an output."""
    return _carriers(signature, output, is_output=True)


def output_layouts(
    op: Op, signature: Signature, attrs: Attrs, layouts: Sequence[Layout | None]
) -> tuple[Layout, ...] | Objection:
    """The layouts of an operator's outputs. None is the layout of a number, or of an operand left out."""
    if is_parallel(op.name):
        return _changed(op, attrs, layouts)
    given = {i: layout for i, layout in enumerate(layouts) if layout is not None}
    if all(layout.is_whole for layout in given.values()):
        return tuple(whole(len(shape)) for shape in signature.output_shapes)
    degrees: dict[str, Degree] = {}
    pieces: dict[str, Degree] = {}
    for i, layout in given.items():
        for numbers, known in ((layout.degrees, degrees), (layout.pieces, pieces)):
            objection = _collect(signature, i, numbers, known)
            if objection is not None:
                return objection
    return _outputs(op, signature, attrs, given, degrees, pieces)


def _changed(op: Op, attrs: Attrs, layouts: Sequence[Layout | None]) -> tuple[Layout, ...] | Objection:
    before, given = layouts[0], op.complete(attrs)
    assert before is not None
    dim, degree = given.get("dim", 0), given["degree"]
    assert isinstance(dim, int)
    if dim >= len(before.degrees) and "dim" in op.attrs:
        return Objection(f"there is no axis {dim}")
    after = EFFECTS[op.name](before, dim, degree)  # type: ignore[arg-type]  # a number or a symbol
    return after if isinstance(after, Objection) else (after,)


def _collect(
    signature: Signature, operand: int, numbers: Sequence[Degree], known: dict[str, Degree]
) -> Objection | None:
    """Add what an operand's axes say about dims to what is known."""
    for axis, (dim, number) in enumerate(zip(carriers(signature, operand), numbers, strict=True)):
        if dim is None:
            if number != 1:
                return Objection(f"axis {axis} of operand {operand} must be whole")
        elif known.setdefault(dim, number) != number:
            return Objection(f"operands split dim '{dim}' differently")
    return None


def _outputs(
    op: Op,
    signature: Signature,
    attrs: Attrs,
    given: Mapping[int, Layout],
    degrees: Mapping[str, Degree],
    pieces: Mapping[str, Degree],
) -> tuple[Layout, ...] | Objection:
    split = {dim for dim, degree in degrees.items() if degree != 1}
    if any(pieces.get(dim, 1) != 1 for dim in signature.summed_dims):
        return Objection("a summed dim cannot be cut in time")
    shared = signature.shared & (split | {dim for dim, n in pieces.items() if n != 1})
    if shared or (signature.finishing & given.keys() and split & set(signature.summed_dims)):
        return Objection("something that is read once, or known of all shards, would be split")
    summing = {i for i, layout in given.items() if layout.partials != 1}
    partials = given[min(summing)].partials if summing else 1
    if summing and (
        any(given[i].partials != partials for i in summing)
        or frozenset(summing) not in additive_sets(op, signature, attrs)
    ):
        return Objection("partial sums do not pass through this operator")
    parts = {layout.parts for layout in given.values()}
    if len(parts) != 1:
        return Objection("operands lie on different numbers of devices")
    own = product((*degrees.values(), partials))
    (count,) = parts
    if not divides(own, count):
        return Objection("there are fewer copies than parts")
    cells = {dim: product((degrees.get(dim, 1), pieces.get(dim, 1))) for dim in (*degrees, *pieces)}
    objection = signature.objection({dim: n for dim, n in cells.items() if isinstance(n, int)})
    if objection is not None:
        return Objection(objection, of_sizes=True)
    found = []
    for output in range(len(signature.outputs)):
        dims = output_carriers(signature, output)
        if (
            not split <= {*dims, *signature.partial_dims(output)}
            or split & set(signature.summed_dims) & shared
        ):
            return Objection(f"output {output} would be split along an axis that must be whole")
        summed = product(degrees[dim] for dim in split if dim not in dims)
        found.append(
            Layout(
                tuple(1 if dim is None else degrees.get(dim, 1) for dim in dims),
                product((summed, partials)),
                quotient(count, own),
                tuple(1 if dim is None else pieces.get(dim, 1) for dim in dims),
            )
        )
    return tuple(found)
