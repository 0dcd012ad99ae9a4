"""The exact minimum of a sum of costs, each of one choice or of two.

Jia et al. 2018 (OptCNN), section 5, minimise the sum of the costs of layers and of edges by two steps:

    node elimination   a layer between two others becomes an edge between them that costs the best of
                       its configurations for each of theirs               -> `_eliminate`
    edge elimination   two edges between the same layers are added up      -> tables are kept per pair

which reduce a linear graph, and the modules of Inception and ResNet, to a graph of one or two layers.
Here a layer with any number of neighbours may be eliminated (its cost then is a table over all of
them), so every graph is reduced, the layer with the smallest table first. Where even that table would
have more than `MOST_ENTRIES` entries, the layer is given the configuration that is best against the best
of its neighbours, and the result is no longer certain to be the minimum (`is_exact`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

MOST_ENTRIES = 1 << 22
"""[choice] Entries of the largest table that is made: 32 MiB."""


@dataclass(frozen=True)
class Problem:
    """`single[i][c]` is what choice c of variable i costs, `pairs[i, j][c, d]` what it costs beside
    choice d of variable j (i < j)."""

    single: Sequence[Table]
    pairs: Mapping[tuple[int, int], Table]

    def cost(self, choices: Sequence[int]) -> float:
        """The sum of all costs."""
        own = sum(float(table[c]) for table, c in zip(self.single, choices, strict=True))
        return own + sum(float(t[choices[i], choices[j]]) for (i, j), t in self.pairs.items())


@dataclass(frozen=True)
class Minimum:
    """The choices that cost least, and whether that is certain."""

    choices: tuple[int, ...]
    cost: float
    is_exact: bool


_Factor = tuple[tuple[int, ...], Table]
"""A cost of the choices of some variables, an axis for each."""


def minimum(problem: Problem, known: Sequence[int]) -> Minimum:
    """The minimum; where it is not certain, no worse than the `known` choices."""
    sizes = [len(table) for table in problem.single]
    factors: list[_Factor] = [((i,), table) for i, table in enumerate(problem.single)]
    factors += [(pair, table) for pair, table in problem.pairs.items()]
    around = {i: {j for pair in problem.pairs if i in pair for j in pair} - {i} for i in range(len(sizes))}
    answers: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    is_exact = True
    for i in [i for i, size in enumerate(sizes) if size == 1]:  # nothing to choose, and no axis of a table
        factors, _ = _fixed(i, factors)
        answers.append((i, (), np.array(0)))
        for j in around.pop(i):
            around[j] -= {i}
    while around:
        entries = {i: sizes[i] * prod(sizes[j] for j in others) for i, others in around.items()}
        first = min(around, key=lambda i: (entries[i], i))
        if entries[first] <= MOST_ENTRIES:
            beside = around.pop(first)
            factors, best = _eliminate(first, tuple(sorted(beside)), sizes, factors)
            answers.append((first, tuple(sorted(beside)), best))
            for i in beside:
                around[i] = (around[i] | beside) - {i, first}
        else:
            is_exact = False
            first = max(around, key=lambda i: (len(around[i]), -i))
            factors, fixed = _fixed(first, factors)
            answers.append((first, (), np.array(fixed)))
            for i in around.pop(first):
                around[i] -= {first}
    choices = [0] * len(sizes)
    for variable, others, best in reversed(answers):
        choices[variable] = int(best[tuple(choices[other] for other in others)])
    if not is_exact:
        choices = min(_descended(problem, choices), _descended(problem, list(known)), key=problem.cost)
    return Minimum(tuple(choices), problem.cost(choices), is_exact)


def _eliminate(
    variable: int, others: tuple[int, ...], sizes: Sequence[int], factors: Sequence[_Factor]
) -> tuple[list[_Factor], NDArray[np.intp]]:
    """The factors without a variable, and its best choice for all choices of its neighbours."""
    scope = (*others, variable)
    total = np.zeros([sizes[i] for i in scope])
    kept: list[_Factor] = []
    for own, table in factors:
        if variable not in own:
            kept.append((own, table))
            continue
        order = np.argsort([scope.index(i) for i in own])
        shape = [sizes[i] if i in own else 1 for i in scope]
        total += table.transpose(order).reshape(shape)
    return [*kept, (others, total.min(axis=-1))], total.argmin(axis=-1)


def _fixed(variable: int, factors: Sequence[_Factor]) -> tuple[list[_Factor], int]:
    """The factors with a variable at the choice that is best if its neighbours did all it wants."""
    hoped = sum(
        table.min(axis=tuple(axis for axis, i in enumerate(own) if i != variable))
        for own, table in factors
        if variable in own
    )
    best = int(np.argmin(hoped))
    return [
        (
            tuple(i for i in own if i != variable),
            table.take([best], axis=own.index(variable)).squeeze(own.index(variable)),
        )
        if variable in own
        else (own, table)
        for own, table in factors
    ], best


def _descended(problem: Problem, choices: list[int]) -> list[int]:
    """The choices after changing one at a time for the better, until none is left to change."""
    beside: list[list[tuple[int, Table]]] = [[] for _ in choices]
    for (i, j), table in problem.pairs.items():
        beside[i].append((j, table.T))
        beside[j].append((i, table))
    changed = True
    while changed:
        changed = False
        for i, own in enumerate(problem.single):
            costs = own + sum((table[choices[j]] for j, table in beside[i]), np.zeros(len(own)))
            best = int(np.argmin(costs))
            if costs[best] < costs[choices[i]] * (1 - 1e-12):
                choices[i], changed = best, True
    return choices
