"""Blocks that look alike, moved together: a descent by the simulator from a mapping.

The sum that `mapping` takes the least of knows no overlap: of two mappings it may prefer the one that is
slower. Markov chains move one block at a time, and where layers repeat, one that is placed otherwise than its
neighbours is slower than none or all (the tensors between them are moved twice). So all blocks of one kind
are given each placement that was looked at, then every second one of them (a product split along its outputs
wants the next one split along its sum), and what the simulator finds faster is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from soapstone import native
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.unity.mapping import Kind, Mapper
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem

MOST_TRIALS = 600
"""[choice] Strategies that are simulated in one descent: a count, so that it does not depend on the clock."""

HALVED = 4
"""[choice] Of so many blocks of a kind, every second one is also moved by itself."""

LEAST_GAIN = 1e-6
"""[choice] A strategy that is not faster by this part is not faster."""


@dataclass(frozen=True)
class Simulated:
    """A strategy, what it lacks of memory, and its time."""

    strategy: Strategy
    excess_bytes: int
    makespan_s: float


class Bench:
    """One graph on a machine, simulated again and again."""

    def __init__(self, problem: FlatProblem, machine: Machine, optimizer: str) -> None:
        self.problem = problem
        self.proposals = native.Proposals(problem.native)
        self.numbers_per_weight = 1 + STATES_PER_WEIGHT[optimizer]
        self.limits = [device.kind.memory_bytes for device in machine.devices]

    def place(self, placements: Mapping[str, Placement]) -> None:
        """Place some blocks."""
        for name, placement in placements.items():
            block = self.problem.blocks[self.problem.number[name]]
            degrees = self.problem.degrees(block, placement)
            number = self.problem.number[name]
            self.proposals.place(number, degrees, placement.copies, list(placement.devices))

    @property
    def makespan_s(self) -> float:
        """The time with all blocks where they were placed last."""
        return float(self.proposals.makespan())

    @property
    def excess_bytes(self) -> int:
        """What the devices lack of memory, added up."""
        held = self.proposals.footprint_bytes(self.numbers_per_weight)
        return sum(max(0, own - limit) for own, limit in zip(held, self.limits, strict=True))


def together(
    bench: Bench, mapper: Mapper, strategy: Strategy, is_over: Callable[[], bool]
) -> tuple[Simulated, int]:
    """The strategy that no move of a kind makes faster, as far as time and `MOST_TRIALS` allow, and how many
    were tried."""
    placements, trials = dict(strategy.placements), 0
    bench.place(placements)
    best_s, excess = bench.makespan_s, bench.excess_bytes
    groups, improved = _groups(mapper, strategy.graph), True
    while improved:
        improved = False
        for names, choices in groups:
            for placement in choices:
                moved = {name: placement for name in names if placements[name] != placement}
                if not moved:
                    continue
                if trials >= MOST_TRIALS or is_over():
                    return Simulated(Strategy(strategy.graph, placements), excess, best_s), trials
                trials += 1
                bench.place(moved)
                found_s = bench.makespan_s
                if found_s < best_s * (1 - LEAST_GAIN) and bench.excess_bytes <= excess:
                    placements |= moved
                    best_s, excess, improved = found_s, bench.excess_bytes, True
                else:
                    bench.place({name: placements[name] for name in moved})
    return Simulated(Strategy(strategy.graph, placements), excess, best_s), trials


def _groups(mapper: Mapper, graph: Graph) -> list[tuple[Sequence[str], tuple[Placement, ...]]]:
    """Blocks that are moved together and where to: first whole kinds, the largest first, then halves."""
    kinds = sorted(mapper.kinds(graph), key=lambda kind: -kind.work_s)
    return [*_whole(kinds), *_halves(kinds)]


def _whole(kinds: Sequence[Kind]) -> Iterator[tuple[Sequence[str], tuple[Placement, ...]]]:
    yield from ((kind.names, kind.placements) for kind in kinds)


def _halves(kinds: Sequence[Kind]) -> Iterator[tuple[Sequence[str], tuple[Placement, ...]]]:
    for kind in kinds:
        if len(kind.names) >= HALVED:
            yield kind.names[::2], kind.placements
            yield kind.names[1::2], kind.placements
