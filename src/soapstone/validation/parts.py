"""What the durations of a plan's tasks are made of, so that factors of them can be fitted to whole steps.

    duration = compute * seconds + overhead_s * operators + message_s * messages        of a compute task
               + handing * (m * messages + p * pieces + b * their bytes + c * calls)
               + handing * (w + s) + wake_s where it needs something of another device
             = wire / bandwidth + latency * latencies                                   of a message

`seconds` are the profile's, `operators` the passes of operators in the task, `messages` those that it waits
for or that wait for it (handing one over takes time of the device's own thread, `m` as measured), `pieces`
those that are cut out of a tensor or put into one for it (which takes `p`, and `b` for each byte that comes,
as measured), `calls` the calls of autograd that begin with it (`c`, as measured), `w` is what meeting another
rank takes, and `s` what waking does where it waited for so long that it slept (`meeting`); `wire` is the time
that the bytes alone take and `latencies` the rest (`traffic`).
Which device waits for what is seen in the simulated timeline. The factors are `Calibration`'s.

A GPU computes while its rank launches the next operators and sees to messages. So there a task is two: its
kernels (`compute * seconds`), and launching them, by a thread that does so for one task after the other and
waits for messages, unless the GPU itself does (all else, and what launching takes by the profile). Kernels
begin when the thread comes to their task, and who needs the task waits for both.

Where ranks share memory (`runtime.mailbox`) the devices copy messages themselves: half of `wire` is the
sender's, at the task after which it gives the message away, and half the receiver's, at the task before which
it takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.launching import Launches
from soapstone.cost.work import Work
from soapstone.machine import DeviceKind, Machine
from soapstone.plans import Plan
from soapstone.runtime.as_run import AsRun, as_run
from soapstone.sim.reference import Timeline, simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.passes import passes_in, recosted
from soapstone.tasks.task import COMPUTE_KINDS, BufferKind, Key, TaskGraph, TaskKind
from soapstone.validation.adding import adding_s
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import NO_CROWDING, Crowding, at_levels, crowded
from soapstone.validation.ends import (
    HandedOver,
    copied_by_devices,
    devices_between,
    ends_of,
    far_apart,
    handed_over,
    meets_of,
    move_of,
    summed_bytes,
)
from soapstone.validation.handing import Handing
from soapstone.validation.in_step import InStep, count_of_parts
from soapstone.validation.meeting import waking_s
from soapstone.validation.sharing import Kinds, going, in_traffic, on_one_bus
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, Traffic
from soapstone.validation.unsteady import Unsteady, slowness

Floats = NDArray[np.float64]

Passes = Mapping[int, Sequence[tuple[Work | None, float]]]
"""As `passes_in` has them."""


@dataclass(frozen=True)
class _Counting:
    """Costs under which operators' passes and updates take what functions say."""

    of_pass: Callable[[Work], float]
    of_update: Callable[[int, DeviceKind], float]

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        """What the function says."""
        del kind
        return self.of_pass(work)

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        """What the function says."""
        return self.of_update(size_bytes, kind)


