"""The exact search finds what trying everything finds, and no bound exceeds what it bounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs
from oracles.strategies import machines

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.exact import exact_search, is_in_space, lower_bound
from soapstone.sim.reference import simulate
from soapstone.strategy.blocks import blocks
from soapstone.strategy.placement import Placement
from soapstone.strategy.space import Space, random_strategy
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.flat import FlatProblem, native_tasks

COSTS = AnalyticCosts()
ROUNDING = 1 + 1e-9
SMALL = ("cpu:1x2", "k80:1x2", "p100:1x2", "cpu:2x1")
FOUR = ("cpu:1x3", "p100:1x4", "k80:1x4", "a100:2x2", "p100:2x2")
MOST_STRATEGIES = 400


@given(graphs(), machines(SMALL))
@settings(max_examples=15, deadline=None)
def test_exact_is_exhaustive(graph: Graph, machine: Machine) -> None:
    """The makespan is the least of all strategies', each built and simulated by the plain Python code."""
    spaces = {block.name: Space(graph, block, len(machine.devices)) for block in blocks(graph)}
    assume(prod(space.count for space in spaces.values()) <= MOST_STRATEGIES)
    least_s = min(
        simulate(
            task_graph(Strategy(graph, dict(zip(spaces, chosen, strict=True))), machine, COSTS)
        ).makespan_s
        for chosen in product(*spaces.values())
    )
    result = exact_search(graph, machine, COSTS, proposals=5)
    assert result.is_optimal
    assert result.space == prod(space.count for space in spaces.values())
    assert least_s <= result.makespan_s <= least_s * ROUNDING
    assert simulate(task_graph(result.strategy, machine, COSTS)).makespan_s == result.makespan_s


@given(graphs(), machines((*SMALL, "cpu:1x3", "p100:1x3")))
@settings(max_examples=15, deadline=None)
def test_exact_among_ranges_is_exhaustive(graph: Graph, machine: Machine) -> None:
    """The same among strategies whose shards are on devices that follow each other."""
    count = len(machine.devices)
    ranges = {block.name: list(_ranges(Space(graph, block, count))) for block in blocks(graph)}
    assume(prod(map(len, ranges.values())) <= MOST_STRATEGIES)
    least_s = min(
        _makespan_s(Strategy(graph, dict(zip(ranges, chosen, strict=True))), machine)
        for chosen in product(*ranges.values())
    )
    result = exact_search(graph, machine, COSTS, has_ranges=True, proposals=5)
    assert result.is_optimal
    assert result.space == prod(map(len, ranges.values()))
    assert least_s <= result.makespan_s <= least_s * ROUNDING
    assert is_in_space(result.strategy, has_ranges=True)


