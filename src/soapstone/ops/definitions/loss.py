"""Losses.

A loss is a sum over samples, so shards of it add up; a mean divides by the number of points of
the whole batch, never of a shard. Where that number depends on the data (labels may be ignored
or weighted) the mean is three nodes: `cross_entropy_sum` (or `nll_sum`), `label_count`, and their
quotient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soapstone.ops import scalar
from soapstone.ops.definitions.axes import shape_at
from soapstone.ops.definitions.convolution import space
from soapstone.ops.examples import Example, example, ids, positive, probabilities
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, Call, Capture, NotationOf, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
"""ATen's reductions, by their numbers."""


def _reduced(
    loss: Callable[..., Tensor], reduction: str, count: float, *operands: Any, **options: Any
) -> Tensor:
    """A shard's part of a loss; a mean is over the `count` points of all shards."""
    how = "none" if reduction == "none" else "sum"
    value = loss(*operands, reduction=how, **options)
    return value / count if reduction == "mean" else value


def _fixed(weight: Tensor | None) -> Tensor | None:
    """A weighting of samples or classes; torch does not differentiate with respect to it."""
    return None if weight is None else weight.detach()


def _pointwise_notation(optional: int) -> NotationOf:
    def notation(_: Sequence[Shape | None], attrs: Attrs) -> str:
        return "..., ..." + ", [...]" * optional + (" -> ..." if attrs["reduction"] == "none" else " -> ")

    return notation


def _pointwise(
    name: str,
    body: Callable[..., Any],
    torch: Callable[..., Tensor],
    *examples: Example,
    attrs: Attrs | None = None,
    optional: int = 0,
    capture: Capture,
) -> Op:
    """A loss with a meaning for each pair of elements, summed, averaged or left as it is."""
    return register(
        Op(
            name,
            _pointwise_notation(optional),
            body=body,
            finish=lambda total, *, count, reduction: total / count if reduction == "mean" else total,
            torch=torch,
            attrs={"reduction": "mean", **(attrs or {})},
            aten={f"{name}.default": capture},
            examples=examples,
        )
    )


mse_loss = _pointwise(
    "mse_loss",
    lambda x, y: (x - y) * (x - y),
    lambda x, y, *, reduction, count: _reduced(F.mse_loss, reduction, count, x, y),
    example((4, 6), (4, 6)),
    example((2, 4), (2, 4), reduction="sum"),
    example((2, 4), (2, 4), reduction="none"),
    capture=lambda x, y, reduction=1: Call((x, y), {"reduction": REDUCTIONS[reduction]}),
)

l1_loss = _pointwise(
    "l1_loss",
    lambda x, y: scalar.apply("abs", x - y),
    lambda x, y, *, reduction, count: _reduced(F.l1_loss, reduction, count, x, y),
    example((4, 6), (4, 6)),
    example((2, 4), (2, 4), reduction="none"),
    capture=lambda x, y, reduction=1: Call((x, y), {"reduction": REDUCTIONS[reduction]}),
)


def _smooth_l1(x: Any, y: Any, *, beta: float) -> Any:
    distance = scalar.apply("abs", x - y)
    if beta == 0:
        return distance
    return scalar.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta)


smooth_l1_loss = _pointwise(
    "smooth_l1_loss",
    _smooth_l1,
    lambda x, y, *, reduction, count, beta: _reduced(F.smooth_l1_loss, reduction, count, x, y, beta=beta),
    example((4, 6), (4, 6)),
    example((2, 4), (2, 4), reduction="sum", beta=0.5),
    attrs={"beta": 1.0},
    capture=lambda x, y, reduction=1, beta=1.0: Call(
        (x, y), {"reduction": REDUCTIONS[reduction], "beta": beta}
    ),
)


def _huber(x: Any, y: Any, *, delta: float) -> Any:
    distance = scalar.apply("abs", x - y)
    return scalar.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))


huber_loss = _pointwise(
    "huber_loss",
    _huber,
    lambda x, y, *, reduction, count, delta: _reduced(F.huber_loss, reduction, count, x, y, delta=delta),
    example((4, 6), (4, 6)),
    example((2, 4), (2, 4), reduction="none", delta=0.5),
    attrs={"delta": 1.0},
    capture=lambda x, y, reduction=1, delta=1.0: Call(
        (x, y), {"reduction": REDUCTIONS[reduction], "delta": delta}
    ),
)


