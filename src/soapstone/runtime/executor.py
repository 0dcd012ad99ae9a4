"""Walking a program: one step of one rank.

Compute runs in this thread, in order; messages and collectives are posted when their turn comes and
waited for when somebody takes what they bring. While autograd takes a region back, what stands between
its tasks in the order is posted as soon as the gradients it needs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from soapstone.ops.box import Box
from soapstone.runtime.actions import Action, Backward, Exchanged, Forward, ReportLoss, SumGradients
from soapstone.runtime.buffers import Buffers
from soapstone.runtime.collectives import post
from soapstone.runtime.inputs import Batch
from soapstone.runtime.part import Part
from soapstone.runtime.program import Program
from soapstone.runtime.recording import Recorder
from soapstone.runtime.replay import Replay, mark
from soapstone.runtime.summing import Bucket
from soapstone.runtime.wire import Pending, Slot, Together, Wire
from soapstone.tasks.exchange import Pattern


def seed_of(seed: int, step: int, node: str) -> int:
    """The seed of a node's random numbers in a step: the same on every rank and for every strategy."""
    digest = blake2b(f"{seed}/{step}/{node}".encode(), digest_size=6).digest()
    return int.from_bytes(digest)


@dataclass(frozen=True)
class Posting:
    """What a recorded pass gives away: the loss or gradients, to be added up once the event has come."""

    action: SumGradients | ReportLoss
    tensor: Tensor
    ready: torch.cuda.Event


