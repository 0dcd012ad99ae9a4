"""Boxes of a weight in the module's own shape.

A graph may see a weight in another shape than the module stores it in: an LSTM's (4H, I) matrix is
(4, H, I), so that half of the hidden units is a box. In the stored shape that half is four boxes.
"""

from __future__ import annotations

from collections.abc import Iterator

from soapstone.errors import CheckpointError
from soapstone.ops.box import Box, Interval, whole

Shape = tuple[int, ...]


def stored_boxes(box: Box, shape: Shape, stored: Shape) -> Iterator[tuple[Box, Box]]:
    """A box of a tensor of this shape as pairs: a part of it, and the box that the part is of the same
    elements in the stored shape. Each stored axis is one or several of the tensor's."""
    groups = _groups(shape, stored)
    for parts in _products([_axis(box, shape, axes) for axes in groups]):
        own: Box = tuple(interval for part, _ in parts for interval in part)
        yield own, tuple(interval for _, interval in parts)


def _axis(box: Box, shape: Shape, axes: tuple[int, ...]) -> list[tuple[Box, Interval]]:
    """The parts of a box along some axes that are one interval each of the axis they make together."""
    if not axes:
        return [((), Interval(0, 1))]
    first, rest = axes[0], axes[1:]
    stride = 1
    for axis in rest:
        stride *= shape[axis]
    inner = tuple(box[axis] for axis in rest)
    if inner == whole(tuple(shape[axis] for axis in rest)):
        lo, hi = box[first]
        return [((box[first], *inner), Interval(lo * stride, hi * stride))]
    return [
        ((Interval(at, at + 1), *part), Interval(at * stride + interval.lo, at * stride + interval.hi))
        for at in range(*box[first])
        for part, interval in _axis(box, shape, rest)
    ]


def _groups(shape: Shape, stored: Shape) -> list[tuple[int, ...]]:
    """The axes of a shape that each axis of the stored shape is made of."""
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in stored:
        start, count = at, 1
        while at < len(shape) and (count < size or (count == size == 1 and at == start)):
            count *= shape[at]
            at += 1
        if count != size:
            raise CheckpointError(f"a weight of shape {list(shape)} is not stored as {list(stored)}")
        groups.append(tuple(range(start, at)))
    while groups and at < len(shape) and shape[at] == 1:
        groups[-1] = (*groups[-1], at)
        at += 1
    return groups


def _products(
    choices: list[list[tuple[Box, Interval]]],
) -> Iterator[tuple[tuple[Box, Interval], ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _products(choices[1:]):
            yield (first, *rest)
