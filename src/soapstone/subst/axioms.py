"""Axioms: what proofs may use, derived from the operators or named here, each checked element by element.

Derived from an operator f's notation and body:

    parallel    f of concats along a dim of its output is the concat of f of the parts       `_parallel`
    cut         a part of f is f of the parts                                                `_cuts`
    sum         f of concats along a summed dim is the sum of f of the parts                 `_sums`
    linear      f of sums (multiples) is the sum (multiple), in operands where f is additive `_linear`
    pointwise   f commutes, associates, is idempotent: tried, and kept if Z3 proves it       `_pointwise`
    moved       f of transposed operands is f transposed: tried, and kept if Z3 proves it    `_transposed`
    permuted    two permutations in a row are a third, or none: tried likewise               `_permuted`
    product     two products in a row, bracketed and ordered otherwise: tried likewise       `_products`
    merged      f of operands with two axes as one is f merged: tried likewise               `_merged`

Named, because they say how the three words that depend on sizes meet: `NAMED`.

Nothing is derived of an opaque function: one whose attributes may be any (`[*]`), which draws random numbers,
or whose notation is another at other sizes. What a check at one choice shows, it does not show of others.

`check` writes both sides out at small sizes, all elements unknown, and has Z3 prove every element equal: the
domain on which the axiom is checked. That it holds at other sizes is what the notation says, or, for a named
axiom, what its name says: its domain, as its docstring states it, is enforced before anything is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from soapstone.ops import Shape, lookup
from soapstone.ops.proof import Proved, Refuted, Unknown, Verdict
from soapstone.subst.elements import all_equal, symbols, written_out
from soapstone.subst.functions import Function, has_elements
from soapstone.subst.linearity import additive_sets
from soapstone.subst.term import Term, Var
from soapstone.subst.words import CUTS, ILL_FORMED, Context, reason


@dataclass(frozen=True)
class Axiom:
    """Two terms that are equal, the shapes at which that is checked, and where it comes from.

    All its cuts are at one position, but for those of `subject`, the function it is about.
    """

    name: str
    left: Term
    right: Term
    domain: Mapping[str, Shape]
    origin: str
    subject: tuple[str, tuple[tuple[str, Any], ...]] | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.domain.items())
        return f"{self.name}: {self.left} = {self.right}, checked at {shapes}"


def check(axiom: Axiom, context: Context, timeout_ms: int = 5_000) -> Verdict:
    """Whether an axiom holds for all elements at the shapes of its domain."""
    key = (axiom.left, axiom.right, tuple(axiom.domain.items()), repr(context))
    found = _CHECKED.get(key)
    if found is None:
        found = _CHECKED[key] = _checked(axiom, context, timeout_ms)
    return found


_CHECKED: dict[object, Verdict] = {}


_MOST_ELEMENTS = 1_024
"""[choice] An axiom is about so few elements, or is not checked: more take long and show nothing more."""


def _checked(axiom: Axiom, context: Context, timeout_ms: int) -> Verdict:
    if sum(prod(shape) for shape in axiom.domain.values()) > _MOST_ELEMENTS:
        return Unknown("its domain is too large to be checked")
    values = {name: symbols(name, shape) for name, shape in axiom.domain.items()}
    try:
        left = written_out((axiom.left,), values, context)
        right = written_out((axiom.right,), values, context)
        return all_equal(left, right, timeout_ms)
    except ILL_FORMED as error:
        return Refuted(f"it is not well formed: {reason(error)}")


def numbered_dims(function: Function) -> frozenset[str]:
    """The dims along which numbers of its attributes may say what happens where: at small sizes, all may be
    beyond them, so that a check there says nothing of larger ones."""
    applied = function.applied
    return applied.op.places(applied.signature, applied.attrs) if function.attrs else frozenset()


_SMALLER = {4: 2, 8: 4, 6: 2}


def _small(shape: Shape) -> Shape:
    return tuple(_SMALLER.get(size, size) for size in shape)


class Deriving:
    """The axioms about a set of functions; those that are opaque have none."""

    def __init__(self, functions: Iterable[Function]) -> None:
        self.functions = {function.key: function for function in functions if not function.is_opaque}

    def axioms(self) -> Iterator[Axiom]:
        """All of them that pass their check."""
        for function in list(self.functions.values()):
            for derive in OF_SOME_DIMS if numbered_dims(function) else DERIVATIONS:
                for axiom in derive(self, function):
                    if axiom.left != axiom.right and check(axiom, function.context) == Proved():
                        yield replace(axiom, subject=(function.word, function.attrs))

    def of(self, word: str, rank: int, arity: int, dim: int | None = None) -> Function | None:
        """The function of that word, where it is among those asked about."""
        attrs = () if dim is None else (("dim", dim),)
        return self.functions.get((word, attrs, (rank,) * arity))


def _variables(function: Function, mark: str = "") -> list[Var]:
    return [Var(f"{'xyzuvw'[i]}{mark}") for i in range(len(function.samples))]


def _domain(function: Function, *marked: tuple[Sequence[Var], Iterable[int]]) -> dict[str, Shape]:
    """Shapes for variables that are the operands of a function: smaller than its samples, unless windows and
    the like need those."""
    small = tuple(map(_small, function.samples))
    samples = small if has_elements(replace(function, samples=small)) else function.samples
    return {variables[i].name: samples[i] for variables, operands in marked for i in operands}


def _without_single_axes(function: Function, variables: Sequence[Var]) -> dict[str, Shape] | None:
    """Shapes for the operands of a function in which it is seen how axes are exchanged; None if there are
    none. (An axis of one element may change places with another, and nobody sees it.)"""
    wide = tuple(tuple(max(2, size) for size in _small(shape)) for shape in function.samples)
    if not has_elements(replace(function, samples=wide)):
        return None
    return {variable.name: shape for variable, shape in zip(variables, wide, strict=True)}


def _dims(function: Function) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    """The dims along which every operand that has them is indexed by them alone, and no number says where."""
    numbered = numbered_dims(function)
    for dim, places in function.places.items():
        if dim in numbered:
            continue
        shown = {
            operand
            for operand in range(len(function.samples))
            for axis in function.signature.operands[operand] or ()
            if dim in axis.dims
        }
        if function.signature.sizes[dim] == 1:
            continue
        if dim not in function.signature.whole and shown == {operand for operand, _ in places}:
            yield dim, places


def _parallel(given: Deriving, function: Function) -> Iterator[Axiom]:
    one, two = _variables(function), _variables(function, "2")
    for dim, places in _dims(function):
        if dim not in function.plain(None) or (function.word == "concat" and len(places) < 2):
            continue
        axis = function.plain(None).index(dim)
        joined = {i: given.of("concat", function.ranks[i], 2, at) for i, at in places}
        outer = given.of("concat", len(function.result), 2, axis)
        if outer is None or any(concat is None for concat in joined.values()):
            continue
        left = [joined[i](one[i], two[i]) if i in joined else one[i] for i in range(len(one))]  # type: ignore[misc]
        second = [two[i] if i in joined else one[i] for i in range(len(one))]
        yield Axiom(
            f"{function.word} is parallel along {dim}",
            function(*left),
            outer(function(*one), function(*second)),
            _domain(function, (one, range(len(one))), (two, joined)),
            "notation",
        )


def _cuts(given: Deriving, function: Function) -> Iterator[Axiom]:
    one = _variables(function)
    for dim, places in _dims(function):
        if dim not in function.plain(None):
            continue
        axis = function.plain(None).index(dim)
        for part in sorted(CUTS):
            outer = given.of(part, len(function.result), 1, axis)
            inner = {i: given.of(part, function.ranks[i], 1, at) for i, at in places}
            if outer is None or any(found is None for found in inner.values()):
                continue
            args = [inner[i](one[i]) if i in inner else one[i] for i in range(len(one))]  # type: ignore[misc]
            yield Axiom(
                f"{part} of {function.word} along {dim}",
                outer(function(*one)),
                function(*args),
                _domain(function, (one, range(len(one)))),
                "notation",
            )


def _sums(given: Deriving, function: Function) -> Iterator[Axiom]:
    op, signature = function.applied.op, function.signature
    add = given.of("add", len(function.result), 2)
    if op.body is None or op.reduce != "sum" or add is None or op.finish_meaning(signature, {}) is not None:
        return
    one, two = _variables(function), _variables(function, "2")
    for dim, places in _dims(function):
        joined = {i: given.of("concat", function.ranks[i], 2, at) for i, at in places}
        if dim not in signature.summed_dims or any(concat is None for concat in joined.values()):
            continue
        left = [joined[i](one[i], two[i]) if i in joined else one[i] for i in range(len(one))]  # type: ignore[misc]
        second = [two[i] if i in joined else one[i] for i in range(len(one))]
        yield Axiom(
            f"{function.word} sums over {dim}",
            function(*left),
            add(function(*one), function(*second)),
            _domain(function, (one, range(len(one))), (two, joined)),
            "notation and body",
        )


def _linear(given: Deriving, function: Function) -> Iterator[Axiom]:
    one, two = _variables(function), _variables(function, "2")
    operands = set(range(len(one)))
    for additive in additive_sets(function.applied.op, function.signature, function.applied.attrs):
        if not additive <= operands:
            continue
        add = given.of("add", len(function.result), 2)
        sums = {i: given.of("add", function.ranks[i], 2) for i in additive}
        if add is not None and function.word != "add" and all(sums.values()):
            yield Axiom(
                f"{function.word} is additive in {sorted(additive)}",
                function(*(sums[i](one[i], two[i]) if i in sums else one[i] for i in range(len(one)))),  # type: ignore[misc]
                add(function(*one), function(*(two[i] if i in sums else one[i] for i in range(len(one))))),
                _domain(function, (one, operands), (two, additive)),
                "body",
            )
        scale = given.of("scale", len(function.result), 1)
        scales = {i: given.of("scale", function.ranks[i], 1) for i in additive}
        if scale is not None and function.word != "scale" and all(scales.values()):
            yield Axiom(
                f"{function.word} is homogeneous in {sorted(additive)}",
                function(*(scales[i](one[i]) if i in scales else one[i] for i in range(len(one)))),  # type: ignore[misc]
                scale(function(*one)),
                _domain(function, (one, operands)),
                "body",
            )


def is_pointwise(function: Function) -> bool:
    """Whether every element of the result depends on the same element of each operand, and on that alone:
    not on where it is."""
    op = function.applied.op
    if function.is_opaque or op.body is None or op.body_knows_place:
        return False
    dims = function.plain(None)
    return None not in dims and all(function.plain(i) == dims for i in range(len(function.samples)))


def _pointwise(_: Deriving, function: Function) -> Iterator[Axiom]:
    if not is_pointwise(function):
        return
    one = _variables(function)
    point = dict.fromkeys([v.name for v in (*one, Var("w"))], (1,) * function.ranks[0])
    if len(one) == 1:
        yield Axiom(
            f"{function.word} is idempotent",
            function(function(one[0])),
            function(one[0]),
            {"x": point["x"]},
            "body",
        )
    if len(one) == 2:
        x, y = one
        yield Axiom(
            f"{function.word} commutes",
            function(x, y),
            function(y, x),
            {v.name: point[v.name] for v in one},
            "body",
        )
        yield Axiom(
            f"{function.word} associates",
            function(function(x, y), Var("w")),
            function(x, function(y, Var("w"))),
            {"x": point["x"], "y": point["y"], "w": point["w"]},
            "body",
        )


def _transposed(given: Deriving, function: Function) -> Iterator[Axiom]:
    """Transposing after `function`, or before another that may have its operands in any order."""
    outer = given.of("transpose", len(function.result), 1)
    if outer is None or not 1 <= len(function.samples) <= 2:
        return
    one = _variables(function)
    domain = _without_single_axes(function, one)
    inner = [given.of("transpose", rank, 1) for rank in function.ranks]
    if domain is None or any(found is None for found in inner):
        return
    for other in list(given.functions.values()):
        if other.ranks != function.ranks or other.word in CUTS:
            continue
        for order in itertools.permutations(range(len(one))):
            for turned in itertools.product((False, True), repeat=len(one)):
                args = [inner[i](one[i]) if turns else one[i] for i, turns in zip(order, turned, strict=True)]  # type: ignore[misc]
                if not _is_related(function, other):
                    continue
                yield Axiom(
                    f"{function.word} transposed is {other.word}",
                    outer(function(*one)),
                    other(*args),
                    domain,
                    "body",
                )
                if not all(turned) and any(turned) and other.key != function.key:
                    yield Axiom(
                        f"{function.word} is {other.word} transposed",
                        function(*one),
                        other(*args),
                        domain,
                        "body",
                    )


def _permuted(given: Deriving, function: Function) -> Iterator[Axiom]:
    """A permutation of axes after another: the value as it was, or one permutation of those asked about.
    Which axes they exchange does not hang on sizes, and is seen where none is single."""
    if function.word != "permute":
        return
    x = Var("x")
    alike = [f for f in given.functions.values() if f.word == "permute" and f.ranks == function.ranks]
    for inner in alike:
        domain = _without_single_axes(inner, [x])
        rights: list[Term] = [x, *(other(x) for other in alike)]
        if domain is None:
            continue
        for right in rights:
            yield Axiom("a permutation after another", function(inner(x)), right, domain, "notation")


def _is_related(one: Function, two: Function) -> bool:
    """Whether two may be the same operator, but for the order of axes: products, or one word."""
    if one.word == two.word:
        return True
    return _is_product(one) and _is_product(two)


def _is_product(function: Function) -> bool:
    op = function.applied.op
    return (
        op.body is not None
        and len(function.samples) == 2
        and op.reduce == "sum"
        and {frozenset({0}), frozenset({1})} <= additive_sets(op, function.signature, function.applied.attrs)
    )


def _products(given: Deriving, function: Function) -> Iterator[Axiom]:
    """Products of three factors: bracketed to the left, and every way to bracket them otherwise."""
    if not _is_product(function) or is_pointwise(function):
        return
    shape = _small(function.samples[0])
    x, y, z = Var("x"), Var("y"), Var("z")
    domain = {"x": shape, "y": shape, "z": shape}
    products = [f for f in given.functions.values() if _is_product(f) and f.ranks == function.ranks]
    products = [f for f in products if not is_pointwise(f)]
    for inner in products:
        left = function(inner(x, y), z)
        for outer, second in itertools.product(products, repeat=2):
            for first, (a, b) in ((x, (y, z)), (x, (z, y))):
                yield Axiom(
                    f"{function.word} after {inner.word}", left, outer(first, second(a, b)), domain, "body"
                )


def _merged(given: Deriving, function: Function) -> Iterator[Axiom]:
    """Merging after `function`, or before the same word at a rank less; the first operand is merged, or all
    of its rank are."""
    rank = function.ranks[0] if function.ranks else 0
    inner, outer = given.of("merge", rank, 1), given.of("merge", len(function.result), 1)
    if inner is None or outer is None or function.word == "merge":
        return
    one = _variables(function)
    domain = _domain(function, (one, range(len(one))))
    alike = [i for i, own in enumerate(function.ranks) if own == rank]
    for merged in dict.fromkeys(((0,), tuple(alike))):
        ranks = tuple(own - (i in merged) for i, own in enumerate(function.ranks))
        args = [inner(x) if i in merged else x for i, x in enumerate(one)]
        for other in list(given.functions.values()):
            if other.word == function.word and other.ranks == ranks:
                yield Axiom(f"{function.word} merged", outer(function(*one)), other(*args), domain, "body")


def _named(given: Deriving, function: Function) -> Iterator[Axiom]:
    for name, make in NAMED.items():
        for left, right, domain in make(given, function):
            yield Axiom(name, left, right, domain, "named")


Made = Iterator[tuple[Term, Term, dict[str, Shape]]]


def _parts_of_concat(given: Deriving, function: Function) -> Made:
    if function.word != "concat":
        return
    x, y = Var("x"), Var("y")
    domain = _domain(function, ([x, y], (0, 1)))
    for part, kept in (("head", x), ("tail", y)):
        cut = given.of(part, len(function.result), 1, function.dim)
        if cut is not None:
            yield cut(function(x, y)), kept, domain


def _concat_of_parts(given: Deriving, function: Function) -> Made:
    if function.word != "concat":
        return
    head, tail = (given.of(part, function.ranks[0], 1, function.dim) for part in ("head", "tail"))
    if head is not None and tail is not None:
        x = Var("x")
        yield function(head(x), tail(x)), x, {"x": _small(function.samples[0])}


def _concat_associates(_: Deriving, function: Function) -> Made:
    if function.word == "concat":
        x, y, z = Var("x"), Var("y"), Var("z")
        shape = _small(function.samples[0])
        yield function(function(x, y), z), function(x, function(y, z)), {"x": shape, "y": shape, "z": shape}


def _transposed_twice(_: Deriving, function: Function) -> Made:
    if function.word == "transpose":
        x = Var("x")
        yield function(function(x)), x, {"x": _small(function.samples[0])}


def _kernel_that_changes_nothing(given: Deriving, function: Function) -> Made:
    """Where the window moves by single steps over neighbours: then the result is as large as the image only
    if the window is `2 * padding + 1`, at which it is checked."""
    kernel = given.functions.get(("identity_kernel", (), (4,)))
    attrs = _convolution(function)
    if attrs is not None and kernel is not None and _is_plain(attrs):
        x, y = Var("x"), Var("y")
        window = [2 * attrs[name] + 1 for name in ("ph", "pw")]
        yield function(x, kernel(y)), x, {"x": (2, 2, 2, 2), "y": (2, 2, *window)}


def _kernel_that_takes_means(given: Deriving, function: Function) -> Made:
    """Where both windows move by single steps over neighbours: then the results are of one size only if the
    windows are, and the axiom is checked at the window that the pooling has."""
    kernel = given.functions.get(("mean_kernel", (), (4,)))
    attrs = _convolution(function)
    if attrs is None or kernel is None or not _is_plain(attrs):
        return
    x, y = Var("x"), Var("y")
    for other in given.functions.values():
        pooling = lookup("avg_pool2d").complete(dict(other.attrs)) if other.word == "avg_pool2d" else {}
        window, step, padding = (pooling.get(name) for name in ("kernel", "stride", "padding"))
        if isinstance(window, int) and step == 1 and padding == attrs["ph"] == attrs["pw"]:
            image = max(2, window - 2 * attrs["ph"])
            yield function(x, kernel(y)), other(x), {"x": (2, 2, image, image), "y": (2, 2, window, window)}


def _enlarged_kernel(given: Deriving, function: Function) -> Made:
    """Where two convolutions differ in padding alone, by one step of the window: then what is read is the
    same for every window, stride and dilation."""
    kernel = given.functions.get(("enlarge", (), (4,)))
    attrs = _convolution(function)
    if attrs is None or kernel is None:
        return
    x, y = Var("x"), Var("y")
    for other in given.functions.values():
        own = _convolution(other)
        if own is not None and {**own, "ph": own["ph"] + own["dh"], "pw": own["pw"] + own["dw"]} == attrs:
            image, domain = [own[name] + 1 for name in ("dh", "dw")], _domain(other, ([x, y], (0, 1)))
            domain = {"x": (*domain["x"][:2], *image), "y": (*domain["y"][:2], 2, 2)}
            yield other(x, y), function(x, kernel(y)), domain


def _convolution(function: Function) -> dict[str, int] | None:
    """The numbers of a convolution of an image with a kernel alone; None for any other function."""
    if function.word != "conv2d" or len(function.samples) != 2:
        return None
    attrs = lookup("conv2d").complete(dict(function.attrs))
    return {name: value for name, value in attrs.items() if isinstance(value, int)}


def _is_plain(attrs: Mapping[str, int]) -> bool:
    """Whether a convolution's window moves by single steps over neighbours."""
    return all(attrs[name] == 1 for name in ("sh", "sw", "dh", "dw"))


NAMED: Mapping[str, Callable[[Deriving, Function], Made]] = {
    "the parts of a concat are what was concatenated": _parts_of_concat,
    "the concat of the parts is the whole": _concat_of_parts,
    "concat associates": _concat_associates,
    "transposed twice is as before": _transposed_twice,
    "a convolution with the identity kernel changes nothing": _kernel_that_changes_nothing,
    "a convolution with the mean kernel is average pooling": _kernel_that_takes_means,
    "a kernel with a border of zeros convolves as without, where padding makes up for it": _enlarged_kernel,
}

DERIVATIONS: tuple[Callable[[Deriving, Function], Iterator[Axiom]], ...] = (
    _parallel,
    _cuts,
    _sums,
    _linear,
    _pointwise,
    _transposed,
    _permuted,
    _products,
    _merged,
    _named,
)

OF_SOME_DIMS = (_parallel, _cuts, _sums, _linear)
"""What is derived of a function some of whose dims are numbered: it is about the others, or about each
element wherever it is."""
