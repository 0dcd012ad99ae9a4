"""What a validation measures beside the strategies that it runs: operators, what ranks take from each other,
and by all of that, the strategy that is best to run.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from math import hypot
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.at_hand import device_at_hand, prepare
from soapstone.cost.candidates import Candidate, candidates_of, weighty_first
from soapstone.cost.choice import threads_of_a_rank
from soapstone.cost.fit import held_out
from soapstone.cost.launching import Launches
from soapstone.cost.measured import MeasuredCosts
from soapstone.cost.profile import Profile
from soapstone.cost.profiler import Profiler
from soapstone.cost.undisturbed import undisturbed
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.plans import Plan, planned
from soapstone.plans import predicted as planner_says
from soapstone.runtime.profiling import measured_at_once, profile_of_all
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import single_device
from soapstone.strategy.strategy import Strategy
from soapstone.validation.adding import adding_s, measured_adding
from soapstone.validation.calibrating import Calibration
from soapstone.validation.crowding import Crowding, eased, measured_crowding, one_of_each, standing_for_all
from soapstone.validation.drawing import FOUND, Drawn, found_anew
from soapstone.validation.in_step import Alone, InStep, Repeated, measured_in_step
from soapstone.validation.kernels import longer_in_step
from soapstone.validation.parts import Parts, parts_of
from soapstone.validation.pieces import Beyond, Said, measured_beyond
from soapstone.validation.rehearsing import Inside
from soapstone.validation.running import LONGEST_ALONE_S, Model, step_alone
from soapstone.validation.traffic import Traffic
from soapstone.validation.unsteady import Pace, Round, does_alike

Show = Callable[[float, str], None]

LONGEST_BESIDE_S = 2.0
"""[choice] No step is done alone beside data parallelism's that takes longer, the first time."""

LATE_SHARE = 0.25
"""[choice] The part of the time for measuring operators that those of what is found by it may take beside."""

INSIDE_SHARE = 0.25
"""[choice] The part of the time for measuring operators that the memory which they take inside may take
beside it."""


