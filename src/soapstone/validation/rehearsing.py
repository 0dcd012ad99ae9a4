"""The memory of strategies, predicted: every rank rehearses its own part of each (`runtime.rehearsal`).

What operators take inside, beside tensors, is measured (`cost.runs`). Where a step cannot be rehearsed
(an opaque operator looks at its operands' elements), the peak is the plan's own, from the task graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log

import torch
from torch import Tensor

from soapstone.cost.profile import OpKey, key_of
from soapstone.cost.work import Work, work_of
from soapstone.graph import Graph
from soapstone.plans import Plan
from soapstone.runtime.noderun import NodeRun
from soapstone.runtime.rehearsal import Hidden, rehearsed
from soapstone.runtime.wire import Wire

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an operator may say that wants to look at elements."""


@dataclass(frozen=True)
class Inside:
    """What passes of operators take of memory beside tensors while they run, as far as it was measured; and
    what they do where the first of these is a part of a larger one (`apart_bytes`)."""

    size_bytes: Mapping[Work, int] = field(default_factory=dict)
    apart_bytes: Mapping[Work, int] = field(default_factory=dict)

    def of(self, work: Work, *, is_apart: bool = False) -> int:
        """What a pass takes: as measured, or else what the operator's shape of the nearest size does, in
        proportion to it."""
        if is_apart and work in self.apart_bytes:
            return self.apart_bytes[work]
        if work in self.size_bytes:
            return self.size_bytes[work]
        alike = self._alike.get(key_of(work), ())
        if not alike:
            return 0
        near = min(alike, key=lambda other: abs(log(max(1, other.size_bytes) / max(1, work.size_bytes))))
        return round(self.size_bytes[near] * work.size_bytes / max(1, near.size_bytes))

    @cached_property
    def _alike(self) -> Mapping[OpKey, Sequence[Work]]:
        found: dict[OpKey, list[Work]] = {}
        for work in self.size_bytes:
            found.setdefault(key_of(work), []).append(work)
        return found

    def hidden(self, graph: Graph) -> Hidden:
        """The same for the nodes of a graph."""

        def of_both(run: NodeRun, is_apart: bool) -> tuple[int, int]:
            node, box = run.node, run.shard.box
            works = [work_of(graph, node, box, backward=backward) for backward in (False, True)]
            forward, backward = (0 if work is None else self.of(work, is_apart=is_apart) for work in works)
            return forward, backward

        return of_both


def rehearsed_peaks(
    plans: Sequence[Plan],
    constants: Mapping[str, Tensor],
    inside: Inside,
    wire: Wire,
    show: Callable[[int], None] = lambda _: None,
) -> tuple[list[tuple[int, ...]], list[str]]:
    """The predicted peak of each rank under each plan, the same on every rank; and why any of them is the
    task graph's."""
    place = torch.device(wire.device.type)
    own: list[int | str] = []
    for done, plan in enumerate(plans):
        show(done)
        try:
            own.append(
                rehearsed(
                    plan,
                    wire.rank,
                    constants,
                    device=place,
                    backend=wire.backend,
                    neighbours=wire.neighbours,
                    hidden=inside.hidden(plan.graph),
                )
            )
        except FAILURES as error:
            own.append(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200])
    ranks = [json.loads(said) for said in wire.told_by_all(json.dumps(own), "rehearsals")]
    found: list[tuple[int, ...]] = []
    reasons: dict[str, None] = {}
    for plan, peaks in zip(plans, zip(*ranks, strict=True), strict=True):
        why = [peak for peak in peaks if isinstance(peak, str)]
        reasons.update(dict.fromkeys(why))
        found.append(tuple(plan.prediction.memory_bytes) if why else tuple(peaks))
    return found, list(reasons)
