"""What the words of terms mean: an operator with its operands and attributes, at given shapes.

Most words are an operator's name and mean that operator. The others are abbreviations:

    head[dim=d](x), tail[dim=d](x)   the two parts of `x` before and after a cut; both mean the same cut
    scale(x)                         `x` times a number, the same number throughout a rule
    transpose(x)                     `x` with its last two axes exchanged
    batch_matmul(x, y)               `matmul` where both have a batch
    merge(x)                         `x` with its first two axes as one: a reshape
    enlarge(x)                       a kernel with a border of zeros around its window
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from soapstone.errors import OpError, RuleError
from soapstone.machine.checks import did_you_mean
from soapstone.ops import Op, Shape, Signature, lookup
from soapstone.ops.op import Attr
from soapstone.subst.degree import Degree, product
from soapstone.subst.layout import Layout, Objection, is_parallel, output_layouts
from soapstone.subst.term import ANY, Call, Side, Term, Var, calls, subterms

CUTS = frozenset({"head", "tail"})

ILL_FORMED = (OpError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""What operators may say to attributes that a person made up: numbers that fit no size, words for numbers."""


def reason(error: Exception) -> str:
    """What an error of `ILL_FORMED` says, if it was written for a person, or that something does not fit."""
    return str(error) if isinstance(error, OpError) else "an attribute does not fit its operator"


FACTOR = 97 / 64
"""The number that `scale` multiplies by, wherever a number is needed."""


@dataclass(frozen=True)
class Applied:
    """A word at given shapes: the operator, which operands are numbers, and its attributes."""

    op: Op
    shapes: tuple[Shape | None, ...]
    numbers: Mapping[int, float]
    attrs: Mapping[str, Attr]

    @property
    def signature(self) -> Signature:
        return self.op.signature(self.shapes, self.attrs)


