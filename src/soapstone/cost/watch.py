"""Watching memory: what torch's allocator gives out while something runs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


class Watch(AbstractContextManager["Watch"]):
    """How much memory was given out at most since the beginning, and how much of that was left at the end;
    both are known when it is over."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._profiler: Any = None
        self._before = 0
        self.highest_bytes = self.left_bytes = 0

    def __enter__(self) -> Watch:
        import torch

        if self._is_cuda:
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its library tells every start and stop
            cpu = [torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=cpu, profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        if self._is_cuda:
            torch.cuda.synchronize()
            self.highest_bytes = torch.cuda.max_memory_allocated() - self._before
            self.left_bytes = torch.cuda.memory_allocated() - self._before
            return
        self._profiler.__exit__(kind, error, trace)
        changes = [
            (event.start_ns(), event.nbytes())
            for event in self._profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        for _, change in sorted(changes, key=lambda each: each[0]):
            self.left_bytes += change
            self.highest_bytes = max(self.highest_bytes, self.left_bytes)
