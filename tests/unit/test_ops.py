"""Every operator in the registry, taken through everything its definition implies.

Adding an operator adds cases here by itself: nothing in this file names one, but for the tests of
the test at the end.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.operators import random_degrees, random_operands, shapes_of, sharded_run, whole_run
from torch.utils.flop_counter import FlopCounterMode

from soapstone.ops import Op, all_ops
from soapstone.ops.examples import Example, example
from soapstone.ops.proof import Proved, prove_split
from soapstone.ops.reference import reference

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


CASES = [
    pytest.param(op, given, id=f"{op.name}-{i}") for op in all_ops() for i, given in enumerate(op.examples)
]
every_case = pytest.mark.parametrize(("op", "given"), CASES)
every_case_with_a_body = pytest.mark.parametrize(
    ("op", "given"), [case for case in CASES if case.values[0].body is not None]
)


def check_shape(op: Op, given: Example) -> None:
    operands = random_operands(given)
    signature = op.signature(shapes_of(operands), given.attrs)
    outputs = whole_run(op, signature, given.attrs, operands).outputs
    assert tuple(tuple(out.shape) for out in outputs) == signature.output_shapes


def check_reference(op: Op, given: Example) -> None:
    operands = random_operands(given)
    signature = op.signature(shapes_of(operands), given.attrs)
    actual = whole_run(op, signature, given.attrs, operands).outputs[0]
    plain = [o.detach().numpy() if isinstance(o, torch.Tensor) else o for o in operands]
    expected = reference(op, signature, given.attrs, plain)
    np.testing.assert_allclose(actual.to(torch.float64).numpy(), expected, rtol=1e-6, atol=1e-9)


def check_sharded(op: Op, given: Example, seed: int) -> None:
    operands = random_operands(given, seed)
    signature = op.signature(shapes_of(operands), given.attrs)
    degrees = random_degrees(signature, seed)
    expected = whole_run(op, signature, given.attrs, operands)
    actual = sharded_run(op, signature, given.attrs, operands, degrees)
    for out, want in zip(actual.outputs, expected.outputs, strict=True):
        assert out.dtype == want.dtype
        torch.testing.assert_close(out, want, **CLOSE, msg=lambda m: f"split {degrees}: {m}", equal_nan=True)
    for i, (grad, want) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        if want is not None:
            torch.testing.assert_close(
                grad, want, **CLOSE, msg=lambda m, i=i: f"split {degrees}, gradient {i}: {m}"
            )


def check_sharded_often(op: Op, given: Example) -> None:
    for seed in range(8):
        check_sharded(op, given, seed)


def check_proofs(op: Op, given: Example) -> None:
    signature = op.signature(shapes_of(random_operands(given)), given.attrs)
    for dim in signature.splits:
        degrees = next((d for n in (2, 3) for d in signature.legal_degrees(n) if d == {dim: n}), None)
        if degrees is not None:
            assert prove_split(op, signature, given.attrs, degrees) == Proved(), degrees


@every_case
def test_shape_is_torchs(op: Op, given: Example) -> None:
    """The shape that the notation gives is the shape that torch gives."""
    check_shape(op, given)


@every_case
@pytest.mark.parametrize("seed", range(4))
def test_sharded_equals_whole(op: Op, given: Example, seed: int) -> None:
    """Any legal split, joined by its boxes, gives torch's outputs and torch's gradients."""
    check_sharded(op, given, seed)


@every_case_with_a_body
def test_body_means_what_torch_computes(op: Op, given: Example) -> None:
    """The scalar body, read as floats, is the torch function."""
    check_reference(op, given)


@every_case_with_a_body
def test_every_offered_split_is_proved(op: Op, given: Example) -> None:
    """Each dim that may be split is proved splittable by Z3."""
    check_proofs(op, given)


@every_case
def test_flops_are_torchs(op: Op, given: Example) -> None:
    """Flops equal those of torch's counter wherever it counts any; it leaves out what follows a sum."""
    operands = random_operands(given)
    signature = op.signature(shapes_of(operands), given.attrs)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        whole_run(op, signature, given.attrs, operands)
    counted = counter.get_total_flops()
    if counted:
        assert op.flop_count(signature) - op.finish_flop_count(signature) == pytest.approx(counted)


@every_case
def test_example_leaves_something_to_split(op: Op, given: Example) -> None:
    """Examples are even enough for the tests above to mean something, unless all dims are whole."""
    signature = op.signature(shapes_of(random_operands(given)), given.attrs)
    assert not signature.splits or any(True for n in (2, 3) for _ in signature.legal_degrees(n))


def linear_with(**changed: object) -> Op:
    fields: dict[str, object] = {
        "name": "linear",
        "notation": "b i, o i, [o] -> b o",
        "body": lambda x, w: x * w,
        "finish": lambda total, bias: total + bias,
        "torch": lambda x, w, bias=None: torch.nn.functional.linear(x, w, bias),
        "weights": ("w", "bias"),
    }
    return Op(**{**fields, **changed})  # type: ignore[arg-type]


class TestOfTheTest:
    """Wrong definitions that the checks above must catch."""

    given = example((4, 6), (8, 6), (8,))

    def test_the_right_one_passes(self) -> None:
        op = linear_with()
        check_shape(op, self.given)
        check_reference(op, self.given)
        check_proofs(op, self.given)
        check_sharded_often(op, self.given)

    def test_bias_inside_the_sum(self) -> None:
        op = linear_with(body=lambda x, w, bias: x * w + bias, finish=None)
        with pytest.raises(AssertionError):
            check_reference(op, self.given)
        with pytest.raises(AssertionError):
            check_sharded_often(op, self.given)

    def test_activation_after_a_split_sum(self) -> None:
        op = linear_with(finish=lambda total, bias: (total + bias) ** 2.0)
        signature = op.signature([(4, 6), (8, 6), (8,)], {})
        assert "i" not in signature.splits
        with pytest.raises(AssertionError):
            check_reference(op, self.given)

    def test_transposed_weight(self) -> None:
        with pytest.raises((AssertionError, RuntimeError)):
            check_shape(linear_with(notation="b i, i o, [o] -> b o"), example((4, 6), (6, 8), (8,)))

    def test_halo_forgotten(self) -> None:
        """A convolution that claims to read only what lies under its output."""
        op = Op(
            "conv",
            "b c l, o c r! -> b o l",
            body=lambda x, w: x * w,
            torch=lambda x, w: torch.nn.functional.conv1d(x, w, padding=1),
        )
        with pytest.raises(AssertionError):
            check_reference(op, example((2, 2, 6), (2, 2, 3)))
        with pytest.raises(AssertionError):
            check_sharded_often(op, example((2, 2, 6), (2, 2, 3)))

    def test_dim_that_is_not_parallel(self) -> None:
        """A softmax that claims its normalised dim may be split."""
        op = Op("softmax", "b s -> b s", torch=lambda x: x.softmax(-1), flops=5)
        with pytest.raises(AssertionError):
            check_sharded_often(op, example((4, 6)))
