"""Every operator in the registry on a GPU: whole and in shards as on a CPU, gradients included.

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
def test_an_operator_computes_on_a_gpu_what_it_does_on_a_cpu(op: Op, given: Example) -> None:
    """Double precision, and random splits: kernels of their own must not mean something else."""
    for seed in range(3):
        check(op, given, seed)


def check(op: Op, given: Example, seed: int) -> None:
    operands = random_operands(given, seed)
    signature = op.signature(shapes_of(operands), given.attrs)
    expected = whole_run(op, signature, given.attrs, operands)
    degrees = random_degrees(signature, seed)
    moved = [on_gpu(operand) for operand in operands]
    for split in ({}, degrees):
        actual = sharded_run(op, signature, given.attrs, moved, split)
        pairs = [
            *zip(actual.outputs, expected.outputs, strict=True),
            *zip(actual.gradients, expected.gradients, strict=True),
        ]
        for i, (found, want) in enumerate(pairs):
            if want is not None:
                assert found is not None
                torch.testing.assert_close(
                    found.cpu(),
                    want,
                    rtol=1e-9,
                    atol=1e-9,
                    equal_nan=True,
                    msg=lambda m, i=i, split=split: f"split {split}, tensor {i}: {m}",
                )
