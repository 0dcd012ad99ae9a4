"""A pass that waits for no message, recorded on a GPU once and replayed: a CUDA graph.

Such a pass is the same kernels on the same memory every time, and launching them one by one from Python can
take longer than they do. The first steps run as ever (libraries choose their kernels then, and their
workspaces); the next is recorded, which runs nothing, and replayed from then on. The batch is copied to
where the recording found its own. What the pass gives away (its loss, gradients to be added up) is marked
by an event of the recording, so that it leaves as soon as it is there. What cannot be recorded goes on as
before, and a log line says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

WARM_UP = 3
"""[choice] Steps before the recording, as torch's own documentation has it."""


class Replay:
    """A pass and its recording. `walk` computes the loss and the gradients of what the inputs hold,
    `forget` drops what a walk that broke off has left."""

    def __init__(
        self,
        walk: Callable[[], None],
        forget: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._walk, self._forget, self._parameters = walk, forget, parameters
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._walked = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.refusal: str | None = None  # why there is no recording

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    def __call__(self) -> None:
        """Do the pass; gradients are left in the parameters."""
        if self._graph is None and self.refusal is None and self._walked >= WARM_UP:
            self._record()
        if self._graph is None:
            self._walked += 1
            self._walk() if self.refusal is not None else self._beside()
            return
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _beside(self) -> None:
        """Walk on the stream that will be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._walk()
        current.wait_stream(self._stream)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        drawn = torch.cuda.get_rng_state(self._device)
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._walk()
        except RuntimeError as error:
            self.refusal = next(iter(str(error).splitlines()), type(error).__name__)
            log.info("steps are not replayed: %s", self.refusal)
            _take_back_generator(self._device, drawn)
            self._forget()
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._graph = graph
        self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]


def _take_back_generator(device: torch.device, drawn: Tensor) -> None:
    """Random numbers go on from a state: after a recording that failed, torch's generator goes on to wait
    for its end, and refuses to draw."""
    fresh = torch.Generator(device)
    fresh.set_state(drawn)
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_set_state(fresh)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event that comes with every replay when it is this far; None where nothing is being recorded."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(external=True)
    event.record()
    return event
