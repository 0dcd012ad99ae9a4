"""Buckets as the runtime has them: sums of gradients that share a shelf and their ranks become one action.

A bucket takes the place of its last member in the order, so that it stays one order for all ranks. Which
gradients share one is said by `tasks.buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.graph import Graph
from soapstone.runtime.actions import Action, SumGradients
from soapstone.runtime.weights import Piece
from soapstone.tasks.buckets import shelves


def bucketed(actions: Sequence[Action], graph: Graph) -> list[Action]:
    """The actions, sums put together."""
    shelf = shelves(graph)
    buckets: dict[tuple[tuple[int, ...], int], list[tuple[int, Piece]]] = {}
    for place, action in enumerate(actions):
        if isinstance(action, SumGradients):
            for piece in action.pieces:
                buckets.setdefault((piece.holders, shelf[piece.weight]), []).append((place, piece))
    placed: dict[int, list[SumGradients]] = {}
    for bucket in buckets.values():
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
