"""What the durations of a plan's tasks are made of, so that factors of them can be fitted to whole steps.

    duration = compute * seconds + overhead_s * operators + message_s * messages        of a compute task
             = wire / bandwidth + latency * latencies                                   of a message

`seconds` are the profile's, `operators` the passes of operators in the task, `messages` those that it waits
for or that wait for it (handing one over takes time of the device's own thread); `wire` is the time that the
bytes alone take and `latencies` the rest. The factors are `Calibration`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.work import Work
from soapstone.machine import DeviceKind, Machine
from soapstone.plans import Plan
from soapstone.runtime.as_run import as_run
from soapstone.sim.memory import STATES_PER_WEIGHT, peak_memory
from soapstone.sim.reference import simulate
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import crowded

Floats = NDArray[np.float64]


class _Counting:
    """Costs under which every operator's pass takes one second."""

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """One."""
        del work, kind
        return 1.0

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        """One."""
        del size_bytes, kind
        return 1.0


@dataclass(frozen=True)
class Parts:
    """The tasks of a plan as the runtime runs them, and what their durations are made of."""

    tasks: TaskGraph
    seconds: Floats
    operators: Floats
    messages: Floats
    wire_s: Floats
    latency_s: Floats
    flat: tuple[Any, ...]
    states_per_weight: int

    def durations(self, found: Calibration) -> Floats:
        """The durations under a calibration."""
        own = found.compute * self.seconds + found.overhead_s * self.operators
        own += found.message_s * self.messages
        return own + self.wire_s / found.bandwidth + found.latency * self.latency_s

    def makespan_s(self, found: Calibration) -> float:
        """The predicted step under a calibration."""
        return native.simulate(self.durations(found), *self.flat)[2]

    def graph(self, found: Calibration) -> TaskGraph:
        """The tasks with their durations under a calibration."""
        durations = self.durations(found)
        tasks = tuple(
            replace(t, duration_s=float(d)) for t, d in zip(self.tasks.tasks, durations, strict=True)
        )
        return replace(self.tasks, tasks=tasks)

    def memory_bytes(self, found: Calibration, device_count: int) -> tuple[int, ...]:
        """The predicted peak of each device under a calibration."""
        graph = self.graph(found)
        memory = peak_memory(graph, simulate(graph), device_count, self.states_per_weight)
        return tuple(device.peak_bytes for device in memory)


def parts_of(plan: Plan, costs: AnalyticCosts, crowding: Sequence[float] = (1.0,)) -> Parts:
    """The parts of a plan's durations; `crowding` says what ranks take from each other."""
    strategy, machine = plan.strategy, plan.machine
    plain = task_graph(strategy, machine, costs)
    ran = as_run(strategy, plain, simulate(plain))
    counted = task_graph(strategy, machine, _Counting())
    swift = task_graph(strategy, _without_latency(machine), costs)
    is_compute = np.array([task.kind in COMPUTE_KINDS for task in plain.tasks])
    full = np.array([task.duration_s for task in plain.tasks])
    wire_s = np.where(is_compute, 0.0, [task.duration_s for task in swift.tasks])
    latency_s = np.where(is_compute, 0.0, full - wire_s)
    for member, leader in ran.led_by.items():
        a, b = plain.ids[member], plain.ids[leader]
        wire_s[b] += wire_s[a]
        latency_s[b] = max(latency_s[b], latency_s[a])
        wire_s[a] = latency_s[a] = 0.0
    for key in ran.left_out:
        wire_s[plain.ids[key]] = latency_s[plain.ids[key]] = 0.0
    flat = _flat(ran.tasks)
    seconds = crowded(
        np.where(is_compute, full, 0.0),
        wire_s + latency_s,
        is_compute,
        crowding,
        lambda durations: native.simulate(durations, *flat)[:2],
    )
    return Parts(
        ran.tasks,
        seconds,
        np.where(is_compute, [task.duration_s for task in counted.tasks], 0.0),
        _messages(ran.tasks, {*ran.led_by, *ran.left_out}),
        wire_s,
        latency_s,
        flat,
        STATES_PER_WEIGHT[plan.optimizer],
    )


def _without_latency(machine: Machine) -> Machine:
    links = tuple(replace(link, latency_s=0.0) for link in machine.links)
    return Machine(machine.name, machine.devices, links, machine.switches)


def _messages(tasks: TaskGraph, led: set[Any]) -> Floats:
    """For each compute task, the messages that it hands over or takes."""
    found = np.zeros(len(tasks.tasks))
    for number, (task, after) in enumerate(zip(tasks.tasks, tasks.after, strict=True)):
        is_compute = task.kind in COMPUTE_KINDS
        for before in after:
            other = tasks.tasks[before]
            if is_compute and other.kind not in COMPUTE_KINDS and other.key not in led and not other.key[-1]:
                found[number] += 1
            elif not is_compute and other.kind in COMPUTE_KINDS and task.key not in led and not task.key[-1]:
                found[before] += 1
    return found


def _flat(tasks: TaskGraph) -> tuple[Any, ...]:
    numbers = {name: i for i, name in enumerate(tasks.resources)}
    resource = np.array([numbers[task.resource] for task in tasks.tasks], dtype=np.int32)
    lengths = [len(after) for after in tasks.after]
    begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    after = np.array([before for row in tasks.after for before in row], dtype=np.int32)
    return resource, begin, after, len(tasks.resources)
