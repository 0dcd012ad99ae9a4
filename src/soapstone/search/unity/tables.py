"""What a part of a graph costs at least, by the placements of the blocks around it; how tables are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soapstone.strategy.placement import Placement

Costs = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """The least cost of a part of a graph for each placement of the blocks before and after it, and the
    placements of its blocks, in order, that have this cost."""

    cost_s: Costs
    pick: Callable[[int, int], tuple[Placement, ...]]


def reordered(placements: Sequence[Placement], order: Sequence[int]) -> tuple[Placement, ...]:
    """The placements in another order."""
    return tuple(placements[n] for n in order)


def summed(tables: Sequence[Table]) -> Table:
    """Parts that run one after the other."""
    return Table(
        np.sum([table.cost_s for table in tables], axis=0),
        lambda x, y: tuple(placement for table in tables for placement in table.pick(x, y)),
    )


def at_once(one: Table, two: Table) -> Table:
    """Two parts that run beside each other."""
    return Table(np.maximum(one.cost_s, two.cost_s), lambda x, y: (*one.pick(x, y), *two.pick(x, y)))


def best_of(tables: Sequence[Table]) -> Table:
    """For every placement of the ends the best of several tables of one part."""
    costs = np.stack([table.cost_s for table in tables])
    which = costs.argmin(axis=0)
    return Table(costs.min(axis=0), lambda x, y: tables[which[x, y]].pick(x, y))


def share_of(works: Sequence[float], part: float) -> int:
    """How many of the first sides have about this part of the work; at least one, and not all."""
    total, done, best = sum(works), 0.0, (float("inf"), 1)
    for n, work in enumerate(works[:-1], 1):
        done += work
        best = min(best, (abs(done / total - part) if total else abs(n / len(works) - part), n))
    return best[1]
