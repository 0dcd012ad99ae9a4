"""Operators that only torch knows: they run whole, on one device, as torch's own call.

An opaque node keeps the call it was captured from: `target` is torch's name for the operator and
`arguments` a JSON text in which `{"operand": i}` stands for the i-th operand. Its output shapes
come from tracing, so the planner can place it and the runtime can run it, but nothing is known
about its dims and so none may be split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from soapstone.errors import OpError
from soapstone.ops.examples import example
from soapstone.ops.lazy import torch
from soapstone.ops.op import Attrs, Op
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape


def _notation(shapes: Sequence[Shape | None], attrs: Attrs) -> str:
    given, made = attrs["out_shapes"], 0
    assert isinstance(given, tuple)
    parts: list[list[str]] = [[], []]
    for side, rows in ((0, shapes), (1, given)):
        for row in rows:
            names = [f"d{made + i}:{size}!" for i, size in enumerate(row or ())]
            made += len(names)
            parts[side].append(" ".join(names))
    return ", ".join(parts[0]) + " -> " + ", ".join(parts[1])


def _call(*operands: Any, target: str, arguments: str) -> Any:
    def filled(item: Any) -> Any:
        if isinstance(item, dict):
            if "operand" in item:
                return operands[item["operand"]]
            return getattr(torch, item["torch"])
        return [filled(part) for part in item] if isinstance(item, list) else item

    document = json.loads(arguments)
    keywords = {key: filled(item) for key, item in document["keywords"].items()}
    results = resolved(target)(*[filled(item) for item in document["positional"]], **keywords)
    return tuple(r for r in results if r is not None) if isinstance(results, tuple | list) else results


def resolved(target: str) -> Any:
    """torch's operator of a name such as `aten.special_erfcx.default`."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise OpError(f"this torch has no operator '{target}': load the library that registers it first")
    return found


opaque = register(
    Op(
        "opaque",
        _notation,
        torch=_call,
        flops=0,
        attrs={"target": "", "arguments": "", "out_shapes": ()},
        is_opaque=True,
        examples=(
            example(
                (4, 6),
                target="aten.special_erfcx.default",
                arguments='{"positional": [{"operand": 0}], "keywords": {}}',
                out_shapes=((4, 6),),
            ),
        ),
    )
)