@given(graphs(), machines(SMALL), st.integers(0, 2**16), st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_parts_of_the_tree_and_restarts_leave_nothing_out(
    graph: Graph, machine: Machine, seed: int, parts: int
) -> None:
    """Searches that share a problem, each of which begins anew now and then, find together what trying
    everything finds, from any start and whichever block they place first."""
    spaces = {block.name: Space(graph, block, len(machine.devices)) for block in blocks(graph)}
    assume(prod(space.count for space in spaces.values()) <= MOST_STRATEGIES)
    least_s = min(
        _makespan_s(Strategy(graph, dict(zip(spaces, chosen, strict=True))), machine)
        for chosen in product(*spaces.values())
    )
    problem = FlatProblem(graph, machine, COSTS)
    start = _placed(problem, random_strategy(graph, len(machine.devices), Random(seed)))
    alone = native.ExactSearch(problem.native, 0.0, first_restart=1 + seed % 9)
    alone.offer(start)
    while not alone.step(3):
        assert alone.lower_bound_s <= least_s * ROUNDING
    assert alone.best_s == least_s
    found = []
    for part in range(parts):
        search = native.ExactSearch(problem.native, 0.0)
        search.offer(start)
        search.split(seed % len(problem.blocks), part, parts)
        while not search.step(3):
            pass
        found.append(search.best_s)
    assert min(found) == least_s


@given(graphs(), machines(FOUR), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_partial_bounds_hold_for_all_relabellings(graph: Graph, machine: Machine, seed: int) -> None:
    """With any number of its blocks placed, a strategy's bound is at most its own makespan, and that of every
    strategy that differs from it by a relabelling that the search takes for a symmetry."""
    count = len(machine.devices)
    strategy = random_strategy(graph, count, Random(seed))
    problem = FlatProblem(graph, machine, COSTS)
    search = native.ExactSearch(problem.native, 0.0)
    bounds_s = search.bounds(_placed(problem, strategy))
    assert max(bounds_s) <= _makespan_s(strategy, machine) * ROUNDING
    symmetries = [to for to in permutations(range(count)) if _is_symmetry(machine, to)]
    assert len(symmetries) == search.symmetry
    for to in symmetries:
        assert max(bounds_s) <= _makespan_s(_relabelled(strategy, to), machine) * ROUNDING


@given(graphs(), machines(FOUR), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_partial_bounds_among_ranges_hold(graph: Graph, machine: Machine, seed: int) -> None:
    """Without relabellings, bounds know which of several copies of a box is sent; they hold all the same."""
    random = Random(seed)
    strategy = Strategy(
        graph,
        {
            block.name: random.choice(list(_ranges(Space(graph, block, len(machine.devices)))))
            for block in blocks(graph)
        },
    )
    problem = FlatProblem(graph, machine, COSTS)
    search = native.ExactSearch(problem.native, 0.0, has_ranges=True)
    assert search.symmetry == 1
    assert max(search.bounds(_placed(problem, strategy))) <= _makespan_s(strategy, machine) * ROUNDING


@given(graphs(), machines(), st.integers(0, 2**16))
@settings(max_examples=80, deadline=None)
def test_lower_bound_holds(graph: Graph, machine: Machine, seed: int) -> None:
    """No strategy of the space takes less time."""
    strategy = random_strategy(graph, len(machine.devices), Random(seed))
    assert lower_bound(graph, machine, COSTS).seconds <= _makespan_s(strategy, machine)


def _ranges(space: Space) -> Iterator[Placement]:
    """The placements on devices that follow each other."""
    for placement in space:
        first = placement.devices[0]
        if placement.devices == tuple(range(first, first + len(placement.devices))):
            yield placement


def _makespan_s(strategy: Strategy, machine: Machine) -> float:
    return native_tasks(strategy, machine, COSTS).simulated()[2]


def _placed(problem: FlatProblem, strategy: Strategy) -> list[tuple[list[int], int, list[int]]]:
    chosen = [strategy.placements[block.name] for block in problem.blocks]
    return [
        (problem.degrees(block, placement), placement.copies, list(placement.devices))
        for block, placement in zip(problem.blocks, chosen, strict=True)
    ]


def _relabelled(strategy: Strategy, to: tuple[int, ...]) -> Strategy:
    placements = {
        name: Placement(each.degrees, tuple(to[device] for device in each.devices), each.copies)
        for name, each in strategy.placements.items()
    }
    return Strategy(strategy.graph, placements)


def _is_symmetry(machine: Machine, to: tuple[int, ...]) -> bool:
    """Kinds, routes and the direction of rings stay as they are."""
    count = len(machine.devices)
    if any(machine.devices[a].kind != machine.devices[to[a]].kind for a in range(count)):
        return False
    links: set[tuple[str, str]] = set()
    for a, b in permutations(range(count), 2):
        links.add((machine.narrowest_link(a, b).name, machine.narrowest_link(to[a], to[b]).name))
        if machine.bandwidth(a, b) != machine.bandwidth(to[a], to[b]):
            return False
        if machine.latency(a, b) != machine.latency(to[a], to[b]):
            return False
    if len({a for a, _ in links}) != len(links) or len({b for _, b in links}) != len(links):
        return False
    rings = [[(d + turn) % count for d in range(count)] for turn in range(count)]
    return list(to) in rings
