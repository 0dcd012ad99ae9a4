"""What operators take longer in a step than over and over again.

An operator that is measured runs many times in a row: its weights are in the caches of its cores, and so are
the interpreter's own structures. In a step hundreds of others come in between, on all ranks at once. So the
operators of a strategy are run one after the other, forward and then backward, as a step does, by one rank
and by all, and what they take beyond what was measured is put down to each pass, to each byte that it
touches, and to its time ([measured] two ranks of one Arm core: 50 us a pass, together 0 to 4 % of the time).

On GPUs the kernels of a step follow each other as measured ones do, and what launching them takes longer is
measured elsewhere (`cost.among`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.among import InTurn, Turn
from soapstone.cost.candidates import Candidate
from soapstone.cost.work import Work
from soapstone.runtime.wire import Wire
from soapstone.strategy.strategy import Strategy

Floats = NDArray[np.float64]

ROUNDS, WARM_UP = 6, 2
"""[choice] How often all operators have their turn, and how often before that."""

LONGEST_S, MOST_BYTES = 0.25, 2**31
"""[choice] Operators are left out, by chance, until one round takes no longer and touches no more."""

FEWEST = 8
"""[choice] With fewer passes than this nothing is told apart; no fewer than twice as many operators are
left."""

MOST_SHARE = 1.0
"""[choice] No pass takes longer by more than this part of its time for its time's sake, or shorter by more
than half of that."""

LEAST_S = 2e-5
"""[choice] Passes are weighed by what they take, no pass as if it took less."""

DOUBT = 0.25
"""[choice] That times as such are as measured is believed as if this part of all passes had said so: passes
with many bytes take long, and what is the bytes' could be said to be the time's, and the other way round."""


@dataclass(frozen=True)
class Longer:
    """What a pass takes longer: so many seconds, and seconds for each byte that it touches and for each
    second that it takes."""

    pass_s: float = 0.0
    byte_s: float = 0.0
    share: float = 0.0

    def of(self, work: Work, seconds: float) -> float:
        """What this pass, which takes so long over and over again, takes longer."""
        return max(-seconds, self.pass_s + self.byte_s * work.size_bytes + self.share * seconds)


@dataclass(frozen=True)
class InStep:
    """The same of forward and of backward passes; and by what part of its time an update takes longer."""

    forward: Longer = field(default_factory=Longer)
    backward: Longer = field(default_factory=Longer)
    update: float = 0.0

    def of(self, work: Work, seconds: float) -> float:
        """What this pass, which takes so long over and over again, takes longer."""
        return (self.backward if work.is_backward else self.forward).of(work, seconds)


def operators_in_turn(strategy: Strategy, seconds_of: Callable[[Work], float]) -> list[Candidate]:
    """The operators of a strategy in turn, each as its first shard has it; as many as there is time for."""
    found = [
        Candidate(strategy.graph, node, row[0])
        for layout in strategy.layouts.values()
        for node, row in zip(layout.block.nodes, layout.boxes, strict=True)
        if row
    ]
    found = [each for each in found if each.works]
    works = [work for each in found for work in each.works]
    taken = max(sum(map(seconds_of, works)) / LONGEST_S, sum(work.size_bytes for work in works) / MOST_BYTES)
    kept = min(len(found), max(2 * FEWEST, int(len(found) / max(1.0, taken))))
    return [found[i] for i in sorted(Random(0).sample(range(len(found)), kept))]


@dataclass(frozen=True)
class Repeated:
    """What passes and updates of weights of some size take over and over."""

    pass_s: Callable[[Work], float]
    update_s: Callable[[int], float]


def measured_in_step(
    wire: Wire, todo: Sequence[Candidate], in_turn: InTurn, repeated: Sequence[Repeated]
) -> tuple[InStep, ...]:
    """What passes take longer in a step for 1, 2, ... ranks at work, the same on every rank. `in_turn` runs
    `todo` one after the other; `repeated` has what they take over and over by the same clock, for 1, 2, ...
    ranks. Numbers of ranks take turns, so that what else the computer does falls on all of them alike."""
    if wire.size == 1 or not todo:
        return ()
    seen: dict[int, list[Turn]] = {1: [], wire.size: []}
    for _ in range(WARM_UP + ROUNDS):
        for busy, turns in seen.items():
            wire.meet("operators in turn")
            if wire.rank < busy:
                turns.append(in_turn.run())
    one, everyone = (
        _at_work(wire, busy, todo, turns[WARM_UP:], in_turn.weight_bytes, repeated[busy - 1])
        for busy, turns in seen.items()
    )
    return tuple(_between(one, everyone, (busy - 1) / (wire.size - 1)) for busy in range(1, wire.size + 1))


def _at_work(
    wire: Wire,
    busy: int,
    todo: Sequence[Candidate],
    turns: Sequence[Turn],
    weight_bytes: Sequence[int],
    repeated: Repeated,
) -> InStep:
    """What passes take longer while so many ranks are at it: the mean of what these have seen."""
    columns = zip(*([*own.forward_s, *own.backward_s, own.update_s] for own in turns), strict=True)
    own_s = [median(column) for column in columns]
    told = wire.told_by_all(json.dumps(own_s), "operators in turn")[:busy]
    seen_s = np.mean([json.loads(each) for each in told], axis=0).tolist()
    update_s = sum(map(repeated.update_s, weight_bytes))
    return InStep(
        longer([each.forward for each in todo], seen_s[: len(todo)], repeated.pass_s),
        longer([each.backward for each in todo], seen_s[len(todo) : -1], repeated.pass_s),
        seen_s[-1] / update_s - 1.0 if update_s else 0.0,
    )


def longer(
    works: Sequence[Work | None], taken_s: Sequence[float], seconds_of: Callable[[Work], float]
) -> Longer:
    """What passes take longer than they do over and over again, by what they took, so that together they take
    what they took; no time tells nothing."""
    rows = [
        (1.0, float(work.size_bytes), seconds_of(work), seen_s)
        for work, seen_s in zip(works, taken_s, strict=True)
        if work is not None and seen_s > 0
    ]
    if len(rows) < FEWEST:
        return Longer()
    told = np.array(rows)
    units, seen = np.mean(told[:, :3], axis=0), told[:, 3]
    of_what, own_s = told[:, :3] / units, told[:, 2]
    weight = 1.0 / np.sqrt(np.maximum(own_s, LEAST_S))
    columns = np.vstack([of_what * weight[:, None], [0.0, 0.0, sqrt(DOUBT * own_s.sum()) / units[2]]])
    wanted = np.append((seen - own_s) * weight, 0.0)
    factors, kept = np.zeros(3), [0, 1, 2]
    while True:  # nothing is faster for being one of many, or for its bytes
        factors[:] = 0.0
        factors[kept], *_ = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)
        least = int(np.argmin(factors[:2]))
        if factors[least] >= 0:
            break
        kept.remove(least)
    pass_s, byte_s, share = factors / units
    share += (seen - own_s - of_what @ factors).sum() / own_s.sum()  # what doubt has kept back
    bounded = min(MOST_SHARE, max(-MOST_SHARE / 2, share))
    return Longer(_digits(pass_s), _digits(byte_s), _digits(bounded))


def _between(one: InStep, everyone: InStep, part: float) -> InStep:
    def mean(a: Longer, b: Longer) -> Longer:
        return Longer(
            *(
                _digits((1 - part) * getattr(a, name) + part * getattr(b, name))
                for name in ("pass_s", "byte_s", "share")
            )
        )

    return InStep(
        mean(one.forward, everyone.forward),
        mean(one.backward, everyone.backward),
        _digits((1 - part) * one.update + part * everyone.update),
    )


def _digits(number: float) -> float:
    return float(f"{number:.3g}")