@dataclass(frozen=True)
class Context:
    """What a rule leaves open: the degree `k`, where values are cut, and attributes written `[*]`.

    `cuts` has a position for the operand of a `head` or `tail` and an axis; the middle where it has none.
    """

    degree: Degree = 2
    cuts: Mapping[tuple[Term, int], int] = field(default_factory=dict)
    attrs: Mapping[str, Mapping[str, Attr]] = field(default_factory=dict)
    factor: float = FACTOR

    def cut(self, call: Call, size: int) -> int:
        """Where the operand of this `head` or `tail` is cut."""
        dim = dict(call.attrs)["dim"]
        assert isinstance(dim, int)
        return self.cuts.get((call.args[0], dim), size // 2)


Lowering = Callable[[Call, Sequence[Shape], Context], Applied]


def _part(call: Call, shapes: Sequence[Shape], context: Context) -> Applied:
    dim = dict(call.attrs)["dim"]
    assert isinstance(dim, int)
    if dim >= len(shapes[0]):
        raise OpError(f"there is no axis {dim}")
    size = shapes[0][dim]
    cut = context.cut(call, size)
    start, end = (0, cut) if call.word == "head" else (cut, size)
    if not 0 < cut < size:
        raise OpError(f"an axis of size {size} cannot be cut at {cut}")
    return Applied(lookup("slice"), tuple(shapes), {}, {"dim": dim, "start": start, "end": end})


def _scale(_: Call, shapes: Sequence[Shape], context: Context) -> Applied:
    return Applied(lookup("mul"), (*shapes, ()), {1: context.factor}, {})


def _transpose(_: Call, shapes: Sequence[Shape], __: Context) -> Applied:
    order = list(range(len(shapes[0])))
    if len(order) < 2:
        raise OpError("a value with fewer than two axes is not transposed")
    order[-2:] = order[:-3:-1]
    return Applied(lookup("permute"), tuple(shapes), {}, {"dims": tuple(order)})


def _batch_matmul(_: Call, shapes: Sequence[Shape], __: Context) -> Applied:
    if any(len(shape) != 3 for shape in shapes):
        raise OpError("both operands of batch_matmul need a batch")
    return Applied(lookup("matmul"), tuple(shapes), {}, {})


def _merge(_: Call, shapes: Sequence[Shape], __: Context) -> Applied:
    (shape,) = shapes
    if len(shape) < 3:
        raise OpError("a value with fewer than three axes is not merged")
    return Applied(lookup("reshape"), (shape,), {}, {"shape": (shape[0] * shape[1], *shape[2:])})


BORDER: Attr = ((1, 1), (1, 1))
"""What `enlarge` puts around a window: the padding of `pad` along the last two axes."""


def _enlarge(_: Call, shapes: Sequence[Shape], __: Context) -> Applied:
    if len(shapes[0]) != 4:
        raise OpError("only kernels of two window axes are enlarged")
    return Applied(lookup("pad"), tuple(shapes), {}, {"pads": BORDER})


ABBREVIATIONS: Mapping[str, Lowering] = {
    "head": _part,
    "tail": _part,
    "scale": _scale,
    "transpose": _transpose,
    "batch_matmul": _batch_matmul,
    "merge": _merge,
    "enlarge": _enlarge,
}


_LOWERED = {
    "head": "slice",
    "tail": "slice",
    "scale": "mul",
    "transpose": "permute",
    "batch_matmul": "matmul",
    "merge": "reshape",
    "enlarge": "pad",
}


def op_name(word: str) -> str:
    """The operator that a word becomes in a graph."""
    return _LOWERED.get(word, word)


def check_words(side: Side) -> None:
    """Raise OpError where a word is no operator, has operands or attributes that its operator has not, or a
    number for an attribute that cannot be."""
    for call in calls(side):
        if call.word in ABBREVIATIONS:
            _check_abbreviation(call)
            continue
        op = lookup(call.word)
        if len(call.args) > len(op.operand_names) and not op.is_variadic:
            raise OpError(_miscounted(call, len(op.operand_names)))
        if call.attrs == ANY:
            continue
        for name, value in call.attrs:
            if name not in op.attrs:
                hint = did_you_mean(name, op.attrs) if op.attrs else "; leave it out"
                raise OpError(f"'{call.word}' has no attribute '{name}'{hint}")
            _check_value(call.word, name, value)


def _check_abbreviation(call: Call) -> None:
    """Raise OpError unless a cut has its axis, and what is no cut has no attributes."""
    word, given = call.word, dict(call.attrs)
    arity = 2 if word == "batch_matmul" else 1
    if len(call.args) != arity:
        raise OpError(_miscounted(call, arity))
    for name in sorted(given.keys() - ({"dim"} if word in CUTS else set())):
        hint = f"; write {word}[dim=0]" if word in CUTS else "; leave it out"
        raise OpError(f"'{word}' has no attribute '{name}'{hint}")
    if word in CUTS and not _is_count(given.get("dim"), 0):
        raise OpError(f"'{word}' needs the axis that is cut, counted from 0; write {word}[dim=0]")


def _miscounted(call: Call, arity: int) -> str:
    return f"'{call.word}' takes {arity} {'operand' if arity == 1 else 'operands'}, not {len(call.args)}"


def _check_value(word: str, name: str, value: Attr) -> None:
    """Raise OpError where a degree is no number of parts, or `k` stands for what is no degree."""
    if is_parallel(word) and name == "degree":
        if value != "k" and not _is_count(value, 1):
            raise OpError(f"the degree of '{word}' is k or a whole number from 1, not {value}")
    elif is_parallel(word) and not _is_count(value, 0):
        raise OpError(f"the axis of '{word}' is a whole number from 0, not {value}")
    elif value == "k":
        raise OpError(f"only a degree is k, and '{name}' of '{word}' is none; write a number")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def applied(call: Call, shapes: Sequence[Shape], context: Context) -> Applied:
    """The operator that a word stands for. Raises OpError where shapes do not fit."""
    lowering = ABBREVIATIONS.get(call.word)
    if lowering is not None:
        return lowering(call, shapes, context)
    op = lookup(call.word)
    given = context.attrs.get(call.word, {}) if call.attrs == ANY else dict(call.attrs)
    attrs = {name: context.degree if value == "k" else value for name, value in given.items()}
    missing = 0 if op.is_variadic else len(op.operand_names) - len(shapes)
    if missing < 0:
        raise OpError(f"{op.name} takes {len(op.operand_names)} operands, not {len(shapes)}")
    return Applied(op, (*shapes, *[None] * missing), {}, attrs)  # type: ignore[arg-type]  # symbolic degrees


@dataclass(frozen=True)
class Typed:
    """The shape and the layout of a value."""

    shape: Shape
    layout: Layout

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a single element"
        return f"{shape} on one device" if self.layout.is_whole else f"{shape} laid out as {self.layout}"

    @property
    def is_uneven(self) -> bool:
        """Whether an axis does not divide into as many equal parts as its layout says."""
        axes = zip(self.shape, self.layout.degrees, self.layout.pieces, strict=True)
        cells = [(size, product((degree, pieces))) for size, degree, pieces in axes]
        return any(isinstance(parts, int) and size % parts for size, parts in cells)


def typed(call: Call, args: Sequence[Typed], context: Context) -> Typed | Objection:
    """The type of a word's result, or why there is none. Operands of a word have one rank each."""
    try:
        meant = applied(call, [arg.shape for arg in args], context)
        signature = meant.signature
    except OpError as error:
        return Objection(str(error), of_sizes=True)
    if is_empty(signature):
        return Objection("the result would have no elements", of_sizes=True)
    if len(args) > 1 and broadcasts(signature):
        return Objection("an operand would be broadcast", of_sizes=True)
    layouts = [*(arg.layout for arg in args), *[None] * (len(meant.shapes) - len(args))]
    found = output_layouts(meant.op, signature, meant.attrs, layouts)
    if isinstance(found, Objection):
        return found
    kind = Typed(signature.output_shapes[0], found[0])
    return Objection("an axis does not divide into equal parts", of_sizes=True) if kind.is_uneven else kind


def is_empty(signature: Signature) -> bool:
    """Whether a dim has no points, as that of a window larger than what it moves over."""
    return any(size < 1 for size in signature.sizes.values())


def broadcasts(signature: Signature) -> bool:
    """Whether an axis that `...` stands for is missing, or of size one, in some operand only."""
    return (
        any(
            not axis.terms and size == 1
            for access, shape in zip(signature.operands, signature.shapes, strict=True)
            if access is not None and shape
            for axis, size in zip(access, shape, strict=True)
        )
        and max(signature.sizes.values(), default=1) > 1
    )


def types_of(side: Side, variables: Mapping[str, Typed], context: Context) -> dict[Term, Typed] | Objection:
    """The type of every subterm, or why one has none."""
    found: dict[Term, Typed] = {}
    for term in subterms(side):
        if isinstance(term, Var):
            if term.name not in variables:
                raise RuleError(f"variable '{term.name}' is not declared")
            found[term] = variables[term.name]
            continue
        result = typed(term, [found[arg] for arg in term.args], context)
        if isinstance(result, Objection):
            return Objection(f"{term}: {result.reason}", result.of_sizes)
        found[term] = result
    return found
