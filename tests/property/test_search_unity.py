"""Machine mappings by dynamic programming cost what trying everything finds, where a sum is all there is."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine, preset
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.part_costs import PartCosts
from soapstone.search.unity import mapping
from soapstone.search.unity.mapping import Mapper
from soapstone.search.unity.views import candidates, whole
from soapstone.strategy.placement import Placement

COSTS = AnalyticCosts()
MACHINES = ("p100:1x2", "k80:1x2", "cpu:2x1", "p100:1x4")
MOST_STRATEGIES = 20_000


def sums(graph: Graph, machine: Machine) -> dict[tuple[Placement, ...], float]:
    """The sum of costs of every way to place the blocks."""
    anatomy, parts = Anatomy(graph), PartCosts(graph, machine, COSTS)
    number = {block.name: i for i, block in enumerate(anatomy.blocks)}
    choices = []
    for block in anatomy.blocks:
        looked_at = candidates(graph, block, whole(machine), richness=2)
        own = parts.block(block, looked_at)
        choices.append([p for p, s in zip(looked_at, own.compute_s, strict=True) if s < float("inf")])
    assume(prod(map(len, choices)) <= MOST_STRATEGIES)
    own_s = [
        (found := parts.block(block, tuple(given))).compute_s + found.sync_s
        for block, given in zip(anatomy.blocks, choices, strict=True)
    ]
    edges = [
        (
            number[before],
            i,
            parts.exchange_s(
                anatomy.blocks[number[before]], block, tuple(choices[number[before]]), tuple(choices[i])
            ),
        )
        for i, block in enumerate(anatomy.blocks)
        for before in anatomy.before[block.name]
    ]
    return {
        tuple(choices[i][c] for i, c in enumerate(chosen)): sum(own_s[i][c] for i, c in enumerate(chosen))
        + sum(table[chosen[i], chosen[j]] for i, j, table in edges)
        for chosen in product(*(range(len(given)) for given in choices))
    }


@given(graphs(), st.sampled_from(MACHINES))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_mappings_cost_the_least_sum(graph: Graph, name: str) -> None:
    """Without division of devices: at most what any strategy costs, and exactly what the returned one does;
    a knot (blocks that no split takes apart) may cost more than the least."""
    machine = preset(name)
    every = sums(graph, machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping, "MOST_DIVISIONS", 0)
        found = Mapper(machine, COSTS).mapped(graph)
    chosen = tuple(found.strategy.placements[block.name] for block in found.strategy.blocks)
    assert every[chosen] == pytest.approx(found.cost_s, rel=1e-9)
    divided = Mapper(machine, COSTS).mapped(graph)
    assert divided.cost_s <= found.cost_s * (1 + 1e-9)
    assert divided.strategy.checked(machine)
    if not KNOTS:
        assert found.cost_s == pytest.approx(min(every.values()), rel=1e-9)
    KNOTS.clear()


KNOTS: list[int] = []
"""The knots that were met since it was last emptied."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mapping._Mapping._knot

    def knot(self, a, b, inner, where):  # type: ignore[no-untyped-def]
        KNOTS.append(len(inner))
        return plain(self, a, b, inner, where)

    monkeypatch.setattr(mapping._Mapping, "_knot", knot)
