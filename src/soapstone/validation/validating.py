"""A validation from end to end, as one of its ranks: draw, measure, predict, run, fit on half, compare.

Every rank does the same and comes to the same numbers: strategies are drawn from the seed, times are rank
0's, and step times are the slowest rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.choice import costs_for
from soapstone.errors import TrainingError
from soapstone.frontends.source import Source
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.heap import settled_objects
from soapstone.plans import Plan, planned, predicted
from soapstone.runtime.wire import Wire
from soapstone.validation.accounts import Accounts, accounts
from soapstone.validation.calibrating import Calibration, calibrated
from soapstone.validation.comparing import STATISTICS, Compared, Summary, summary
from soapstone.validation.crowding import NO_CROWDING
from soapstone.validation.drawing import Drawn, drawn, to_do_alone
from soapstone.validation.measuring import Measuring, Show, predicted_parts, run_plan
from soapstone.validation.pieces import Beyond
from soapstone.validation.rehearsing import Inside, rehearsed_peaks
from soapstone.validation.running import model_of, ran, traced
from soapstone.validation.traffic import AS_THE_MACHINE_SAYS, between, measured_traffic
from soapstone.validation.unsteady import Unsteady


@dataclass(frozen=True)
class Wanted:
    """What to validate, and how long. `given` makes strategies that are run beside those that are drawn."""

    machine: Machine
    strategies: int
    steps: int
    seed: int
    costs: str
    budget_s: float
    statistic: str = "quartile"
    given: Callable[[Graph], Sequence[Drawn]] = lambda _: ()


@dataclass(frozen=True)
class Outcome:
    """How many steps counted of each strategy, at least; every strategy compared, with calibrated
    predictions; summaries of the half that was not fitted, of the half that was, and of the first without any
    fit, and what was predicted of all then; the worst, with what accounts for it; the plan of the fastest;
    how long each stage of the validation took; and what is to be said about the capture."""

    steps: int
    compared: tuple[Compared, ...]
    fitted_on: frozenset[int]
    calibration: Calibration
    reported: Summary
    seen: Summary
    unfitted: Summary
    unfitted_s: tuple[float, ...]
    worst: tuple[tuple[Compared, Accounts], ...]
    fastest: Plan
    costs_name: str
    measured: dict[str, Any] | None
    took_s: Mapping[str, float]
    notes: tuple[str, ...]


@dataclass
class _Stages:
    """How long each stage took, by its name: from the end of the one before."""

    took_s: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=perf_counter)

    def over(self, name: str) -> None:
        """A stage has come to its end."""
        now_s = perf_counter()
        self.took_s[name], self._since_s = now_s - self._since_s, now_s


def validated(source: Source, wanted: Wanted, wire: Wire, worst: int, show: Show) -> Outcome:
    """Validate a model on this computer."""
    stages = _Stages()
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
    model = model_of(source, graph, captured.constants, wire.device)
    stages.over("drawing")
    told, crowding, inside, traffic, beyond = None, NO_CROWDING, Inside(), AS_THE_MACHINE_SAYS, Beyond()
    measuring = None
    if wanted.costs == "measured":
        with settled_objects():  # as steps are run
            measuring = Measuring(machine, wanted.budget_s, wire, show)
            done_alone = [found[0], *to_do_alone(found[::2], machine)]
            beside = [done_alone[1]] if wire.device.type == "cpu" else []  # no step of it is done elsewhere
            measuring.strategies([*found, *beside], first=done_alone)
            traffic = measured_traffic(wire, machine)
            first, finer, cut_up = (run_plan(each, machine, measuring.costs) for each in done_alone)
            crowding = measuring.crowding(first, finer, model, traffic)
            beyond = measuring.beyond(cut_up, model, crowding, traffic)
            found = measuring.found_anew(found, graph, wanted.seed, crowding, beyond.added_to(traffic))
            costs, inside = measuring.costs, measuring.inside()
        stages.over("measuring")
    plans = [run_plan(each, machine, costs) for each in found]
    with settled_objects():
        peaks, unrehearsed = rehearsed_peaks(
            plans, captured.constants, inside, wire, lambda done: show(done, "strategies rehearsed")
        )
    stages.over("rehearsing")
    pace = None if measuring is None else measuring.pace
    seen = ran(plans, model, wire, wanted.steps, lambda done: show(done, "strategies run"), pace)
    del pace
    stages.over("running")
    if measuring is not None:
        with settled_objects():
            again = between(traffic, measured_traffic(wire, machine))
        if crowding.in_step:  # steps alone were told apart by these
            by_them = traffic.handing
            handing = replace(again.handing, part_s=by_them.part_s, call_s=by_them.call_s)
            again = replace(again, handing=handing)
        traffic = beyond.added_to(again)
        faster = STATISTICS[wanted.statistic]
        crowding = replace(crowding, unsteady=Unsteady(measuring.rounds(crowding), faster))
        told = measuring.told(crowding) | {"traffic": asdict(again), "longer_in_steps": asdict(beyond)}
    fitted_on = frozenset(range(0, len(found), 2))
    rest = [i for i in range(len(found)) if i not in fitted_on]
    parts = predicted_parts(plans, costs, crowding, traffic, wire)
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
                own.spread,
            )
            for each, own, part, peak in zip(found, seen, parts, peaks, strict=True)
        ]

    compared, raw = against(calibration), against(Calibration())
    blamed = sorted(rest, key=lambda i: -abs(compared[i].error))[:worst]
    reasons = tuple(
        (
            compared[i],
            accounts(parts[i].tasks, parts[i].timeline(calibration), traced(plans[i], model, wire)),
        )
        for i in blamed
    )
    stages.over("predicting")
    return Outcome(
        min(len(each.steps_s) for each in seen),
        tuple(compared),
        fitted_on,
        calibration,
        summary([compared[i] for i in rest]),
        summary([compared[i] for i in sorted(fitted_on)]),
        summary([raw[i] for i in rest]),
        tuple(each.predicted_s for each in raw),
        reasons,
        _fastest(found, compared, machine, costs),
        costs.name,
        told,
        stages.took_s,
        (
            *captured.notes,
            *(f"memory is the plan's: a step was not rehearsed ({why})" for why in unrehearsed),
        ),
    )


def _fastest(
    found: Sequence[Drawn], compared: Sequence[Compared], machine: Machine, costs: AnalyticCosts
) -> Plan:
    """The plan of the strategy whose steps were the fastest, with what the planner says of it."""
    best, _ = min(zip(found, compared, strict=True), key=lambda each: each[1].actual_s)
    return planned(best.strategy, machine, predicted(best.strategy, machine, costs), costs)
