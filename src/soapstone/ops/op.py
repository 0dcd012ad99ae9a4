"""An operator, written once: notation, scalar body, torch function; the rest is derived.

    Op("matmul", "m k, k n -> m n", body=lambda x, w: x * w, torch=lambda x, w: x @ w, weights=("w",))

What is derived, and where: shapes, legal splits, boxes, partial sums and gradient sums in
`signature`; flops and bytes here; the reference meaning over floats in `reference`; the proof
that every offered split is sound in `proof`. No other module may ask for an operator's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any, Literal

from soapstone.errors import OpError
from soapstone.ops import notation as notations
from soapstone.ops import scalar
from soapstone.ops.box import slices, volume
from soapstone.ops.examples import Example
from soapstone.ops.signature import IterationBox, Shape, Signature, bind

Attr = int | float | bool | str | None | tuple[Any, ...]
Attrs = Mapping[str, Attr]
NotationOf = Callable[[Sequence[Shape | None], Attrs], str]


@dataclass(frozen=True)
class Statistics:
    """What an operator needs to know of a dim as a whole, though the dim may be split.

    `local` takes the shard's operands and gives its statistics, one tensor; `merge` takes those of
    all shards along `dims`, in order, and gives the tensor that the torch function receives as
    `stats` (None when no such dim is split: then torch's own operator does it all). An attribute
    named `sync` that is False on a node leaves every shard to its own statistics. `pull` takes a shard's
    own, the merged ones and their gradient, and gives the gradient of the shard's own.
    """

    dims: tuple[str, ...]
    local: Callable[..., Any]
    merge: Callable[[Sequence[Any]], Any]
    pull: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Call:
    """What an ATen call means here: the operands, in order, the attributes, and for each of our
    outputs its position among ATen's (None: the same)."""

    operands: tuple[Any, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)
    outputs: tuple[int, ...] | None = None


Capture = Callable[..., Call | None]


@dataclass(frozen=True)
class Shard:
    """The piece of a node that is being computed: what a torch function may ask about it.

    `dtype` is that of the first output and `device` is where it is computed, which a shard that reads
    nothing (all of it is padding, or made from no operand) cannot see on its operands.
    """

    signature: Signature
    box: IterationBox
    seed: int = 0
    dtype: str = "f32"
    device: str = "cpu"

    def start(self, dim: str) -> int:
        """The first index of this dim that the shard holds."""
        return self.box[dim].lo

    def length(self, dim: str) -> int:
        """How many indices of this dim the shard holds."""
        return self.box[dim].length

    def size(self, dim: str) -> int:
        """How many indices the dim has over all shards."""
        return self.signature.sizes[dim]

    def pads(self, operand: int) -> tuple[tuple[int, int], ...]:
        """How far the shard reads past both borders of each axis of an operand."""
        return self._pads[operand]

    @cached_property
    def _pads(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(self.signature.read(i, self.box).pads for i in range(len(self.signature.shapes)))

    @property
    def is_whole(self) -> bool:
        return self.box == self.signature.points


@dataclass(frozen=True, eq=False)
class Op:
    """One operator. The fields a definition states; `docs/notation.md` explains them in turn.

    name        what it is called in graphs and plans
    notation    its index notation, or a function from shapes and attributes to it
    torch       computes a shard from its slices; keyword-only parameters are filled by name from
                the attributes, and with `shard`, `count` (points summed per output) and `stats`
    body        the scalar meaning of one point; takes the first operands (None for one left out), and
                by name attributes, `at` (the point's coordinates), `count` and `shapes` (the operands')
    finish      what follows the sum; takes the sum and the operands the body did not take
    reduce      how points are combined; only sums can be split
    attrs       the attributes and their defaults; names used in the notation are integers
    weights     the operands that are weights, by the torch function's parameter names
    flops       per point of the iteration space (a number), or in all (a function of the sizes);
                None counts the body
    sums        whether partial results add up, for an operator without a body
    outside     the value of reads past an operand's border: a number, or the attribute that holds it
    gathers     dims read only where an index operand points
    statistics  what it computes over a dim that may nevertheless be split
    random      whether it draws random numbers, from the shard's seed and global coordinates
    is_view     whether torch computes it without touching an element
    keeps       what torch's backward pass needs, where the body does not tell: operands by the torch
                function's parameter names, and `output`
    is_opaque   whether it stands for an operator that only torch knows
    needs_grad  False when nothing can be differentiated through it
    aten        ATen overloads it stands for, each with a function from ATen's arguments to a Call (it
                may answer None: not this case), or None where arguments are the operands in order
                and the attributes by name
    examples    shapes and attributes at which the tests take it through everything
    """

    name: str
    notation: str | NotationOf
    torch: Callable[..., Any]
    body: Callable[..., Any] | None = None
    finish: Callable[..., Any] | None = None
    reduce: Literal["sum", "max", "min"] = "sum"
    attrs: Attrs = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    flops: float | Callable[[Mapping[str, int]], float] | None = None
    sums: bool = False
    outside: float | str = 0.0
    gathers: tuple[str, ...] = ()
    statistics: Statistics | None = None
    random: bool = False
    is_view: bool = False
    keeps: tuple[str, ...] | None = None
    is_opaque: bool = False
    needs_grad: bool = True
    aten: Mapping[str, Capture | None] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        if self.body is None and self.flops is None:
            raise OpError(f"operator '{self.name}' has neither a body nor flops: give one of them")
        unknown = set(self.weights) - set(self.operand_names)
        if unknown:
            raise OpError(
                f"operator '{self.name}' calls '{min(unknown)}' a weight, which is no operand of it"
            )
        strange = set(self.keeps or ()) - {*self.operand_names, "output"}
        if strange:
            raise OpError(f"operator '{self.name}' keeps '{min(strange)}', which is no operand of it")
        if isinstance(self.notation, str):
            notations.parse(self.notation, frozenset(self.attrs))

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands: the torch function's positional parameters."""
        return tuple(p.name for p in _positional(self.torch))

    @property
    def is_variadic(self) -> bool:
        """Whether it takes any number of operands."""
        return _takes_any_number(self.torch)

    @property
    def is_identity(self) -> bool:
        """Whether it gives back what it is given, and nothing is to be done for that."""
        return self.is_view and self.torch is self.body

    def complete(self, attrs: Attrs) -> dict[str, Attr]:
        """The attributes with defaults filled in; an unknown name is an error."""
        return {**self.attrs, **attrs}

    def joins_statistics(self, attrs: Attrs) -> bool:
        """Whether shards tell each other their statistics; else they take none, or each its own."""
        return self.statistics is not None and bool(self.complete(attrs).get("sync", True))

    def signature(self, shapes: Sequence[Shape | None], attrs: Attrs) -> Signature:
        """This operator at these shapes (None for an optional operand left out)."""
        key = (tuple(shapes), tuple(sorted(attrs.items())))
        found = self._signatures.get(key)
        if found is None:
            found = self._signatures[key] = self._bound(tuple(shapes), self.complete(attrs))
        return found

    @cached_property
    def _signatures(self) -> dict[Any, Signature]:
        return {}

    def _bound(self, shapes: tuple[Shape | None, ...], attrs: Attrs) -> Signature:
        text = self.notation if isinstance(self.notation, str) else self.notation(shapes, attrs)
        coefficients = frozenset(self.attrs) if isinstance(self.notation, str) else frozenset[str]()
        parsed = notations.parse(text, coefficients)
        if self.finish is None or self.body is None:
            finishing = frozenset[int]()
        else:
            finishing = frozenset(range(len(_positional(self.body)), len(shapes)))
        return bind(
            self.name,
            parsed,
            shapes,
            attrs,
            shared=frozenset(self.statistics.dims) if self.statistics else frozenset(),
            summable=self._sums_add_up,
            finishing=finishing if self._sums_add_up else frozenset(),
        )

    @cached_property
    def _sums_add_up(self) -> bool:
        """Whether partial results of a split sum add up to the whole: finish(a + b, c) must be
        finish(a, c) + finish(b, 0). Checked at a few points here, proved in `proof`."""
        if self.body is None:
            return self.sums
        if self.reduce != "sum":
            return False
        if self.finish is None:
            return True
        extra = [f"e{i}" for i in range(len(_positional(self.finish)) - 1)]
        keywords = {**self.attrs, "count": 7}
        try:
            meaning = scalar.traced(
                self.finish, ["sum", *extra], **{k: keywords[k] for k in keywords_of(self.finish)}
            )
        except (TypeError, KeyError):
            return False
        for a, b, c in ((0.5, 2.25, 3.0), (-1.5, 0.75, -2.0), (4.0, -8.0, 1.25)):
            values, zeros = dict.fromkeys(extra, c), dict.fromkeys(extra, 0.0)
            together = scalar.evaluate(meaning, {"sum": a + b, **values})
            apart = scalar.evaluate(meaning, {"sum": a, **values}) + scalar.evaluate(
                meaning, {"sum": b, **zeros}
            )
            if abs(together - apart) > 1e-9 * (1 + abs(together)):
                return False
        return True

    def weight_positions(self, count: int) -> tuple[int, ...]:
        """The positions, among `count` operands, of those that are weights."""
        return tuple(i for i, name in enumerate(self.operand_names[:count]) if name in self.weights)

    def run(self, operands: Sequence[Any], attrs: Attrs, shard: Shard, stats: Any = None) -> tuple[Any, ...]:
        """Compute one shard with torch from its slices; always a tuple of outputs."""
        given = {
            **self.complete(attrs),
            "shard": shard,
            "count": summed_points(shard.signature),
            "stats": stats,
        }
        result = self.torch(*operands, **{name: given[name] for name in keywords_of(self.torch)})
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def slices(self, operands: Sequence[Any], shard: Shard) -> list[Any]:
        """What a shard reads of the whole operands. Numbers stay, empty reads become None."""
        pieces: list[Any] = []
        for i, operand in enumerate(operands):
            if operand is None or isinstance(operand, int | float | bool):
                pieces.append(operand)
                continue
            region = shard.signature.read(i, shard.box)
            pieces.append(None if region.is_empty else operand[slices(region.box)])
        return pieces

    def flop_count(self, signature: Signature, shard: IterationBox | None = None) -> float:
        """Floating-point operations of the forward pass of one shard (default: of the whole)."""
        box = shard or signature.points
        sizes = {dim: interval.length for dim, interval in box.items()}
        if callable(self.flops):
            return float(self.flops(sizes))
        all_points = prod(sizes.values())
        points = all_points / prod(axis.divisor for access in signature.operands for axis in access or ())
        if self.flops is not None:
            return float(self.flops) * points
        per_point = scalar.flops(self.body_meaning(signature, dict.fromkeys(signature.sizes, 0), self.attrs))
        combined = points if all_points > volume(signature.write(0, box)) else 0
        return float(points * per_point + combined) + self.finish_flop_count(signature, box)

    def finish_flop_count(self, signature: Signature, shard: IterationBox | None = None) -> float:
        """The part of `flop_count` that follows the sum."""
        meaning = None if self.body is None else self.finish_meaning(signature, self.attrs)
        if meaning is None:
            return 0.0
        return float(scalar.flops(meaning) * volume(signature.write(0, shard or signature.points)))

    def body_meaning(self, signature: Signature, point: Mapping[str, int], attrs: Attrs) -> scalar.Scalar:
        """The body as an expression over symbols `x0, x1, ...`, one per operand it takes and is given."""
        if self.body is None:
            raise OpError(f"operator '{self.name}' has no scalar body")
        symbols = _symbols(signature, range(self.body_arity(signature)))
        return scalar.traced(self.body, symbols, **self._scalar_keywords(self.body, signature, point, attrs))

    def finish_meaning(self, signature: Signature, attrs: Attrs) -> scalar.Scalar | None:
        """What follows the sum, over symbols `sum, x2, ...`; None when nothing does."""
        if self.finish is None:
            return None
        taken = self.body_arity(signature)
        rest = _symbols(signature, range(taken, len(signature.shapes)))
        if signature.shapes[taken:] and all(shape is None for shape in signature.shapes[taken:]):
            return None
        return scalar.traced(
            self.finish, ["sum", *rest], **self._scalar_keywords(self.finish, signature, {}, attrs)
        )

    def body_arity(self, signature: Signature) -> int:
        """How many operands the body takes, counted from the first."""
        assert self.body is not None
        return len(signature.shapes) if _takes_any_number(self.body) else len(_positional(self.body))

    @cached_property
    def body_knows_place(self) -> bool:
        """Whether the body's meaning depends on the coordinates of the point."""
        return self.body is not None and "at" in keywords_of(self.body)

    def places(self, signature: Signature, attrs: Attrs) -> frozenset[str]:
        """The dims whose coordinates the body asks for."""
        if not self.body_knows_place:
            return frozenset()
        asked = _Asked(signature.sizes)
        for at in (dict.fromkeys(signature.sizes, 0), {dim: n - 1 for dim, n in signature.sizes.items()}):
            asked.point = at
            self.body_meaning(signature, asked, attrs)
        return frozenset(asked.dims)

    def _scalar_keywords(
        self, function: Callable[..., Any], signature: Signature, point: Mapping[str, int], attrs: Attrs
    ) -> dict[str, Any]:
        known = {"at": point, "count": summed_points(signature), "shapes": signature.shapes}
        given = {**self.complete(attrs), **known}
        return {name: given[name] for name in keywords_of(function)}

    def bytes_touched(
        self, signature: Signature, item_bytes: Sequence[int], out_bytes: Sequence[int], shard: IterationBox
    ) -> int:
        """Bytes that one shard reads and writes, each element once; of dims that it gathers from, only
        what it can point at."""
        written = [volume(signature.write(i, shard)) for i in range(len(signature.outputs))]
        total = sum(count * size for count, size in zip(written, out_bytes, strict=True))
        for i, size in enumerate(item_bytes):
            count = volume(signature.read(i, shard).box)
            access = signature.operands[i] or ()
            if any(dim in self.gathers for axis in access for dim in axis.dims):
                pointed_at = prod(shard[dim].length for dim in signature.sizes if dim not in self.gathers)
                count = min(count, pointed_at)
            total += count * size
        return total


class _Asked(Mapping[str, int]):
    """A point that notes which of its coordinates are asked for."""

    def __init__(self, dims: Iterable[str]) -> None:
        self.point: Mapping[str, int] = dict.fromkeys(dims, 0)
        self.dims: set[str] = set()

    def __getitem__(self, dim: str) -> int:
        self.dims.add(dim)
        return self.point[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self.point)

    def __len__(self) -> int:
        return len(self.point)


def summed_points(signature: Signature) -> int:
    """How many points are combined into one element of the output, over all shards."""
    return prod(signature.sizes[dim] for dim in signature.summed_dims)


def _symbols(signature: Signature, operands: Iterable[int]) -> list[str | None]:
    """The names by which expressions call operands; None for one left out."""
    return [None if signature.shapes[i] is None else f"x{i}" for i in operands]


@cache
def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]


@cache
def _takes_any_number(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values())


@cache
def keywords_of(function: Callable[..., Any]) -> list[str]:
    """What a function of an operator is given by name."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
