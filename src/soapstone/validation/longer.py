"""What passes take longer in a step than over and over again, told apart by what tasks and calls took.

Of a step only the times of whole forward tasks and of whole calls of autograd are seen (`in_step`). What
they take beyond what their passes do over and over again is put down to tasks, views, passes, their time and
adding gradients up, each as far as that is told more clearly than it is unlikely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NO_ROWS: Floats = np.zeros((0, 4))

FEWEST = 8
"""[choice] With fewer tasks than this, those of both steps, nothing is told apart."""

MOST_SHARE = 1.0
"""[choice] No pass takes longer by more than this part of its time for its time's sake, or shorter by more
than half of that."""

MOST_LESS_S = 3e-5
"""[choice] What a pass over and over again may take longer by its own call of autograd; where passes of a
step take less than without that, they take less by the same part."""

LEAST_S = 2e-5
"""[choice] Tasks are weighed by what they take, no task as if it took less."""

MOST_BESIDE_S = 2e-4
"""[choice] What lies between tasks and is none of theirs is so far the step's own at most, and else that of
weights. Two steps of the same weights do not tell these apart ([measured] a rank with nothing to compute, two
x86 cores: 0.16 to 0.18 ms; by two steps 0.25 for an MLP of 4 weights, 0.44 for one of 8, 1.0 for a DLRM of
17)."""

MOST_ADDING = 3.0
"""[choice] Adding up takes no more times as long as by itself."""

DOUBT = 2.0
"""[choice] That times as such are as measured is believed as if so many times all tasks had said so: what
they take longer is the runtime's before it is theirs."""

LIKELY_S = 5e-5
"""[choice] By so much a task, a view or a pass may well take longer for its own sake; more is believed as
far as it is told more clearly than that is unlikely ([measured] AlexNet, which has one view, on two x86 cores
that do other work: 0.44 to 0.75 ms for it, by what one task of a few took longer)."""

LIKELY_BACK = 3e-5, 0.1, 1.0
"""[choice] The same of a backward pass, of the part of its time, and of how many times as long adding up
takes."""

TOLD = 0.01
"""[choice] No call tells its passes nearer than this, as a part of their time, however few calls agree."""

SETTLING = 3
"""[choice] So often what backward passes take in all is settled: none takes less than half, so the first time
may not be all of it."""

ROOM = 0.1
"""[choice] What passes have of their own is at most what all of them take longer, and this part of their
time: no more than that is believed to be saved by their time ([measured] RNNLM on two x86 cores, whose small
cells are bound by their weights: by two steps all passes were to take 0.12 ms more, and half their time
less)."""

SMALLER, MOST_TIMES = 2.0, 3.0
"""[choice] Where tasks of the second step are so many times smaller, what tasks, views and passes have of
their own is such that all of its tasks together take what they took; by no more than so many times is it
changed for that."""


@dataclass(frozen=True)
class Longer:
    """What a task and each of its views take, and each pass of which it does only a part, since others have
    to be asked amid it; and what a pass takes longer, as such and for each second."""

    task_s: float = 0.0
    view_s: float = 0.0
    part_s: float = 0.0
    pass_s: float = 0.0
    share: float = 0.0

    def of(self, seconds: float) -> float:
        """What a pass, which takes so long over and over again, takes longer."""
        return max(-MOST_SHARE / 2 * seconds, self.pass_s + self.share * seconds)


@dataclass(frozen=True)
class Call:
    """A call of autograd: what each of its passes takes over and over, and which part of it there is; what
    adding up gradients takes by its measurement; and what was seen of all of it, but for the call itself."""

    passes: Sequence[tuple[float, float]]
    adding_s: float
    seen_s: float

    @property
    def seconds(self) -> float:
        """What its passes take over and over."""
        return sum(seconds * share for seconds, share in self.passes)

    @property
    def count(self) -> float:
        """How many passes there are."""
        return sum(share for _, share in self.passes)

    def said_s(self, longer: Longer) -> float:
        """What its passes take in a step."""
        return sum(share * (seconds + longer.of(seconds)) for seconds, share in self.passes)


