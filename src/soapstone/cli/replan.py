"""`soapstone train --resume DIR --replan`: the same model, planned anew for the devices there are now.

A checkpoint does not depend on a plan, so that a run may go on under another one: after a device was lost,
on a larger machine, or simply with a better plan. The search finds it and the runtime runs it; they meet
in the Plan that is made here.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.cli.searching import cores
from soapstone.errors import TrainingError
from soapstone.machine import Machine, preset, resolve
from soapstone.machine.presets import PRESETS
from soapstone.machine.units import counted
from soapstone.plans import Plan, planned, predicted
from soapstone.search.baselines import baseline
from soapstone.search.find import Options, find, settled
from soapstone.search.mcmc import Budget

BUDGET = Budget(20.0, 2000)
"""[choice] A run that waits to go on should not wait long: seconds, and proposals of each chain."""


def replanned(plan: Plan, machine: Machine, strategy: str | None = None) -> Plan:
    """The plan's model on another machine, under a named strategy or the best that a short search finds."""
    graph, costs = plan.graph, plan.cost_model
    if strategy is None:
        options = Options(budget=BUDGET, threads=cores(), optimizer=plan.optimizer)
        return settled(find(graph, machine, costs, options), machine, costs, plan.model, options).plan
    chosen = baseline(strategy, graph, machine, costs)
    prediction = predicted(chosen, machine, costs, plan.optimizer)
    return planned(
        chosen,
        machine,
        prediction,
        costs,
        model=plan.model,
        optimizer=plan.optimizer,
        search={"strategy": strategy},
    )


def machine_now(plan: Plan, text: str | None, ranks: int | None) -> Machine:
    """The machine to plan for: the one that was named; else the plan's, with as many devices as there
    are ranks (None: as many as it has)."""
    if text is not None:
        machine = resolve(text)
        if ranks is not None and len(machine.devices) != ranks:
            raise TrainingError(
                f"machine {machine.name} has {counted(len(machine.devices), 'device')} and there"
                f" {'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}: start one for each device"
            )
        return machine
    if ranks is None or ranks == len(plan.machine.devices):
        return plan.machine
    return _resized(plan.machine, ranks)


def _resized(machine: Machine, count: int) -> Machine:
    name, _, size = machine.name.partition(":")
    nodes, _, devices = size.partition("x")
    if name in PRESETS and nodes.isdigit() and devices.isdigit():
        per_node = int(devices)
        if int(nodes) > 1 and count % per_node == 0:
            return preset(f"{name}:{count // per_node}x{per_node}")
        if count <= per_node or int(nodes) == 1:
            return preset(f"{name}:1x{count}")
    if count > len(machine.devices):
        raise TrainingError(
            f"there are {count} ranks and machine {machine.name} has {len(machine.devices)} devices: name the"
            " machine to plan for with --machine"
        )
    kept = machine.devices[:count]
    gone = {device.name for device in machine.devices[count:]}
    links = tuple(link for link in machine.links if link.a not in gone and link.b not in gone)
    return replace(machine, name=f"{machine.name}, {count} of them", devices=kept, links=links)