@dataclass(frozen=True)
class Parts:
    """The tasks of a plan as the runtime runs them, and what their durations are made of."""

    tasks: TaskGraph
    seconds: Floats
    launching_s: Floats
    operators: Floats
    handed: HandedOver
    calls: Floats
    meets: Floats
    met_s: Floats
    woken_s: Floats
    handing: Handing
    wire_s: Floats
    latency_s: Floats
    flat: tuple[Any, ...]
    launches_ahead: bool
    beside_s: float = 0.0
    unsteady: float = 1.0

    def durations(self, found: Calibration) -> Floats:
        """The durations under a calibration; on GPUs those of launching follow."""
        computed = found.compute * self.seconds
        handled = self.handed.taken_s(self.handing, self.calls)
        messages_s = found.message_s * self.handed.messages
        beside = found.overhead_s * self.operators + messages_s + found.wake_s * self.meets
        sent = self.wire_s / found.bandwidth + found.latency * self.latency_s
        if not self.launches_ahead:
            return computed + found.handing * (handled + self.met_s + self.woken_s) + beside + sent
        thread = found.handing * (self.launching_s + handled) + beside
        return np.concatenate([computed + sent, thread[self._computing]])

    @cached_property
    def _computing(self) -> NDArray[np.int64]:
        """The numbers of the compute tasks."""
        return np.flatnonzero([task.kind in COMPUTE_KINDS for task in self.tasks.tasks])

    def makespan_s(self, found: Calibration) -> float:
        """The predicted step under a calibration."""
        return self._beside_too(native.simulate(self.durations(found), *self.flat)[2], found)

    def _beside_too(self, makespan_s: float, found: Calibration) -> float:
        """A simulated step with what it takes beside its tasks."""
        return self.unsteady * (makespan_s + self.beside_s) + found.step_s

    @property
    def alone(self) -> Parts:
        """The same with nobody at the other ends of belts: what comes is there at once."""
        return replace(self, wire_s=np.zeros_like(self.wire_s), latency_s=np.zeros_like(self.latency_s))

    def timeline(self, found: Calibration) -> Timeline:
        """When each task runs under a calibration; on GPUs, launching is a part of it."""
        start_s, end_s, makespan_s = native.simulate(self.durations(found), *self.flat)
        count = len(self.tasks.tasks)
        if self.launches_ahead:
            end_s[self._computing] = np.maximum(end_s[self._computing], end_s[count:])
        begun_s, done_s = (self.unsteady * each[:count] for each in (start_s, end_s))
        return Timeline(begun_s.tolist(), done_s.tolist(), self._beside_too(makespan_s, found))

    def among(self, found: Unsteady, machine: Machine, busy: Floats) -> Parts:
        """The same where ranks are as fast as in these rounds, with so many at work during each task. That
        ranks wait for the slowest counts once: in their meetings, or, if that is more, by the rounds."""
        if not found.rounds:
            return self
        number = {device.name: i for i, device in enumerate(machine.devices)}
        place = np.array([number.get(task.resource, -1) for task in self.tasks.tasks])
        unmet = replace(self, met_s=np.zeros_like(self.met_s))
        said_s = unmet._among(found, place, busy)
        if self.met_s.any():
            evened = replace(found, rounds=tuple(each.evened for each in found.rounds))
            said_s = max(said_s, self._among(evened, place, busy))
        return replace(self, unsteady=said_s / native.simulate(self.durations(Calibration()), *self.flat)[2])

    def _among(self, found: Unsteady, place: NDArray[np.int64], busy: Floats) -> float:
        """Seconds of a step in these rounds. What messages and meetings take is not of the moment to which
        rounds are relative: it was measured before the strategies and after them."""
        steady_s = self.durations(Calibration())
        if self.launches_ahead:  # threads differ, not kernels, and all of them are at work
            times = slowness(found.rounds, place, np.full(len(place), len(found.rounds[0].each)))
            ways_s = steady_s * np.hstack([np.ones_like(times), times[:, self._computing]])
        else:
            none = np.zeros_like(self.calls)
            pieces = self.handed.cut + self.handed.put
            own_s = self.seconds + self.handing.taken_s(none, pieces, self.handed.came_bytes, self.calls)
            ways_s = steady_s + own_s * (slowness(found.rounds, place, busy) - 1.0)
        return float(np.quantile([native.simulate(each_s, *self.flat)[2] for each_s in ways_s], found.faster))


