"""Links fitted to messages, and the machine they become."""

from __future__ import annotations

from pathlib import Path

import pytest

from soapstone.cost.analytic import collective_s, transfer_s
from soapstone.cost.links import ALL_REDUCE, ALONE, AT_ONCE, LinkFit, Message, fitted, local_machine
from soapstone.machine import KINDS, Machine, read_machine, write_machine
from soapstone.sim.reference import simulate
from soapstone.tasks.task import Task, TaskGraph, TaskKind

SIZES = [4**i for i in range(5, 13)]


def simulated(machine: Machine, what: str, size_bytes: int) -> float:
    """What the simulator says of a measurement on a machine."""
    count = len(machine.devices)
    ring = [(i, (i + 1) % count) for i in range(count)]
    if what == ALL_REDUCE:
        bandwidth = min(machine.bandwidth(a, b) for a, b in ring)
        latency_s = max(machine.latency(a, b) for a, b in ring)
        seconds = collective_s("all_reduce", size_bytes, count, bandwidth, latency_s)
    else:
        seconds = transfer_s(size_bytes, machine.bandwidth(0, 1), machine.latency(0, 1))
    tasks = tuple(
        Task((i,), TaskKind.TRANSFER, "message", machine.narrowest_link(a, b).name, seconds, ())
        for i, (a, b) in enumerate(ring[:1] if what == ALONE else ring)
    )
    return simulate(TaskGraph(tasks, tuple(link.name for link in machine.links))).makespan_s


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_fit_finds_the_machine_that_the_simulator_had(count: int, is_shared: bool) -> None:
    """Messages as the simulator times them on a machine lead back to that machine."""
    truth = local_machine("lab", KINDS["cpu"], count, LinkFit(80e-6, 3e9, is_shared, {}))
    messages = [
        Message(what, size, simulated(truth, what, size))
        for what in (ALONE, AT_ONCE, ALL_REDUCE)
        for size in SIZES
    ]
    found = fitted(messages, count)
    assert found.is_shared == is_shared
    assert found.latency_s == pytest.approx(80e-6, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(3e9, rel=1e-3)
    assert found.error < 1e-3


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_local_machine_survives_its_file(tmp_path: Path, is_shared: bool) -> None:
    machine = local_machine("lab", KINDS["cpu"], 3, LinkFit(8.12345e-5, 2.98765e9, is_shared, {}))
    write_machine(machine, tmp_path / "m.yaml")
    assert read_machine(tmp_path / "m.yaml") == machine
    assert machine.bandwidth(0, 2) == 2.988e9
    assert machine.latency(2, 1) == pytest.approx(8.123e-5, rel=1e-3)


def test_one_device_needs_no_link() -> None:
    assert local_machine("lab", KINDS["cpu"], 1, None).links == ()


def test_messages_without_a_law_still_make_a_machine() -> None:
    """Times that fall with size leave no bandwidth to find, but the machine is one."""
    messages = [Message(ALONE, size, 1.0 / size) for size in SIZES]
    machine = local_machine("lab", KINDS["cpu"], 2, fitted(messages, 2))
    assert machine.bandwidth(0, 1) > 0


def test_large_messages_tell_whether_a_link_is_shared() -> None:
    """As four slices of a GPU were seen: latencies pass at once, bytes do not."""
    bus, own = 42e9, 36e9
    messages = []
    for size in (4**i for i in range(5, 13)):
        messages.append(Message(ALONE, size, 41e-6 + size / own))
        messages.append(Message(AT_ONCE, size, 46e-6 + 4 * size / bus))
        messages.append(Message(ALL_REDUCE, size, 270e-6 + 6 * size / bus))
    fit = fitted(messages, 4)
    assert fit.is_shared
    assert fit.bandwidth_bytes_per_s == pytest.approx(bus, rel=0.25)
    assert fit.large_error < 0.25


@pytest.mark.parametrize("count", [2, 4, 16])
def test_sums_by_one_device_are_as_many_messages_as_go_to_it_and_back(count: int) -> None:
    message_s = transfer_s(10**6, 1e9, 5e-6)
    through_one_s = collective_s("all_reduce", 10**6, count, 1e9, 5e-6, "one_device")
    assert through_one_s == pytest.approx(2 * (count - 1) * message_s)
    assert collective_s("all_gather", 10**6, count, 1e9, 5e-6, "one_device") == collective_s(
        "all_gather", 10**6, count, 1e9, 5e-6
    )
