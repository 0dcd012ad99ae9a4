"""ATen operators that are several of ours.

An expansion takes the builder and ATen's arguments (tensors as handles) and adds nodes; it returns
a handle, or a list of them where ATen returns several, or None to say: not this case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from soapstone.ops import Attr

if TYPE_CHECKING:
    from soapstone.frontends.capture import Handle


class Builder(Protocol):
    """What an expansion builds with."""

    def emit(
        self,
        op_name: str,
        operands: Sequence[Any],
        attrs: Mapping[str, Attr] | None = None,
        dtypes: Sequence[str] | None = None,
    ) -> list[Handle]:
        """Add a node; its outputs."""

    def weight_as(self, handle: Handle, shape: tuple[int, ...]) -> Handle:
        """A weight seen in another shape."""


Expansion = Callable[..., Any]
EXPANSIONS: dict[str, Expansion] = {}


def expands(*targets: str) -> Callable[[Expansion], Expansion]:
    """Register a function as the expansion of ATen overloads."""

    def registered(function: Expansion) -> Expansion:
        EXPANSIONS.update(dict.fromkeys(targets, function))
        return function

    return registered


# -- pieces of a tensor --------------------------------------------------------------------------


def _slices(build: Builder, x: Handle, sizes: Sequence[int], dim: int) -> list[Handle]:
    axis, start, pieces = dim % len(x.shape), 0, []
    for size in sizes:
        attrs: dict[str, Attr] = {"dim": axis, "start": start, "end": start + size, "step": 1}
        pieces.append(build.emit("slice", [x], attrs, [x.dtype])[0])
        start += size
    return pieces


@expands("split.Tensor")
def split(build: Builder, x: Handle, size: int, dim: int = 0) -> list[Handle]:
    """Equal slices, the last one shorter."""
    total = x.shape[dim]
    return _slices(build, x, [min(size, total - at) for at in range(0, total, size)], dim)


@expands("split_with_sizes.default", "split_with_sizes_copy.default", "split.sizes")
def split_with_sizes(build: Builder, x: Handle, sizes: Sequence[int], dim: int = 0) -> list[Handle]:
    """Slices of the given sizes."""
    return _slices(build, x, sizes, dim)


@expands("chunk.default")
def chunk(build: Builder, x: Handle, chunks: int, dim: int = 0) -> list[Handle]:
    """As many equal slices as asked for, or fewer."""
    return split(build, x, -(-x.shape[dim] // chunks), dim)


@expands("unbind.int")
def unbind(build: Builder, x: Handle, dim: int = 0) -> list[Handle]:
    """Every index of one axis, without the axis."""
    axis = dim % len(x.shape)
    return [build.emit("select", [x], {"dim": axis, "index": i}, [x.dtype])[0] for i in range(x.shape[axis])]


@expands("stack.default")
def stack(build: Builder, xs: Sequence[Handle], dim: int = 0) -> Handle:
    """Each tensor with one more axis, joined along it."""
    axis = dim % (len(xs[0].shape) + 1)
    shape = (*xs[0].shape[:axis], 1, *xs[0].shape[axis:])
    parts = [build.emit("reshape", [x], {"shape": shape}, [x.dtype])[0] for x in xs]
    return build.emit("concat", parts, {"dim": axis}, [xs[0].dtype])[0]


@expands("glu.default")
def glu(build: Builder, x: Handle, dim: int = -1) -> Handle:
    """One half, gated by the other."""
    value, gate = chunk(build, x, 2, dim)
    return build.emit("mul", [value, build.emit("sigmoid", [gate])[0]])[0]


@expands("broadcast_tensors.default")
def broadcast_tensors(build: Builder, xs: Sequence[Handle]) -> list[Handle] | None:
    """Every tensor expanded to the shape of all of them."""
    rank = max(len(x.shape) for x in xs)
    padded = [(1,) * (rank - len(x.shape)) + x.shape for x in xs]
    shape = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    return [x if x.shape == shape else build.emit("expand", [x], {"size": shape}, [x.dtype])[0] for x in xs]


# -- products ------------------------------------------------------------------------------------


@expands("baddbmm.default")
def baddbmm(build: Builder, x: Handle, a: Handle, b: Handle, *, beta: float = 1, alpha: float = 1) -> Handle:
    """A batched product, scaled, added to a scaled tensor."""
    made = build.emit("matmul", [a, b])[0]
    if alpha != 1:
        made = build.emit("mul", [made, alpha])[0]
    if beta == 0:
        return made
    return build.emit("add", [made, x if beta == 1 else build.emit("mul", [x, beta])[0]])[0]


@expands("_weight_norm.default")
def weight_norm(build: Builder, v: Handle, g: Handle, dim: int = 0) -> Handle:
    """A direction scaled to a length, both weights: one length for each index of an axis."""
    axes = tuple(axis for axis in range(len(v.shape)) if axis != dim % len(v.shape))
    (squares,) = build.emit("square", [v])
    (total,) = build.emit("sum", [squares], {"dims": axes, "keepdim": True})
    (scale,) = build.emit("div", [g, build.emit("sqrt", [total])[0]])
    return build.emit("mul", [v, scale])[0]


@expands("outer.default", "ger.default")
def outer(build: Builder, a: Handle, b: Handle) -> Handle:
    """All products of two vectors' elements."""
    column = build.emit("reshape", [a], {"shape": (a.shape[0], 1)})[0]
    return build.emit("mul", [column, b])[0]


