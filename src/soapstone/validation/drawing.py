"""Strategies to try: the baselines that apply, one that a search finds, random ones, and baselines with some
blocks changed.

Random strategies alone are all alike (bad, and bound by messages); a search meets mostly neighbours of good
ones. So half of those that are drawn are baselines with a few blocks placed at random. Two of a kind come one
after the other, so that every second strategy is half of each kind.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.baselines import applicable, baseline
from soapstone.search.mcmc import Budget, mcmc
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.space import Space, random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import TaskKind
from soapstone.validation.ends import pieces_in

PROPOSALS = 2000
"""[choice] Of each chain of the search: a number, since all ranks have to find the same."""

FOUND, BEFORE = "found", "found before measuring"
"""The names of what a search finds, and of what one has found by costs that were not measured here."""

Predicted = Callable[[Sequence[Strategy]], Sequence[float]]
"""What a step of each is said to take by all that was measured, of which a search knows a part."""

CHANGED_SHARE = 0.15
"""[choice] The part of its blocks that a changed baseline has placed at random, at least one."""


MICRO_BATCHES = 4, 2
"""[choice] In how many micro-batches a strategy is tried to be done alone, the most first."""


@dataclass(frozen=True)
class Drawn:
    """A strategy and where it comes from."""

    name: str
    strategy: Strategy


def drawn(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    count: int,
    seed: int = 0,
    given: Sequence[Drawn] = (),
) -> list[Drawn]:
    """`count` different strategies (fewer if there are no more to be found), of which some may be given."""
    random = Random(seed)
    known = [
        Drawn(each.name, baseline(each.name, graph, machine, costs, seed))
        for each in applicable(graph, machine)
        if each.name != "random"
    ]
    best = Drawn(FOUND, _searched(graph, machine, costs, seed, known))
    found: list[Drawn] = []
    for each in [*given, *known[:1], best, *known[1:]]:
        _add(found, each)
    starts, attempts = list(found), 0
    while len(found) < count and attempts < 20 * count:
        attempts += 1
        if attempts % 4 in (1, 2):
            start = random.choice(starts)
            _add(found, Drawn(f"{start.name}, changed {attempts}", _changed(start.strategy, machine, random)))
        else:
            _add(found, Drawn(f"random {attempts}", random_strategy(graph, len(machine.devices), random)))
    return found[:count]


def found_anew(
    found: Sequence[Drawn],
    graph: Graph,
    machine: Machine,
    costs: Sequence[AnalyticCosts],
    seed: int = 0,
    predicted: Predicted | None = None,
) -> list[Drawn]:
    """The same strategies, but what is found by these costs in the place of what was found before: the best
    by its prediction of what searches find, of the baselines and of what was found before. If that is one of
    the others, it has that name, and the earlier one another."""
    names = {FOUND, *(each.name for each in applicable(graph, machine))}
    known = [each for each in found if each.name in names]
    best, *more = [_searched(graph, machine, own, seed, known) for own in costs]
    if predicted is not None:
        tried = [best, *more, *(each.strategy for each in known)]
        times_s = predicted(tried)
        best = tried[min(range(len(tried)), key=times_s.__getitem__)]
    others = [each for each in found if each.name != FOUND]
    if any(best.placements == each.strategy.placements for each in others):
        return [Drawn(BEFORE, each.strategy) if each.name == FOUND else each for each in found]
    place = next((i for i, each in enumerate(found) if each.name == FOUND), 1)
    return [*others[:place], Drawn(FOUND, best), *others[place:]][: len(found)]


def to_do_alone(found: Sequence[Drawn], machine: Machine) -> tuple[Drawn, Drawn]:
    """The first in micro-batches, or else the strategy of the most forward tasks on a device; and the one of
    the most pieces."""
    graphs = [task_graph(each.strategy, machine, AnalyticCosts()) for each in found]
    forward = [[task.resource for task in own.tasks if task.kind is TaskKind.FORWARD] for own in graphs]
    finest = np.argmax([max(Counter(each).values()) for each in forward])
    divided = _in_micro_batches(found[0].strategy, machine)
    finer = found[int(finest)] if divided is None else Drawn(f"{found[0].name}, in micro-batches", divided)
    return finer, found[int(np.argmax([pieces_in(own) for own in graphs]))]


def _in_micro_batches(strategy: Strategy, machine: Machine) -> Strategy | None:
    """The same in as many micro-batches as can be, up to a few; None if there are some already, or can be
    none."""
    if strategy.pipeline is not None:
        return None
    for count, schedule in product(MICRO_BATCHES, Schedule):
        with contextlib.suppress(StrategyError):
            divided = strategy.pipelined(Pipeline(count, schedule)).checked(machine)
            if divided.placements != strategy.placements:
                return divided
    return None


def _searched(
    graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int, known: Sequence[Drawn]
) -> Strategy:
    """The best that a search finds, which starts from what is known, among other things."""
    return mcmc(
        graph,
        machine,
        costs,
        budget=Budget(None, PROPOSALS),
        seed=seed,
        threads=1,
        known={each.name: each.strategy for each in known if each.strategy.graph is graph},
        in_buckets=True,  # as they are run
    ).strategy


def _add(found: list[Drawn], new: Drawn) -> None:
    if all(new.strategy.placements != old.strategy.placements for old in found):
        found.append(new)


def _changed(strategy: Strategy, machine: Machine, random: Random) -> Strategy:
    names = [block.name for block in strategy.blocks]
    chosen = set(random.sample(names, max(1, round(CHANGED_SHARE * len(names)))))
    placements = {
        block.name: Space(strategy.graph, block, len(machine.devices)).drawn(random)
        if block.name in chosen
        else strategy.placements[block.name]
        for block in strategy.blocks
    }
    return Strategy(strategy.graph, placements, strategy.apart)
