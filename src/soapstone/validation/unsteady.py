"""How fast ranks are while strategies run: faster or slower than when operators were measured, and than each
other.

A computer is not always as fast as it was a minute ago ([measured] two cores of a shared computer, RNNTC:
everything took 0.75 times as long as when it was measured), nor does it slow down alike what one rank does
and what all do ([measured] the same, BERT: 1.1 times as long for two ranks at work, and for one as before).
And ranks that do the same at the same time are not done at the same moment: one core is shared with more than
another, and at one time more than at another. In a step all wait for whoever is last, so a step of several
ranks takes longer than a rank takes in the middle ([measured] 16 cores of a large computer, four ranks, a
step of NMT alone: 42 to 65 ms within ten rounds; two Arm cores: 3.2 ms on one of them and 3.6 on the other).

So ranks do a step alone, one of them and all at once, now and then between the steps of strategies, one in
which each of them has as much to do. What each took in each round, relative to what it took when operators
were held against it (`in_step`), is a way in which a real step may go. The faster quartile of steps, or what
else counts of them, is predicted as that of what steps would be in these ways (`parts`).

Ranks slow down mostly each at its own time ([measured] two x86 cores of a shared server, the same product
over and over: each now takes 1.25 ms and now 1.8, for 20 to 500 ms at a time; of 386 spans of 20 ms one was
slow in 57, the other in 10, both in 4). So where they work one after the other, each is as slow as it is in
the round, too, and a step of both is seldom as fast as the faster quarter of either's.

That one rank is slower than another does not last ([measured] two Arm cores: the other one a minute later),
so it is not told which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, hypot, log
from statistics import fmean, median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.undisturbed import doubt
from soapstone.plans import Plan
from soapstone.runtime.alone import StepAlone
from soapstone.runtime.wire import Wire
from soapstone.tasks.task import COMPUTE_KINDS

Floats = NDArray[np.float64]

MOST_WAYS = 64
"""[choice] So many ways in which a step may go stand for all."""

REFILLED_S = 0.3
"""[choice] The first step of a turn does not count where steps take less than this: it finds in caches what
others had there ([measured] RNNTC on two x86 cores, steps of 0.1 to 0.15 s: it takes up to 5 % longer)."""

ALIKE = 0.01
"""[choice] Ranks have as much to do as each other where what they have differs by no larger part."""


@dataclass(frozen=True)
class Round:
    """How long each rank takes by itself, and with all at work, relative to what one takes in the middle when
    it was measured."""

    alone: tuple[float, ...]
    each: tuple[float, ...]

    @property
    def evened(self) -> Round:
        """The same as if all at work were as fast. So it is where ranks share cores: whoever is done leaves
        its core to the others, and no step waits for the slowest as it was while all were at work to the end.
        And it is so where they meet so often that waiting for each other is in what their meetings take. Who
        works by itself keeps nobody waiting that it does not keep waiting anyway."""
        return Round(self.alone, (fmean(self.each),) * len(self.each))


@dataclass(frozen=True)
class Unsteady:
    """Rounds, and the part of steps that is faster than what is predicted."""

    rounds: tuple[Round, ...] = ()
    faster: float = 0.5


def does_alike(plan: Plan) -> bool:
    """Whether all devices have as much to compute under a plan."""
    own_s = {device.name: 0.0 for device in plan.machine.devices}
    for task in plan.executed().tasks.tasks:
        if task.kind in COMPUTE_KINDS:
            own_s[task.resource] += task.duration_s
    return max(own_s.values()) - min(own_s.values()) <= ALIKE * max(own_s.values())


@dataclass
class Pace:
    """A step in which all ranks do alike, for each to do alone now and then, and what that took one of them
    and all of them when it was measured. How much faster than with all at work one rank is by itself is seen
    by one of them, and is the middle of what was seen: it is a matter of what they share, not of the
    moment. It is believed as far as it is told: `doubt` says how uncertain it is what the step took of one
    and of all when it was measured, as a part of that."""

    wire: Wire
    step: StepAlone
    one_s: float
    all_s: float
    doubt: float = 0.0
    taken: list[tuple[float, float]] = field(default_factory=list)

    def among_all(self) -> float:
        """How much longer than is usual this rank takes now, with all at work."""
        return self._taken_s() / self.all_s

    def take(self) -> None:
        """Do it once more, all ranks and one."""
        own = self.among_all()
        one = self._taken_s(is_at_work=not self.wire.rank) / self.one_s
        self.taken.append((one, own))

    def _taken_s(self, *, is_at_work: bool = True) -> float:
        self.wire.meet("steps alone")
        if is_at_work and (self.step.is_launched or self.all_s < REFILLED_S):
            self.step.run(perf_counter)  # what comes after other work takes longer
        taken_s = self.step.run(perf_counter) if is_at_work else 0.0
        self.step.be_still()  # what a GPU still has to do is not to be in what follows
        return taken_s

    def rounds(self) -> tuple[Round, ...]:
        """What all of them took so far; the same on every rank."""
        told = self.wire.told_by_all(json.dumps(self.taken), "steps alone")
        taken = list(zip(*map(json.loads, told), strict=True))
        eased = believed([row[0][0] / row[0][1] for row in taken], self.doubt)
        return tuple(
            Round(tuple(_digits(eased * own) for _, own in row), tuple(_digits(own) for _, own in row))
            for row in taken
        )


def believed(times: Sequence[float], other_doubt: float) -> float:
    """The middle of these, as far as it is more than they and what they are relative to are uncertain by:
    what differs from one by no more than that is one ([measured] two x86 cores of a shared server: 1.18 and
    1.20 in validations of ResNet-101 and Inception-v3 that had few rounds of a long step, after which errors
    deviated by 13.1 and 8.7 %, without that by 8.5 and 7.6; but also 0.5, in an hour in which both cores
    together were as fast as one)."""
    if len(times) < 2:
        return 1.0
    found, uncertain = log(median(times)), hypot(doubt(times), other_doubt)
    return exp(found * max(0.0, 1.0 - (uncertain / found) ** 2)) if found else 1.0


def slowness(rounds: Sequence[Round], place: NDArray[np.int64], busy: Floats) -> Floats:
    """For each way in which a step may go how much longer each task takes, by the number of the device whose
    time it is of, or -1 for none, and by how many ranks are at work meanwhile. Which rank is the slow one
    changes, so each round stands for as many ways as there are ranks."""
    count = len(rounds[0].each)
    among = np.clip((busy - 1.0) / max(1, count - 1), 0.0, 1.0)
    ways = [(np.roll(r.alone, turn), np.roll(r.each, turn)) for turn in range(count) for r in rounds]
    ways = ways[:: -(-len(ways) // MOST_WAYS)]
    found = [alone[place] * (1.0 - among) + own[place] * among for alone, own in ways]
    return np.where(place >= 0, found, 1.0).copy(order="C")


def _digits(number: float) -> float:
    return float(f"{number:.3g}")
