"""What is enumerated: sets of operators and variables (Unity 4, "all PCGs up to a fixed size").

A family is small enough that all its graphs of a few nodes fit in memory, and has the operators that can meet
in a model: matrices, batches of matrices, images. Sizes are 4 with halves of 2 and pairs of 8; degrees are
2 and stand for any; the proof is about all sizes and degrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soapstone.ops import Shape
from soapstone.ops.op import Attr
from soapstone.subst.layout import Layout
from soapstone.subst.term import Call, Var

Template = tuple[Call, ...]
"""One operator of an enumeration: a call for each of its outputs, on variables that stand for operands."""


@dataclass(frozen=True)
class Family:
    """A set of operators and variables, and how far to go.

    `variables` are shapes and layouts with the number of variables of each; `sizes` what axes may measure;
    `takes` the shapes of each operand of a word, where these are not all that it could take.
    """

    name: str
    variables: tuple[tuple[Shape, Layout, int], ...]
    templates: tuple[Template, ...]
    sizes: frozenset[int]
    most_nodes: int = 3
    most_outputs: int = 2
    most_parts: int = 2
    takes: Mapping[str, tuple[frozenset[Shape], ...]] = field(default_factory=dict)


def word(name: str, arity: int, **attrs: Attr) -> Template:
    """An operator with one output."""
    return (Call(name, tuple(Var(str(i)) for i in range(arity)), tuple(attrs.items())),)


def cut(dim: int) -> Template:
    """The two parts of a value, as one node."""
    return tuple(Call(part, (Var("0"),), (("dim", dim),)) for part in ("head", "tail"))


def parallel(*dims: int, in_time: Sequence[int] = ()) -> tuple[Template, ...]:
    """The parallel operators over some axes."""
    spread = [word(name, 1, dim=dim, degree="k") for dim in dims for name in ("partition", "combine")]
    timed = [word(name, 1, dim=dim, degree="k") for dim in in_time for name in ("pipeline", "batch")]
    return (*spread, word("replicate", 1, degree="k"), word("reduce", 1, degree="k"), *timed)


_MATRIX = (4, 4)
_WHOLE = Layout((1, 1))
_SPREAD = (Layout((2, 1)), Layout((1, 2)), Layout((1, 1), partials=2), Layout((1, 1), copies=2))
_SIZES = frozenset({2, 4, 8})

MATRICES = Family(
    "matrices",
    ((_MATRIX, _WHOLE, 3),),
    (
        word("matmul", 2),
        word("linear", 2),
        word("add", 2),
        word("mul", 2),
        word("relu", 1),
        word("gelu", 1),
        word("scale", 1),
        word("transpose", 1),
        word("softmax", 1),
        word("layer_norm", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        cut(0),
        cut(1),
    ),
    _SIZES,
)

PARALLEL_MATRICES = Family(
    "parallel-matrices",
    ((_MATRIX, _WHOLE, 2), *((_MATRIX, layout, 2) for layout in _SPREAD)),
    (
        word("matmul", 2),
        word("linear", 2),
        word("add", 2),
        word("mul", 2),
        word("relu", 1),
        word("scale", 1),
        word("transpose", 1),
        word("softmax", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        cut(0),
        cut(1),
        *parallel(0, 1, in_time=(0,)),
    ),
    _SIZES,
)

_BATCH = (2, 4, 4)
BATCHES = Family(
    "batches",
    ((_BATCH, Layout((1, 1, 1)), 2), *((_BATCH, Layout(d), 1) for d in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))),
    (
        word("batch_matmul", 2),
        word("add", 2),
        word("relu", 1),
        word("scale", 1),
        word("softmax", 1),
        word("layer_norm", 1),
        word("transpose", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        word("concat", 2, dim=2),
        *parallel(0, 1, 2),
    ),
    _SIZES,
)

_IMAGE, _KERNEL = (2, 4, 4, 4), (4, 4, 3, 3)
_ALIKE = {"ph": 1, "pw": 1}
_WINDOW = {"kernel": 3, "stride": 1, "padding": 1}
IMAGES = Family(
    "images",
    (
        (_IMAGE, Layout((1, 1, 1, 1)), 2),
        (_IMAGE, Layout((2, 1, 1, 1)), 1),
        (_IMAGE, Layout((1, 2, 1, 1)), 1),
        (_IMAGE, Layout((1, 1, 1, 1), partials=2), 1),
        (_KERNEL, Layout((1, 1, 1, 1)), 2),
        (_KERNEL, Layout((1, 1, 1, 1), copies=2), 1),
    ),
    (
        word("conv2d", 2, **_ALIKE),
        word("max_pool2d", 1, **_WINDOW),
        word("avg_pool2d", 1, **_WINDOW),
        word("add", 2),
        word("relu", 1),
        word("scale", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        cut(0),
        cut(1),
        *parallel(0, 1),
    ),
    frozenset({2, 3, 4, 8}),
)

_POINT = (4, 4, 1, 1)
_PLAIN_IMAGE = Layout((1, 1, 1, 1))
KERNELS = Family(
    "kernels",
    ((_IMAGE, _PLAIN_IMAGE, 1), (_KERNEL, _PLAIN_IMAGE, 2), (_POINT, _PLAIN_IMAGE, 2)),
    (
        word("conv2d", 2, **_ALIKE),
        word("conv2d", 2),
        word("enlarge", 1),
        word("identity_kernel", 1),
        word("mean_kernel", 1),
        word("avg_pool2d", 1, **_WINDOW),
        word("add", 2),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
    ),
    frozenset({1, 2, 3, 4, 8}),
    takes={
        "conv2d": (frozenset({_IMAGE}), frozenset({_KERNEL, _POINT, (8, 4, 3, 3), (8, 4, 1, 1)})),
        "avg_pool2d": (frozenset({_IMAGE}),),
        "enlarge": (frozenset({_POINT, (8, 4, 1, 1)}),),
        "identity_kernel": (frozenset({_KERNEL}),),
        "mean_kernel": (frozenset({_KERNEL}),),
    },
)
"""TASO's constants: kernels that are enlarged, that change nothing, that take means."""

