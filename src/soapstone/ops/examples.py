"""Examples of operands: the shapes at which the tests take an operator through everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """An operand to be filled at random: a float (any, positive, or a probability), an integer below
    a limit, or a mask."""

    shape: tuple[int, ...]
    below: int | None = None
    mask: bool = False
    positive: bool = False
    probability: bool = False


Given = Tensor | float | int | bool | None


@dataclass(frozen=True)
class Example:
    """Operands and attributes that an operator must handle; keep the shapes small and even."""

    operands: tuple[Given, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def example(*operands: tuple[int, ...] | Given, **attrs: Any) -> Example:
    """An example; a bare tuple stands for a float tensor of that shape."""
    return Example(tuple(Tensor(o) if isinstance(o, tuple) else o for o in operands), MappingProxyType(attrs))


def ids(*shape: int, below: int) -> Tensor:
    """A tensor of integers in [0, below)."""
    return Tensor(shape, below=below)


def mask(*shape: int) -> Tensor:
    """A tensor of booleans."""
    return Tensor(shape, mask=True)


def positive(*shape: int) -> Tensor:
    """A tensor of floats above zero."""
    return Tensor(shape, positive=True)


def probabilities(*shape: int) -> Tensor:
    """A tensor of floats between zero and one."""
    return Tensor(shape, probability=True)