@expands("matmul.default")
def matmul(build: Builder, a: Handle, b: Handle) -> Handle | None:
    """Products with a vector on either side; all others are the operator itself."""
    if len(a.shape) > 1 and len(b.shape) > 1:
        return None
    left = a if len(a.shape) > 1 else build.emit("reshape", [a], {"shape": (1, *a.shape)})[0]
    right = b if len(b.shape) > 1 else build.emit("reshape", [b], {"shape": (*b.shape, 1)})[0]
    made = build.emit("matmul", [left, right])[0]
    shape = made.shape
    if len(b.shape) == 1:
        shape = shape[:-1]
    if len(a.shape) == 1:
        shape = (*made.shape[:-2], *shape[len(made.shape) - 1 :])
    return build.emit("reshape", [made], {"shape": shape})[0]


@expands("soapstone.expert_linear.default")
def expert_linear(build: Builder, x: Handle, expert: Handle, w: Handle, transposed: bool) -> Handle:
    """A token's product with the weights of its expert, as `frontends.huggingface.experts` records it."""
    return build.emit("expert_linear", [x, expert, w], {"transposed": transposed}, [x.dtype])[0]


@expands("_grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(
    build: Builder,
    x: Handle,
    w: Handle,
    offs: Handle | None = None,
    bias: Handle | None = None,
    out_dtype: object = None,
) -> Handle | None:
    """Rows in groups, each with a matrix of its own: a row's group is the number of groups that end
    before it."""
    if offs is None or bias is not None or out_dtype is not None or len(x.shape) != 2 or len(w.shape) != 3:
        return None
    (rows,) = build.emit("arange", [], {"count": x.shape[0]}, ["i64"])
    (column,) = build.emit("reshape", [rows], {"shape": (x.shape[0], 1)})
    (past,) = build.emit("ge", [column, offs], None, ["bool"])
    (group,) = build.emit("sum", [past], {"dims": (1,)}, ["i64"])
    return build.emit("expert_linear", [x, group, w], {"transposed": True}, [x.dtype])[0]


# -- places that a mask names ---------------------------------------------------------------------------


@expands("masked_scatter.default")
def masked_scatter(build: Builder, x: Handle, mask: Handle, source: Handle) -> Handle:
    """The source's elements, in order, where the mask is true.

    The n-th true place takes the n-th element: which one follows from a running count. A mask that
    is the same along the last axes counts rows instead.
    """
    same = next((i for i, size in enumerate(reversed(mask.shape)) if size != 1), len(mask.shape))
    if prod(source.shape) % prod(x.shape[len(x.shape) - same :]):
        same = 0
    row = x.shape[len(x.shape) - same :]
    places = x.shape[: len(x.shape) - same]
    marked = build.emit("reshape", [mask], {"shape": mask.shape[: len(mask.shape) - same]}, ["bool"])[0]
    if marked.shape != places:
        marked = build.emit("expand", [marked], {"size": places}, ["bool"])[0]
    return _scattered(build, x, marked, source, row)


