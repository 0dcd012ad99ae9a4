"""A part of a batch: the samples that one rank reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from soapstone.graph import Graph, Role, Value


@dataclass(frozen=True)
class Part:
    """A batch of which only the samples are there that a rank reads: `tensors` are as a whole batch's
    would be, but their sample axis has one entry for each of the rank's rows."""

    tensors: Tensor | Sequence[Tensor] | Mapping[str, Tensor]


def sample_axes(graph: Graph) -> Mapping[str, int]:
    """The axis of each input along which a batch is cut into samples; an input without one is read
    whole by everyone."""
    return {
        value.name: value.samples
        for value in graph.with_role(Role.INPUT)
        if value.samples is not None and value.shape[value.samples] == graph.sample_count
    }


def part_shape(value: Value, axis: int | None, count: int) -> tuple[int, ...]:
    """The shape of so many samples of an input."""
    return tuple(count if at == axis else size for at, size in enumerate(value.shape))
