"""Buckets: gradients that the same ranks add up one after the other are added up together.

A bucket takes the place of its last member in the order, so that it stays one order for all ranks, and
is closed when it is full. A full bucket is what DDP takes: large enough that a collective's start counts
for little, small enough that the first are on their way while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.graph import ITEM_BYTES, Graph
from soapstone.ops.box import volume
from soapstone.runtime.actions import Action, SumGradients
from soapstone.runtime.weights import Piece

FULL_BYTES = 25 * 2**20
"""[choice] As DistributedDataParallel's default `bucket_cap_mb`."""

FIRST_BYTES = 2**20
"""[choice] Of the first bucket of a group, as DDP has it: the earlier something is under way, the better."""


def bucketed(actions: Sequence[Action], graph: Graph) -> list[Action]:
    """The actions, sums put together."""
    groups: dict[tuple[tuple[int, ...], str], list[tuple[int, Piece]]] = {}
    for place, action in enumerate(actions):
        if isinstance(action, SumGradients):
            for piece in action.pieces:
                key = (piece.holders, graph.value(piece.weight).dtype)
                groups.setdefault(key, []).append((place, piece))
    placed: dict[int, list[SumGradients]] = {}
    for found in groups.values():
        for bucket in _filled(found, graph):
            last, _ = bucket[-1]
            action = actions[last]
            assert isinstance(action, SumGradients)
            placed.setdefault(last, []).append(SumGradients(action.task, [piece for _, piece in bucket]))
    result: list[Action] = []
    for place, action in enumerate(actions):
        if isinstance(action, SumGradients):
            result.extend(placed.get(place, []))
        else:
            result.append(action)
    return result


def _filled(found: Sequence[tuple[int, Piece]], graph: Graph) -> list[list[tuple[int, Piece]]]:
    """The pieces in runs of so many bytes."""
    buckets: list[list[tuple[int, Piece]]] = [[]]
    size_bytes, full_bytes = 0, FIRST_BYTES
    for place, piece in found:
        if size_bytes >= full_bytes:
            buckets.append([])
            size_bytes, full_bytes = 0, FULL_BYTES
        buckets[-1].append((place, piece))
        size_bytes += volume(piece.box) * ITEM_BYTES[graph.value(piece.weight).dtype]
    return buckets