@dataclass
class Rows:
    """Of forward tasks one, their views, their passes, and what these take over and over; what each took; of
    how many passes they do a part; the calls that take tasks back; and how many tasks there are, and what
    lies between them."""

    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    seen_s: list[float] = field(default_factory=list)
    parts: int = 0
    calls: list[Call] = field(default_factory=list)
    tasks: int = 0
    between_s: float = 0.0

    @property
    def told(self) -> Floats:
        """The rows."""
        return np.array(self.rows, dtype=np.float64).reshape(-1, 4)


def beside_tasks(own: Rows, others: Rows) -> float:
    """What a step takes beside its tasks and what lies between each two of them, for its own sake and for its
    weights', by two steps of the same weights of which one has more tasks."""
    if others.tasks <= own.tasks:
        return 0.0
    each_s = max(0.0, others.between_s - own.between_s) / (others.tasks - own.tasks)
    return max(0.0, own.between_s - own.tasks * each_s)


def longer(
    rows: Floats, seen_s: Floats, other_rows: Floats = NO_ROWS, other_seen_s: Floats = NO_ROWS[:, 0]
) -> Longer:
    """What forward tasks take longer than their passes do over and over again, by what they took, so that
    together they take what they took. A row has one, a task's views and passes, and these passes' seconds.
    Others help to tell these apart; if they are clearly smaller, they take together what they took, too."""
    every, every_s = np.vstack([rows, other_rows]), np.append(seen_s, other_seen_s)
    if not len(rows) or len(every) < FEWEST:
        return Longer()
    own_s, count = every[:, -1], every.shape[1] - 1
    units = units_of(every)
    weight = 1.0 / np.sqrt(np.maximum(own_s, LEAST_S))
    told, wanted = every / units * weight[:, None], (every_s - own_s) * weight
    left = wanted - told @ without_gain(told, wanted, count)
    noise = sqrt(left @ left / max(1, len(told) - count - 1))
    doubts = np.diag([*[noise / LIKELY_S] * count, sqrt(DOUBT * own_s.sum())] / units)
    columns, wanted = np.vstack([told, doubts]), np.append(wanted, np.zeros(count + 1))
    factors = np.where(every.any(axis=0), without_gain(columns, wanted, count) / units, 0.0)
    own, others = _together(rows, seen_s, factors), _together(other_rows, other_seen_s, factors)
    if others[0] * own[1] > SMALLER * own[0] * others[1]:
        times = (others[2] * own[1] - own[2] * others[1]) / (others[0] * own[1] - own[0] * others[1])
        factors *= min(MOST_TIMES, max(0.0, times))
    own_more_s, passes_s, longer_s = _together(rows, seen_s, factors)
    room_s = longer_s - _least_share(longer_s, passes_s) * passes_s
    factors *= min(1.0, room_s / max(own_more_s, 1e-12))
    share = (longer_s - (rows[:, :-1] @ factors[:-1]).sum()) / max(passes_s, 1e-9)
    task_s, view_s, pass_s = map(_digits, factors[:-1])
    return Longer(task_s, view_s, pass_s=pass_s, share=_bounded(share))


def _together(rows: Floats, seen_s: Floats, factors: Floats) -> tuple[float, float, float]:
    """What all tasks have of their own by these factors; what their passes take over and over, and how much
    longer they took."""
    passes_s = rows[:, -1].sum()
    return float((rows[:, :-1] @ factors[:-1]).sum()), float(passes_s), float(seen_s.sum() - passes_s)


def _least_share(longer_s: float, passes_s: float) -> float:
    """By what part of their time passes take less at least, which together take so much longer."""
    return min(0.0, longer_s / max(passes_s, 1e-9)) - ROOM


def units_of(columns: Floats) -> Floats:
    """The mean of each column; one where all of it is nothing, of which nothing is told then."""
    means = np.mean(columns, axis=0)
    return np.where(means > 0, means, 1.0)


