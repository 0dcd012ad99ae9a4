"""A Plan: a graph, how it is split and placed on a machine, and what that is predicted to take.

The search makes plans, the runtime runs them, and neither knows the other. A plan holds all that its
prediction follows from, so that anyone can simulate it again and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.measured import MeasuredCosts
from soapstone.cost.profile import Profile
from soapstone.errors import PlanError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.checks import did_you_mean
from soapstone.sim.memory import STATES_PER_WEIGHT, DeviceMemory, peak_memory
from soapstone.sim.outcome import peaks
from soapstone.sim.reference import Timeline, simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.passes import Costs
from soapstone.tasks.task import TaskGraph

COSTS = ("analytic", "measured")
"""Where durations of compute tasks may come from."""


@dataclass(frozen=True)
class Prediction:
    """What one training iteration takes: time, bytes over links, and the most memory of each device."""

    makespan_s: float
    moved_bytes: int
    memory_bytes: tuple[int, ...]

    def fits(self, machine: Machine) -> bool:
        """Whether every device has the memory it needs."""
        return all(
            needed <= device.kind.memory_bytes
            for needed, device in zip(self.memory_bytes, machine.devices, strict=True)
        )


@dataclass(frozen=True)
class Simulation:
    """The one task graph with its times and its memory."""

    tasks: TaskGraph
    timeline: Timeline
    memory: tuple[DeviceMemory, ...]

    @property
    def prediction(self) -> Prediction:
        """The figures that a plan keeps."""
        peaks = tuple(device.peak_bytes for device in self.memory)
        return Prediction(self.timeline.makespan_s, self.tasks.moved_bytes, peaks)


@dataclass(frozen=True)
class Plan:
    """A decision. `model` is what the graph was captured from, as a user writes it (it may be empty);
    `costs` and `optimizer` name what the prediction is based on, and `profiles` holds the measured times of
    it by kind of device; `search` is what the search that found it has to say."""

    strategy: Strategy
    machine: Machine
    prediction: Prediction
    model: str = ""
    costs: str = "analytic"
    optimizer: str = "momentum"
    search: Mapping[str, Any] | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    @property
    def cost_model(self) -> AnalyticCosts:
        """The costs that the prediction is based on."""
        return costs_named(self.costs, self.profiles)

    @property
    def graph(self) -> Graph:
        """The graph that the strategy places."""
        return self.strategy.graph

    @property
    def samples_per_s(self) -> float | None:
        """Training throughput; None for a model without samples or a plan that takes no time."""
        count, makespan_s = self.graph.sample_count, self.prediction.makespan_s
        return count / makespan_s if count and makespan_s else None

    def simulated(self, *, in_buckets: bool = False) -> Simulation:
        """The plan simulated again."""
        return simulation(self.strategy, self.machine, self.cost_model, self.optimizer, in_buckets=in_buckets)

    def executed(self) -> Simulation:
        """The same without what messages take of devices: a rank that hands over and takes messages does so
        within the tasks that give and need them, and has no tasks of its own for it."""
        machine = self.machine.with_message_overhead(0.0)
        return simulation(self.strategy, machine, self.cost_model, self.optimizer)


def planned(
    strategy: Strategy,
    machine: Machine,
    simulated: Simulation | Prediction,
    costs: AnalyticCosts,
    *,
    model: str = "",
    optimizer: str = "momentum",
    search: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a simulated strategy, with the measured times that its prediction rests on."""
    profiles = costs.profiles if isinstance(costs, MeasuredCosts) else {}
    prediction = simulated.prediction if isinstance(simulated, Simulation) else simulated
    return Plan(strategy, machine, prediction, model, costs.name, optimizer, search, profiles)


def predicted(
    strategy: Strategy, machine: Machine, costs: AnalyticCosts, optimizer: str = "momentum"
) -> Prediction:
    """The prediction of `simulation`, by the native core, which is much quicker where devices are many."""
    makespan_s, moved_bytes, memory = peaks(strategy, machine, costs, _states(optimizer))
    return Prediction(makespan_s, moved_bytes, tuple(each.peak_bytes for each in memory))


def simulation(
    strategy: Strategy,
    machine: Machine,
    costs: str | Costs = "analytic",
    optimizer: str = "momentum",
    *,
    in_buckets: bool = False,
) -> Simulation:
    """The simulation of a strategy on a machine; in buckets, its small gradients are summed together, as the
    runtime does it, which predictions leave out."""
    states = _states(optimizer)
    known = costs_named(costs) if isinstance(costs, str) else costs
    tasks = task_graph(strategy, machine, known, in_buckets=in_buckets)
    timeline = simulate(tasks)
    memory = peak_memory(tasks, timeline, len(machine.devices), states)
    return Simulation(tasks, timeline, memory)


def _states(optimizer: str) -> int:
    if optimizer not in STATES_PER_WEIGHT:
        raise PlanError(f"there is no optimizer {optimizer!r}{did_you_mean(optimizer, STATES_PER_WEIGHT)}")
    return STATES_PER_WEIGHT[optimizer]


def costs_named(name: str, profiles: Mapping[str, Profile] | None = None) -> AnalyticCosts:
    """The costs of that name; measured ones rest on profiles."""
    if name not in COSTS:
        raise PlanError(f"there are no costs {name!r}{did_you_mean(name, COSTS)}")
    if name == "analytic":
        return AnalyticCosts()
    if not profiles:
        raise PlanError("measured costs need the times that were measured, and there are none")
    return MeasuredCosts(profiles=profiles)
