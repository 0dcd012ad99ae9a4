"""Moves that the task graph has recognised as collectives, as the backend's own.

Which ones are better than direct messages is the backend's matter (`USED`). What one collective brings is
handed to the arrivals that the messages would have filled, so that nothing else knows of it:

    all_gather          the part of each rank is that rank's arrival
    all_to_all          likewise
    reduce_scatter      the sum of what the others give is the first arrival; the rest bring nothing
    all_reduce          the sum over all ranks, this one included, is the first arrival, and stands for
                        all there is to add up (`is_plain_sum`), so that all ranks have the same bits

What is merged and not added (`seams`) is an all_reduce in the task graph, and gathered here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from soapstone.runtime.wire import Slot, Wire
from soapstone.tasks.exchange import Exchange, Move, Pattern
from soapstone.tasks.placed import WEIGHT
from soapstone.tasks.task import Key, TaskGraph

if TYPE_CHECKING:
    from soapstone.runtime.actions import Exchanged
    from soapstone.runtime.ports import Departure

USED: Mapping[str, frozenset[Pattern]] = MappingProxyType(
    {
        "memory": frozenset({Pattern.ALL_REDUCE}),
        "belts": frozenset({Pattern.ALL_REDUCE}),
        "gloo": frozenset({Pattern.ALL_REDUCE, Pattern.ALL_TO_ALL}),
        "nccl": frozenset(Pattern) - {Pattern.TRANSFER},
    }
)
"""The collectives that are used with each backend, shared memory among them. gloo's all_gather and
reduce_scatter take 2.4 times as long as direct messages for large boxes ([measured] 4 ranks of one computer,
16 MiB: 1164 and 1356 ms against 484), its all_to_all about as long, its all_reduce a fifth (100 ms against
546)."""


RARE = 4
"""[choice] Some of the ranks that meet in fewer moves of a step than this use messages: a process group
costs milliseconds, threads and file descriptors on every rank."""

Chosen = frozenset[tuple[Key, int]]
"""Moves that are made by collectives: the key of the exchange, and the move's number in it."""


def chosen(
    tasks: TaskGraph, used: Iterable[Pattern], summed: Iterable[tuple[int, ...]]
) -> tuple[Chosen, set[tuple[int, ...]]]:
    """The moves that are made by collectives, and the groups of ranks that these need, the same on all
    ranks. `summed` are the groups that gradients are added up in, which there are anyway."""
    found: dict[tuple[int, ...], list[tuple[Key, int]]] = {}
    for key, exchange in tasks.exchanges.items():
        for m, move in enumerate(exchange.moves) if key[2] != WEIGHT else ():
            is_fit = move.pattern is not Pattern.ALL_REDUCE or is_plain_sum(exchange, move)
            if move.pattern in used and is_fit:
                found.setdefault(tuple(sorted(move.devices)), []).append((key, m))
    there = {tuple(sorted(group)) for group in summed}
    groups = {group for group, moves in found.items() if group in there or len(moves) >= RARE}
    return frozenset(move for group in groups for move in found[group]), groups


def is_plain_sum(exchange: Exchange, move: Move) -> bool:
    """Whether every rank gives what it has of one box and needs the sum of all that, and nothing else."""
    boxes = {source.box for source in exchange.sources} | {sink.box for sink in exchange.sinks}
    if len(exchange.moves) != 1 or len(boxes) != 1:
        return False
    given = sorted(move.sources)
    kept = sorted({(i, exchange.sinks[k].device) for i, k in exchange.local})
    return given == kept and {sink.device for sink in exchange.sinks} == set(move.devices)


def post(action: Exchanged, wire: Wire) -> None:
    """Post a collective, and let its arrivals wait for their parts of it."""
    ranks = sorted(action.ranks)
    name, count = action.arrivals[0].name, action.arrivals[0].count
    place = {rank: i for i, rank in enumerate(ranks)}
    nothing: slice | None = None

    def given(departure: Departure) -> Tensor:
        return departure.total(wire.device)

    match action.pattern:
        case Pattern.ALL_REDUCE:
            shared = wire.sum_up(given(action.departures[0]).clone(), ranks, name)
            parts = {ranks[0] if ranks[0] != wire.rank else ranks[1]: slice(0, count)}
        case Pattern.ALL_GATHER:
            shared = wire.gather_up(given(action.departures[0]), ranks, name)
            parts = {rank: slice(i * count, (i + 1) * count) for rank, i in place.items()}
        case Pattern.ALL_TO_ALL:
            others = [rank for rank in ranks if rank != wire.rank]
            own = {departure.peer: given(departure) for departure in action.departures}
            shared = wire.swap(torch.cat([own[rank].reshape(-1) for rank in others]), ranks, count, name)
            parts = {rank: slice(i * count, (i + 1) * count) for i, rank in enumerate(others)}
        case Pattern.REDUCE_SCATTER:
            own = {departure.peer: given(departure) for departure in action.departures}
            some = next(iter(own.values()))
            flat = torch.zeros(len(ranks) * count, dtype=some.dtype, device=some.device)
            for rank, tensor in own.items():
                flat[place[rank] * count : (place[rank] + 1) * count] = tensor.reshape(-1)
            shared = wire.scatter_sum(flat, ranks, count, name)
            parts = {ranks[0] if ranks[0] != wire.rank else ranks[1]: slice(0, count)}
        case Pattern.TRANSFER:
            raise AssertionError("a transfer is no collective")
    for arrival in action.arrivals:
        arrival.expect(Slot(shared, parts.get(arrival.peer, nothing), arrival.shape))
