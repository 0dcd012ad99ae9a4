"""Whether strategies fit in memory, by the native core's estimate: exact peaks take seconds each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.baselines.scoring import Scorer
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.strategy.strategy import Strategy


class Footprint(NamedTuple):
    """What a strategy needs on the device that it fills most, about, and what that device has."""

    needed_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes


def footprints(
    strategies: Mapping[str, Strategy], graph: Graph, machine: Machine, costs: AnalyticCosts, optimizer: str
) -> dict[str, Footprint]:
    """The footprint of each strategy, by name."""
    scorer, numbers = Scorer(graph, machine, costs), 1 + STATES_PER_WEIGHT[optimizer]
    capacities = [device.kind.memory_bytes for device in machine.devices]
    found = {}
    for name, strategy in strategies.items():
        needed = scorer.footprint_bytes(strategy, numbers)
        pairs = (Footprint(*pair) for pair in zip(needed, capacities, strict=True))
        found[name] = max(pairs, key=lambda each: each.needed_bytes / each.capacity_bytes)
    return found