def _binary_with_logits(x: Any, y: Any, weight: Any, pos_weight: Any) -> Any:
    log_sigmoid = -scalar.log(1.0 + scalar.exp(-x))
    positives = 1.0 if pos_weight is None else 1.0 + (pos_weight - 1.0) * y
    loss = (1.0 - y) * x - positives * log_sigmoid
    return loss if weight is None else loss * weight


binary_cross_entropy_with_logits = _pointwise(
    "binary_cross_entropy_with_logits",
    _binary_with_logits,
    lambda x, y, weight=None, pos_weight=None, *, reduction, count: _reduced(
        F.binary_cross_entropy_with_logits,
        reduction,
        count,
        x,
        y,
        weight=_fixed(weight),
        pos_weight=_fixed(pos_weight),
    ),
    example((4, 6), probabilities(4, 6), None, None),
    example((2, 4), probabilities(2, 4), positive(4), positive(4), reduction="sum"),
    example((2, 4), probabilities(2, 4), positive(2, 1), None, reduction="none"),
    optional=2,
    capture=lambda x, y, weight=None, pos_weight=None, reduction=1: Call(
        (x, y, weight, pos_weight), {"reduction": REDUCTIONS[reduction]}
    ),
)


def _binary(x: Any, y: Any, weight: Any) -> Any:
    # torch bounds the logarithm below, so that a probability of zero has a finite loss.
    log_x, log_rest = (scalar.maximum(scalar.log(p), -100.0) for p in (x, 1.0 - x))
    loss = -(y * log_x + (1.0 - y) * log_rest)
    return loss if weight is None else loss * weight


binary_cross_entropy = _pointwise(
    "binary_cross_entropy",
    _binary,
    lambda x, y, weight=None, *, reduction, count: _reduced(
        F.binary_cross_entropy, reduction, count, x, y, weight=_fixed(weight)
    ),
    example(probabilities(4, 6), probabilities(4, 6), None),
    example(probabilities(2, 4), probabilities(2, 4), positive(4), reduction="none"),
    optional=1,
    capture=lambda x, y, weight=None, reduction=1: Call((x, y, weight), {"reduction": REDUCTIONS[reduction]}),
)


def _divergence(x: Any, y: Any, *, log_target: bool) -> Any:
    if log_target:
        return scalar.exp(y) * (y - x)
    return scalar.where(y > 0.0, y * scalar.log(y), 0.0) - y * x


kl_div = _pointwise(
    "kl_div",
    _divergence,
    lambda x, y, *, reduction, count, log_target: _reduced(
        F.kl_div, reduction, count, x, y, log_target=log_target
    ),
    example((4, 6), probabilities(4, 6)),
    example((2, 4), (2, 4), reduction="sum", log_target=True),
    example((2, 4), probabilities(2, 4), reduction="none"),
    attrs={"log_target": False},
    capture=lambda x, y, reduction=1, *, log_target=False: Call(
        (x, y), {"reduction": REDUCTIONS[reduction], "log_target": log_target}
    ),
)


def _poisson(x: Any, y: Any, *, log_input: bool, full: bool, eps: float) -> Any:
    loss = scalar.exp(x) - y * x if log_input else x - y * scalar.log(x + eps)
    if not full:
        return loss
    stirling = y * scalar.log(y) - y + 0.5 * scalar.log(2 * math.pi * y)
    return loss + scalar.where(y > 1.0, stirling, 0.0)


poisson_nll_loss = _pointwise(
    "poisson_nll_loss",
    _poisson,
    lambda x, y, *, reduction, count, log_input, full, eps: _reduced(
        F.poisson_nll_loss, reduction, count, x, y, log_input=log_input, full=full, eps=eps
    ),
    example((4, 6), positive(4, 6)),
    example(positive(2, 4), positive(2, 4), log_input=False, full=True, reduction="none"),
    attrs={"log_input": True, "full": False, "eps": 1e-8},
    capture=lambda x, y, log_input, full, eps, reduction: Call(
        (x, y), {"reduction": REDUCTIONS[reduction], "log_input": log_input, "full": full, "eps": eps}
    ),
)


def _hinge(x: Any, y: Any, *, margin: float) -> Any:
    near = scalar.where(scalar.equal(y, -1.0), 0.0, x)
    return near + scalar.where(scalar.equal(y, 1.0), 0.0, scalar.maximum(margin - x, 0.0))