def without_gain(columns: Floats, wanted: Floats, count: int) -> Floats:
    """The factors of columns by which they are nearest to what is wanted; the first so many are not negative,
    since nothing is faster for being one of many."""
    factors = np.zeros(columns.shape[1])
    kept = [i for i in range(len(factors)) if columns[:, i].any()]
    while kept:
        factors[:] = 0.0
        factors[kept], *_ = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)
        least = int(np.argmin(factors[:count]))
        if factors[least] >= 0:
            break
        kept.remove(least)
        factors[least] = 0.0
    return factors


def longer_back(own: Sequence[Call], others: Sequence[Call] = ()) -> tuple[Longer, float]:
    """What backward passes take less or longer than over and over again, so that together those of `own`
    calls take what they took; and how many times as long as by itself adding gradients up takes, which the
    calls of another strategy, whose passes are of another size, help to tell from that."""
    passes = [each for call in own for each in call.passes]
    found = less_or_longer(passes, sum(call.seen_s - call.adding_s for call in own))
    calls = [*own, *others]
    if not others or len(passes) < FEWEST:
        return found, 1.0
    columns = np.array([(call.count, call.seconds, call.adding_s) for call in calls])
    units = units_of(columns)
    weight = 1.0 / np.sqrt(np.maximum(columns[:, 1], LEAST_S))
    rows = columns / units * weight[:, None]
    wanted = np.array([call.seen_s - call.adding_s - call.said_s(found) for call in calls]) * weight
    left = wanted - rows @ np.linalg.lstsq(rows, wanted, rcond=None)[0]
    noise = sqrt(left @ left / max(1, len(calls) - len(LIKELY_BACK)))
    noise = max(noise, TOLD * float(np.mean(1.0 / weight)))
    doubts = np.diag(noise / (np.array(LIKELY_BACK) * units))
    both = np.vstack([rows, doubts]), np.append(wanted, np.zeros(len(doubts)))
    pass_s, share, adding = np.linalg.lstsq(*both, rcond=None)[0] / units
    seconds, longer_s = columns[: len(own), 1].sum(), sum(c.seen_s - c.adding_s - c.seconds for c in own)
    pass_s, more = max(-MOST_LESS_S, found.pass_s + pass_s), min(MOST_ADDING - 1.0, max(0.0, adding))
    own_more_s = max(0.0, pass_s) * columns[: len(own), 0].sum() + more * columns[: len(own), 2].sum()
    room_s = longer_s - _least_share(longer_s, seconds) * seconds
    part = min(1.0, room_s / max(own_more_s, 1e-12))
    times = _digits(1.0 + part * more)
    found = Longer(pass_s=part * pass_s if pass_s > 0 else pass_s, share=found.share + share)
    for _ in range(SETTLING):
        rest_s = sum(call.seen_s - times * call.adding_s - call.said_s(found) for call in own)
        found = replace(found, share=found.share + rest_s / max(seconds, 1e-9))
    return Longer(pass_s=_digits(found.pass_s), share=_bounded(found.share)), times


def less_or_longer(passes: Sequence[tuple[float, float]], seen_s: float) -> Longer:
    """What backward passes take less or longer than over and over again, by what all of them took; of each
    its seconds, and which part of it there is."""
    own_s = sum(seconds * share for seconds, share in passes)
    if len(passes) < FEWEST or own_s <= 0:
        return Longer()
    if seen_s >= own_s:
        return Longer(share=_bounded(seen_s / own_s - 1.0))
    less_s, whole = own_s - seen_s, sum(share for _, share in passes)
    for seconds, share in sorted(passes):  # the shortest give no more than they may
        each_s, most_s = less_s / whole, MOST_SHARE / 2 * seconds
        if each_s > MOST_LESS_S:
            break
        if each_s <= most_s:
            return Longer(pass_s=_digits(-each_s))
        less_s, whole = less_s - share * most_s, whole - share
    return Longer(share=_bounded(seen_s / own_s - 1.0))


def _bounded(share: float) -> float:
    return _digits(min(MOST_SHARE, max(-MOST_SHARE / 2, share)))


def _digits(number: float) -> float:
    return float(f"{number:.3g}")
