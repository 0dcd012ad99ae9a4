"""Pipelines: a batch in micro-batches, which the same shards compute one after the other.

A micro-batch is a shard in time. A block that is split along its samples into m times as many parts, with
the parts of each of m equal runs of samples on the same devices, computes m micro-batches; where blocks lie
on different devices, these are the stages of a pipeline (GPipe, PipeDream). Nothing else follows from the
split than from any other: boxes say what moves, losses divide by the whole batch, random numbers know their
place in it, and the gradient of a weight is summed over all shards before one update. So the result is that
of one process, always.

What a Pipeline adds is an order:

    1f1b    a stage runs ahead of its own backward pass by no more micro-batches than there are stages from
            it on: the forward task of a shard waits for the backward task of the shard that many micro-
            batches before (PipeDream's one forward, one backward; memory for as many micro-batches)
    gpipe   a backward task waits for the last forward task of its block on the device (memory for all)

`docs/decisions/0014-pipelines.md` gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement


class Schedule(StrEnum):
    """The order of micro-batches; see the module's docstring."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


@dataclass(frozen=True)
class Pipeline:
    """How many micro-batches a step has, and in which order they run."""

    micro_batches: int
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise StrategyError(f"a step has at least 1 micro-batch, not {self.micro_batches}")


def micro_dim(graph: Graph, block: Block, micro_batches: int) -> str | None:
    """The dim of a block's leader that counts samples, if it can be cut into so many micro-batches."""
    dim = graph.sample_dims.get(block.leader.name)
    signature = graph.signature(block.leader)
    if dim is None or dim not in signature.splits or signature.sizes[dim] % micro_batches:
        return None
    return dim


def repeated(graph: Graph, block: Block, placement: Placement, micro_batches: int) -> Placement:
    """The placement of one micro-batch, for all of them: on the same devices, one after the other. A block
    that counts no samples stays as it is."""
    dim = micro_dim(graph, block, micro_batches)
    if dim is None or micro_batches == 1:
        return placement
    sizes = graph.signature(block.leader).sizes
    own = placement.degree_of.get(dim, 1)
    if sizes[dim] % (own * micro_batches):
        raise StrategyError(
            f"block '{block.name}' is split along {sizes[dim]} samples into {own} parts of {micro_batches} "
            "micro-batches, which are not equal; choose other numbers"
        )
    degrees = {d: placement.degree_of.get(d, 1) * (micro_batches if d == dim else 1) for d in sizes}
    rows = _rows(list(sizes), placement, dim)
    devices = [device for row in rows for _ in range(micro_batches) for device in row]
    return Placement(tuple((d, n) for d, n in degrees.items() if n > 1), tuple(devices), placement.copies)


def one_of(graph: Graph, block: Block, placement: Placement, micro_batches: int) -> Placement:
    """The placement of one micro-batch of a repeated one."""
    dim = micro_dim(graph, block, micro_batches)
    if dim is None or micro_batches == 1:
        return placement
    own, rest = divmod(placement.degree_of.get(dim, 1), micro_batches)
    if rest:
        raise StrategyError(
            f"block '{block.name}' is split into {placement.degree_of.get(dim, 1)} parts along its samples, "
            f"which are not {micro_batches} micro-batches"
        )
    sizes = graph.signature(block.leader).sizes
    degrees = {d: own if d == dim else placement.degree_of.get(d, 1) for d in sizes}
    rows = _rows(list(sizes), placement, dim)
    devices = [device for row in rows for device in row[: len(row) // micro_batches]]
    found = Placement(tuple((d, n) for d, n in degrees.items() if n > 1), tuple(devices), placement.copies)
    if repeated(graph, block, found, micro_batches) != placement:
        raise StrategyError(
            f"the micro-batches of block '{block.name}' run on different devices; give them the same"
        )
    return found


def _rows(dims: Sequence[str], placement: Placement, dim: str) -> list[tuple[int, ...]]:
    """The devices, a row for each place along the dims outside of a dim."""
    at = dims.index(dim)
    length = prod(placement.degree_of.get(d, 1) for d in dims[at:]) * placement.copies
    return [placement.devices[i : i + length] for i in range(0, len(placement.devices), length)]


@dataclass(frozen=True)
class Turns:
    """When the shards of one block take their turns: `lanes[s]` is the micro-batch of shard s, `step` how far
    the shard that computes the same of the next one is. `in_flight` is how many micro-batches may be ahead
    of their backward pass; 0 for all of them, none of which is then taken back before the last is there."""

    lanes: tuple[int, ...]
    step: int = 0
    in_flight: int = 0

    @property
    def count(self) -> int:
        """How many micro-batches there are."""
        return max(self.lanes) + 1


def turns(graph: Graph, block: Block, placement: Placement, micro_batches: int, in_flight: int) -> Turns:
    """The turns of a block's shards."""
    dim = micro_dim(graph, block, micro_batches)
    if dim is None or micro_batches == 1:
        return Turns((0,) * placement.parts)
    degrees = {d: placement.degree_of.get(d, 1) for d in graph.signature(block.leader).sizes}
    after = prod(n for d, n in list(degrees.items())[list(degrees).index(dim) + 1 :])
    own = degrees[dim] // micro_batches
    lanes = tuple(shard // after % degrees[dim] // own for shard in range(placement.parts))
    return Turns(lanes, own * after, in_flight)


def stages(placements: Mapping[str, Placement], names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Some blocks, put together where they share devices, in the order of their first: the stages."""
    found: list[tuple[set[int], list[str]]] = []
    for name in names:
        devices, own = set(placements[name].devices), [name]
        joined = [stage for stage in found if stage[0] & devices]
        if not joined:
            found.append((devices, own))
            continue
        first = joined[0]
        for stage in joined[1:]:
            first[0].update(stage[0])
            first[1].extend(stage[1])
            found.remove(stage)
        first[0].update(devices)
        first[1].extend(own)
    return tuple(tuple(own) for _, own in found)