hinge_embedding_loss = _pointwise(
    "hinge_embedding_loss",
    _hinge,
    lambda x, y, *, reduction, count, margin: _reduced(
        F.hinge_embedding_loss, reduction, count, x, y, margin=margin
    ),
    example((4, 6), (4, 6)),
    attrs={"margin": 1.0},
    capture=lambda x, y, margin=1.0, reduction=1: Call(
        (x, y), {"reduction": REDUCTIONS[reduction], "margin": margin}
    ),
)

soft_margin_loss = _pointwise(
    "soft_margin_loss",
    lambda x, y: scalar.log(1.0 + scalar.exp(-y * x)),
    lambda x, y, *, reduction, count: _reduced(F.soft_margin_loss, reduction, count, x, y.detach()),
    example((4, 6), (4, 6)),
    capture=lambda x, y, reduction=1: Call((x, y), {"reduction": REDUCTIONS[reduction]}),
)


def _class_notation(text: str) -> NotationOf:
    """A notation for logits with a class in axis 1; `.` stands for the axes that follow it."""

    def notation(shapes: Sequence[Shape | None], _: Attrs) -> str:
        return text.replace(".", " ".join(space(shape_at(shapes, 0))))

    return notation


def _has_labels(x: Any, target: Any) -> bool:
    """Whether the targets are class numbers, one for each sample."""
    return len(x.shape) > 1 and target.shape == (x.shape[0], *x.shape[2:]) and target.dtype[0] in "iu"


