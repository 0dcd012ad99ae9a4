"""A pass that no message interrupts, recorded on a GPU once and replayed: a CUDA graph.

On one device a step is the same kernels on the same memory every time, and launching them one by one from
Python can take longer than they do. The first steps run as ever (libraries choose their kernels then, and
their workspaces); the next is recorded, which runs nothing, and replayed from then on. The batch is copied
to where the recording found its own. What cannot be recorded goes on as before, and a log line says why.
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
    """A pass and its recording. `walk` computes the gradients of what the inputs hold and gives the
    loss, `forget` drops what a walk that broke off has left."""

    def __init__(
        self,
        walk: Callable[[], Tensor],
        forget: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._walk, self._forget, self._parameters = walk, forget, parameters
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._walked = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.refusal: str | None = None  # why there is no recording

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    def __call__(self) -> Tensor:
        """The loss; gradients are left in the parameters."""
        if self._graph is None and self.refusal is None and self._walked >= WARM_UP:
            self._record()
        if self._graph is None or self._loss is None:
            self._walked += 1
            return self._walk() if self.refusal is not None else self._beside()
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss

    def _beside(self) -> Tensor:
        """Walk on the stream that will be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._walk()
        current.wait_stream(self._stream)
        return loss

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                loss = self._walk()
        except RuntimeError as error:
            self.refusal = next(iter(str(error).splitlines()), type(error).__name__)
            log.info("steps are not replayed: %s", self.refusal)
            self._forget()
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._graph, self._loss = graph, loss
        self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
