"""What messages, their pieces and calls of autograd take in a step.

A strategy that cuts its operators in many ways puts what they need together from pieces that others send, and
has autograd take back a few of them at a time. All of that is measured by itself (`handing`), which shows too
little: in a step it comes once among hundreds of operators, and gradients are put together by adding them up
([measured] NMT and RNNLM, hidden 256, an Arm core: 40 to 80 us for a piece, 16 by itself; 0.15 to 0.25 ms for
a call, 0.1 by itself). So ranks do steps of such a strategy alone, too (`runtime.alone`). What tasks take
beyond their prediction is put down to messages, pieces and calls, and to the bytes that are copied, which are
known; a message also takes what asking for it does, less what one to nobody takes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from soapstone.runtime.alone import Clock, StepAlone, Taken
from soapstone.runtime.wire import Wire
from soapstone.tasks.task import TaskKind
from soapstone.validation.handing import to_nobody_s
from soapstone.validation.in_step import FEWEST, LEAST_S, medians, without_gain
from soapstone.validation.parts import Parts
from soapstone.validation.traffic import Traffic

Floats = NDArray[np.float64]

IN_MEETINGS = 1.0
"""[choice] A meeting has two ends of messages, of whose longer time ports and regions, which meetings are
measured without, are about a half."""

ROUNDS, WARM_UP = 5, 2
"""[choice] How often the step is done, and how often before that."""


@dataclass(frozen=True)
class Said:
    """What a step's tasks take by their prediction while all ranks are at work, by the clock that steps are
    timed by: operators and all that was found beside them, but nothing of messages."""

    parts: Parts
    seconds: Floats


@dataclass(frozen=True)
class Beyond:
    """What a message takes of each of its ends, a piece and a call, beyond what was measured of them by
    themselves."""

    message_s: float = 0.0
    piece_s: float = 0.0
    call_s: float = 0.0

    def added_to(self, traffic: Traffic) -> Traffic:
        """The traffic as it is in steps. Of what ends of messages take longer there, a part is in meetings as
        these are measured."""
        handing = replace(
            traffic.handing,
            message_s=traffic.handing.message_s + self.message_s,
            part_s=traffic.handing.part_s + self.piece_s,
            call_s=traffic.handing.call_s + self.call_s,
        )
        return replace(traffic, handing=handing, meeting=traffic.meeting.less(IN_MEETINGS * self.message_s))


def measured_beyond(wire: Wire, step: StepAlone | None, said: Said, clock: Clock) -> Beyond:
    """What is seen of it in this step; the same on every rank."""
    if step is None:
        return Beyond()
    usual_s = to_nobody_s(wire)
    seen = []
    for _ in range(WARM_UP + ROUNDS):
        wire.meet("steps alone")
        seen.append(step.timed(clock))
    taken = medians(seen[WARM_UP:])
    sums = {task for task, *_ in step.sums}
    asked_s = sum(seconds for task, seconds in taken.asked_s.items() if task not in sums)
    own = beyond_said(said, _seen_as_one(step, taken), taken.tasks_s, asked_s, usual_s)
    told = wire.told_by_all(json.dumps(None if own is None else astuple(own)), "pieces")
    known = [json.loads(each) for each in told if each != "null"]
    return Beyond(*(float(f"{fmean(column):.3g}") for column in zip(*known, strict=True)))


def _seen_as_one(step: StepAlone, taken: Taken) -> list[list[int]]:
    """The tasks of which one time was taken: each on the way forward, and those that a call takes back."""
    tasks = step.tasks.tasks
    forward = [[number] for number in taken.tasks_s if tasks[number].kind is TaskKind.FORWARD]
    return forward + [each for each in step.taken_back if each[0] in taken.tasks_s]


def beyond_said(
    said: Said,
    seen_as_one: Sequence[Sequence[int]],
    taken_s: Mapping[int, float],
    asked_s: float,
    usual_s: float,
) -> Beyond | None:
    """What is found by what tasks took, of which each first one has the time, and what asking for messages
    did, where `usual_s` is what an end of a message to nobody takes by itself; None where there are too few
    pieces to tell."""
    parts, handing = said.parts, said.parts.handing
    rows, beyond_s, said_s = [], [], []
    for numbers in map(list, seen_as_one):
        is_call = float(parts.tasks.tasks[numbers[0]].kind is TaskKind.BACKWARD)
        pieces, messages, bytes_s = (
            float(each[numbers].sum()) for each in (parts.pieces, parts.messages, parts.wire_s)
        )
        rows.append((messages, pieces, is_call, bytes_s))
        said_s.append(float(said.seconds[numbers].sum()))
        known_s = said_s[-1] + handing.part_s * pieces + handing.call_s * is_call
        beyond_s.append(taken_s[numbers[0]] - known_s)
    told = np.array(rows).reshape(-1, 4)
    if np.count_nonzero(told[:, 1]) < FEWEST:
        return None
    units = np.maximum(np.mean(told, axis=0), 1e-30)
    weight = 1.0 / np.sqrt(np.maximum(said_s, LEAST_S))
    factors = without_gain(told / units * weight[:, None], np.array(beyond_s) * weight, 4) / units
    taking_s, piece_s, call_s, _ = factors.tolist()
    message_s = asked_s / max(1.0, float(told[:, 0].sum())) + taking_s - usual_s
    return Beyond(max(message_s, 0.0), piece_s, call_s)