class Executor:
    """Runs a program step by step; gradients are left in the parameters."""

    def __init__(self, program: Program, wire: Wire, seed: int = 0, *, replays: bool = True) -> None:
        self.program, self.wire, self.seed = program, wire, seed
        self._random = [run for run in program.links.node_runs.values() if run.op.random]
        self.buffers = Buffers(program.links, program.free)
        self.recorder: Recorder | None = None
        self._loss: Pending | None = None
        self._sums: list[tuple[SumGradients, Pending | Together]] = []
        self._postings: list[Posting] = []
        sums = [action for action in program.actions if isinstance(action, SumGradients)]
        self._buckets = {id(action): Bucket(action, program.held, wire) for action in sums}
        self._sums_gradients = True
        self._cursor = 0
        self._region_end = 0
        self._ends = self._region_ends()
        self._fired: dict[str, int] = {}
        self._expected = self._watch_parameters()
        self.replay = self._replay() if replays else None

    def _replay(self) -> Replay | None:
        """A recording of the whole pass, where there is a GPU and nothing to wait for before the end;
        random numbers come from a new seed in each step, which a recording could not have."""
        if self.wire.device.type != "cuda" or self._random:
            return None
        talks = self.buffers.to_share or any(isinstance(a, Exchanged) for a in self.program.actions)
        if self.wire.size > 1 and (talks or not self.wire.posts_aside):
            return None
        self.program.free.holds_still = True
        parameters = [holding.parameter for holding in self.program.held]
        return Replay(self._walk, self._forget, parameters, self.wire.device)

    def gradients(self, batches: Sequence[Batch | Part], step: int) -> Tensor:
        """Compute the mean gradient over the batches, summed over ranks, and give the mean loss."""
        for seed in self.program.seeds:
            seed.scale = 1.0 / len(batches)
        losses = []
        for number, batch in enumerate(batches):
            self._sums_gradients = number == len(batches) - 1
            losses.append(self._pass(batch, step, number))
        for action, pending in self._sums:
            flat = pending.wait()
            with torch.no_grad():
                self._buckets[id(action)].put_back(flat)
        self._sums.clear()
        for bucket in self.buckets:  # an optimizer may change gradients where they lie
            self.wire.read_by_all(bucket, "gradients")
        return torch.stack(losses).sum()

    def _pass(self, batch: Batch | Part, step: int, number: int) -> Tensor:
        """One forward and backward pass; the loss, divided by the number of batches."""
        self.program.free.take(batch)
        for run in self._random:
            run.seed = seed_of(self.seed, step, f"{run.node.name}/{number}" if number else run.node.name)
        is_one = number == 0 and self._sums_gradients and not self.program.free.is_shared
        if self.replay is not None and is_one and self.recorder is None:
            self.replay()
            for posting in self._postings if self.replay.is_recorded else []:
                self._post(posting.action, posting.tensor, posting.ready)
        else:
            self._walk()
        assert self._loss is not None
        loss, self._loss = self._loss.told()[0], None
        return loss

    def _walk(self) -> None:
        """Do all actions on the batch that was taken."""
        self.program.free.compute()
        self._fired = dict.fromkeys(self._fired, 0)
        for bucket in self._buckets.values():
            bucket.begin()
        actions, self._cursor, released = self.program.actions, 0, 0
        while self._cursor < len(actions):
            action = actions[self._cursor]
            self._cursor += 1
            self._do(action)
            while released < self._cursor:
                for port in self.program.releases[released]:
                    port.release()
                released += 1
        self.program.free.finish()
        self.buffers.update(self.wire)
        self.wire.settle()
        self._clear()

    def _do(self, action: Action) -> None:
        if self.recorder is None or isinstance(action, ReportLoss):
            self._run(action)
            return
        waited_s, is_computed = self.wire.waited_s, isinstance(action, Forward | Backward)
        start = self.recorder.computing() if is_computed else self.recorder.now()
        self._run(action)
        if is_computed:
            waited_s = self.wire.waited_s - waited_s
            self.recorder.note(action.task, start, self.recorder.computing(), waited_s)
        else:
            self.recorder.asked(action.task, start)
        pending: list[Pending | Together | Slot] = []
        if isinstance(action, Exchanged):
            pending = [a.pending for a in action.arrivals if a.pending is not None]
        elif isinstance(action, SumGradients) and self._sums:
            pending = [self._sums[-1][1]]
        for each in pending:
            each.on_done = self.recorder.noting(action.task, start)

    def _run(self, action: Action) -> None:
        match action:
            case Forward():
                action.segment.forward()
            case Backward():
                if action.is_first:
                    self._region_end = self._ends[action.region.number]
                    action.region.backward()
                    self._region_end = 0
            case Exchanged() if action.pattern is not Pattern.TRANSFER:
                post(action, self.wire)
            case Exchanged():
                for departure in action.departures:
                    departure.post(self.wire)
                for arrival in action.arrivals:
                    arrival.post(self.wire)
            case SumGradients():
                if self._sums_gradients:
                    self._sum(action)
            case ReportLoss():
                self._report(action)

    # -- while a region is taken back ---------------------------------------------------------------

    def _region_ends(self) -> dict[int, int]:
        """For each region the place after its last task; regions with messages inside tell when a
        gradient is there."""
        ends: dict[int, int] = {}
        starts: dict[int, int] = {}
        for place, action in enumerate(self.program.actions):
            if isinstance(action, Backward):
                ends[action.region.number] = place + 1
                starts.setdefault(action.region.number, place)
        for action in self.program.actions:
            if isinstance(action, Backward) and action.is_first:
                number = action.region.number
                inside = self.program.actions[starts[number] : ends[number]]
                if any(isinstance(other, Exchanged) for other in inside):
                    action.region.on_gradient = self._advance
        return ends

    def _advance(self) -> None:
        """Post what stands next in the order, as far as it is ready."""
        actions = self.program.actions
        while self._cursor < self._region_end:
            action = actions[self._cursor]
            match action:
                case Backward():
                    pass
                case Exchanged() if action.is_ready:
                    self._do(action)
                case SumGradients() if self._is_ready(action):
                    self._do(action)
                case _:
                    return
            self._cursor += 1

    def _watch_parameters(self) -> dict[str, int]:
        """Let summed parameters tell when their gradient is there; how often each does in a pass: once for
        each region, and for each part that is read in it."""
        expected: dict[str, set[tuple[int, Box | None]]] = {}
        for (where, n), run in self.program.links.node_runs.items():
            placed = self.program.links.block(where)
            for i, operand in enumerate(run.node.operands):
                if isinstance(operand, str) and operand in self.program.weights.pieces:
                    box = placed.layout.reads(n, i)[where[1]]
                    segments = range(placed.segments.reads_in[n], placed.segments.writes_in[n] + 1)
                    for segment in segments:
                        region = self.program.regions.get((where, segment))
                        if region is not None:
                            expected.setdefault(operand, set()).add((region.number, box))
        for name in expected:
            holdings = self.program.held.holdings.get(name, [])
            if len(holdings) == 1 and any(p.is_summed for p in self.program.weights.pieces[name]):
                self._fired[name] = 0
                holdings[0].watch(self._noting(name))
        return {name: len(reads) for name, reads in expected.items()}

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._fired[name] += 1
            self._advance()

        return note

    def _is_ready(self, action: SumGradients) -> bool:
        return self._buckets[id(action)].is_ready(self._fired, self._expected)

    # -- sums ---------------------------------------------------------------------------------------

    @property
    def buckets(self) -> Iterable[Tensor]:
        """The buckets that stay from step to step."""
        return [each.tensor for each in self._buckets.values() if each.tensor is not None]

    def _sum(self, action: SumGradients) -> None:
        with torch.no_grad():
            flat = self._buckets[id(action)].filled()
        self._give(action, flat)

    def _give(self, action: SumGradients | ReportLoss, tensor: Tensor) -> None:
        """Have a tensor added up, now or, while the pass is recorded, in every replay."""
        ready = mark(self.wire.device)
        if ready is None:
            self._post(action, tensor)
        else:
            self._postings.append(Posting(action, tensor, ready))

    def _post(
        self, action: SumGradients | ReportLoss, tensor: Tensor, ready: torch.cuda.Event | None = None
    ) -> None:
        if isinstance(action, ReportLoss):
            self._loss = self.wire.report(tensor, "loss", ready)
        else:
            name = f"{action.pieces[0].weight} gradient"
            self._sums.append((action, self.wire.sum_up(tensor, action.ranks, name, ready)))

    def _report(self, action: ReportLoss) -> None:
        total = torch.zeros(1, dtype=torch.float64, device=self.wire.device)
        with torch.no_grad():
            for outlet, weight in self.program.loss_outlets:
                if outlet.tensor is not None:
                    total += outlet.tensor.detach() * (weight * self.program.seeds[0].scale)
        self._give(action, total)

    # -- the end of a pass --------------------------------------------------------------------------

    def _clear(self) -> None:
        for port in self.program.links.ports:
            port.clear()
        for shard in self.program.shards.values():
            shard.clear()
        for entrance in self.program.entrances.values():
            entrance.clear()
        for statistics in self.program.links.statistics.values():
            statistics.clear()
        for holding in self.program.held:
            holding.clear()

    def _forget(self) -> None:
        """Drop what a pass that broke off has left."""
        self._loss = None
        self._postings.clear()
        self._clear()
        for region in self.program.regions.values():
            region.clear()
