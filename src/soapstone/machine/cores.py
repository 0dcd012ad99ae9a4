"""How many cores of this computer are this process's to use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that the scheduler (taskset, SLURM, a container) lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
