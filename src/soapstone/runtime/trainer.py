"""A Trainer: what a user holds while training under a plan, one on each rank.

trainer = soapstone.parallelize(model, plan, optimizer=torch.optim.AdamW(model.parameters()))
for batch in batches:
    loss = trainer.step(batch)
model.load_state_dict(trainer.state_dict())
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soapstone.errors import TrainingError
from soapstone.plans import Plan
from soapstone.runtime import checkpoint
from soapstone.runtime.gathering import gathered, write_safetensors
from soapstone.runtime.inputs import Batch
from soapstone.runtime.optimizing import OptimizerOf, clip, localized
from soapstone.runtime.part import Part
from soapstone.runtime.recording import Recorder, gathered_spans, recorded
from soapstone.runtime.run import Run, State, started
from soapstone.runtime.sources import Source, batches_of
from soapstone.runtime.versions import FLUSH, TWO_BUFFERED, WEIGHTS, Versions, forget_older
from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.tasks.exchange import Pattern
from soapstone.tasks.task import TaskGraph, TaskKind


@dataclass(frozen=True)
class Options:
    """How to train, beside the optimizer: clip gradients to this norm; the mean gradient of so many
    batches for each step; the seed of dropout; whether runs of tasks are taken back together; whether
    steps on one GPU are recorded and replayed; the collectives that are used (None: those that the backend
    does better than messages); which weights gradients are taken at (`versions`)."""

    clip_norm: float | None = None
    accumulate: int = 1
    seed: int = 0
    fuse: bool = True
    replay: bool = True
    collectives: tuple[Pattern, ...] | None = None
    weights: str = FLUSH


class Trainer:
    """Training under a plan, as one rank sees it."""

    def __init__(
        self,
        plan: Plan,
        state: State,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | OptimizerOf,
        wire: Wire,
        options: Options | None = None,
    ) -> None:
        devices = len(plan.machine.devices)
        if wire.size != devices:
            raise TrainingError(
                f"the plan is for {devices} device{'s' if devices > 1 else ''} and there {_are(wire.size)}:"
                f" start {devices}, one for each device"
            )
        self.plan, self.wire, self.options = plan, wire, options or Options()
        if self.options.weights not in WEIGHTS:
            raise TrainingError(
                f"gradients are taken at the weights of {' or '.join(WEIGHTS)}, not {self.options.weights!r}"
            )
        self.simulated = simulated = plan.executed()
        wire.agree(_digest(simulated.tasks), "plan")
        wire.agree(repr(self.options), "set of options")
        self.run: Run = started(
            plan.strategy,
            simulated.tasks,
            simulated.timeline,
            state,
            wire,
            seed=self.options.seed,
            fuse=self.options.fuse,
            replay=self.options.replay,
            collectives=self.options.collectives,
        )
        sources = {s: v.name for v in plan.graph.values.values() for s in v.sources}
        self.optimizer = localized(optimizer, parameters, sources, self.run.held)
        self.versions = Versions(self.optimizer) if self.options.weights == TWO_BUFFERED else None
        self.steps_done = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """The samples of a batch that this rank reads, ascending: all that it has to load."""
        return self.run.free.rows

    def part(self, tensors: Batch) -> Part:
        """A batch of which only the samples `rows` were loaded, for `step`."""
        return Part(tensors)

    def batches(
        self, source: Source, *, whole: bool = False, shuffle_seed: int | None = None
    ) -> Iterator[Batch | Part]:
        """Batches for `step`, from the step on that is next: of a function with a parameter `rows` and of
        a map-style dataset only what this rank reads, or, with `whole`, all samples. A dataset goes round
        and round, in its own order or, with a seed, in another one each time."""
        rows = range(self.plan.graph.sample_count or 0) if whole else self.rows
        done = self.steps_done * self.options.accumulate
        found = batches_of(source, self.plan.graph, rows, done, shuffle_seed)
        if not whole:
            return found
        return (batch.tensors if isinstance(batch, Part) else batch for batch in found)

    def step(self, batch: Batch | Part | Sequence[Batch | Part]) -> float:
        """Train on a batch (on `accumulate` of them, in a list) and give its loss."""
        with self.wire.telling():
            return self._step(batch)

    def _step(self, batch: Batch | Part | Sequence[Batch | Part]) -> float:
        is_one = self.options.accumulate == 1 or isinstance(batch, Part)
        batches: list[Any] = [batch] if is_one else list(cast(Sequence[Any], batch))
        if len(batches) != self.options.accumulate:
            raise TrainingError(
                f"a step takes {self.options.accumulate} batches, not {len(batches)}: see `accumulate`"
            )
        for holding in self.run.held:
            holding.parameter.grad = None
        with nullcontext() if self.versions is None else self.versions.older():
            loss = float(self.run.executor.gradients(batches, self.steps_done))
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {self.steps_done + 1}: training stops here")
        for holding in self.run.held:
            if holding.parameter.requires_grad and holding.parameter.grad is None:
                holding.parameter.grad = torch.zeros_like(holding.parameter)
        if self.options.clip_norm is not None:
            clip(self.run.held, self.wire, self.options.clip_norm)
        self._update()
        self.steps_done += 1
        return loss

    def _update(self) -> None:
        recorder = self.run.executor.recorder
        start = None if recorder is None else recorder.computing()
        with nullcontext() if self.versions is None else self.versions.updating():
            self.optimizer.step()
        if recorder is not None and start is not None:
            end = recorder.computing()
            for number, task in enumerate(self.simulated.tasks.tasks):
                if task.kind is TaskKind.UPDATE and task.key[-1] == self.wire.rank:
                    recorder.note(number, start, end)

    def traced_step(self, batch: Batch | Part) -> tuple[float, TaskGraph, Timeline]:
        """A step with its real timeline: the loss, the task graph with real durations, and the times.
        Make the trainer with `fuse=False`, or tasks that were taken back together have one time."""
        recorder = self.run.executor.recorder = Recorder(self.wire.device)
        recorder.begin(self.wire)
        try:
            loss = self.step(batch)
        finally:
            self.run.executor.recorder = None
        with self.wire.telling():
            spans = gathered_spans(recorder.spans, self.wire)
        executed, tasks = self.simulated.tasks, self.plan.simulated().tasks
        return loss, *recorded(tasks, {tasks.ids[executed.tasks[n].key]: span for n, span in spans.items()})

    def train(self, batches: Iterable[Batch | Part]) -> list[float]:
        """Train on all batches; the losses."""
        return [self.step(batch) for batch in batches]

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers, whole, under the module's names and in its shapes, on every rank."""
        with self.wire.telling():
            return gathered(self.run, self.wire)

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint into a folder, from all ranks at once; the checkpoint's own path."""
        with self.wire.telling():
            return checkpoint.save(Path(folder), self.run, self.optimizer, self.steps_done, self.wire)

    def load(self, folder: Path | str) -> None:
        """Go on from the last complete checkpoint of a folder, whatever plan it was written under."""
        with self.wire.telling():
            self.steps_done = checkpoint.load(Path(folder), self.run, self.optimizer, self.wire)
        if self.versions is None:
            forget_older(self.optimizer)

    def export(self, path: Path | str) -> None:
        """Write the weights and buffers as one safetensors file, under the module's names."""
        state = self.state_dict()
        if self.wire.rank == 0:
            write_safetensors(Path(path), state)


def _digest(tasks: TaskGraph) -> str:
    """A short text that differs for plans whose tasks differ in kind, place or time."""
    return blake2b(
        repr([(task.key, task.resource, task.duration_s) for task in tasks.tasks]).encode()
    ).hexdigest()


def _are(ranks: int) -> str:
    return "is one rank" if ranks == 1 else f"are {ranks} ranks"
