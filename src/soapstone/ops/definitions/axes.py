"""Names and numbers of axes, for operators whose notation is written for one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from string import ascii_lowercase
from typing import Any

from soapstone.errors import OpError
from soapstone.ops.box import shape_of
from soapstone.ops.op import Attrs, Shard
from soapstone.ops.signature import Shape


def letters(rank: int) -> list[str]:
    """A name for each of an operand's axes: a, b, c, ..."""
    if rank > len(ascii_lowercase):
        raise OpError(f"a tensor of {rank} axes has more than can be named (at most {len(ascii_lowercase)})")
    return list(ascii_lowercase[:rank])


def notation_of(operands: Sequence[Sequence[str]], *outputs: Sequence[str]) -> str:
    """The notation with these axes. One operand without axes is `...`: no text would be no operand."""
    read = ", ".join(" ".join(axes) for axes in operands)
    return f"{read or '...' if operands else ''} -> {', '.join(' '.join(axes) for axes in outputs)}"


def shape_at(shapes: Sequence[Shape | None], operand: int) -> Shape:
    """The shape of an operand that must be there."""
    shape = shapes[operand]
    if shape is None:
        raise OpError(f"operand {operand} must not be left out")
    return shape


def int_attr(attrs: Attrs, name: str) -> int:
    """An attribute that must be an integer."""
    value = attrs[name]
    if not isinstance(value, int):
        raise OpError(f"attribute '{name}' must be an integer, not {value!r}")
    return value


def tuple_attr(attrs: Attrs, name: str) -> tuple[Any, ...]:
    """An attribute that must be a tuple."""
    value = attrs[name]
    if not isinstance(value, tuple):
        raise OpError(f"attribute '{name}' must be a tuple, not {value!r}")
    return value


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
        return float(prod(size for dim, size in sizes.items() if dim not in dims))

    return flops


def keeps(x: Any) -> Any:
    """The body of operators that move elements and leave them as they are."""
    return x
