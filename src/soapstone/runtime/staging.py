"""Messages of a GPU that gloo carries: through pinned host memory, while the GPU computes on.

A tensor that leaves is copied on a stream beside the one that computes, and posted by a thread of its own
when the copy is there, so that the rank goes on launching kernels meanwhile. There is one such thread, and
it posts in the order in which it was asked to: sums meet on all ranks in the order of all. It waits for
nothing but copies, so it can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Queued:
    """Work that the thread posts; `wait` waits for the posting, then for the work."""

    __slots__ = ("future",)

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> None:
        """Until it is done; a RuntimeError where it failed."""
        self.future.result().wait()


class Staging:
    """The way out of one GPU, and into it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, "soapstone-staging")
        self._last: Future[Any] | None = None

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the GPU can copy from and to by itself. torch keeps it for the next who asks,
        once the copies are done."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def out(
        self, tensor: Tensor, post: Callable[[Tensor], Any], ready: torch.cuda.Event | None = None
    ) -> tuple[Tensor, Queued]:
        """Copy a tensor to the host and have it posted when it is there. It is made by what was launched
        before this, or before an event."""
        tensor = tensor.detach().contiguous()
        staged = self.room(tensor.shape, tensor.dtype)
        if ready is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self.stream.wait_event(ready)
        with torch.cuda.stream(self.stream):
            staged.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        tensor.record_stream(self.stream)

        def posted() -> Any:
            copied.synchronize()
            return post(staged)

        self._last = self._thread.submit(posted)
        return staged, Queued(self._last)

    def into(self, staged: Tensor) -> Tensor:
        """The tensor on the GPU; what is launched after this sees it."""
        return staged.to(self.device, non_blocking=True)

    def drain(self) -> None:
        """Wait until all that left has been posted, so that what is posted next comes after it."""
        if self._last is not None:
            self._last.exception()
            self._last = None