def parts_of(
    plan: Plan,
    costs: AnalyticCosts,
    crowding: Crowding = NO_CROWDING,
    *,
    launches: Launches | None = None,
    backend: str = "gloo",
    traffic: Traffic = AS_THE_MACHINE_SAYS,
) -> Parts:
    """The parts of a plan's durations; `crowding` says what ranks take from each other, `launches` what
    GPUs take of the threads that launch their kernels (None where there are none), `backend` what carries
    messages (`Wire.backend`), and `traffic` what bytes take."""
    shares_memory, on_a_bus = backend == "memory", backend == "belts"
    strategy, machine = plan.strategy, plan.machine
    plain = task_graph(strategy, machine, costs)
    timeline = simulate(plain)
    ran = as_run(
        strategy,
        plain,
        timeline,
        device_count=len(machine.devices),
        backend=backend,
    )
    # All weights are updated by one call: what each adds to it is in what was measured.
    (counted,) = recosted(plain, strategy, machine, [_Counting(lambda _: 1.0, lambda *_: 0.0)])
    swift = task_graph(strategy, _without_latency(machine), costs)
    is_compute = np.array([task.kind in COMPUTE_KINDS for task in plain.tasks])
    full = np.array([task.duration_s for task in plain.tasks])
    wire_s = np.where(is_compute, 0.0, [task.duration_s for task in swift.tasks])
    latency_s = np.where(is_compute, 0.0, full - wire_s)
    for key in ran.left_out:
        wire_s[plain.ids[key]] = latency_s[plain.ids[key]] = 0.0
    ends = ends_of(plain, timeline, machine)
    is_sum = np.array([task.kind is TaskKind.ALL_REDUCE for task in plain.tasks])
    of_bytes, among, of_latency = _sum_factors(plain, ran.led_by, traffic)
    of_size = np.array([traffic.of_message(task.size_bytes) for task in plain.tasks])
    wire_s *= np.where(is_sum, of_bytes, of_size * (1.0 if on_a_bus else traffic.messages[0]))
    latency_s *= np.where(is_sum, of_latency, traffic.latency)
    is_copied = _are_copied(plain, machine, traffic, shares_memory=shares_memory)
    handed = handed_over(plain, ends, ran, traffic, np.where(is_copied, wire_s, 0.0))
    calls = np.array([float(task.key in ran.begins) for task in plain.tasks])
    handling_s = handed.taken_s(traffic.handing, calls)
    copying_s = copied_by_devices(plain, ends, np.where(is_copied, wire_s, 0.0))
    wire_s = np.where(is_copied, 0.0, wire_s)
    if shares_memory:
        wire_s, copying_s = copying_s, np.zeros_like(copying_s)
    for member, leader in ran.led_by.items():
        a, b = plain.ids[member], plain.ids[leader]
        wire_s[b] += wire_s[a]
        latency_s[b] = max(latency_s[b], latency_s[a])
        wire_s[a] = latency_s[a] = 0.0
    tasks = ran.tasks
    own_s, thread_s = np.where(is_compute, full, 0.0), np.zeros((1, len(full)))
    if launches is not None:
        own_s, thread_s = _launched(plain, strategy, machine, costs, launches, crowding)
    launching_s = thread_s[-1]
    flat = _flat(
        tasks,
        _lanes(plain, len(machine.devices))
        if on_a_bus
        else _carriers(tasks, has_links=not shares_memory, sums_apart=traffic.delay is not None),
    )
    if launches is not None:
        most_ahead = _most_ahead(ran, launching_s, crowding.ahead_s)
        flat = _with_launching(tasks, flat, most_ahead, awaits_messages=not on_a_bus)

    def simulated(durations: Floats) -> tuple[Floats, Floats]:
        count = len(durations)
        threads = (launching_s + handling_s)[is_compute] if launches is not None else ()
        start_s, end_s, _ = native.simulate(np.concatenate([durations, threads]), *flat)
        return start_s[:count], end_s[:count]

    levels_s = np.outer(crowding.usual, own_s)
    if crowding.operators or (crowding.in_step and launches is None):
        levels_s = _crowded_apart(plain, strategy, machine, costs, launches, crowding)
    levels_s += np.outer(crowding.stretch, copying_s)
    levels_s = np.array(crowding.real)[:, None] * (
        levels_s + np.outer(crowding.adding_up, adding_s(plain, timeline, machine, costs, crowding.adding))
    )
    seconds, busy = crowded(levels_s, wire_s + latency_s, is_compute, simulated)
    launching_s = at_levels(thread_s, busy)
    kinds = Kinds(~is_compute & ~is_sum, is_sum, flat[0][: len(full)], tasks.after)
    if on_a_bus:
        wire_s, latency_s = on_one_bus(wire_s, latency_s, seconds, kinds, going(plain), traffic, simulated)
    elif not shares_memory:
        wire_s, latency_s = in_traffic(wire_s, latency_s, seconds, kinds, traffic, among, simulated)
    meets = meets_of(plain, ends, {*ran.led_by, *ran.left_out})
    met_s = traffic.meeting_s * meets
    handled_s = handling_s + met_s if launches is None else np.zeros_like(met_s)
    waited_s = kinds.waited_s(is_compute, *simulated(seconds + wire_s + latency_s + handled_s))
    return Parts(
        tasks,
        seconds,
        launching_s,
        np.array(counted),
        handed,
        calls,
        meets,
        met_s,
        meets * waking_s(traffic.waking, waited_s),
        traffic.handing,
        wire_s,
        latency_s,
        flat,
        launches is not None,
        crowding.beside_s,
    ).among(crowding.unsteady, machine, busy)


