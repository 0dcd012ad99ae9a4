"""What a process that runs steps does with its memory.

Memory that it frees stays with it, for the next that asks (`keep_freed_memory`): by default glibc maps large
blocks anew each time and gives them back, and every 4 KiB of new memory costs a page fault: thousands in a
convolution, a third of the CPU time of a data-parallel step ([measured] BERT).

torch has an allocator of its own on some processors (mimalloc, on Arm), which gives memory back a hundredth
of a second after it was freed. It can be told not to only in the environment, before torch is loaded (`KEPT`;
[measured] CANDLE Uno, two ranks on Arm: 25,000 page faults in a step under ZeRO, and 220 ms instead of 177).

And the garbage collector does not look again and again at what stays (`settled_objects`): a look at all that
a model's graph, its tasks and their programs are made of takes up to 0.9 s ([measured] 20 strategies of RNNTC
in one process), comes at any moment of a step, on each rank at another, and the other ranks wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

KEPT = {"MIMALLOC_PURGE_DELAY": "-1"}
"""What the environment of a process says that keeps what it frees."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


def tell_allocators() -> None:
    """Let processes that are started from here keep what they free, and this one if torch is not loaded yet;
    what the user has set stays."""
    for name, value in KEPT.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """From now on in this process; where there is another allocator, nothing changes."""
    tell_allocators()
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def settled_objects() -> Iterator[None]:
    """Within, what was there before is left alone by the garbage collector."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
