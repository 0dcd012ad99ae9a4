"""Running strategies for real, as one of several ranks: step times, peak memory, and traces.

Steps of all strategies take turns, so that what else the computer does falls on all of them alike. A step's
time is that of the slowest rank, from a moment at which all ranks are ready. Peak memory is what torch's
allocator gave out at most during a step, beyond what the rank holds between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from soapstone.cost.undisturbed import doubt
from soapstone.cost.watch import Watch
from soapstone.errors import SoapstoneError
from soapstone.frontends.source import Source
from soapstone.machine.heap import settled_objects
from soapstone.plans import Plan
from soapstone.runtime.alone import StepAlone
from soapstone.runtime.detecting import memory_bytes
from soapstone.runtime.optimizing import optimizer_named
from soapstone.runtime.run import State, state_of
from soapstone.runtime.trainer import Options, Trainer
from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.validation.comparing import STATISTICS
from soapstone.validation.in_step import Alone
from soapstone.validation.rehearsing import FAILURES
from soapstone.validation.unsteady import REFILLED_S, Pace

WARM_UP = 2
"""[choice] Steps of a strategy before its first counted one."""

IN_TURN = 2
"""[choice] Steps of a strategy before the next has its turn."""

STEADY, MOST_TIMES, LONGEST_MORE_S = 0.01, 16, 60.0
"""[choice] Strategies have more turns than were asked for until half of them are told so well (as a
part of themselves, one standard error), up to so many times as many, and for no longer than this in all."""

BETWEEN_PACES = 4
"""[choice] So many strategies have their turn before ranks see how fast they are now."""

LONGEST_ALONE_S = 5.0
"""[choice] A step that takes longer, the first time, is not done alone some twenty times."""

MEMORY_SHARE = 0.3
"""[choice] The part of this rank's memory that strategies taking turns may hold together."""


@dataclass(frozen=True)
class Model:
    """A module's tensors as all strategies start from them."""

    state: State
    parameters: dict[str, nn.Parameter]
    inputs: tuple[Tensor, ...]


def model_of(source: Source, graph: Any, constants: Any, place: torch.device) -> Model:
    """The tensors of a captured module. The batch is where it is computed on already: a prediction begins
    when the first task could."""
    module = source.module
    named: dict[str, Tensor] = {
        name.removeprefix(source.prefix): tensor
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    }
    parameters = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
    inputs = tuple(tensor.to(place) for tensor in source.inputs)
    return Model(state_of(graph, named, constants), parameters, inputs)


@dataclass
class Ran:
    """What was seen of one strategy: seconds of its steps, and each rank's peak of memory."""

    steps_s: list[float] = field(default_factory=list)
    peak_bytes: tuple[int, ...] = ()

    def step_s(self, statistic: str) -> float:
        """The step as a statistic of all: the faster `quartile`, since what else a computer does makes steps
        only longer, and for now this strategy and now that; their `median`, or the `fastest`."""
        return float(np.quantile(self.steps_s, STATISTICS[statistic]))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of steps, relative to their median."""
        low, middle, high = quantiles(self.steps_s, n=4)
        return (high - low) / 2 / middle

    @property
    def doubt(self) -> float:
        """How uncertain their faster quartile is, as a part of it."""
        return doubt(self.steps_s)


def ran(
    plans: Sequence[Plan],
    model: Model,
    wire: Wire,
    steps: int,
    show: Callable[[int], None],
    pace: Pace | None = None,
) -> list[Ran]:
    """Run each plan for so many steps, and more where these differ much; the same on every rank. Amid them
    ranks see how fast they are, if they have a step for that."""
    found: dict[int, Ran] = {}
    if pace is not None:
        pace.taken.clear()
    chunks = _chunks(plans, wire)
    for chunk in chunks:
        trainers = {i: _trainer(plans[i], model, wire, fuse=True) for i in chunk}
        found |= _in_turn(trainers, model, wire, steps, pace, LONGEST_MORE_S / len(chunks))
        del trainers
        if wire.device.type == "cuda":
            torch.cuda.empty_cache()  # ranks that share a GPU need it too
        show(len(found))
    return [found[i] for i in range(len(plans))]


def _in_turn(
    trainers: Mapping[int, Trainer],
    model: Model,
    wire: Wire,
    steps: int,
    pace: Pace | None,
    longest_more_s: float,
) -> dict[int, Ran]:
    """Run trainers that fit in memory together, which they leave when this is over."""
    found = {i: Ran() for i in trainers}
    taken_s: dict[int, list[float]] = {i: [] for i in trainers}
    is_short: dict[int, bool] = {}

    def turn(count: int) -> None:
        for number, (i, trainer) in enumerate(trainers.items()):
            if pace is not None and number % BETWEEN_PACES == 0:
                pace.take()
            if is_short[i]:
                _timed_step(trainer, model, wire)
            taken_s[i] += [_timed_step(trainer, model, wire) for _ in range(count)]

    def is_doubtful() -> bool:  # not within turns: gloo's threads would take cores from who computes next
        for i, own in found.items():
            own.steps_s = _slowest(taken_s[i], wire)
        return _is_doubtful(found.values(), steps)

    with settled_objects():
        for i, trainer in trainers.items():
            warm_s = [_timed_step(trainer, model, wire) for _ in range(WARM_UP)]
            is_short[i] = min(_slowest(warm_s, wire)) < REFILLED_S
        for done in range(0, steps, IN_TURN):
            turn(min(IN_TURN, steps - done))
        more_s = 0.0
        while is_doubtful() and more_s < longest_more_s:
            start_s = perf_counter()
            turn(IN_TURN)
            more_s += _slowest([perf_counter() - start_s], wire)[0]
        for i, trainer in trainers.items():
            found[i].peak_bytes = _peaks(trainer, model, wire)
    return found


def _is_doubtful(found: Iterable[Ran], steps: int) -> bool:
    """Whether more steps, of which so many were asked for, would tell much more."""
    return all(len(own.steps_s) < MOST_TIMES * steps for own in found) and (
        median(own.doubt for own in found) > STEADY
    )


def traced(plan: Plan, model: Model, wire: Wire) -> Timeline:
    """The real times of a plan's tasks in one step; they are taken back one by one for that."""
    trainer = _trainer(plan, model, wire, fuse=False)
    for _ in range(WARM_UP):
        trainer.step(model.inputs)
    _, _, timeline = trainer.traced_step(model.inputs)
    return timeline


