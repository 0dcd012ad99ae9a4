"""All operators by name, and by the ATen overloads they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from soapstone.errors import OpError
from soapstone.ops.op import Op

_OPS: dict[str, Op] = {}
_ATEN: dict[str, list[Op]] = {}


def register(op: Op) -> Op:
    """Add an operator; a name can be taken once. Several may stand for one ATen overload if all of
    them say in which cases they do: a rank, a reduction, windows that come out even."""
    if op.name in _OPS:
        raise OpError(f"operator '{op.name}' is already registered")
    for overload, capture in op.aten.items():
        for other in _ATEN.get(overload, []):
            if capture is None or other.aten[overload] is None:
                raise OpError(f"operators '{other.name}' and '{op.name}' both stand for {overload}")
    _OPS[op.name] = op
    for overload in op.aten:
        _ATEN.setdefault(overload, []).append(op)
    return op


def lookup(name: str) -> Op:
    """The operator of that name."""
    found = _OPS.get(name)
    if found is None:
        close = get_close_matches(name, _OPS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise OpError(f"there is no operator '{name}'{hint}")
    return found


def claimants(overload: str) -> tuple[Op, ...]:
    """The operators that may stand for an ATen overload (`relu.default`): the first whose capture answers."""
    return tuple(_ATEN.get(overload, ()))


def all_ops() -> Iterator[Op]:
    """Every operator, in the order of definition."""
    return iter(_OPS.values())