class Measuring:
    """Operators measured by all ranks at once, and what follows from them."""

    def __init__(self, machine: Machine, budget_s: float, wire: Wire, show: Show) -> None:
        self._machine, self._budget_s, self._wire, self._show = machine, budget_s, wire, show
        self._kind = machine.devices[0].kind
        threads = threads_of_a_rank(machine)
        self._device = device_at_hand(wire.device.type, self._kind.name, threads, wire.size)
        prepare(self._device)
        self._profiler = Profiler(self._device, launches=True, statistic=undisturbed)
        self._profiler.measure_updates()
        self._asked: list[Candidate] = []
        self._measured: list[Candidate] = []
        self._profile = Profile(self._kind.name, {})
        self.pace: Pace | None = None

    @property
    def costs(self) -> MeasuredCosts:
        """What was measured so far."""
        return MeasuredCosts(profiles={self._kind.name: self._profile})

    def strategies(self, found: Iterable[Drawn], share: float = 1.0, first: Sequence[Drawn] = ()) -> None:
        """Measure what strategies need and was not asked for before, in this part of the time there is: what
        these need first, since their steps are compared with that (`crowding`)."""
        known = {candidate.works for candidate in self._asked}
        used = [list(each.strategy.layouts.values()) for each in found]
        new = [each for each in candidates_of(chain(*used)) if each.works not in known]
        if not new:
            return
        guessed = AnalyticCosts()
        todo = weighty_first(new, used, lambda work: guessed.compute_s(work, self._kind))
        needed = [
            {candidate.works for candidate in candidates_of(each.strategy.layouts.values())} for each in first
        ]
        order = {works: i for i, own in reversed(list(enumerate(needed))) for works in own}
        todo.sort(key=lambda each: order.get(each.works, len(needed)))
        before = len(self._measured)
        done = measured_at_once(
            self._profiler,
            todo,
            self._wire,
            share * self._budget_s,
            lambda n, what: self._show(before + n, f"measuring {what}"),
        )
        self._asked += todo
        self._measured += todo[:done]
        self._profile = profile_of_all(self._profiler.profile, self._wire)
        self._profiler.let_go()

    def crowding(self, plan: Plan, finer: Plan, model: Model, traffic: Traffic) -> Crowding:
        """What ranks take from each other; in steps, as they are under this plan and, on CPUs, under one of
        finer tasks."""
        runs = standing_for_all(self._profiler, self._measured, self.costs, self._kind)
        in_turn, ahead_s = self._profiler.launching_among(one_of_each(self._measured))
        found = measured_crowding(self._device, self._wire, runs, in_turn, ahead_s)
        found = replace(found, adding=measured_adding(self._wire, self._device.clock))
        found = replace(found, in_step=self._in_step(plan, finer, model, found, traffic.handing.call_s))
        return self._with_kernels(found, plan, traffic)

    def _with_kernels(self, found: Crowding, plan: Plan, traffic: Traffic) -> Crowding:
        """The same with what a GPU's kernels take longer in a step of this plan, in which all do alike."""
        if self.pace is None or not self._device.is_cuda:
            return found

        def longer(busy: int) -> float:
            (parts,) = predicted_parts([plan], self.costs, found.at_work(busy), traffic, self._wire)
            alone = parts.alone
            return longer_in_step(
                lambda times: alone.makespan_s(Calibration(compute=times)), found.in_step[busy - 1].settled_s
            )

        one, everyone = longer(1), longer(self._wire.size)
        return found.with_kernels(np.linspace(one, everyone, self._wire.size).tolist())

    def beyond(self, plan: Plan, model: Model, crowding: Crowding, traffic: Traffic) -> Beyond:
        """What messages, pieces and calls of autograd take in steps of this plan beyond what was measured."""
        alone = step_alone(plan, model, self._wire, LONGEST_BESIDE_S) if crowding.in_step else None
        if alone is None:
            return Beyond()
        is_cuda, always = self._device.is_cuda, crowding.all_at_work
        tasks_only = replace(always, in_step=tuple(replace(each, between_s=0.0) for each in always.in_step))
        nothing_copied = replace(traffic, within_nodes=False)
        (parts,) = predicted_parts([plan], self.costs, tasks_only, nothing_copied, self._wire)
        stretch = 1.0 if is_cuda else always.stretch[-1] * always.real[-1]
        if traffic.within_nodes:  # what devices copy there is stretched, as all that they do
            (with_copies,) = predicted_parts([plan], self.costs, tasks_only, traffic, self._wire)
            put_s = stretch * with_copies.handed.put_s
            parts = replace(parts, handed=replace(parts.handed, put_s=put_s))
        said = Said(parts, parts.launching_s if is_cuda else parts.seconds / stretch, stretch)
        clock = perf_counter if is_cuda else self._device.clock
        found = measured_beyond(self._wire, alone.step, said, clock, self.pace)
        del alone
        self._let_go()
        return found

    def _let_go(self) -> None:
        """Give back the memory of operators and of steps done alone, whose parts know each other."""
        self._profiler.let_go()
        gc.collect()
        if self._device.is_cuda:
            torch.cuda.empty_cache()  # ranks that share a GPU need it too

    def _in_step(
        self, plan: Plan, finer: Plan, model: Model, crowding: Crowding, call_s: float
    ) -> tuple[InStep, ...]:
        """What operators take longer in a step, or on GPUs launching them. The step that tells it is kept, to
        tell how fast ranks are later (`pace`)."""
        costs, kind, is_cuda = self.costs, self._kind, self._device.is_cuda
        launches = _launches(costs, plan.machine) if is_cuda else None
        place = plan.machine.devices[self._wire.rank].name

        def done_alone(some: Plan, longest_s: float = LONGEST_ALONE_S) -> Alone | None:
            alone = step_alone(some, model, self._wire, longest_s)
            if alone is None:
                return None
            simulated = some.executed()
            adding = adding_s(simulated.tasks, simulated.timeline, some.machine, costs, crowding.adding)
            ids = alone.step.tasks.ids
            own = {
                ids[task.key]: float(seconds)
                for task, seconds in zip(simulated.tasks.tasks, adding, strict=True)
                if task.resource == place and seconds
            }
            return replace(alone, adding_s=own)

        def with_busy(busy: int) -> Repeated:
            if launches is not None:
                times = crowding.launching[busy - 1]
                return Repeated(
                    lambda work: times * launches.of(work).launching_s, lambda _: 0.0, call_s, 0.0
                )
            stretch = crowding.stretch[busy - 1]
            return Repeated(
                lambda work: crowding.seconds(work, costs.compute_s(work, kind), busy) / stretch,
                lambda size_bytes: crowding.update_s(costs.update_s(size_bytes, kind), busy) / stretch,
                call_s,
                crowding.usual[busy - 1] / stretch,
                stretch,
            )

        levels = [with_busy(busy) for busy in range(1, self._wire.size + 1)]
        alone = done_alone(plan)
        beside = undivided = None
        if not is_cuda and finer.strategy is not plan.strategy:
            beside = done_alone(finer, LONGEST_BESIDE_S)
        if is_cuda and alone is not None and alone.has_parts:
            whole = Drawn("", single_device(plan.graph, self._machine))
            undivided = done_alone(run_plan(whole, self._machine, costs))
        clock = perf_counter if is_cuda else self._device.clock
        found = measured_in_step(self._wire, alone, clock, levels, undivided, beside)
        if alone is not None and found and does_alike(plan):
            one, everyone = found[0], found[-1]
            uncertain = hypot(one.doubt, everyone.doubt)
            self.pace = Pace(self._wire, alone.step, one.whole_s, everyone.whole_s, uncertain)
        del alone, beside, undivided
        self._let_go()
        return found

    def rounds(self, crowding: Crowding) -> tuple[Round, ...]:
        """How fast ranks were whenever they were asked since; the step that told it is let go."""
        found = () if self.pace is None else self.pace.rounds()
        self.pace = None
        self._let_go()
        return tuple(each.evened for each in found) if crowding.shares_cores else found

    def found_anew(
        self, found: Sequence[Drawn], graph: Graph, seed: int, crowding: Crowding, traffic: Traffic
    ) -> list[Drawn]:
        """The strategies, with the best of what searches find by these costs: by what operators take while
        all ranks compute, and while half of them do."""
        machine, costs, wire = self._machine, self.costs, self._wire
        half = eased(self._profile, crowding, wire.size // 2) if wire.size > 1 else self._profile

        def predicted(strategies: Sequence[Strategy]) -> list[float]:
            own = strategies[wire.rank :: wire.size]
            plans = [run_plan(Drawn(FOUND, each), machine, costs) for each in own]
            parts = predicted_parts(plans, costs, crowding, traffic, wire)
            said = wire.told_by_all(
                json.dumps([each.makespan_s(Calibration()) for each in parts]), "predictions"
            )
            told = [json.loads(text) for text in said]
            return [told[i % wire.size][i // wire.size] for i in range(len(strategies))]

        tried = [costs, MeasuredCosts(profiles={self._kind.name: half})]
        anew = found_anew(found, graph, machine, tried, seed, predicted)
        self.strategies((each for each in anew if each.name == FOUND), LATE_SHARE)
        return anew

    def inside(self) -> Inside:
        """What operators take of memory inside."""
        until_s = monotonic() + INSIDE_SHARE * self._budget_s
        for candidate in self._measured:
            if monotonic() < until_s:
                self._profiler.measure_hidden(candidate)
        return Inside(self._profiler.hidden_bytes, self._profiler.apart_bytes)

    def told(self, crowding: Crowding) -> dict[str, Any]:
        """What to tell of it."""
        off = held_out(self._profile.times)
        return {
            "shards": len(self._asked),
            "measured": len(self._measured),
            "failed": dict(self._profiler.failed),
            "crowding": asdict(crowding),
            "held_out_median": None if off is None else off.median,
            "held_out_worst": None if off is None else off.worst,
        }


def predicted_parts(
    plans: Sequence[Plan], costs: AnalyticCosts, crowding: Crowding, traffic: Traffic, wire: Wire
) -> list[Parts]:
    """The parts of all plans' durations, by all that was measured."""
    if not plans:
        return []
    launches = _launches(costs, plans[0].machine) if wire.device.type == "cuda" else None
    return [
        parts_of(plan, costs, crowding, launches=launches, backend=wire.backend, traffic=traffic)
        for plan in plans
    ]


def _launches(costs: AnalyticCosts, machine: Machine) -> Launches:
    """What launching takes on the ranks' GPUs, as far as it was measured."""
    kind = machine.devices[0].kind
    known = costs.profiles.get(kind.name) if isinstance(costs, MeasuredCosts) else None
    return Launches(known or Profile(kind.name, {}), lambda work: costs.compute_s(work, kind))


def run_plan(each: Drawn, machine: Machine, costs: AnalyticCosts) -> Plan:
    """The plan of a strategy on ranks, of whose time `parts` knows what messages take."""
    ranks = machine.with_message_overhead(0.0)
    return planned(each.strategy, ranks, planner_says(each.strategy, ranks, costs), costs)
