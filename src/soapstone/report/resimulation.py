"""A strategy that can be changed block by block, each change simulated by the native core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem


class Resimulation:
    """A strategy on a machine, and what it would take otherwise. The strategy itself stays as it is, and in
    a pipeline what may be in flight does too."""

    def __init__(self, strategy: Strategy, machine: Machine, costs: AnalyticCosts) -> None:
        self.strategy = strategy.checked(machine)
        self.problem = FlatProblem(strategy.graph, machine, costs, strategy.apart)
        self._proposals = native.Proposals(self.problem.native)
        self._place(block.name for block in self.problem.blocks)
        self.makespan_s = self._proposals.makespan()

    def otherwise_s(self, block: Block, placement: Placement) -> float:
        """The makespan with one block placed otherwise, by a layout that it has; in a pipeline, in as many
        micro-batches."""
        number, degrees = self.problem.number[block.name], self.problem.degrees(block, placement)
        turns, devices = self.strategy.turns[block.name], list(placement.devices)
        found = self._proposals.propose(
            number, degrees, placement.copies, devices, inf, turns.count, turns.in_flight
        )
        self._proposals.reject()
        return found

    def with_s(self, changes: Mapping[str, Placement]) -> float:
        """The makespan with several blocks placed otherwise."""
        self._place(changes, changes)
        found = self._proposals.makespan()
        self._place(changes)
        self._proposals.makespan()  # so that the next proposal starts from the strategy again
        return found

    def _place(self, names: Iterable[str], changes: Mapping[str, Placement] | None = None) -> None:
        for name in names:
            block = self.problem.blocks[self.problem.number[name]]
            placement = (changes or self.strategy.placements)[name]
            self.problem.place_block(self._proposals, block, placement, self.strategy.turns[name])
