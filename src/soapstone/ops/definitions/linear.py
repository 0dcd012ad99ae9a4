"""Linear layers and matrix products: sums of products over a shared dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from string import ascii_letters
from typing import TYPE_CHECKING, Any

from soapstone.ops import scalar
from soapstone.ops.definitions.axes import points_but
from soapstone.ops.examples import example, ids
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, Call, Op, Shard
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _product(*factors: Any) -> Any:
    return reduce(operator.mul, factors)


def _addmm(bias: Any, x: Any, w: Any, *, beta: float = 1, alpha: float = 1) -> Call | None:
    return Call((x, w, bias)) if beta == alpha == 1 and len(bias.shape) == 1 else None


def _spelled(equation: str, operands: Sequence[Any]) -> str:
    """The equation with letters for `...`, where every operand that has it has as many axes there."""
    parts = equation.partition("->")[0].split(",")
    ranks = {len(x.shape) - len(p) + 3 for p, x in zip(parts, operands, strict=True) if "..." in p}
    free = [letter for letter in ascii_letters if letter not in equation]
    return equation.replace("...", "".join(free[: ranks.pop()])) if len(ranks) == 1 else equation


def _einsum(equation: str, operands: Sequence[Any], *, path: Any = None) -> Call | None:
    """Plain einsums: no index twice in one operand, none of size one where others differ."""
    del path  # the order of contraction, not its meaning
    left, arrow, right = _spelled(equation.replace(" ", ""), operands).partition("->")
    parts = left.split(",")
    if not arrow or "." in left or any(len(set(part)) < len(part) for part in (*parts, right)):
        return None
    return Call(tuple(operands), {"equation": f"{left}->{right}"})


linear = register(
    Op(
        "linear",
        "... i, o i, [o] -> ... o",
        body=lambda x, w: x * w,
        finish=lambda total, bias: total + bias,
        torch=lambda x, w, bias=None: F.linear(x, w, bias),
        weights=("w", "bias"),
        aten={"linear.default": None},
        examples=(example((4, 6), (8, 6), (8,)), example((2, 4, 6), (4, 6), None)),
    )
)

matmul = register(
    Op(
        "matmul",
        "... m k, ... k n -> ... m n",
        body=lambda x, w: x * w,
        torch=lambda x, w: torch.matmul(x, w),
        aten={"matmul.default": None, "mm.default": None, "bmm.default": None},
        examples=(example((4, 6), (6, 4)), example((2, 4, 6), (2, 6, 4)), example((2, 3, 4, 2), (2, 6))),
    )
)

addmm = register(
    Op(
        "addmm",
        "m k, k n, [n] -> m n",
        body=lambda x, w: x * w,
        finish=lambda total, bias: total + bias,
        torch=lambda x, w, bias=None: torch.mm(x, w) if bias is None else torch.addmm(bias, x, w),
        weights=("w", "bias"),
        aten={"addmm.default": _addmm},
        examples=(example((4, 6), (6, 8), (8,)), example((4, 6), (6, 2), None)),
    )
)


def _einsum_notation(_: Sequence[Shape | None], attrs: Attrs) -> str:
    equation = str(attrs["equation"]).replace(" ", "")
    operands, output = equation.split("->")
    return ", ".join(" ".join(part) for part in operands.split(",")) + " -> " + " ".join(output)


einsum = register(
    Op(
        "einsum",
        _einsum_notation,
        body=_product,
        torch=lambda *xs, equation: torch.einsum(equation, *xs),
        attrs={"equation": ""},
        aten={"einsum.default": _einsum},
        examples=(
            example((2, 4, 6), (2, 8, 6), equation="bid,bjd->bij"),
            example((4, 2, 2), (2, 6), equation="asb,bc->sac"),
        ),
    )
)


def _expert_notation(_: Sequence[Shape | None], attrs: Attrs) -> str:
    return f"t i, t, {'e i o' if attrs['transposed'] else 'e o i'} -> t o"


def _by_expert(x: Tensor, expert: Tensor, w: Tensor, *, transposed: bool, shard: Shard) -> Tensor:
    """Each expert's tokens times its weights; zero for tokens whose expert another shard holds."""
    rows, made = [], []
    for place in range(w.shape[0]):
        mine = (expert == shard.start("e") + place).nonzero().flatten()
        rows.append(mine)
        made.append(x[mine] @ (w[place] if transposed else w[place].T))
    return x.new_zeros(x.shape[0], shard.length("o")).index_copy(0, torch.cat(rows), torch.cat(made))


# A token meets one expert, so a sum over all of them costs no more than over one; and the split of
# the experts over devices is the split of a sum.
expert_linear = register(
    Op(
        "expert_linear",
        _expert_notation,
        body=lambda x, expert, w, *, at: scalar.where(scalar.equal(expert, at["e"]), x * w, 0.0),
        torch=_by_expert,
        flops=lambda sizes: 2 * points_but("e")(sizes),
        attrs={"transposed": False},
        weights=("w",),
        examples=(
            example((6, 4), ids(6, below=4), (4, 2, 4)),
            example((4, 2), ids(4, below=2), (2, 2, 6), transposed=True),
        ),
    )
)
