"""Every baseline by its name: what it is, which models it has a meaning for, and the strategy it gives.

A baseline that does not apply says why, in a clause that completes "... does not apply to MODEL: ". All are
deterministic: those that draw from chance take it from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.baselines import (
    colocrl,
    dlrm_expert,
    krizhevsky,
    megatron,
    optcnn,
    pipeline,
    simple,
    taso_then_flexflow,
    wu,
    zero,
)
from soapstone.strategy.strategy import Strategy


@dataclass(frozen=True)
class Given:
    """What a baseline is made for, and from."""

    graph: Graph
    machine: Machine
    costs: AnalyticCosts
    seed: int


def _none(graph: Graph, machine: Machine) -> str | None:
    """No objection to any model or machine."""
    del graph, machine
    return None


@dataclass(frozen=True)
class Baseline:
    """A strategy of others. `objection` is None for the graphs and machines that it has a meaning for, and
    `build` is for those alone."""

    name: str
    summary: str
    build: Callable[[Given], Strategy]
    objection: Callable[[Graph, Machine], str | None] = _none


_ALL = (
    Baseline(
        "data_parallel",
        "every block split along samples",
        lambda given: simple.data_parallel(given.graph, given.machine),
    ),
    Baseline(
        "model_parallel",
        "consecutive blocks on each device",
        lambda given: simple.model_parallel(given.graph, given.machine),
    ),
    Baseline(
        "single_device",
        "everything on the first device",
        lambda given: simple.single_device(given.graph, given.machine),
    ),
    Baseline(
        "krizhevsky",
        "samples for convolutions, parameters for dense layers (Krizhevsky 2014)",
        lambda given: krizhevsky.krizhevsky(given.graph, given.machine),
        krizhevsky.objection,
    ),
    Baseline(
        "wu",
        "samples over nodes, recurrent layers over the devices of a node (Wu et al. 2016)",
        lambda given: wu.wu(given.graph, given.machine),
        wu.objection,
    ),
    Baseline(
        "optcnn",
        "the best split of every layer, by dynamic programming (Jia et al. 2018)",
        lambda given: optcnn.optcnn(given.graph, given.machine, given.costs),
    ),
    Baseline(
        "colocrl",
        "whole blocks, placed by reinforcement learning (Mirhoseini et al. 2017)",
        lambda given: colocrl.colocrl(given.graph, given.machine, given.costs, given.seed),
    ),
    Baseline(
        "megatron",
        "column- and row-parallel pairs within groups, samples between them (Shoeybi et al. 2019)",
        lambda given: megatron.megatron(given.graph, given.machine, given.costs),
        megatron.objection,
    ),
    Baseline(
        "dlrm_expert",
        "embedding tables on devices of their own, all else data parallel (Naumov et al. 2019)",
        lambda given: dlrm_expert.dlrm_expert(given.graph, given.machine),
        dlrm_expert.objection,
    ),
    Baseline(
        "pipeline",
        "micro-batches through balanced stages, one forward, one backward (Narayanan et al. 2019)",
        lambda given: pipeline.pipeline(given.graph, given.machine, given.costs),
        pipeline.objection,
    ),
    Baseline(
        "zero",
        "samples split, weights and all that belongs to them stored in shares (Rajbhandari et al. 2020)",
        lambda given: zero.zero(given.graph, given.machine),
    ),
    Baseline(
        "taso_then_flexflow",
        "the graph that is fastest on one device, then FlexFlow's chains (Unity 6.2)",
        lambda given: taso_then_flexflow.taso_then_flexflow(
            given.graph, given.machine, given.costs, given.seed
        ),
    ),
    Baseline(
        "random",
        "every block split and placed at random",
        lambda given: simple.random(given.graph, given.machine, given.seed),
    ),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({each.name: each for each in _ALL})
"""All baselines by name, in the order of the documentation."""


def applicable(graph: Graph, machine: Machine) -> tuple[Baseline, ...]:
    """The baselines that have a meaning for this model on this machine."""
    return tuple(each for each in BASELINES.values() if each.objection(graph, machine) is None)


def baseline(
    name: str, graph: Graph, machine: Machine, costs: AnalyticCosts | None = None, seed: int = 0
) -> Strategy:
    """The strategy of that name; an error says what there is, or why it does not apply."""
    if name not in BASELINES:
        raise StrategyError(f"there is no strategy '{name}': choose one of {', '.join(BASELINES)}")
    objection = BASELINES[name].objection(graph, machine)
    if objection is not None:
        raise StrategyError(f"strategy '{name}' does not apply to '{graph.name}': {objection}")
    return BASELINES[name].build(Given(graph, machine, costs or AnalyticCosts(), seed))
