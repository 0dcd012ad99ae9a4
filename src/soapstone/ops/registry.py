"""All operators by name, and by the ATen overloads they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from soapstone.errors import OpError
from soapstone.ops.op import Op

_OPS: dict[str, Op] = {}
_ATEN: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an operator; a name or an ATen overload can be taken once."""
    if op.name in _OPS:
        raise OpError(f"operator '{op.name}' is already registered")
    for overload in op.aten:
        if overload in _ATEN:
            raise OpError(f"operators '{_ATEN[overload].name}' and '{op.name}' both stand for {overload}")
    _OPS[op.name] = op
    _ATEN.update(dict.fromkeys(op.aten, op))
    return op


def lookup(name: str) -> Op:
    """The operator of that name."""
    found = _OPS.get(name)
    if found is None:
        close = get_close_matches(name, _OPS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise OpError(f"there is no operator '{name}'{hint}")
    return found


def by_aten(overload: str) -> Op | None:
    """The operator that stands for an ATen overload such as `relu.default`, if there is one."""
    return _ATEN.get(overload)


def all_ops() -> Iterator[Op]:
    """Every operator, in the order of definition."""
    return iter(_OPS.values())
