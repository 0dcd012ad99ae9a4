"""A rank's tasks, out of all, in the order of all.

A collective is one thing to do, at the place of the first of its tasks. The gradients of a piece of a
weight are added up in one all-reduce: where the task graph has one, at its place; where it has transfers
(some holders have copies of what others give), when the last holder could update, since only then every
contribution is sure to be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.runtime.actions import Exchanged
from soapstone.runtime.linking import Links, Task
from soapstone.runtime.weights import Piece, Weights
from soapstone.tasks.placed import COMPUTE, FORWARD, UPDATE, WEIGHT
from soapstone.tasks.task import Key

Listed = tuple[int, Key, Any]
"""A task of this rank: its number, its key, and a Task, a Piece or an Exchanged."""


def listed(links: Links, weights: Weights, order: Sequence[int]) -> list[Listed]:
    """This rank's tasks in order."""
    found: list[Listed] = []
    seen: set[tuple[Key, int]] = set()
    summed = _places_of_sums(links, weights, order)
    for number in order:
        key = links.tasks.tasks[number].key
        if key[0] != UPDATE and key[2] == COMPUTE:
            task = _task(links, key)
            if links.device_of(task[0]) == links.rank:
                found.append((number, key, task))
        elif key[0] != UPDATE and key[2] != WEIGHT:
            move = key[:-2], key[-2]
            if move not in seen and move in links.moves:
                ports = links.moves[move]
                parts = (ports.arrivals, ports.departures, ports.pattern, ports.ranks)
                found.append((number, key, Exchanged(number, *parts)))
            seen.add(move)
        found += [(number, key, p) for p in summed.get(number, []) if links.rank in p.holders]
    return found


def _places_of_sums(links: Links, weights: Weights, order: Sequence[int]) -> Mapping[int, list[Piece]]:
    """The pieces whose gradients are added up at the place of each task."""
    ids = links.tasks.ids
    last: dict[int, int] = {}  # number of a weight -> its last update
    for number in order:
        key = links.tasks.tasks[number].key
        if key[0] == UPDATE:
            last[key[1]] = number
    places: dict[int, list[Piece]] = {}
    for name, pieces in weights.pieces.items():
        for piece in pieces:
            if piece.is_summed:
                is_one = links.tasks.exchanges[piece.key].is_one_sum
                place = ids[*piece.key, 0, 0] if is_one else last[weights.numbers[name]]
                places.setdefault(place, []).append(piece)
    return places


def _task(links: Links, key: Key) -> Task:
    if key[0] == FORWARD:
        return (key[1], key[4], key[5]), key[3]
    placed = links.blocks[len(links.blocks) - 1 - key[1]]
    return (placed.number, key[4], key[5]), placed.segments.count - 1 - key[3]
