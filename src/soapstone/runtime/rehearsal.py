"""A step in rehearsal: what memory a rank takes, seen without computing anything.

The rank's own program walks its own actions on tensors that have shapes but no elements (torch's
`FakeTensorMode`), with nobody at the other end of its wire, and all memory that is given out and taken back
is written down. What is held how long is nowhere described a second time: autograd's graph, views that hold
what they are views of, messages that wait to be read, sums beside their parts are what they are in a step.

What operators take inside, which no tensor shows, is told (`Hidden`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from soapstone.cost.count import Count
from soapstone.graph import Role, Value
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.plans import Plan
from soapstone.runtime.nobody import NobodysWire
from soapstone.runtime.noderun import NodeRun
from soapstone.runtime.run import Run, State, started
from soapstone.runtime.wire import Pending
from soapstone.sim.memory import STATES_PER_WEIGHT

Hidden = Callable[[NodeRun, bool], tuple[int, int]]
"""What the forward and the backward pass of a node's shard take beside tensors while they run; and what they
do where the first of these is a part of a larger one."""


def nothing_hidden(_: NodeRun, is_apart: bool) -> tuple[int, int]:
    """No operator takes more than its tensors."""
    del is_apart
    return 0, 0


def rehearsed(
    plan: Plan,
    rank: int,
    constants: Mapping[str, Tensor],
    *,
    device: torch.device | None = None,
    backend: str = "memory",
    neighbours: frozenset[int] = frozenset(),
    hidden: Hidden = nothing_hidden,
) -> int:
    """The most bytes that a rank of a plan holds in a step: what stays from step to step, and what a step
    takes beyond that. `backend` is what carries messages (`Wire.backend`), but for those that lie in
    memory which is shared with `neighbours`."""
    place, graph, simulated = device or torch.device("cpu"), plan.graph, plan.executed()
    count = Count(is_cuda=place.type == "cuda")
    with FakeTensorMode():
        state = State(
            {value.name: _empty(value, place) for value in graph.with_role(Role.WEIGHT)},
            {value.name: _empty(value, place) for value in graph.with_role(Role.BUFFER)},
            {name: torch.empty(t.shape, dtype=t.dtype, device=place) for name, t in constants.items()},
        )
        batch = [_empty(value, place) for value in graph.with_role(Role.INPUT)]
        wire = _RehearsedWire(rank, len(plan.machine.devices), place, backend, neighbours, count)
        run = started(plan.strategy, simulated.tasks, simulated.timeline, state, wire, replay=False)
        run.free.take(batch)
        _tell(run, count, hidden)
        weights = [holding.parameter for holding in run.held]
        stay_bytes = count.know([*weights, *run.free.held()])
        stay_bytes += STATES_PER_WEIGHT[plan.optimizer] * sum(w.nbytes for w in weights if w.requires_grad)
        with count:
            run.executor.gradients([batch], 0)
        buckets = list(run.executor.buckets)
        stay_bytes += sum(bucket.nbytes for bucket in buckets)
        return stay_bytes + count.highest_bytes(without=buckets)


def _empty(value: Value, place: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=place)


def _tell(run: Run, count: Count, hidden: Hidden) -> None:
    """Let the passes of nodes take what operators take inside."""
    runs = run.executor.program.links.node_runs.values()
    taken = [(each, hidden(each, False), hidden(each, True)) for each in runs]
    if any(any(both) for _, both, _ in taken):
        for each, whole, apart in taken:
            each.compute = _counted(each, count, whole, apart)  # type: ignore[method-assign]


def _counted(
    run: NodeRun, count: Count, whole: tuple[int, int], apart: tuple[int, int]
) -> Callable[..., tuple[Any, ...]]:
    compute = run.compute

    def counted(operands: Sequence[Any], stats: Tensor | None = None) -> tuple[Any, ...]:
        first = operands[0] if operands else None
        is_apart = isinstance(first, Tensor) and not first.is_contiguous()
        forward, backward = apart if is_apart else whole

        def begin_backward(_: Tensor) -> None:
            count.beside(backward)  # until that of the next node begins

        count.beside(forward)
        made = compute(operands, stats)
        count.beside(0)
        for each in made:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(begin_backward)
        return made

    return counted


class _RehearsedWire(NobodysWire):
    """A wire with nobody at its other ends, whose memory is counted."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        neighbours: frozenset[int],
        count: Count,
    ) -> None:
        super().__init__(rank, size, device, backend, neighbours)
        self._count = count

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, what: str) -> Pending:
        """Memory for a message: from now on, or when it is waited for, or none where the sender's is read."""
        if peer in self.neighbours or self.is_staged:
            return _Elsewhere(self, self._count, shape, dtype, copies=self.is_staged)
        return super().receive(shape, dtype, peer, tag, what)


class _Elsewhere(Pending):
    """A message that lies in memory which is not counted, and is copied for whoever waits for it."""

    __slots__ = ("copies", "count", "dtype", "shape")

    def __init__(
        self, wire: NobodysWire, count: Count, shape: Sequence[int], dtype: torch.dtype, *, copies: bool
    ) -> None:
        super().__init__(wire, None, torch.empty(0), "")
        self.count, self.shape, self.dtype, self.copies = count, tuple(shape), dtype, copies

    def wait(self) -> Tensor:
        """A copy."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.wire.device)

    def borrow(self) -> Tensor:
        """The message where it lies, if it can be read there."""
        return self.wait() if self.copies else self.count.elsewhere(self.shape, self.dtype, self.wire.device)
