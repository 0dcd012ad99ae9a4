"""Every operator in the registry on a GPU: in shards as in one piece, gradients included.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.operators import random_degrees, random_operands, shapes_of, sharded_run, whole_run

from soapstone.ops import Op, all_ops
from soapstone.ops.examples import Example

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

CASES = [
    pytest.param(op, given, id=f"{op.name}-{i}") for op in all_ops() for i, given in enumerate(op.examples)
]


def on_gpu(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    return operand.detach().cuda().requires_grad_(operand.requires_grad)


@pytest.mark.parametrize(("op", "given"), CASES)
def test_an_operator_computes_in_shards_what_it_does_in_one_piece(op: Op, given: Example) -> None:
    """Double precision, and random splits: kernels of their own must not mean something else."""
    for seed in range(3):
        check(op, given, seed)


def check(op: Op, given: Example, seed: int) -> None:
    operands = [on_gpu(operand) for operand in random_operands(given, seed)]
    signature = op.signature(shapes_of(operands), given.attrs)
    expected = whole_run(op, signature, given.attrs, operands)
    degrees = random_degrees(signature, seed)
    actual = sharded_run(op, signature, given.attrs, operands, degrees)
    pairs = [
        *zip(actual.outputs, expected.outputs, strict=True),
        *zip(actual.gradients, expected.gradients, strict=True),
    ]
    for i, (found, want) in enumerate(pairs):
        if want is not None:
            torch.testing.assert_close(
                found,
                want,
                rtol=1e-9,
                atol=1e-9,
                equal_nan=True,
                msg=lambda m, i=i: f"split {degrees}, tensor {i}: {m}",
            )