def _are_copied(
    tasks: TaskGraph, machine: Machine, traffic: Traffic, *, shares_memory: bool
) -> NDArray[np.bool_]:
    """Which messages devices copy themselves: all, or those within a computer where others are elsewhere."""
    if shares_memory or not traffic.within_nodes:
        return np.full(len(tasks.tasks), shares_memory)
    return ~far_apart(tasks, machine)


def _launched(
    tasks: TaskGraph,
    strategy: Strategy,
    machine: Machine,
    costs: AnalyticCosts,
    launches: Launches,
    crowding: Crowding,
) -> tuple[Floats, Floats]:
    """For each compute task what its kernels take; and for 1, 2, ... devices at work what launching them
    does. Updates are launched all together."""

    def threads(level: int) -> _Counting:
        def of_pass(work: Work) -> float:
            seconds = crowding.launching[level] * launches.of(work).launching_s
            return crowding.in_step_s(work, seconds, level + 1)

        return _Counting(of_pass, lambda *_: 0.0)

    kernels = _Counting(lambda work: launches.of(work).kernels_s, costs.update_s)
    levels = [threads(level) for level in range(len(crowding.launching))]
    own_s, *launching_s = recosted(tasks, strategy, machine, [kernels, *levels])
    return np.array(own_s), np.array(launching_s) + _around(tasks, strategy, crowding)


def _crowded_apart(
    tasks: TaskGraph,
    strategy: Strategy,
    machine: Machine,
    costs: AnalyticCosts,
    launches: Launches | None,
    crowding: Crowding,
) -> Floats:
    """For 1, 2, ... devices at work what each task takes, where operators are crowded each in its own way."""
    kind = machine.devices[0].kind

    def at(level: int) -> _Counting:
        def of_pass(work: Work) -> float:
            if launches is not None:
                return crowding.seconds(work, launches.of(work).kernels_s, level + 1)
            seconds = crowding.seconds(work, costs.compute_s(work, kind), level + 1)
            return crowding.in_step_s(work, seconds, level + 1)

        return _Counting(of_pass, lambda *update: crowding.update_s(costs.update_s(*update), level + 1))

    levels = [at(level) for level in range(len(crowding.usual))]
    found = np.array(recosted(tasks, strategy, machine, levels))
    return found if launches is not None else found + _around(tasks, strategy, crowding)


def _around(tasks: TaskGraph, strategy: Strategy, crowding: Crowding) -> Floats:
    """For 1, 2, ... devices at work what each task does beside passes, if that was measured."""
    if not crowding.in_step:
        return np.zeros((1, len(tasks.tasks)))
    passes = passes_in(tasks, strategy)
    own = [_around_passes(tasks, passes, each) for each in crowding.in_step]
    return np.array(crowding.stretch)[:, None] * np.array(own)


def _around_passes(tasks: TaskGraph, passes_of: Passes, in_step: InStep) -> Floats:
    """What each task does beside passes: itself, views, what the runtime does between tasks, collecting
    gradients that are added up, and asking for all updates of a device."""
    found = np.zeros(len(tasks.tasks))
    for number, passes in passes_of.items():
        is_forward = tasks.tasks[number].kind is TaskKind.FORWARD
        longer = in_step.forward if is_forward else in_step.backward
        found[number] = in_step.between_s + longer.part_s * count_of_parts(passes)
        if is_forward:
            views = sum(share for work, share in passes if work is None)
            found[number] += in_step.forward.task_s + in_step.forward.view_s * views
    asked: set[str] = set()  # devices that have asked for their updates
    for buffer in tasks.buffers:
        if buffer.kind is BufferKind.WEIGHT_GRADIENT:
            for number in (tasks.ids[key] for key in buffer.needed_by):
                place = tasks.tasks[number].resource
                found[number] += in_step.update_s + in_step.beside_weight_s
                found[number] += in_step.update_once_s * (place not in asked)
                asked.add(place)
                before = (tasks.tasks[i].kind for i in tasks.after[number])
                if any(kind is TaskKind.ALL_REDUCE for kind in before):
                    found[number] += in_step.collecting_s(buffer.size_bytes)
    return found


def _most_ahead(ran: AsRun, launching_s: Floats, ahead_s: float | None) -> Mapping[int, tuple[int]]:
    """For compute tasks, by number, the last task of their device whose kernels must be done before they are
    launched: all that was launched since takes `ahead_s` to launch, or more."""
    found: dict[int, tuple[int]] = {}
    if ahead_s is None:
        return found
    for keys in ran.walked.values():
        numbers = [ran.tasks.ids[key] for key in keys]
        launched_s = np.cumsum(launching_s[numbers])
        places = np.searchsorted(launched_s, launched_s - ahead_s, side="right").tolist()
        found |= {
            number: (numbers[place - 1],)
            for number, place in zip(numbers[1:], places, strict=False)
            if place > 0
        }
    return found


