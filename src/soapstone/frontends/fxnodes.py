"""What a node of an exported program says about itself."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from soapstone.ops import Attr, Call, Op

# A constant larger than this stays a computation: folding a causal mask expanded over a large
# batch would take more memory than computing it.
_LARGEST_FOLD = 1 << 22


def target_of(node: FxNode) -> str:
    """The ATen overload that a node calls, such as `relu.default`."""
    return str(node.target).removeprefix("aten.")


def module_path(node: FxNode) -> str:
    """The name of the module that a node came from; nothing for the whole model."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def scope_of(node: FxNode, prefix: str) -> str:
    """The module that a node came from, without the wrapper's prefix."""
    path = module_path(node)
    return (path + ".").removeprefix(prefix).rstrip(".") if path else ""


def user_targets(node: FxNode) -> set[str]:
    """What the readers of a node call."""
    return {str(user.target) for user in node.users}


def has_effect(node: FxNode) -> bool:
    """Whether a call may do something even if nobody reads its result."""
    return not isinstance(node.target, torch._ops.OpOverload)


def is_foldable(node: FxNode) -> bool:
    """Whether a call on constants is a constant: nothing random, and not too large."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or torch.Tag.data_dependent_output in tags:
        return False
    values = as_tuple(node.meta.get("val"))
    return all(isinstance(v, Tensor) and prod(v.shape) <= _LARGEST_FOLD for v in values)


def is_empty(value: Any) -> bool:
    """Whether a result has no elements, and so depends on nothing."""
    return isinstance(value, Tensor) and prod(value.shape) == 0


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Several results, also of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def reads_output(node: FxNode, position: int) -> bool:
    """Whether somebody reads the result at this position."""
    return any(
        user.target is operator.getitem and user.args[1] == position and user.users for user in node.users
    )


def in_order(node: FxNode, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """ATen's arguments read in order: operands first, then attributes by name."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    given |= kwargs
    count = len(op.operand_names)
    names = [argument.name for argument in schema]
    operands = tuple(given.get(name, _default(schema[i])) for i, name in enumerate(names[:count]))
    attrs: dict[str, Attr] = {}
    for argument in schema[count:]:
        value = given.get(argument.name, _default(argument))
        if argument.name in op.attrs:
            attrs[argument.name] = tuple(value) if isinstance(value, list) else value
        elif value != _default(argument):
            return None
    return Call(operands, attrs)


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None
