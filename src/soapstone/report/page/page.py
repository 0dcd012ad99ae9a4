"""The page itself: all its data as one JSON document, in a template with its style and its script.

The document stands in a script element that is no script, with `<`, `>` and `&` escaped, so that no name of
a model, layer or device can end it; the script sets text only as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from soapstone.machine.units import BYTES, SECONDS
from soapstone.plans import Plan, Simulation
from soapstone.report.figures import Figures, as_trained, is_alike
from soapstone.report.page.actual import Actual
from soapstone.report.page.finding import Finding, finding
from soapstone.report.page.occupancy import PART_ORDER, occupancy
from soapstone.report.page.picture import boxes
from soapstone.report.page.timeline import critical_path, packed
from soapstone.report.page.traffic import DeviceTime, Traffic, traffic
from soapstone.sim.reference import Timeline
from soapstone.tasks.flat import KINDS
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph

REFERENCE = "data_parallel"
"""What the reasons compare with."""


@dataclass(frozen=True)
class Rival:
    """A strategy of others that the plan is compared with; `needed_bytes` is its peak on the device
    that it fills most, where that is known, and `fits` whether that device has it."""

    name: str
    summary: str
    figures: Figures
    needed_bytes: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Compared:
    """A task kind's total time, as predicted and as it was."""

    kind: str
    predicted_s: float
    actual_s: float


def page(
    plan: Plan,
    simulated: Simulation,
    own: Figures,
    rivals: Sequence[Rival] = (),
    actual: Actual | None = None,
) -> str:
    """The report of a plan as HTML."""
    folder = resources.files("soapstone.report.page")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{plan.graph.name} on {plan.machine.name}"),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        data=embedded(document(plan, simulated, own, rivals, actual)),
    )


def embedded(found: Mapping[str, Any]) -> str:
    """JSON that may stand inside an HTML element."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def document(
    plan: Plan,
    simulated: Simulation,
    own: Figures,
    rivals: Sequence[Rival] = (),
    actual: Actual | None = None,
) -> dict[str, Any]:
    """All that the page shows, as JSON has it."""
    machine = plan.machine
    moved = traffic(simulated, machine)
    found = finding(plan.search, simulated.timeline.makespan_s, own.bucketed_s)
    return {
        "model": plan.graph.name,
        "machine": machine.name,
        "costs": plan.costs,
        "optimizer": plan.optimizer,
        "samples": plan.graph.sample_count,
        "parameters": plan.graph.parameter_count,
        "makespan_s": simulated.timeline.makespan_s,
        "bucketed_s": own.bucketed_s,
        "moved_bytes": own.moved_bytes,
        "fits": simulated.prediction.fits(machine),
        "why": list(why(simulated, moved, own, rivals)),
        "rivals": [
            {
                "name": rival.name,
                "summary": rival.summary,
                "makespan_s": rival.figures.makespan_s,
                "bucketed_s": rival.figures.bucketed_s,
                "needed_bytes": rival.needed_bytes,
                "fits": rival.fits,
            }
            for rival in rivals
        ],
        "devices": [
            {"name": device.name, "kind": device.kind.name, "node": machine.nodes.index(device.node)}
            for device in machine.devices
        ],
        "nodes": list(machine.nodes),
        "kinds": [kind.value for kind in KINDS],
        "boxes": [asdict(box) for box in boxes(plan.strategy)],
        "timeline": asdict(packed(simulated, machine, actual)),
        "traffic": {
            "matrix": [list(entry) for entry in moved.matrix],
            "largest": [asdict(total) for total in moved.largest],
        },
        "times": [asdict(each) for each in moved.times],
        "parts": list(PART_ORDER),
        "memory": [asdict(each) for each in occupancy(plan, simulated, machine)],
        "finding": None if found is None else _finding(found),
        "actual": None
        if actual is None
        else {
            "makespan_s": actual.makespan_s,
            "kinds": [asdict(each) for each in compared(simulated.tasks, simulated.timeline, actual)],
        },
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {**asdict(found), "curve": [list(point) for point in found.curve]}


def compared(graph: TaskGraph, timeline: Timeline, actual: Actual) -> tuple[Compared, ...]:
    """The time of all tasks of each kind, as predicted and as it was."""
    found = []
    for kind in KINDS:
        numbers = [i for i, task in enumerate(graph.tasks) if task.kind is kind]
        if numbers:
            found.append(
                Compared(
                    kind.value,
                    sum(timeline.end_s[i] - timeline.start_s[i] for i in numbers),
                    sum(actual.end_s[i] - actual.start_s[i] for i in numbers),
                )
            )
    return tuple(found)


def why(simulated: Simulation, moved: Traffic, own: Figures, rivals: Sequence[Rival] = ()) -> tuple[str, str]:
    """Two sentences: what the plan does otherwise than data parallelism, and what its time consists of."""
    reference = next((as_trained(rival.figures) for rival in rivals if rival.name == REFERENCE), None)
    return _difference(as_trained(own), reference), _path(simulated, moved.times)


def _difference(own: Figures, reference: Figures | None) -> str:
    moves = BYTES.short_text(own.moved_bytes)
    waits = SECONDS.short_text(max(own.waiting_s, 0.0))
    if reference is None:
        return f"An iteration moves {moves} over links, and a device waits {waits} of it on average."
    if is_alike(own.makespan_s, reference.makespan_s):
        speed = "It takes as long as data parallelism"
    elif own.makespan_s < reference.makespan_s:
        speed = f"It is {reference.makespan_s / own.makespan_s:.3g} times as fast as data parallelism"
    else:
        speed = f"It is {own.makespan_s / reference.makespan_s:.3g} times as slow as data parallelism"
    return (
        f"{speed}: a device waits {waits} on average instead of "
        f"{SECONDS.short_text(max(reference.waiting_s, 0.0))}, the busiest computes "
        f"{SECONDS.short_text(own.busiest_s)} instead of {SECONDS.short_text(reference.busiest_s)}, and "
        f"{moves} move over links instead of "
        f"{BYTES.short_text(reference.moved_bytes)}."
    )


def _path(simulated: Simulation, times: Sequence[DeviceTime]) -> str:
    """What the critical path consists of, and how the devices spend the time."""
    path, graph = critical_path(simulated.tasks, simulated.timeline), simulated.tasks
    whole_s = simulated.timeline.makespan_s
    if not whole_s:
        return "It takes no time."
    computes_s = sum(graph.tasks[i].duration_s for i in path if graph.tasks[i].kind in COMPUTE_KINDS)
    exposed_s = sum(each.exposed_s for each in times) / len(times)
    idle_s = sum(each.idle_s for each in times) / len(times)
    return (
        f"The chain of {len(path):,} tasks that sets its length is {computes_s / whole_s:.0%} compute and "
        f"{1 - computes_s / whole_s:.0%} communication; on average a device has {exposed_s / whole_s:.0%} of "
        f"the time nothing to compute while bytes of its own move, and {idle_s / whole_s:.0%} nothing at all."
    )
