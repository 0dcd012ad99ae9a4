"""The ends of messages: which tasks of which devices hand over and take what, and what that is of their own
time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soapstone.machine import Machine
from soapstone.ops.box import intersection, volume
from soapstone.runtime.as_run import AsRun
from soapstone.sim.reference import Timeline
from soapstone.tasks.exchange import Exchange, Move, Pattern, Transfer
from soapstone.tasks.placed import BACKWARD
from soapstone.tasks.task import COMPUTE_KINDS, Key, Task, TaskGraph, TaskKind
from soapstone.validation.handing import Handing
from soapstone.validation.traffic import Traffic

Floats = NDArray[np.float64]


def summed_bytes(tasks: TaskGraph, led_by: Mapping[Key, Key]) -> Mapping[Key, int]:
    """For each hop of a sum the bytes of that sum, together with those that it leads or that lead it."""
    moved: dict[Key, int] = {}
    counts: dict[Key, int] = {}
    for task in tasks.tasks:
        if task.kind is TaskKind.ALL_REDUCE:
            counts[task.key] = len(move_of(tasks, task).devices)
            leader = led_by.get(task.key, task.key)
            moved[leader] = moved.get(leader, 0) + task.size_bytes
    return {key: moved[led_by.get(key, key)] * n // (2 * (n - 1)) for key, n in counts.items()}


@dataclass(frozen=True)
class PutTogether:
    """Of what a sink is put together: the elements of each part that is on its device already, and how many
    parts come."""

    here: tuple[int, ...]
    coming: int

    @property
    def count(self) -> int:
        """How many parts there are."""
        return len(self.here) + self.coming


@dataclass(frozen=True)
class Ends:
    """For each message, by number, the last task that makes what is sent on the device that sends it, and the
    first that needs it on the device that it comes to; -1 where no task of a device does. The first task of
    each device. And of what the sinks of each exchange are put together."""

    made: Mapping[int, int]
    taken: Mapping[int, int]
    first: Mapping[int, int]
    together: Mapping[Key, Mapping[int, PutTogether]]


def ends_of(tasks: TaskGraph, timeline: Timeline, machine: Machine) -> Ends:
    """The ends of messages; `tasks` are as they were built, so that each sum has its own."""
    start_s = timeline.start_s
    resources = [device.name for device in machine.devices]
    needed_by: dict[int, list[int]] = {}
    for number, after in enumerate(tasks.after):
        for before in after:
            needed_by.setdefault(before, []).append(number)

    def on(device: int, numbers: Sequence[int]) -> list[int]:
        own = [n for n in numbers if tasks.tasks[n].resource == resources[device]]
        return sorted((n for n in own if tasks.tasks[n].kind in COMPUTE_KINDS), key=lambda n: start_s[n])

    made: dict[int, int] = {}
    taken: dict[int, int] = {}
    for number, task in enumerate(tasks.tasks):
        if task.kind not in COMPUTE_KINDS:
            sender, receiver = devices_between(move_of(tasks, task), task)
            made[number] = next(reversed(on(sender, tasks.after[number])), -1)
            taken[number] = next(iter(on(receiver, needed_by.get(number, []))), -1)
    everything = range(len(tasks.tasks))
    first = {device: next(iter(on(device, everything)), -1) for device in range(len(resources))}
    return Ends(made, taken, first, _together(tasks))


def move_of(tasks: TaskGraph, task: Task) -> Move:
    """The move that a message, or the hop of a collective, is of."""
    return tasks.exchanges[task.key[:-2]].moves[task.key[-2]]


def copied_by_devices(tasks: TaskGraph, ends: Ends, wire_s: Floats) -> Floats:
    """The time of bytes, with the tasks of the devices that copy them: half where they are sent, half where
    they are taken. Where what comes is put together with what is there, that is copied too."""
    found = np.zeros_like(wire_s)
    seen: set[tuple[Key, int]] = set()
    for number in np.flatnonzero(wire_s).tolist():
        task, both = tasks.tasks[number], [ends.made[number], ends.taken[number]]
        there = [end for end in both if end >= 0] or [number]
        for end in there:
            found[end] += wire_s[number] / len(there)
        move = move_of(tasks, task)
        if move.pattern is not Pattern.ALL_REDUCE and ends.taken[number] >= 0:
            own, count = tasks.exchanges[task.key[:-2]], len(move.devices)
            _, receiver = devices_between(move, task)
            sinks = {(task.key[:-2], sink) for sink in move.sinks if own.sinks[sink].device == receiver}
            elements = sum(sum(ends.together[key][sink].here) for key, sink in sinks - seen)
            seen |= sinks
            found[ends.taken[number]] += wire_s[number] / 2 * elements / max(1, move.elements * (count - 1))
    return found


def far_apart(tasks: TaskGraph, machine: Machine) -> NDArray[np.bool_]:
    """Which messages and hops of collectives are among devices of several computers."""
    nodes = [device.node for device in machine.devices]
    return np.array(
        [
            task.kind not in COMPUTE_KINDS and len({nodes[d] for d in _among(move_of(tasks, task), task)}) > 1
            for task in tasks.tasks
        ]
    )


def _among(move: Move, task: Task) -> Sequence[int]:
    """The two devices of a message, and all of a collective, whose hops are as fast as its slowest."""
    return devices_between(move, task) if move.pattern is Pattern.TRANSFER else move.devices


@dataclass(frozen=True)
class HandedOver:
    """For each compute task, the messages that it hands over or takes, a collective being one of them and one
    that goes in pieces more than one; how many are cut out of a tensor for that; how many are put into one;
    the bytes of all that comes, with those that it is put together with; and for how long devices copy what
    is put together, as far as `copied_by_devices` has it."""

    messages: Floats
    cut: Floats
    put: Floats
    came_bytes: Floats
    put_s: Floats

    def taken_s(self, handing: Handing, calls: Floats) -> Floats:
        """What all of this takes of tasks, and so many calls of autograd."""
        return handing.taken_s(self.messages, self.cut + self.put, self.came_bytes, calls)


def handed_over(tasks: TaskGraph, ends: Ends, ran: AsRun, traffic: Traffic, wire_s: Floats) -> HandedOver:
    """What each task hands over and takes. What no task makes (weights) is handed over at the beginning, on
    both sides. `wire_s` are the times of bytes that devices copy."""
    messages = np.zeros(len(tasks.tasks))
    pieces = _Pieces(tasks, ends, wire_s)
    sizes = summed_bytes(tasks, ran.led_by)
    for number, task in enumerate(tasks.tasks):
        if task.kind in COMPUTE_KINDS or task.key in ran.led_by or task.key in ran.left_out:
            continue
        move = move_of(tasks, task)
        made, taken = ends.made[number], ends.taken[number]
        sender, receiver = devices_between(move, task)
        there = (made, taken) if made >= 0 else (ends.first.get(sender, -1), ends.first.get(receiver, -1))
        is_collective = task.key[:-1] in ran.collectives
        if not is_collective:
            handed = _messages(move, task, traffic)
        elif move.pattern is Pattern.ALL_REDUCE:  # at each end of a hop
            handed = traffic.handing.of_sum(len(move.devices), sizes[task.key]) / 2
        else:
            handed = 1.0
        for end in there:
            if end >= 0:
                messages[end] += handed
        if not is_collective:
            pieces.add(number, there[0], taken)
        elif taken >= 0 and tasks.tasks[taken].kind is not TaskKind.UPDATE:
            pieces.came_bytes[taken] += task.size_bytes
    return HandedOver(messages, pieces.cut, pieces.put, pieces.came_bytes, pieces.put_s)


class _Pieces:
    """What tasks cut messages out of, and put them into, and what comes to them."""

    def __init__(self, tasks: TaskGraph, ends: Ends, wire_s: Floats) -> None:
        self.cut, self.put, self.came_bytes, self.put_s = np.zeros((4, len(tasks.tasks)))
        self._tasks, self._ends, self._wire_s = tasks, ends, wire_s
        self._joined: set[tuple[Key, int]] = set()
        self._copied: set[tuple[Key, int]] = set()

    def add(self, number: int, made: int, taken: int) -> None:
        """Add a message between two tasks, -1 where there is none."""
        task = self._tasks.tasks[number]
        key, move = task.key[:-2], move_of(self._tasks, task)
        sender, receiver = devices_between(move, task)
        for transfer in move.transfers:
            if transfer.sender == sender and made >= 0:
                exchange = self._tasks.exchanges[key]
                self.cut[made] += len(transfer.sources) > 1 or not _is_whole(exchange, transfer)
            if transfer.receiver == receiver and taken >= 0:
                own = self._ends.together[key]
                sinks = {(key, sink) for sink in transfer.sinks if own[sink].count > 1}
                if sinks:
                    self._put_in(number, taken, sinks, volume(transfer.box))
                else:
                    share = volume(transfer.box) / move.elements
                    self.came_bytes[taken] += _box_bytes(move, task) * share

    def _put_in(self, number: int, taken: int, sinks: set[tuple[Key, int]], elements: int) -> None:
        """Put a box that came into sinks, and with the first what is there already."""
        task, together = self._tasks.tasks[number], self._ends.together
        move, is_sum = move_of(self._tasks, task), task.kind is TaskKind.ALL_REDUCE
        here = [each for key, sink in sinks - self._joined for each in together[key][sink].here]
        self._joined |= sinks
        self.put[taken] += len(sinks) + len(here)
        self.came_bytes[taken] += _box_bytes(move, task) * (len(sinks) * elements + sum(here)) / move.elements
        if self._wire_s[number]:  # nobody copies what is far
            copied = len(sinks) * elements
            if not is_sum:
                copied += sum(sum(together[key][sink].here) for key, sink in sinks - self._copied)
            self._copied |= sinks
            self.put_s[taken] += self._wire_s[number] / 2 * copied / (_steps(move) * move.elements)


def pieces_in(tasks: TaskGraph) -> int:
    """How many pieces there are of all that is put together from more than one."""
    found = _together(tasks).values()
    return sum(own.count for each in found for own in each.values() if own.count > 1)


def _messages(move: Move, task: Task, traffic: Traffic) -> float:
    """The messages that a message, or the hop of what is made of messages, is at each of its ends."""
    return _steps(move) * traffic.handed(task.size_bytes // _steps(move))


def _steps(move: Move) -> int:
    """How many boxes go over a hop, one after the other."""
    return 1 if move.pattern is Pattern.TRANSFER else len(move.devices) - 1


def _box_bytes(move: Move, task: Task) -> float:
    """The bytes of a box that goes over a hop."""
    is_sum = task.kind is TaskKind.ALL_REDUCE
    return task.size_bytes / _steps(move) * (len(move.devices) / 2 if is_sum else 1.0)


def _is_whole(exchange: Exchange, transfer: Transfer) -> bool:
    return all(exchange.sources[i].box == transfer.box for i in transfer.sources)


def _together(tasks: TaskGraph) -> Mapping[Key, Mapping[int, PutTogether]]:
    """Of what the sinks of each exchange are put together. Gradients of a box that several have read there
    are one, which autograd has added up."""
    found: dict[Key, dict[int, PutTogether]] = {}
    for key, exchange in tasks.exchanges.items():
        is_gradient = key[0] == BACKWARD
        own = {(k, exchange.sources[i].box if is_gradient else i): (i, k) for i, k in exchange.local}
        here: dict[int, list[int]] = {}
        for i, k in own.values():
            overlap = intersection(exchange.sources[i].box, exchange.sinks[k].box)
            here.setdefault(k, []).append(0 if overlap is None else volume(overlap))
        coming = Counter(k for move in exchange.moves for each in move.transfers for k in each.sinks)
        found[key] = {k: PutTogether(tuple(here.get(k, ())), coming[k]) for k in {*here, *coming}}
    return found


def devices_between(move: Move, task: Task) -> tuple[int, int]:
    """The devices that a message, or the hop of a collective, goes from and to."""
    hop = task.key[-1]
    return move.devices[hop], move.devices[(hop + 1) % len(move.devices)]


def meets_of(tasks: TaskGraph, ends: Ends, led: set[Key]) -> Floats:
    """One for each forward or backward task that needs something of another device, and needs it first: it is
    there for all that come later, such as the cells of a layer whose weights were gathered."""
    found = np.zeros(len(tasks.tasks))
    for number, taken in ends.taken.items():
        is_told = taken >= 0 and tasks.tasks[number].key not in led
        if is_told and tasks.tasks[taken].kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            found[taken] = 1.0
    return found