_TALL = (8, 4)
SEQUENCES = Family(
    "sequences",
    (
        (_BATCH, Layout((1, 1, 1)), 2),
        (_BATCH, Layout((2, 1, 1)), 1),
        (_TALL, _WHOLE, 2),
        (_TALL, Layout((1, 1), copies=2), 1),
    ),
    (
        word("merge", 1),
        word("linear", 2),
        word("add", 2),
        word("relu", 1),
        word("scale", 1),
        word("softmax", 1),
        word("layer_norm", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        word("concat", 2, dim=2),
        *parallel(0),
    ),
    frozenset({2, 4, 8, 16}),
)
"""Products with three axes, and the same with two: a reshape between them."""

LOOKUPS = Family(
    "lookups",
    (((2, 4), _WHOLE, 2), (_TALL, _WHOLE, 2), (_BATCH, Layout((1, 1, 1)), 1)),
    (
        word("embedding", 2),
        word("linear", 2),
        word("merge", 1),
        word("add", 2),
        word("relu", 1),
        word("scale", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        word("concat", 2, dim=2),
    ),
    frozenset({2, 4, 8}),
    takes={"embedding": (frozenset({(2, 4), (4, 4), (2, 8)}), frozenset({_TALL, (8, 8)}))},
)
"""Rows of tables; an index is a variable, or several of them joined."""

ATTENTION = Family(
    "attention",
    ((_BATCH, Layout((1, 1, 1)), 3), (_BATCH, Layout((2, 1, 1)), 1)),
    (
        word("sdpa", 3),
        word("scale", 1),
        word("concat", 2, dim=0),
        word("concat", 2, dim=1),
        word("concat", 2, dim=2),
        *parallel(0),
    ),
    _SIZES,
)

FAMILIES: tuple[Family, ...] = (
    MATRICES,
    PARALLEL_MATRICES,
    BATCHES,
    IMAGES,
    KERNELS,
    SEQUENCES,
    LOOKUPS,
    ATTENTION,
)
