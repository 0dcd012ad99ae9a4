"""The simulated time of strategies, by the native core."""

from __future__ import annotations

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem


class Scorer:
    """Scores strategies of one graph on one machine, one after another; what two of them have in common
    is built once. Nodes that stand `apart` are not supported."""

    def __init__(self, graph: Graph, machine: Machine, costs: AnalyticCosts) -> None:
        self.problem = FlatProblem(graph, machine, costs)
        self._proposals = native.Proposals(self.problem.native)

    def makespan_s(self, strategy: Strategy) -> float:
        """How long one iteration takes."""
        self.problem.place(self._proposals, strategy)
        return self._proposals.makespan()

    def footprint_bytes(self, strategy: Strategy, numbers_per_weight: int) -> list[int]:
        """About what memory each device needs (cpp/footprint.h), which is quicker to have than the peak."""
        self.problem.place(self._proposals, strategy)
        return self._proposals.footprint_bytes(numbers_per_weight)

    def whole_makespan_s(self, devices: list[int]) -> float:
        """How long one iteration takes with each block whole, on the device of its number."""
        for number, device in enumerate(devices):
            block = self.problem.blocks[number]
            dims = len(self.problem.graph.signature(block.leader).sizes)
            self._proposals.place(number, [1] * dims, 1, [device])
        return self._proposals.makespan()
