"""The native core: flat arrays and boxes in, flat arrays out.

It knows no operator, no torch and no file. Every function here is a pure function of its arguments,
releases the interpreter lock while it works, and so may be called from many threads at once. Only `word_*`
are about memory that the caller has: 32-bit words at addresses in a mapping that processes share, which one
adds to (`word_add`; `word_ring` adds one and wakes) and others wait for (`word_wait`, watching first, then
asleep; the word after it counts the sleepers).
The code is in `cpp/`; this module is the only one that imports it, and says what it means in Python.

Boxes are an array `int64[n, d, 2]`: for each of n boxes and each of d dims the half-open interval
`[lower, upper)`. A box is empty when some interval is, and an empty box overlaps nothing; a box of rank
0 is the one element of a scalar, and overlaps every other. An array of another dtype or shape is a
`TypeError`, arrays that do not fit together are a `ValueError`: both are mistakes of the caller, not of
a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone import _core
from soapstone._core import (
    Access,
    Axis,
    BlockData,
    BlockHeld,
    ExactSearch,
    HeldData,
    MachineData,
    NodeData,
    PlannedTasks,
    Problem,
    Proposals,
    TermBank,
    TimeCurve,
    ValueData,
    WeightData,
    word_add,
    word_load,
    word_ring,
    word_wait,
)

__all__ = [
    "Access",
    "Axis",
    "BlockData",
    "BlockHeld",
    "ExactSearch",
    "HeldData",
    "MachineData",
    "Method",
    "NodeData",
    "PlannedTasks",
    "Problem",
    "Proposals",
    "TermBank",
    "TimeCurve",
    "ValueData",
    "WeightData",
    "grid_overlaps",
    "lower_bound",
    "overlaps",
    "simulate",
    "word_add",
    "word_load",
    "word_ring",
    "word_wait",
]

Boxes: TypeAlias = NDArray[np.int64]
"""Boxes of one rank, `int64[n, d, 2]`."""

Pairs: TypeAlias = NDArray[np.int64]
"""Index pairs, `int64[k, 2]`, sorted by the first index and then by the second."""

Method: TypeAlias = Literal["engine", "full", "paper_delta", "plain"]
"""How `Proposals` simulates, all ways giving the same makespans to the bit.

    engine       incremental, with a threshold and a rewind: what the search uses
    full         the task graph is changed incrementally, and simulated whole
    paper_delta  Algorithm 2 of FlexFlow as written
    plain        everything is built and simulated anew
"""


def overlaps(written: Boxes, read: Boxes) -> Pairs:
    """The pairs (i, j) for which `written[i]` and `read[j]` share an element.

    Every pair is tested: the time grows with `len(written) * len(read)`.
    """
    return _core.overlaps(np.ascontiguousarray(written), np.ascontiguousarray(read))


def grid_overlaps(sizes: Sequence[int], degrees: Sequence[int], read: Boxes) -> Pairs:
    """The pairs (i, j) for which cell i of a grid and `read[j]` share an element.

    The grid cuts a tensor of shape `sizes` into `degrees[d]` equal cells along each dim d, numbered in
    row-major order. The answer is that of `overlaps` on those cells, but only pairs that overlap are
    visited. What a read box covers outside the grid, such as padding, overlaps nothing.
    """
    return _core.grid_overlaps(sizes, degrees, np.ascontiguousarray(read))


def lower_bound(problem: Problem) -> tuple[float, float]:
    """What no strategy of a problem does better than, in seconds: all compute on all devices at once, and
    the longest path. `cpp/lower_bound.h` says why."""
    return _core.lower_bound(problem)


def simulate(
    duration_s: NDArray[np.float64],
    resource: NDArray[np.int32],
    after_begin: NDArray[np.int64],
    after: NDArray[np.int32],
    resource_count: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Start and end of every task, and the makespan, by Algorithm 1 of FlexFlow.

    Tasks are numbered in task order; task t waits for `after[after_begin[t]:after_begin[t + 1]]`.
    `sim.reference` is the specification.
    """
    return _core.simulate(duration_s, resource, after_begin, after, resource_count)
