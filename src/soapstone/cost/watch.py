"""Watching memory: what torch's allocator gives out while something runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


class Watch(AbstractContextManager["Watch"]):
    """How much memory is given out at most while it is on, beyond what there was."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._profiler: Any = None
        self._before = 0
        self._highest_bytes = 0

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
            self._highest_bytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._profiler.__exit__(kind, error, trace)
        roots = self._profiler.profiler.kineto_results.experimental_event_tree()
        self._highest_bytes = counted(_changes(roots))

    def highest_bytes(self) -> int:
        """The most that was given out, once it is over."""
        return self._highest_bytes


def counted(changes: Iterable[tuple[int, int]]) -> int:
    """The most that was given out, of addresses and bytes: more than zero for what is given out, less for
    what is taken back. What was there before the first is not counted when it is taken back:
    torch knows sizes by address, also of what has long been taken back, and tells a wrong one."""
    given: dict[int, int] = {}
    highest_bytes = now_bytes = 0
    for address, change in changes:
        if change > 0:
            given[address] = change
            now_bytes += change
        else:
            now_bytes -= given.pop(address, 0)
        highest_bytes = max(highest_bytes, now_bytes)
    return highest_bytes


def _changes(roots: list[Any]) -> Iterator[tuple[int, int]]:
    """The address and the bytes of all that was given out (more than zero) or taken back, in order of time,
    from torch's tree of events."""
    from torch._C._profiler import _EventType

    found, open_events = [], list(roots)
    while open_events:
        event = open_events.pop()
        open_events.extend(event.children)
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.typed[1]))
    for _, change in sorted(found, key=lambda each: each[0]):
        if change.device.type == "cpu":
            yield change.ptr, change.alloc_size
