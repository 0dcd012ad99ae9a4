"""Sequential optimization (Unity 6.2: "TASO first and FlexFlow second"): rewrite, then parallelize.

    TASO       the graph that takes least on one device, by the same backtracking as the joint search
               (`unity.selecting`), with a machine of one device
    FlexFlow   the paper's Markov chains (`mcmc-paper`) over its space on that graph: sample, attribute and
               parameter dims, and no reductions (FlexFlow, Table 2)

What it cannot find is what the first step threw away: a graph that is slower on one device and faster on
many.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.strategy.blocks import blocks
from soapstone.strategy.strategy import Strategy

FLEXFLOW_STARTS = ("data_parallel", "krizhevsky", "wu", "dlrm_expert", "random")
"""Those of `mcmc-paper` that split no reductions: all but Megatron's."""

MOST_PROPOSALS, LEAST_PROPOSALS, SHARDS = 2000, 100, 400_000
"""[choice] Proposals of each chain: fewer where blocks times devices are many, so that the baseline takes
seconds, and not minutes."""


def taso_then_flexflow(
    graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int, most_proposals: int = MOST_PROPOSALS
) -> Strategy:
    """The strategy found for the graph that was found first."""
    from soapstone.search.mcmc import RULES, Budget, mcmc

    fast = fastest_on_one_device(graph, machine, costs)
    size = len(blocks(fast)) * len(machine.devices)
    proposals = min(most_proposals, max(LEAST_PROPOSALS, SHARDS // max(1, size)))
    return mcmc(
        fast,
        machine,
        costs,
        method=replace(RULES["mcmc-paper"], starts=FLEXFLOW_STARTS),
        budget=Budget(None, proposals),
        seed=seed,
        without=frozenset({Kind.REDUCTION}),
    ).strategy


def fastest_on_one_device(graph: Graph, machine: Machine, costs: AnalyticCosts) -> Graph:
    """What a graph optimizer that knows no parallelism makes of a graph."""
    from soapstone.search.unity.selecting import fastest_alone

    return fastest_alone(graph, machine, costs, lambda: False).graph