def _scattered(build: Builder, x: Handle, mask: Handle, source: Handle, row: tuple[int, ...]) -> Handle:
    """Rows of the source, in order, at the places that the mask marks."""
    count = prod(mask.shape)
    (flat,) = build.emit("reshape", [mask], {"shape": (count,)}, ["bool"])
    (seen,) = build.emit("cumsum", [flat], {"dim": 0}, ["i64"])
    (index,) = build.emit("clamp", [build.emit("sub", [seen, 1], None, ["i64"])[0], 0, None], None, ["i64"])
    (rows,) = build.emit("reshape", [source], {"shape": (prod(source.shape) // prod(row), *row)})
    (taken,) = build.emit("index_select", [rows, index], {"dim": 0})
    (placed,) = build.emit("reshape", [taken], {"shape": x.shape})
    (marked,) = build.emit("reshape", [mask], {"shape": (*mask.shape, *[1] * len(row))}, ["bool"])
    return build.emit("where", [marked, placed, x], None, [x.dtype])[0]


@expands("index_put.default")
def masked_put(
    build: Builder, x: Handle, indices: Sequence[Handle | None], values: Handle, accumulate: bool = False
) -> Handle | None:
    """`x[mask] = values`: one value (or row) for all places, or one for each in order."""
    if accumulate or len(indices) != 1 or indices[0] is None or indices[0].dtype != "bool":
        return None
    mask, row = indices[0], x.shape[len(indices[0].shape) :]
    if len(values.shape) == len(row) + 1 and values.shape[1:] == row and values.shape[0] != 1:
        return _scattered(build, x, mask, values, row)
    (marked,) = build.emit("reshape", [mask], {"shape": (*mask.shape, *[1] * len(row))}, ["bool"])
    return build.emit("where", [marked, values, x], None, [x.dtype])[0]


# -- random numbers -------------------------------------------------------------------------------------


@expands("uniform.default")
def uniform(build: Builder, x: Handle, low: float = 0.0, high: float = 1.0, **_: Any) -> Handle:
    """Numbers drawn evenly between two, in the form of a tensor whose own are not read."""
    (drawn,) = build.emit("rand", [], {"size": x.shape, "dtype": x.dtype}, [x.dtype])
    (scaled,) = build.emit("mul", [drawn, high - low])
    return build.emit("add", [scaled, low])[0]


# -- recurrent layers ------------------------------------------------------------------------------


def _gates(build: Builder, weight: Handle | None, gates: int) -> Handle | None:
    """A cell's weight with its gates as an axis of their own, so that hidden units split as boxes."""
    if weight is None:
        return None
    return build.weight_as(weight, (gates, weight.shape[0] // gates, *weight.shape[1:]))


@expands("lstm_cell.default")
def lstm_cell(
    build: Builder,
    x: Handle,
    hx: Sequence[Handle],
    w_ih: Handle,
    w_hh: Handle,
    b_ih: Handle | None = None,
    b_hh: Handle | None = None,
) -> list[Handle]:
    """One step of an LSTM."""
    weights = [_gates(build, w, 4) for w in (w_ih, w_hh, b_ih, b_hh)]
    return build.emit("lstm_cell", [x, hx[0], hx[1], *weights])


@expands("gru_cell.default")
def gru_cell(
    build: Builder,
    x: Handle,
    hx: Handle,
    w_ih: Handle,
    w_hh: Handle,
    b_ih: Handle | None = None,
    b_hh: Handle | None = None,
) -> Handle:
    """One step of a GRU; the previous state is read twice, whole and in part."""
    weights = [_gates(build, w, 3) for w in (w_ih, w_hh, b_ih, b_hh)]
    return build.emit("gru_cell", [x, hx, hx, *weights])[0]


def _layers(
    build: Builder,
    cell: str,
    x: Handle,
    states: Sequence[Handle],
    params: Sequence[Handle],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Handle]:
    """Layers and directions as nodes of their own; the output sequence, then the last states."""
    directions, each = (2 if bidirectional else 1), (4 if has_biases else 2)
    sequence = x
    last: list[list[Handle]] = [[] for _ in states]
    for layer in range(num_layers):
        made = []
        for direction in range(directions):
            index = layer * directions + direction
            given = [*params[index * each : (index + 1) * each]] + [None] * (4 - each)
            start = [build.emit("select", [state], {"dim": 0, "index": index})[0] for state in states]
            attrs: dict[str, Attr] = {"batch_first": batch_first, "reverse": direction == 1}
            result = build.emit(f"{cell}_layer", [sequence, *start, *given], attrs)
            made.append(result[0])
            for kept, state in zip(last, result[1:], strict=True):
                kept.append(state)
        sequence = made[0]
        if directions == 2:
            sequence = build.emit("concat", made, {"dim": len(made[0].shape) - 1})[0]
        if dropout and train and layer + 1 < num_layers:
            sequence = build.emit("dropout", [sequence], {"p": dropout})[0]
    return [sequence, *(stack(build, states) for states in last)]


@expands("lstm.input")
def lstm(
    build: Builder,
    x: Handle,
    hx: Sequence[Handle],
    params: Sequence[Handle],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Handle] | None:
    """nn.LSTM, a node for each layer and direction."""
    if len(x.shape) != 3 or len(params) != num_layers * (2 if bidirectional else 1) * (
        4 if has_biases else 2
    ):
        return None
    options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return _layers(build, "lstm", x, hx, params, *options)


@expands("gru.input")
def gru(
    build: Builder,
    x: Handle,
    hx: Handle,
    params: Sequence[Handle],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Handle] | None:
    """nn.GRU, a node for each layer and direction."""
    if len(x.shape) != 3:
        return None
    options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return _layers(build, "gru", x, [hx], params, *options)


# -- embedding bags ----------------------------------------------------------------------------------

_BAG_MODES = ("sum", "mean", "max")


@expands("embedding_bag.padding_idx", "embedding_bag.default", "_embedding_bag.default")
def embedding_bag(
    build: Builder,
    weight: Handle,
    indices: Handle,
    offsets: Handle,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Handle | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> dict[int, Handle] | None:
    """Bags of equal size (a matrix of indices) as such; others by their offsets."""
    del sparse  # how the gradient is stored, not what it is
    if (
        scale_grad_by_freq
        or mode == 2
        or (padding_idx is not None and padding_idx >= 0)
        or include_last_offset
    ):
        return None
    attrs: dict[str, Attr] = {"mode": _BAG_MODES[mode]}
    length = _equal_bags(indices, offsets)
    if length is None:
        made = build.emit("embedding_bag_offsets", [indices, offsets, weight, per_sample_weights], attrs)
        return {0: made[0]}
    shape = (offsets.shape[0], length)
    bags = build.emit("reshape", [indices], {"shape": shape}, [indices.dtype])[0]
    scales = per_sample_weights and build.emit("reshape", [per_sample_weights], {"shape": shape})[0]
    return {0: build.emit("embedding_bag", [bags, weight, scales], attrs)[0]}


def _equal_bags(indices: Handle, offsets: Handle) -> int | None:
    """The size of all bags, when the offsets are known and evenly spaced."""
    count = offsets.shape[0]
    if offsets.data is None or not count or len(indices.shape) != 1 or indices.shape[0] % count:
        return None
    length = indices.shape[0] // count
    return length if offsets.data.tolist() == [i * length for i in range(count)] else None


# -- losses ------------------------------------------------------------------------------------------


_MEAN = 1
"""ATen's number for the reduction to a mean."""


def _mean_over_labels(
    build: Builder, name: str, operands: Sequence[Any], attrs: dict[str, Attr], ignore_index: int
) -> Handle:
    """The mean as a sum over a count, each of which may be split over samples."""
    x, target, weight = operands
    total = build.emit(name, [x, target, weight], {**attrs, "ignore_index": ignore_index}, [x.dtype])[0]
    counted = "i64" if weight is None else weight.dtype
    count = build.emit("label_count", [target, weight], {"ignore_index": ignore_index}, [counted])[0]
    return build.emit("div", [total, count], None, [x.dtype])[0]


def _has_labels(x: Handle, target: Handle, reduction: int) -> bool:
    return len(x.shape) > 1 and target.shape == (x.shape[0], *x.shape[2:]) and reduction == _MEAN


@expands("cross_entropy_loss.default")
def cross_entropy(
    build: Builder,
    x: Handle,
    target: Handle,
    weight: Handle | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Handle | None:
    """A mean over labels; sums, separate losses and soft targets are operators of their own."""
    if not _has_labels(x, target, reduction):
        return None
    attrs: dict[str, Attr] = {"label_smoothing": label_smoothing}
    return _mean_over_labels(build, "cross_entropy_sum", (x, target, weight), attrs, ignore_index)


@expands("nll_loss.default", "nll_loss2d.default", "nll_loss_nd.default")
def nll_loss(
    build: Builder,
    x: Handle,
    target: Handle,
    weight: Handle | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Handle | None:
    """A mean over labels."""
    if not _has_labels(x, target, reduction):
        return None
    return _mean_over_labels(build, "nll_sum", (x, target, weight), {}, ignore_index)


@expands("soapstone.ctc_loss.default")
def ctc_loss(
    build: Builder,
    x: Handle,
    target: Handle,
    frames: Handle,
    lengths: Handle,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Handle:
    """The loss of each sequence, as `frontends.huggingface.forward` records it."""
    attrs: dict[str, Attr] = {"blank": blank, "zero_infinity": zero_infinity}
    return build.emit("ctc_each", [x, target, frames, lengths], attrs, [x.dtype])[0]


@expands("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss_forward(build: Builder, *operands: Any) -> dict[int, Handle] | None:
    """The same with the count as a second result, which nobody reads but a backward pass."""
    made = nll_loss(build, *operands)
    return None if made is None else {0: made}