def step_alone(plan: Plan, model: Model, wire: Wire, longest_s: float = LONGEST_ALONE_S) -> Alone | None:
    """A plan's step for each rank to do alone; None where one of them cannot, or takes too long for it."""
    step: StepAlone | None = None
    if wire.size > 1:
        with contextlib.suppress(*FAILURES, MemoryError, SoapstoneError):
            tried = StepAlone(plan, model.state, model.parameters, model.inputs, wire)
            step = tried if tried.run(perf_counter) < longest_s else None
    told = wire.told_by_all("no" if step is None else "yes", "steps alone")
    return Alone(plan.strategy, step) if step is not None and "no" not in told else None


def _trainer(plan: Plan, model: Model, wire: Wire, *, fuse: bool) -> Trainer:
    optimizer = optimizer_named(plan.optimizer, 1e-6)
    # Steps are launched, not replayed: the memory of a recording is not seen by the allocator's counters,
    # and not every plan has one.
    return Trainer(plan, model.state, model.parameters, optimizer, wire, Options(fuse=fuse, replay=False))


def _chunks(plans: Sequence[Plan], wire: Wire) -> list[list[int]]:
    """Plans that fit in memory together."""
    room = memory_bytes(wire)
    chunks: list[list[int]] = [[]]
    held = 0
    for i, plan in enumerate(plans):
        own = max(plan.prediction.memory_bytes)
        if chunks[-1] and held + own > MEMORY_SHARE * room:
            chunks.append([])
            held = 0
        chunks[-1].append(i)
        held += own
    return chunks


def _timed_step(trainer: Trainer, model: Model, wire: Wire) -> float:
    """Seconds of a step on this rank. Ranks meet as they do in steps: gloo's threads would take their cores
    while the step begins."""
    wire.meet("step")
    start = perf_counter()
    trainer.step(model.inputs)
    if wire.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def _slowest(steps_s: Sequence[float], wire: Wire) -> list[float]:
    """Each step as long as it was on the slowest rank."""
    found = torch.tensor(steps_s, dtype=torch.float64, device=wire.host)
    if wire.size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found]


def _peaks(trainer: Trainer, model: Model, wire: Wire) -> tuple[int, ...]:
    """The most memory of each rank in a step."""
    held = _size_bytes(_held(trainer)) + sum(each.nbytes for each in trainer.run.executor.buckets)
    is_cuda = wire.device.type == "cuda"
    if is_cuda:
        for holding in trainer.run.held:
            holding.parameter.grad = None
    with Watch(is_cuda=is_cuda) as watch:
        trainer.step(model.inputs)
    own = torch.zeros(wire.size, dtype=torch.int64, device=wire.host)
    own[wire.rank] = held + watch.highest_bytes()
    if wire.size > 1:
        dist.all_reduce(own)
    return tuple(int(each) for each in own)


def _held(trainer: Trainer) -> Iterable[Tensor]:
    """What a rank holds between steps beside buckets: weights, optimizer state, and what shards read beside
    weights."""
    for holding in trainer.run.held:  # a step starts by letting go of the last one's gradients
        yield holding.parameter
    for state in trainer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    yield from trainer.run.free.held()


def _size_bytes(tensors: Iterable[Tensor]) -> int:
    seen = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(seen.values())
