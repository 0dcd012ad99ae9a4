"""FlexFlow's Table 2, the parallelizable dims of some operators, comes out of the notation."""

from __future__ import annotations

import pytest

from soapstone.ops import Kind, Shape, lookup

ATTRIBUTE, PARAMETER, REDUCTION, SAMPLE = Kind.ATTRIBUTE, Kind.PARAMETER, Kind.REDUCTION, Kind.SAMPLE


def kinds(name: str, *shapes: Shape | None, **attrs: object) -> dict[str, Kind]:
    op = lookup(name)
    signature = op.signature(shapes, attrs)  # type: ignore[arg-type]
    return signature.kinds(op.weight_positions(len(shapes)))


@pytest.mark.parametrize("name", ["max_pool1d", "avg_pool1d"])
def test_1d_pooling(name: str) -> None:
    """[paper] sample | length, channel | (no parameters)"""
    assert kinds(name, (8, 4, 16)) == {"b": SAMPLE, "c": ATTRIBUTE, "l": ATTRIBUTE}


def test_1d_convolution() -> None:
    """[paper] sample | length | channel. Sums over input channels are what SOAP leaves whole."""
    found = kinds("conv1d", (8, 4, 16), (6, 4, 3), (6,), pl=1)
    assert found == {"b": SAMPLE, "l": ATTRIBUTE, "o": PARAMETER, "c": REDUCTION}


def test_2d_convolution() -> None:
    """[paper] sample | height, width | channel"""
    found = kinds("conv2d", (8, 4, 16, 16), (6, 4, 3, 3), (6,), ph=1, pw=1)
    assert found == {"b": SAMPLE, "h": ATTRIBUTE, "w": ATTRIBUTE, "o": PARAMETER, "c": REDUCTION}


def test_matrix_multiplication() -> None:
    """[paper] sample | | channel"""
    assert kinds("linear", (8, 4), (6, 4), (6,)) == {"b": SAMPLE, "o": PARAMETER, "i": REDUCTION}


def test_batch_norm_by_channel_sample_and_position() -> None:
    found = kinds("batch_norm", (8, 4, 16, 16), (4,), (4,), (4,), (4,))
    assert found == {"b": SAMPLE, "c": PARAMETER, "h": ATTRIBUTE, "w": ATTRIBUTE}


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layer_by_sample_only(batch_first: bool) -> None:
    """Where time comes first the batch is still found: what must stay whole does not lead."""
    x = (8, 5, 3) if batch_first else (5, 8, 3)
    shapes = (x, (8, 6), (8, 6), (24, 3), (24, 6), (24,), (24,))
    assert kinds("lstm_layer", *shapes, batch_first=batch_first) == {"b": SAMPLE}


def test_embedding_by_rows_and_columns_of_the_table() -> None:
    found = kinds("embedding", (8, 5), (100, 16))
    assert found == {"b": SAMPLE, "b1": ATTRIBUTE, "e": PARAMETER, "v": REDUCTION}