def _cross_entropy_call(wanted: str) -> Capture:
    def capture(
        x: Any,
        target: Any,
        weight: Any = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Call | None:
        if not _has_labels(x, target) or REDUCTIONS[reduction] != wanted:
            return None
        return Call((x, target, weight), {"ignore_index": ignore_index, "label_smoothing": label_smoothing})

    return capture


def _cross_entropy(reduction: str) -> Callable[..., Tensor]:
    def loss(
        x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        return F.cross_entropy(
            x,
            target,
            _fixed(weight),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    return loss


# A softmax, and a product with the target.
_CROSS_ENTROPY_FLOPS = 6

cross_entropy_sum = register(
    Op(
        "cross_entropy_sum",
        _class_notation("b c! ., b ., [c!] -> "),
        torch=_cross_entropy("sum"),
        keeps=("target", "weight"),
        sums=True,
        attrs={"ignore_index": -100, "label_smoothing": 0.0},
        flops=_CROSS_ENTROPY_FLOPS,
        aten={"cross_entropy_loss.default": _cross_entropy_call("sum")},
        examples=(
            example((4, 6), ids(4, below=6), None),
            example((4, 6), ids(4, below=6), positive(6), ignore_index=2, label_smoothing=0.1),
            example((2, 3, 2, 4), ids(2, 2, 4, below=3), None, ignore_index=0),
        ),
    )
)

cross_entropy_each = register(
    Op(
        "cross_entropy_each",
        _class_notation("b c! ., b ., [c!] -> b ."),
        torch=_cross_entropy("none"),
        keeps=("target", "weight"),
        attrs={"ignore_index": -100, "label_smoothing": 0.0},
        flops=_CROSS_ENTROPY_FLOPS,
        aten={"cross_entropy_loss.default": _cross_entropy_call("none")},
        examples=(
            example((4, 6), ids(4, below=6), positive(6), label_smoothing=0.1),
            example((2, 3, 4), ids(2, 4, below=3), None, ignore_index=1),
        ),
    )
)


def _soft_notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    dims = " ".join(space(shape_at(shapes, 0)))
    return f"b c! {dims}, b c! {dims}, [c!] -> " + (f"b {dims}" if attrs["reduction"] == "none" else "")


def _soft_call(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    _ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Call | None:
    if target.shape != x.shape or len(x.shape) < 2:
        return None
    return Call((x, target, weight), {"reduction": REDUCTIONS[reduction], "label_smoothing": label_smoothing})


def _soft_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    label_smoothing: float,
    count: int,
    shard: Shard,
) -> Tensor:
    samples = count // shard.size("c")
    return _reduced(
        F.cross_entropy, reduction, samples, x, target, weight=_fixed(weight), label_smoothing=label_smoothing
    )


soft_cross_entropy = register(
    Op(
        "soft_cross_entropy",
        _soft_notation,
        torch=_soft_cross_entropy,
        sums=True,
        attrs={"reduction": "mean", "label_smoothing": 0.0},
        flops=_CROSS_ENTROPY_FLOPS,
        aten={"cross_entropy_loss.default": _soft_call},
        examples=(
            example((4, 6), probabilities(4, 6), None),
            example((2, 3, 4), probabilities(2, 3, 4), positive(3), reduction="sum", label_smoothing=0.1),
            example((4, 6), probabilities(4, 6), None, reduction="none"),
        ),
    )
)


def _label_body(target: Any, weight: Any, *, at: Mapping[str, int], ignore_index: int) -> Any:
    if weight is None:
        return scalar.where(scalar.equal(target, ignore_index), 0.0, 1.0)
    if at["c"] == ignore_index:
        return 0.0
    return scalar.where(scalar.equal(target, at["c"]), weight, 0.0)


def _labels(target: Tensor, weight: Tensor | None = None, *, ignore_index: int) -> Tensor:
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight[torch.where(counted, target, 0)] * counted).sum()


# A whole number, unless classes are weighted: any float divided by it keeps its type.
label_count = register(
    Op(
        "label_count",
        "..., [c!] -> ",
        body=_label_body,
        torch=_labels,
        attrs={"ignore_index": -100},
        flops=1,
        needs_grad=False,
        examples=(
            example(ids(4, 6, below=5), None, ignore_index=3),
            example(ids(8, below=4), positive(4), ignore_index=2),
            example(ids(8, below=4), positive(4)),
        ),
    )
)


def _likelihood_body(x: Any, target: Any, weight: Any, *, at: Mapping[str, int], ignore_index: int) -> Any:
    if at["c"] == ignore_index:
        return 0.0
    return scalar.where(scalar.equal(target, at["c"]), -x if weight is None else -x * weight, 0.0)


def _likelihood(reduction: str) -> Callable[..., Tensor]:
    def loss(
        x: Tensor, target: Tensor, weight: Tensor | None = None, *, shard: Shard, ignore_index: int
    ) -> Tensor:
        if shard.length("c") < shard.size("c"):
            here = (target >= shard.start("c")) & (target < shard.box["c"].hi) & (target != ignore_index)
            target, ignore_index = torch.where(here, target - shard.start("c"), -100), -100
        return F.nll_loss(x, target, _fixed(weight), ignore_index=ignore_index, reduction=reduction)

    return loss


def _likelihood_captures(wanted: str) -> dict[str, Capture]:
    def capture(
        x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100
    ) -> Call | None:
        if not _has_labels(x, target) or REDUCTIONS[reduction] != wanted:
            return None
        return Call((x, target, weight), {"ignore_index": ignore_index}, outputs=(0,))

    names = ("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward")
    return {f"{name}.default": capture for name in names}


def _negative_log_likelihood(name: str, reduction: str, notation: str, *examples: Example) -> Op:
    return register(
        Op(
            name,
            _class_notation(notation),
            body=_likelihood_body,
            torch=_likelihood(reduction),
            attrs={"ignore_index": -100},
            flops=0,
            gathers=("c",),
            aten=_likelihood_captures(reduction),
            examples=examples,
        )
    )


nll_sum = _negative_log_likelihood(
    "nll_sum",
    "sum",
    "b c ., b ., [c] -> ",
    example((4, 6), ids(4, below=6), None),
    example((4, 6), ids(4, below=6), positive(6), ignore_index=2),
    example((2, 4, 2, 2), ids(2, 2, 2, below=4), None),
)

nll_each = _negative_log_likelihood(
    "nll_each",
    "none",
    "b c ., b ., [c] -> b .",
    example((4, 6), ids(4, below=6), positive(6), ignore_index=2),
    example((2, 4, 4), ids(2, 4, below=4), None),
)


def _ctc(
    log_probabilities: Tensor,
    target: Tensor,
    frames: Tensor,
    length: Tensor,
    *,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return F.ctc_loss(log_probabilities, target, frames, length, blank, "none", zero_infinity)


# Each frame takes three additions and as many exponentials for every label and the blanks between.
_CTC_FLOPS = 12

ctc_each = register(
    Op(
        "ctc_each",
        "t! b c!, b u!, b, b -> b",
        torch=_ctc,
        attrs={"blank": 0, "zero_infinity": False},
        flops=lambda sizes: _CTC_FLOPS * float(sizes["b"] * sizes["t"] * sizes["u"]),
        examples=(
            example((5, 4, 6), ids(4, 3, below=6), ids(4, below=6), ids(4, below=4), zero_infinity=True),
        ),
    )
)
