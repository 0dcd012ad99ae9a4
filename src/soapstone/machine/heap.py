"""Memory that a process frees stays with it, for the next that asks.

By default glibc maps large blocks anew each time and gives them back, and every 4 KiB of new memory costs a
page fault: thousands in a convolution, a third of the CPU time of a data-parallel step ([measured] BERT).
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


def keep_freed_memory() -> None:
    """From now on in this process; where there is another allocator, nothing changes."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
