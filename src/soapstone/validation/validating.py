"""A validation from end to end, as one of its ranks: draw, measure, predict, run, fit on half, compare.

Every rank does the same and comes to the same numbers: strategies are drawn from the seed, times are rank
0's, and step times are the slowest rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.candidates import Candidate, candidates_of, spread_out
from soapstone.cost.choice import costs_for, threads_of_a_rank
from soapstone.cost.fit import held_out
from soapstone.cost.launching import Launches
from soapstone.cost.measured import MeasuredCosts
from soapstone.cost.profile import Profile
from soapstone.cost.profiler import Profiler, device_at_hand, prepare
from soapstone.errors import TrainingError
from soapstone.frontends.source import Source
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.heap import settled_objects
from soapstone.plans import Plan, planned, simulation
from soapstone.runtime.profiling import measured_at_once, shared_profile
from soapstone.runtime.wire import Wire
from soapstone.validation.calibrating import Calibration, calibrated
from soapstone.validation.comparing import Account, Compared, Summary, accounts, summary
from soapstone.validation.crowding import NO_CROWDING, Crowding, measured_crowding, standing_for_all
from soapstone.validation.drawing import FOUND, Drawn, drawn, found_anew
from soapstone.validation.parts import parts_of
from soapstone.validation.rehearsing import Inside, rehearsed_peaks
from soapstone.validation.running import model_of, ran, traced
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, between, measured_traffic

Show = Callable[[float, str], None]

LATE_SHARE = 0.25
"""[choice] The part of the time for measuring operators that those of what is found by it may take beside."""

INSIDE_SHARE = 0.25
"""[choice] The part of the time for measuring operators that the memory which they take inside may take
beside it."""


@dataclass(frozen=True)
class Wanted:
    """What to validate, and how long. `given` makes strategies that are run beside those that are drawn."""

    machine: Machine
    strategies: int
    steps: int
    seed: int
    costs: str
    budget_s: float
    statistic: str = "median"
    given: Callable[[Graph], Sequence[Drawn]] = lambda _: ()


@dataclass(frozen=True)
class Outcome:
    """Every strategy compared, with calibrated predictions; summaries of the half that was not fitted, of
    the half that was, and of the first without any fit; the worst, with the tasks to blame; and what is to be
    said about the capture."""

    compared: tuple[Compared, ...]
    fitted_on: frozenset[int]
    calibration: Calibration
    reported: Summary
    seen: Summary
    unfitted: Summary
    worst: tuple[tuple[Compared, tuple[Account, ...]], ...]
    costs_name: str
    measured: dict[str, Any] | None
    notes: tuple[str, ...]


def validated(source: Source, wanted: Wanted, wire: Wire, worst: int, show: Show) -> Outcome:
    """Validate a model on this computer."""
    captured = source.captured()
    graph, machine = captured.graph, wanted.machine
    if graph.loss is None or graph.loss not in graph.differentiable:
        raise TrainingError(f"model '{graph.name}' has no loss that depends on a weight: nothing to train")
    # Strategies are drawn before anything is measured here: by what is known of such devices already. What
    # was found by that is then searched for anew, by what was measured.
    costs = costs_for(machine, "auto" if wanted.costs == "measured" else wanted.costs, graph=graph)
    found = drawn(graph, machine, costs, wanted.strategies, wanted.seed, wanted.given(graph))
    if len(found) < 2:
        raise TrainingError(f"model '{graph.name}' has no two strategies on machine '{machine.name}'")
    told, crowding, inside, traffic = None, NO_CROWDING, Inside(), AS_THE_MACHINE_SAYS
    if wanted.costs == "measured":
        with settled_objects():  # as steps are run
            found, costs, inside, crowding, told = _measured(found, graph, wanted, wire, show)
            traffic = measured_traffic(wire, machine)
    plans = [_plan(each, machine, costs) for each in found]
    with settled_objects():
        peaks, unrehearsed = rehearsed_peaks(
            plans, captured.constants, inside, wire, lambda done: show(done, "strategies rehearsed")
        )
    model = model_of(source, graph, captured.constants, wire.device)
    seen = ran(plans, model, wire, wanted.steps, lambda done: show(done, "strategies run"))
    if told is not None:
        with settled_objects():
            traffic = between(traffic, measured_traffic(wire, machine))
        told |= {"traffic": asdict(traffic)}
    fitted_on = frozenset(range(0, len(found), 2))
    rest = [i for i in range(len(found)) if i not in fitted_on]
    launches = _launches(costs, machine) if wire.device.type == "cuda" else None
    parts = [
        parts_of(plan, costs, crowding, launches=launches, backend=wire.backend, traffic=traffic)
        for plan in plans
    ]
    calibration = calibrated(
        [parts[i].makespan_s for i in sorted(fitted_on)],
        [seen[i].step_s(wanted.statistic) for i in sorted(fitted_on)],
    )

    def against(tried: Calibration) -> list[Compared]:
        return [
            Compared(
                each.name,
                part.makespan_s(tried),
                own.step_s(wanted.statistic),
                peak,
                own.peak_bytes,
            )
            for each, own, part, peak in zip(found, seen, parts, peaks, strict=True)
        ]

    compared, raw = against(calibration), against(Calibration())
    blamed = sorted(rest, key=lambda i: -abs(compared[i].error))[:worst]
    reasons = tuple(
        (compared[i], tuple(accounts(parts[i].graph(calibration), traced(plans[i], model, wire))))
        for i in blamed
    )
    return Outcome(
        tuple(compared),
        fitted_on,
        calibration,
        summary([compared[i] for i in rest]),
        summary([compared[i] for i in sorted(fitted_on)]),
        summary([raw[i] for i in rest]),
        reasons,
        costs.name,
        told,
        (
            *captured.notes,
            *(f"memory is the plan's: a step was not rehearsed ({why})" for why in unrehearsed),
        ),
    )


def _measured(
    found: Sequence[Drawn], graph: Graph, wanted: Wanted, wire: Wire, show: Show
) -> tuple[list[Drawn], AnalyticCosts, Inside, Crowding, dict[str, Any]]:
    """The strategies, with what a search finds by measured costs among them; these costs, measured by all
    ranks at once, what operators take of memory inside, what ranks take from each other, and what to tell of
    it."""
    kind = wanted.machine.devices[0].kind
    device = device_at_hand(wire.device.type, kind.name, threads_of_a_rank(wanted.machine), wire.size)
    prepare(device)
    profiler = Profiler(device, launches=True)
    measured: list[Candidate] = []

    def measure(more: Sequence[Candidate], budget_s: float) -> Profile:
        done = measured_at_once(
            profiler, more, wire, budget_s, lambda n, what: show(len(measured) + n, f"measuring {what}")
        )
        measured.extend(more[:done])
        return shared_profile(profiler.profile, wire)

    profiler.measure_updates()
    todo = spread_out(candidates_of(layout for each in found for layout in each.strategy.layouts.values()))
    profile = measure(todo, wanted.budget_s)
    costs = MeasuredCosts(profiles={kind.name: profile})
    found = found_anew(found, graph, wanted.machine, costs, wanted.seed)
    known = {candidate.works for candidate in todo}
    best = [each for each in found if each.name == FOUND]
    late = spread_out(candidates_of(layout for each in best for layout in each.strategy.layouts.values()))
    more = [candidate for candidate in late if candidate.works not in known]
    if more:
        profile = measure(more, LATE_SHARE * wanted.budget_s)
        costs = MeasuredCosts(profiles={kind.name: profile})
    until_s = monotonic() + INSIDE_SHARE * wanted.budget_s
    for candidate in measured:
        if monotonic() < until_s:
            profiler.measure_hidden(candidate)
    off = held_out(profile.times)
    crowding = measured_crowding(device, wire, standing_for_all(profiler, measured, costs, kind))
    told = {
        "shards": len(todo) + len(more),
        "measured": len(measured),
        "failed": dict(profiler.failed),
        "crowding": asdict(crowding),
        "held_out_median": None if off is None else off.median,
        "held_out_worst": None if off is None else off.worst,
    }
    return found, costs, Inside(profiler.hidden_bytes), crowding, told


def _launches(costs: AnalyticCosts, machine: Machine) -> Launches:
    """What launching takes on the ranks' GPUs, as far as it was measured."""
    kind = machine.devices[0].kind
    known = costs.profiles.get(kind.name) if isinstance(costs, MeasuredCosts) else None
    return Launches(known or Profile(kind.name, {}), lambda work: costs.compute_s(work, kind))


def _plan(each: Drawn, machine: Machine, costs: AnalyticCosts) -> Plan:
    """The plan of a strategy on ranks, of whose time `parts` knows what messages take."""
    ranks = machine.with_message_overhead(0.0)
    return planned(each.strategy, ranks, simulation(each.strategy, ranks, costs), costs)
