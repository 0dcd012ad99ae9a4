"""What operators take longer in a step than over and over again, and what a step takes beside them.

An operator that is measured runs many times in a row: its weights are in the caches of its cores, and so are
the interpreter's own structures. In a step hundreds of others come in between, on all ranks at once, and the
runtime does its part: it hands values on, looks at tensors in another way (views, which no cost model has
time for), collects gradients into buckets. So ranks do steps of a strategy alone (`runtime.alone`), one of
them and all of them, and what forward tasks take beyond what was measured is put down to each task, to each
view, to each pass, and to time; the rest is the step's own ([measured] two ranks of one Arm core each, a
small Llama: its 40 forward tasks, with 37 views, take 7.0 ms alone and 3.4 by what was measured over and
over; 25 us more for each task, 43 for each view, and a quarter of the time).

Backward passes follow each other within one call of autograd, of which only the whole is seen. Over and over
again each has a call of its own; so where they take less than that, it is as much less for each of them, as
far as a call can be, and where they take more, or still less, it is by the same part. Gradients that a rank
adds up are in none of its caches then, unlike over and over again ([measured] two x86 cores, the pipeline of
an MLP: 2.3 times as long; its backward passes had been predicted 20 % too fast).

How much of all that is each task's, view's and pass's, how much is of their time and how much of adding up is
told by two steps: that of the first strategy, and the same in micro-batches, which has as much to do in
smaller passes, and more to add up (or else that of the finest tasks; [measured] a small GPT-2 on two x86
cores: by one strategy, the pipeline's passes on one rank were to take 128 ms, and took 140).

On GPUs all of this is of the thread that launches kernels: what it takes longer than launching operators one
after the other (`cost.among`), and before the first of them, when the GPU has nothing to do. What kernels
themselves take longer is told by when the step is done (`kernels`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.undisturbed import doubt, undisturbed
from soapstone.cost.work import Work
from soapstone.runtime.alone import Clock, StepAlone, Taken
from soapstone.runtime.wire import Wire
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.passes import passes_in
from soapstone.tasks.task import BufferKind, TaskGraph, TaskKind
from soapstone.validation.longer import (
    MOST_BESIDE_S,
    Call,
    Longer,
    Rows,
    beside_tasks,
    longer,
    longer_back,
)

Floats = NDArray[np.float64]

ROUNDS, FEWEST_ROUNDS, WARM_UP = 96, 3, 2
"""[choice] How often each step is done, no more and no less, and how often before that. Short steps are over
in a moment, which a computer that also does other work may have been slow for."""

LONGEST_S = 9.0
"""[choice] There are fewer rounds of both steps where they would take longer. Neither has more than the
other: what is told apart by them is of the same moments."""

MOST_ONCE_S = 1.5e-4
"""[choice] What updates take in a step beyond what each of them was measured to take is so far that of asking
for all of them, which is done once, and only then a part of their time ([measured] a tiny MLP on two x86
cores: 0.14 ms for 2 weights, 0.17 for 4)."""


@dataclass(frozen=True)
class InStep:
    """The same of forward and of backward passes; by what part of its time an update takes longer, what
    launching it takes for each weight, and what asking for all of them does; what it takes to put the
    gradient of a weight into a bucket, and each byte of it; what the runtime does between tasks, for each of
    them, and beside that in a step and for each weight; how much longer all of it takes in real time than its
    parts by a thread's own clock, because the computer does other work now and then, which no short
    measurement shows (or less, as far as what is usual of parts is more than what is of the whole); the real
    time of the whole step that was seen, and how uncertain that is; on a GPU, where that is until all of it
    is launched, the time until all of it is done; and how many times as long it takes to add gradients up,
    none of which is in a cache then."""

    forward: Longer = field(default_factory=Longer)
    backward: Longer = field(default_factory=Longer)
    update: float = 0.0
    update_s: float = 0.0
    update_once_s: float = 0.0
    weight_s: float = 0.0
    weight_byte_s: float = 0.0
    between_s: float = 0.0
    beside_s: float = 0.0
    beside_weight_s: float = 0.0
    real: float = 1.0
    whole_s: float = 0.0
    doubt: float = 0.0
    settled_s: float = 0.0
    adding: float = 1.0

    def of(self, work: Work, seconds: float) -> float:
        """What this pass, which takes so long over and over again, takes longer."""
        return (self.backward if work.is_backward else self.forward).of(seconds)

    def collecting_s(self, size_bytes: int) -> float:
        """What it takes to put a gradient into a bucket."""
        return self.weight_s + self.weight_byte_s * size_bytes


@dataclass(frozen=True)
class Repeated:
    """What passes and updates of weights of some size take over and over, and a call of autograd; and how
    many times as long as it was measured adding gradients up takes. On a GPU, what launching that takes, of
    updates nothing that is known."""

    pass_s: Callable[[Work], float]
    update_s: Callable[[int], float]
    call_s: float
    adding: float = 1.0
    stretch: float = 1.0


@dataclass(frozen=True)
class Alone:
    """A strategy, its step for a rank to do alone, and what the rank's backward tasks take in it to add up
    gradients, as that was measured, by their numbers."""

    strategy: Strategy
    step: StepAlone
    adding_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_parts(self) -> bool:
        """Whether tasks do only parts of passes."""
        return any(map(count_of_parts, passes_in(self.step.tasks, self.strategy).values()))


@dataclass(frozen=True)
class _Seen:
    """What was seen of a step: all of it, in real time too, and its tasks; and on a GPU, when it was done."""

    whole_s: float
    real_s: float
    taken: Taken
    settled_s: float = 0.0


def measured_in_step(
    wire: Wire,
    alone: Alone | None,
    clock: Clock,
    repeated: Sequence[Repeated],
    undivided: Alone | None = None,
    finer: Alone | None = None,
) -> tuple[InStep, ...]:
    """What passes take longer in a step for 1, 2, ... ranks at work, the same on every rank. `repeated` has
    what they take over and over by the same clock, for 1, 2, ... ranks. Numbers of ranks take turns, so that
    what else the computer does falls on all of them alike. Of a step that is `undivided`, on one rank, is
    what passes take longer that are not in parts, if it is given; and one whose tasks are `finer` helps to
    tell what is each task's and pass's, what is of their time, and what adding up takes."""
    if wire.size == 1 or alone is None:
        return ()
    plain = None if undivided is None else _undivided(wire, undivided, clock, repeated[0])
    rounds = _rounds(wire, alone, finer, clock)
    seen: dict[int, list[_Seen]] = {1: [], wire.size: []}
    beside: dict[int, list[Taken]] = {busy: [] for busy in seen}
    for _ in range(WARM_UP + rounds):
        for busy, own in seen.items():
            own += _seen(wire, alone.step, clock, is_at_work=wire.rank < busy)
            if finer is not None:
                wire.meet("steps alone")
                if wire.rank < busy:
                    beside[busy].append(finer.step.timed(clock))

    def found(busy: int) -> InStep | None:
        if not seen[busy]:
            return None
        others = Rows()
        if finer is not None:
            others = _rows(finer, usual(beside[busy][WARM_UP:]), repeated[busy - 1], met=False)
        return _found(alone, seen[busy][WARM_UP:], repeated[busy - 1], plain, others)

    one, everyone = (_mean(wire, found(busy)) for busy in seen)
    return tuple(_between(one, everyone, (busy - 1) / (wire.size - 1)) for busy in range(1, wire.size + 1))


def _rounds(wire: Wire, alone: Alone, finer: Alone | None, clock: Clock) -> int:
    """How often both steps are done, the same on every rank. In each round the first is done twice, by one
    rank and by all, and the other once."""
    step = alone.step
    own_s = step.settled(clock)[1] if step.is_launched else step.run(clock)
    taken_s = 4 * own_s + (0.0 if finer is None else 2 * finer.step.run(clock))
    longest_s = max(map(float, wire.told_by_all(str(taken_s), "steps alone")))
    return max(FEWEST_ROUNDS, min(ROUNDS, int(LONGEST_S / longest_s)))


def _undivided(wire: Wire, alone: Alone, clock: Clock, repeated: Repeated) -> InStep:
    """What is seen of it by the rank that has tasks in it, and other ranks hear of."""
    rounds = [_seen(wire, alone.step, clock) for _ in range(WARM_UP + FEWEST_ROUNDS)]
    own = [seen for each in rounds for seen in each]
    return _mean(wire, _found(alone, own[WARM_UP:], repeated, None, Rows()))


def _seen(wire: Wire, step: StepAlone, clock: Clock, *, is_at_work: bool = True) -> list[_Seen]:
    """What this rank sees of the step, if it is at work. Those that are begin at the same moment."""
    wire.meet("steps alone")
    taken = step.timed(clock) if is_at_work else None
    if step.is_launched:
        wire.meet("steps alone")
    if taken is None:
        return []
    if step.is_launched:  # while all is launched at once, the thread may wait for its GPU; else it is slower
        real_s, settled_s = step.settled(clock)
        return [_Seen(min(taken.whole_s, real_s), real_s, taken, settled_s)]
    start = perf_counter()
    whole_s = step.run(clock)
    return [_Seen(whole_s, perf_counter() - start, taken)]


def _rows(alone: Alone, taken: Taken, repeated: Repeated, *, met: bool = True) -> Rows:
    """What is told of this rank's tasks; if not `met`, of those forward ones alone that need nothing of
    others."""
    found, tasks, passes_of = Rows(), alone.step.tasks, passes_in(alone.step.tasks, alone.strategy)
    place = tasks.tasks[next(iter(taken.tasks_s))].resource if taken.tasks_s else None
    found.tasks = sum(tasks.tasks[number].resource == place for number in passes_of)
    found.between_s = taken.between_s
    for number, passes in passes_of.items():
        if tasks.tasks[number].kind is TaskKind.BACKWARD or number not in taken.tasks_s:
            continue
        if not met and any(tasks.tasks[before].resource != place for before in tasks.after[number]):
            continue
        works = [(repeated.pass_s(work), share) for work, share in passes if work is not None]
        views = sum(share for work, share in passes if work is None)
        whole = 0.0 if alone.step.is_launched else sum(share for _, share in works)
        found.rows.append((1.0, views, whole, sum(seconds * share for seconds, share in works)))
        found.parts += count_of_parts(passes)
        found.seen_s.append(taken.tasks_s[number])
    for numbers in alone.step.taken_back:
        if numbers[0] in taken.tasks_s:
            found.calls.append(
                Call(
                    [
                        (repeated.pass_s(work), share)
                        for number in numbers
                        for work, share in passes_of[number]
                        if work is not None
                    ],
                    repeated.adding * sum(alone.adding_s.get(number, 0.0) for number in numbers),
                    taken.tasks_s[numbers[0]] - repeated.call_s,
                )
            )
    return found


def _found(
    alone: Alone, seen: Sequence[_Seen], repeated: Repeated, plain: InStep | None, others: Rows
) -> InStep | None:
    """What this rank has seen, of passes in parts only, if `plain` has the rest; None if it does nothing in a
    step. `others` are forward tasks and calls of another step."""
    tasks, taken = alone.step.tasks, usual([each.taken for each in seen])
    if not taken.tasks_s:
        return None
    own = _rows(alone, taken, repeated)
    seen_s, parts = own.seen_s, own.parts
    backward_s, adding = longer_back(own.calls, others.calls)
    updated = _updated_bytes(tasks, taken)
    update_s = sum(map(repeated.update_s, updated))
    once_s = min(MOST_ONCE_S, max(0.0, taken.update_s - update_s)) if update_s else 0.0
    whole_s = undisturbed(each.whole_s for each in seen)
    if alone.step.is_launched:  # a GPU has nothing to do before the first task is launched
        between_s = max(taken.before_s, whole_s - taken.done_s)
        outside_s = beside_s = taken.before_s
    else:
        between_s, outside_s = taken.between_s, beside_tasks(own, others)
        beside_s = min(MOST_BESIDE_S, outside_s) if updated else outside_s
    if plain is None or not parts:
        forward_s = longer(own.told, np.array(seen_s), others.told, np.array(others.seen_s))
    else:
        known = plain.forward
        said = known.task_s, known.view_s, known.pass_s, 1.0 + known.share
        rest_s = [
            sum(seen_s) - float((own.told @ np.array(said)).sum()),
            sum(call.seen_s - adding * call.adding_s - call.said_s(plain.backward) for call in own.calls),
        ]
        forward_s, backward_s = (
            replace(own, part_s=_digits(max(0.0, each_s / parts)))
            for own, each_s in zip((plain.forward, plain.backward), rest_s, strict=True)
        )
    return InStep(
        forward_s,
        backward_s,
        (taken.update_s - once_s) / update_s - 1.0 if update_s else 0.0,
        0.0 if update_s or not updated else taken.update_s / len(updated),
        once_s,
        *_collecting(alone.step, taken),
        (between_s - outside_s) / own.tasks,
        beside_s,
        (outside_s - beside_s) / max(1, len(updated)),
        1.0
        if alone.step.is_launched
        else median(each.real_s / max(each.whole_s, 1e-9) for each in seen)
        / repeated.stretch
        * whole_s
        / (taken.done_s + between_s),
        undisturbed(each.real_s for each in seen),
        doubt([each.real_s for each in seen]),
        undisturbed(each.settled_s for each in seen),
        adding,
    )


def count_of_parts(passes: Sequence[tuple[Work | None, float]]) -> int:
    """Of how many passes a task does only a part."""
    return sum(work is not None and share < 1 for work, share in passes)


def _updated_bytes(tasks: TaskGraph, taken: Taken) -> list[int]:
    """The sizes of the gradients of the device whose tasks these are."""
    own = {tasks.tasks[number].resource for number in taken.tasks_s}
    return [
        buffer.size_bytes
        for buffer in tasks.buffers
        if buffer.kind is BufferKind.WEIGHT_GRADIENT
        for key in buffer.needed_by
        if tasks.tasks[tasks.ids[key]].resource in own
    ]


def _collecting(step: StepAlone, taken: Taken) -> tuple[float, float]:
    """What collecting a gradient takes, and each byte of it."""
    rows = [
        (float(pieces), float(size_bytes), taken.asked_s[task])
        for task, pieces, size_bytes in step.sums
        if task in taken.asked_s
    ]
    if not rows:
        return 0.0, 0.0
    told = np.array(rows)
    units = np.maximum(told[:, :2].mean(axis=0), 1e-30)
    both, *_ = np.linalg.lstsq(told[:, :2] / units, told[:, 2], rcond=None)
    if both.min() < 0:  # all of it is the other's
        other = int(np.argmax(both))
        both = np.zeros(2)
        both[other] = told[:, 2].sum() / (told[:, other] / units[other]).sum()
    weight_s, byte_s = both / units
    return float(weight_s), float(byte_s)


def usual(seen: Sequence[Taken]) -> Taken:
    """What each task took in several steps, when nothing disturbed it."""

    def of(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
        return {number: undisturbed(each[number] for each in found) for number in found[0]}

    return Taken(
        of([each.tasks_s for each in seen]),
        of([each.asked_s for each in seen]),
        undisturbed(each.update_s for each in seen),
        undisturbed(each.whole_s for each in seen),
        undisturbed(each.between_s for each in seen),
        undisturbed(each.before_s for each in seen),
    )


def _mean(wire: Wire, own: InStep | None) -> InStep:
    """What lies between what ranks have seen, on every one of them."""
    told = wire.told_by_all(json.dumps(None if own is None else asdict(own)), "steps alone")
    found = [_of(json.loads(each)) for each in told if each != "null"]
    mean = InStep()
    for count, each in enumerate(found, 1):
        mean = _between(mean, each, 1.0 / count)
    return mean


def _of(said: dict[str, Any]) -> InStep:
    return InStep(**{**said, "forward": Longer(**said["forward"]), "backward": Longer(**said["backward"])})


def _between(one: InStep, other: InStep, part: float) -> InStep:
    def mean(a: float, b: float) -> float:
        return _digits((1 - part) * a + part * b)

    def longer_of(a: Longer, b: Longer) -> Longer:
        return Longer(*(mean(getattr(a, each.name), getattr(b, each.name)) for each in fields(Longer)))

    numbers = [each.name for each in fields(InStep) if each.name not in ("forward", "backward")]
    return InStep(
        longer_of(one.forward, other.forward),
        longer_of(one.backward, other.backward),
        *(mean(getattr(one, name), getattr(other, name)) for name in numbers),
    )


def _digits(number: float) -> float:
    return float(f"{number:.3g}")
