"""Finding a plan: a search by its name, and what is taken of what it found.

find      the search itself: one entry of `SEARCHES` for each way to search
settled   the plan: what was found, with its exact prediction; where that does not fit in memory, the
          fastest baseline that does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import SearchError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.checks import did_you_mean
from soapstone.plan import Plan, Simulation, simulation
from soapstone.search.baselines import applicable, baseline
from soapstone.search.mcmc import RULES, Budget, mcmc
from soapstone.search.report import SearchReport, ShowSearch
from soapstone.strategy.blocks import blocks
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import native_tasks

EXPERTS = ("krizhevsky", "wu", "megatron", "dlrm_expert")
"""The baselines that a person who knows the model would choose."""

RESORTS = ("data_parallel", "optcnn", *EXPERTS, "model_parallel")
"""The baselines that are tried when what was found does not fit in memory."""


@dataclass(frozen=True)
class Options:
    """How to search, and what for: `optimizer` says how much memory a weight takes, `slack` by what part the
    strategy may take longer than the best that was found, if links are then less busy."""

    search: str = "mcmc"
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    threads: int = 2
    optimizer: str = "momentum"
    slack: float = 0.0


Search = Callable[[Graph, Machine, AnalyticCosts, Options, ShowSearch | None], SearchReport]


def _by_chains(
    method: str,
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None,
) -> SearchReport:
    return mcmc(
        graph,
        machine,
        costs,
        method=method,
        budget=options.budget,
        seed=options.seed,
        threads=options.threads,
        optimizer=options.optimizer,
        slack=options.slack,
        show=show,
    )


SEARCHES: Mapping[str, Search] = MappingProxyType({name: partial(_by_chains, name) for name in RULES})
"""Every way to search, by name."""


def find(
    graph: Graph,
    machine: Machine,
    costs: AnalyticCosts,
    options: Options,
    show: ShowSearch | None = None,
) -> SearchReport:
    """What the search of `options` finds. A KeyboardInterrupt ends it with the best so far."""
    if not blocks(graph):
        raise SearchError(
            f"model '{graph.name}' has nothing to split: no operator of it depends on a weight; give it one"
        )
    return search_named(options.search)(graph, machine, costs, options, show)


def search_named(name: str) -> Search:
    """The search of that name; an error says what there is."""
    if name not in SEARCHES:
        raise SearchError(f"there is no search {name!r}{did_you_mean(name, SEARCHES)}")
    return SEARCHES[name]


@dataclass(frozen=True)
class Settled:
    """A plan and its simulation. `instead` names the baseline that took the place of what the search had
    found, because that does not fit in memory and the baseline does."""

    plan: Plan
    simulation: Simulation
    instead: str | None = None


def settled(report: SearchReport, machine: Machine, model: str, options: Options) -> Settled:
    """The plan that a search leads to. One that does not fit is never preferred to one that does."""
    simulated = simulation(report.strategy, machine, optimizer=options.optimizer)
    fits = simulated.prediction.fits(machine)
    chosen, instead = report.strategy, None
    if not fits:
        for name, strategy in _fastest_first(report.strategy.graph, machine, options.seed):
            other = simulation(strategy, machine, optimizer=options.optimizer)
            if other.prediction.fits(machine):
                simulated, chosen, instead, fits = other, strategy, name, True
                break
    taken = replace(report, strategy=chosen, makespan_s=simulated.timeline.makespan_s, fits=fits)
    document = {**taken.document(), "instead": instead}
    plan = Plan(chosen, machine, simulated.prediction, model, optimizer=options.optimizer, search=document)
    return Settled(plan, simulated, instead)


def _fastest_first(graph: Graph, machine: Machine, seed: int) -> Iterator[tuple[str, Strategy]]:
    """The baselines to fall back on, the fastest first."""
    costs, names = AnalyticCosts(), {each.name for each in applicable(graph, machine)}
    found = {name: baseline(name, graph, machine, costs, seed) for name in RESORTS if name in names}

    def seconds(item: tuple[str, Strategy]) -> float:
        return native_tasks(item[1], machine, costs).simulated()[2]

    return iter(sorted(found.items(), key=seconds))
