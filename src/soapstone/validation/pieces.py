"""What messages, their pieces and calls of autograd take in a step.

A strategy that cuts its operators in many ways puts what they need together from pieces that others send, and
has autograd take back a few of them at a time. All of that is measured by itself (`handing`), which shows too
little: in a step it comes once among hundreds of operators, and gradients are put together by adding them up
([measured] NMT and RNNLM, hidden 256, an Arm core: 40 to 80 us for a piece, 16 by itself; 0.15 to 0.25 ms for
a call, 0.1 by itself). So ranks do steps of such a strategy alone, too (`runtime.alone`). What tasks take
beyond their prediction, copying included, is put down to messages, pieces, the bytes of what comes and
calls; a message also takes what asking for it does, less what one to nobody takes by itself. Messages and
pieces are told from their bytes, since a strategy in micro-batches has as many that are smaller ([measured]
an MLP, two x86 cores: 0.1 ms for a piece of 0.5 MB, and 0.06 for taking a message of 0.25; pipelines whose
messages are a fourth of that or less were 12 to 36 % too slow when each was charged as much). Where all are
of one size only what is likely tells the two apart.

Where tasks are long and messages large, all of this is little beside what a task takes one time and not the
next, and telling it apart would be guessing ([measured] four ranks on two cores, messages of 2 MB: 0.6 ms for
an end of a message by one run, 0.06 by the next). So each of them is believed to take longer, or
less, only as far as that is told more clearly than it is unlikely (`LIKELY_S` and those that follow it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.undisturbed import undisturbed
from soapstone.runtime.alone import Clock, StepAlone, Taken
from soapstone.runtime.wire import Wire
from soapstone.tasks.task import TaskKind
from soapstone.validation.handing import message_to_nobody_s
from soapstone.validation.in_step import usual
from soapstone.validation.longer import FEWEST, LEAST_S, units_of, without_gain
from soapstone.validation.parts import Parts
from soapstone.validation.traffic import Traffic
from soapstone.validation.unsteady import Pace

Floats = NDArray[np.float64]

LIKELY_S = 1e-4
"""[choice] By so much asking for a message or a call may well take longer in a step."""

LIKELY_PIECE_S, LIKELY_BYTE_S, LIKELY_TAKING_S = 3e-5, 3e-10, 1e-5
"""[choice] And by so much a piece, each byte of what comes, and taking a message. Where the thread only
launches what becomes of them, bytes take nothing, and taking one as much as a piece."""

MOST_LESS = 0.75
"""[choice] What was measured by itself may take less in a step, by so large a part of it at most."""

ROUNDS, FEWEST_ROUNDS, WARM_UP = 48, 9, 2
"""[choice] How often the step is done, no more and no less, and how often before that."""

LONGEST_S = 2.0
"""[choice] There are fewer rounds where they would take longer."""


@dataclass(frozen=True)
class Said:
    """What a step's tasks take by their prediction while all ranks are at work, by the clock that steps are
    timed by: operators and all that was found beside them, but nothing of messages, nor of what lies between
    tasks. `stretch` is how many seconds pass while that clock counts one."""

    parts: Parts
    seconds: Floats
    stretch: float = 1.0


@dataclass(frozen=True)
class Seen:
    """What was seen of a rank's step: the tasks of which one time was taken, which the first of them has;
    these times; and of messages how often something was asked for, their bytes, and what that took."""

    as_one: Sequence[Sequence[int]]
    tasks_s: Mapping[int, float]
    asked: Sequence[tuple[int, int, float]]


@dataclass(frozen=True)
class Beyond:
    """What a message takes of each of its ends, a piece, a call and a byte of what comes, beyond what was
    measured of them by themselves."""

    message_s: float = 0.0
    piece_s: float = 0.0
    call_s: float = 0.0
    came_byte_s: float = 0.0

    def added_to(self, traffic: Traffic) -> Traffic:
        """The traffic as it is in steps. Sums and further pieces, which are told in ends of messages, stay as
        they are."""
        own = traffic.handing
        fewer = own.message_s / (own.message_s + self.message_s) if self.message_s else 1.0
        handing = replace(
            own,
            message_s=own.message_s + self.message_s,
            part_s=own.part_s + self.piece_s,
            came_byte_s=own.came_byte_s + self.came_byte_s,
            further=own.further * fewer,
            call_s=own.call_s + self.call_s,
            sums={count: (fewer * few, fewer * many) for count, (few, many) in own.sums.items()},
        )
        return replace(traffic, handing=handing)


def measured_beyond(
    wire: Wire, step: StepAlone | None, said: Said, clock: Clock, pace: Pace | None = None
) -> Beyond:
    """What is seen of it in this step; the same on every rank. That the computer is faster or slower now than
    when it was measured what tasks take is none of it."""
    if step is None:
        return Beyond()
    usual_s = message_to_nobody_s(wire)
    seen, slower = [], []

    def do(times: int) -> None:
        for _ in range(times):
            slower.append(1.0 if pace is None else pace.among_all())
            wire.meet("steps alone")
            seen.append(step.timed(clock))

    start = perf_counter()
    do(WARM_UP)
    own_s = (perf_counter() - start) / WARM_UP
    longest_s = max(map(float, wire.told_by_all(str(own_s), "pieces")))
    do(max(FEWEST_ROUNDS, min(ROUNDS, int(LONGEST_S / longest_s))))
    now = replace(said, seconds=undisturbed(slower[WARM_UP:]) * said.seconds)
    own = beyond_said(now, _seen(step, usual(seen[WARM_UP:])), usual_s)
    told = wire.told_by_all(json.dumps(None if own is None else astuple(own)), "pieces")
    known = [json.loads(each) for each in told if each != "null"]
    return Beyond(*(float(f"{fmean(column):.3g}") for column in zip(*known, strict=True)))


def _seen(step: StepAlone, taken: Taken) -> Seen:
    tasks = step.tasks.tasks
    forward = [[number] for number in taken.tasks_s if tasks[number].kind is TaskKind.FORWARD]
    back = [each for each in step.taken_back if each[0] in taken.tasks_s]
    asked: dict[int, int] = {}
    for task, times in step.asked:
        asked[task] = asked.get(task, 0) + times
    messages = [
        (times, tasks[task].size_bytes, taken.asked_s[task])
        for task, times in asked.items()
        if task in taken.asked_s
    ]
    return Seen([*forward, *back], taken.tasks_s, messages)


def beyond_said(said: Said, seen: Seen, usual_s: float) -> Beyond | None:
    """What is found by what was seen, where `usual_s` is what an end of a message to nobody takes by itself;
    None where there are too few pieces to tell. A message that is cut out of a tensor is so when it is asked
    for; what is put together is so in the task that needs it."""
    parts, handing, stretch = said.parts, said.parts.handing, said.stretch
    handed = parts.handed
    rows, beyond_s, said_s = [], [], []
    for numbers in map(list, seen.as_one):
        is_call = float(parts.tasks.tasks[numbers[0]].kind is TaskKind.BACKWARD)
        columns = (handed.messages, handed.put, handed.came_bytes)
        messages, put, came_bytes = (float(each[numbers].sum()) for each in columns)
        came_bytes *= not parts.launches_ahead  # the thread that launches reads nothing
        rows.append((messages, put, came_bytes, is_call))
        handed_s = handing.part_s * put + handing.came_byte_s * came_bytes + handing.call_s * is_call
        handed_s += float(handed.put_s[numbers].sum())
        said_s.append(float(said.seconds[numbers].sum()) + handed_s / stretch)
        beyond_s.append(seen.tasks_s[numbers[0]] - said_s[-1])
    told = np.array(rows).reshape(-1, 4)
    if len(told) < FEWEST or not told[:, 1].any() or not seen.asked:
        return None
    weight = 1.0 / np.sqrt(np.maximum(said_s, LEAST_S))
    taking_likely_s = LIKELY_PIECE_S if parts.launches_ahead else LIKELY_TAKING_S
    likely = np.array([taking_likely_s, LIKELY_PIECE_S, LIKELY_BYTE_S, LIKELY_S]) / stretch
    least = -MOST_LESS * np.array([0.0, handing.part_s, handing.came_byte_s, handing.call_s]) / stretch
    found_s = (stretch * _factors(told, np.array(beyond_s), weight, likely, least)).tolist()
    taking_s, piece_s, byte_s, call_s = found_s
    numbers = [number for each in seen.as_one for number in each]
    cut = float(handed.cut[numbers].sum())
    asked = np.array(seen.asked, dtype=np.float64)
    each_s = usual_s + (handing.part_s + piece_s) * cut / float(asked[:, 0].sum())
    longer_s = asked[:, 2] - each_s / stretch * asked[:, 0]
    only_messages = np.array([np.inf, LIKELY_S / stretch])
    least = np.array([0.0, -MOST_LESS * usual_s / stretch])
    by_asking = _factors(asked[:, 1::-1], longer_s, np.ones(len(asked)), only_messages, least)
    message_s = max(stretch * float(by_asking[1]) + taking_s, -MOST_LESS * handing.message_s)
    return Beyond(message_s, piece_s, call_s, byte_s)


def _factors(columns: Floats, wanted: Floats, weight: Floats, likely: Floats, least: Floats) -> Floats:
    """What one of each column takes, but nothing less than the `least`. Each is thought to be zero, give or
    take what is likely, and what was seen counts against that by how well it hangs together."""
    count, units = columns.shape[1], units_of(columns)
    rows, seen, least = columns / units * weight[:, None], wanted * weight, least * units
    least[~columns.any(axis=0)] = 0.0
    seen = seen - rows @ least
    left = seen - rows @ without_gain(rows, seen, count)
    noise = np.sqrt(left @ left / max(1, len(rows) - count))
    doubts = np.diag(noise / (likely * units))
    found = without_gain(np.vstack([rows, doubts]), np.append(seen, -doubts @ least), count)
    return np.asarray((found + least) / units)