def _with_launching(
    tasks: TaskGraph, flat: tuple[Any, ...], most_ahead: Mapping[int, tuple[int]], *, awaits_messages: bool
) -> tuple[Any, ...]:
    """The tasks for the native simulator, and after them the launching of each compute task, which one thread
    of each device does in the order of its tasks, once their messages are there where it waits for them, and
    the kernels that it must not be further ahead of are done."""
    resource, _, _, count = flat
    computing = [i for i, task in enumerate(tasks.tasks) if task.kind in COMPUTE_KINDS]
    thread = {i: len(tasks.tasks) + n for n, i in enumerate(computing)}
    rows = [[*after, *(thread[i] for i in after if i in thread)] for after in tasks.after]
    rows += [
        [
            *(thread.get(i, i) for i in tasks.after[number] if awaits_messages or i in thread),
            *most_ahead.get(number, ()),
        ]
        for number in computing
    ]
    lengths = [len(row) for row in rows]
    begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    after = np.array([before for row in rows for before in row], dtype=np.int32)
    return np.concatenate([resource, count + resource[computing]]), begin, after, 2 * count


def _without_latency(machine: Machine) -> Machine:
    links = tuple(replace(link, latency_s=0.0) for link in machine.links)
    return replace(machine, links=links)


def _sum_factors(
    tasks: TaskGraph, led_by: Mapping[Key, Key], traffic: Traffic
) -> tuple[Floats, Floats, Floats]:
    """How much longer than the machine says the bytes of each sum take, together with those that it leads or
    that lead it; the part of that which it takes among other sums; and how much longer its latency is. One
    for all else."""
    of_bytes, among, of_latency = np.ones((3, len(tasks.tasks)))
    for key, whole_bytes in summed_bytes(tasks, led_by).items():
        number = tasks.ids[key]
        count = len(move_of(tasks, tasks.tasks[number]).devices)
        of_bytes[number], with_others = traffic.of_sum(count, whole_bytes)
        among[number] = with_others / of_bytes[number]
        of_latency[number] = traffic.latency_of_sum(count)
    return of_bytes, among, of_latency


def _carriers(tasks: TaskGraph, *, has_links: bool, sums_apart: bool) -> tuple[NDArray[np.int32], int]:
    """What carries each task out, by number, and how many there are. Where there are no links, no message
    waits for another, and where sums are apart, none for a sum."""
    numbers = {name: i for i, name in enumerate(tasks.resources)}
    resource = np.array([numbers[task.resource] for task in tasks.tasks], dtype=np.int32)
    count = len(tasks.resources)
    if not has_links:
        messages = np.array([task.kind not in COMPUTE_KINDS for task in tasks.tasks])
        resource[messages] = count + np.arange(messages.sum(), dtype=np.int32)
        count += int(messages.sum())
    elif sums_apart:
        resource[[task.kind is TaskKind.ALL_REDUCE for task in tasks.tasks]] += count
        count *= 2
    return resource, count


def _lanes(tasks: TaskGraph, devices: int) -> tuple[NDArray[np.int32], int]:
    """What carries each task out where there are belts: one for the messages of each two devices in each
    direction, and one for the sums of each device."""
    numbers = {name: i for i, name in enumerate(tasks.resources)}
    found, count = [], len(tasks.resources)
    for task in tasks.tasks:
        if task.kind in COMPUTE_KINDS:
            found.append(numbers[task.resource])
            continue
        sender, receiver = devices_between(move_of(tasks, task), task)
        is_sum = task.kind is TaskKind.ALL_REDUCE
        found.append(count + sender * (devices + 1) + (devices if is_sum else receiver))
    return np.array(found, dtype=np.int32), count + devices * (devices + 1)


def _flat(tasks: TaskGraph, carriers: tuple[NDArray[np.int32], int]) -> tuple[Any, ...]:
    """The tasks for the native simulator."""
    lengths = [len(after) for after in tasks.after]
    begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    after = np.array([before for row in tasks.after for before in row], dtype=np.int32)
    return carriers[0], begin, after, carriers[1]
