"""How much faster or slower ranks are than each other, from one step to the next.

Ranks do the same at the same time and are not done at the same moment: one core is shared with more than
another, and at one time more than at another. In a step all wait for whoever is last, so a step of several
ranks takes longer than a rank takes in the middle ([measured] 16 cores of a large computer, four ranks, a
step of NMT alone: 42 to 65 ms within ten rounds; two Arm cores: 3.2 ms on one of them and 3.6 on the other).
So ranks do a step alone several times, all at once, in which each of them has as much to do; what each took
in each round, relative to all, is a way in which a real step may go. A prediction is the middle of what it
would be in each of them (`parts`).

That one rank is slower than another does not last ([measured] the same two cores: the other one a minute
later), so it is not told which.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from soapstone.plans import Plan
from soapstone.runtime.alone import StepAlone
from soapstone.runtime.wire import Wire
from soapstone.tasks.task import COMPUTE_KINDS

Floats = NDArray[np.float64]

Rounds = tuple[tuple[float, ...], ...]
"""For each round how long each rank took, relative to what a rank takes in the middle."""

ROUNDS, FEWEST = 15, 5
"""[choice] How often the step is done, no more and no less."""

LONGEST_S = 3.0
"""[choice] There are fewer rounds where they would take longer."""

ALIKE = 0.01
"""[choice] Ranks have as much to do as each other where what they have differs by no larger part."""


def does_alike(plan: Plan) -> bool:
    """Whether all devices have as much to compute under a plan."""
    own_s = {device.name: 0.0 for device in plan.machine.devices}
    for task in plan.executed().tasks.tasks:
        if task.kind in COMPUTE_KINDS:
            own_s[task.resource] += task.duration_s
    return max(own_s.values()) - min(own_s.values()) <= ALIKE * max(own_s.values())


def measured_rounds(wire: Wire, step: StepAlone) -> Rounds:
    """Of a step in which all ranks do alike; the same on every rank."""
    once_s = max(map(float, wire.told_by_all(str(step.run(perf_counter)), "steps alone")))
    taken_s = []
    for _ in range(max(FEWEST, min(ROUNDS, int(LONGEST_S / once_s)))):
        wire.meet("steps alone")
        taken_s.append(step.run(perf_counter))
    told = [json.loads(each) for each in wire.told_by_all(json.dumps(taken_s), "steps alone")]
    usual_s = sum(map(median, told)) / wire.size
    return tuple(tuple(float(f"{each / usual_s:.3g}") for each in row) for row in zip(*told, strict=True))


def slowness(rounds: Rounds, place: NDArray[np.int64]) -> Floats:
    """For each way in which a step may go how much longer each task takes, by the number of the device whose
    time it is of, or -1 for none. Which rank is the slow one changes, so each round stands for as many ways
    as there are ranks."""
    found = np.array(rounds)
    ways = np.vstack([np.roll(found, turn, axis=1) for turn in range(found.shape[1])])
    return np.where(place >= 0, ways[:, place], 1.0)
