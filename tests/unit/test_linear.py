"""Linearity read off a body: never claimed where torch shows none, and found where a loss needs it."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.operators import random_operands, shapes_of, whole_run

from soapstone.ops import Op, all_ops
from soapstone.ops.examples import Example, example
from soapstone.ops.linear import is_linear
from soapstone.ops.registry import lookup

CASES = [
    pytest.param(op, given, id=f"{op.name}-{i}")
    for op in all_ops()
    if op.body is not None
    for i, given in enumerate(op.examples)
]


@pytest.mark.parametrize(("op", "given"), CASES)
def test_what_is_read_off_holds_for_tensors(op: Op, given: Example) -> None:
    """f(a + 2 b) = f(a) + 2 f(b), as torch computes it."""
    a, b = random_operands(given, 1), random_operands(given, 2)
    signature = op.signature(shapes_of(a), given.attrs)
    present = [i for i, x in enumerate(a) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for found in [frozenset(c) for n in (1, 2) for c in itertools.combinations(present, n)]:
        if is_linear(op, signature, given.attrs, found):
            both = [x + 2 * y if i in found else x for i, (x, y) in enumerate(zip(a, b, strict=True))]
            other = [y if i in found else x for i, (x, y) in enumerate(zip(a, b, strict=True))]
            of_both, of_a, of_b = (
                whole_run(op, signature, given.attrs, x).outputs[0] for x in (both, a, other)
            )
            torch.testing.assert_close(of_both, of_a + 2 * of_b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "given", "operands", "expected"),
    [
        ("add", example((3,), (3,)), {0, 1}, True),
        ("add", example((3,), (3,)), {0}, False),  # affine: the other would be added on every device
        ("mul", example((3,), (3,)), {0}, True),
        ("mul", example((3,), (3,)), {0, 1}, False),
        ("div", example((3,), (3,)), {0}, True),
        ("div", example((3,), (3,)), {1}, False),
        ("mean", example((4,), dims=(0,)), {0}, True),
        ("concat", example((2,), (3,)), {0, 1}, True),
        ("reshape", example((), shape=(1,)), {0}, True),
        ("relu", example((3,)), {0}, False),
        ("exp", example((3,)), {0}, False),
    ],
)
def test_known_cases(name: str, given: Example, operands: set[int], expected: bool) -> None:
    op = lookup(name)
    signature = op.signature(shapes_of(random_operands(given)), given.attrs)
    assert is_linear(op, signature, given.attrs, operands) is expected
