"""Names and numbers of axes, for operators whose notation is written for one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from soapstone.errors import OpError
from soapstone.ops.box import shape_of
from soapstone.ops.op import Shard
from soapstone.ops.signature import Shape


def letters(rank: int) -> list[str]:
    """A name for each of an operand's axes: a, b, c, ..."""
    if rank > len(ascii_lowercase):
        raise OpError(f"a tensor of {rank} axes has more than can be named (at most {len(ascii_lowercase)})")
    return list(ascii_lowercase[:rank])


def shape_at(shapes: Sequence[Shape | None], operand: int) -> Shape:
    """The shape of an operand that must be there."""
    shape = shapes[operand]
    if shape is None:
        raise OpError(f"operand {operand} must not be left out")
    return shape


def axis_at(dim: int, rank: int) -> int:
    """The number, from 0, of an axis that may be counted from the end."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise OpError(f"there is no axis {dim} among {rank}")
    return dim % max(rank, 1)


def axes_at(dims: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """The numbers, from 0 and in order, of some axes; all of them where ATen is given none."""
    given = [dims] if isinstance(dims, int) else list(dims or ())
    return tuple(sorted({axis_at(dim, rank) for dim in given})) if given else tuple(range(rank))


def written_shape(shard: Shard, output: int = 0) -> Shape:
    """The shape of what a shard writes."""
    return shape_of(shard.signature.write(output, shard.box))


def points_but(*dims: str) -> Callable[[Mapping[str, int]], float]:
    """Flops of an operator that takes one for each point, were it not for the dims named here."""

    def flops(sizes: Mapping[str, int]) -> float:
        total = 1.0
        for dim, size in sizes.items():
            total *= 1 if dim in dims else size
        return total

    return flops


def keeps(x: Any) -> Any:
    """The body of operators that move elements and leave them as they are."""
    return x
