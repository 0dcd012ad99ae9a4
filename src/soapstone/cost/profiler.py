"""Measuring operators on the device at hand (FlexFlow 5.1), and collecting their times: with `runs`, the one
place in `cost` that runs torch. The median over a candidate's batches and their spread are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import median, quantiles
from typing import Any

from soapstone.cost.among import ahead_s, in_turn_s
from soapstone.cost.at_hand import Device
from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Launched, Measured, OpKey, Profile, Updated, key_of
from soapstone.cost.runs import BATCHES, Again, Held, Runs, update_batches
from soapstone.cost.work import Work
from soapstone.errors import CostError, SoapstoneError

UPDATE_SIZES = tuple(4 * 4**i for i in range(3, 13))
"""[choice] Bytes of the weights whose update is measured: 256 B to 64 MB."""

DIGITS = 4
"""Significant digits of a time that are kept: the spread is in the second."""

_FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, SoapstoneError, TypeError, ValueError)
"""What running an operator on made-up operands may meet: too little memory, or operands that do not fit."""


class Profiler:
    """Measures candidates, and collects their times; what cannot be run is left out and counted."""

    def __init__(
        self,
        device: Device,
        *,
        launches: bool = False,
        statistic: Callable[[Sequence[float]], float] = median,
    ) -> None:
        self.device = device
        self.statistic = statistic
        self.launches = launches and device.is_cuda
        self.launched: dict[Work, list[Launched]] = {}
        self.batches: dict[OpKey, dict[tuple[Any, ...], tuple[Any, list[float]]]] = {}
        self.failed: dict[str, str] = {}
        self.failures = 0
        self.updates: dict[int, list[float]] = {}
        self.hidden_bytes: dict[Work, int] = {}
        self.apart_bytes: dict[Work, int] = {}
        self._held = Held()

    def let_go(self) -> None:
        """Hold nothing any more of what was made."""
        self._held.let_go()

    def measure(self, candidate: Candidate, *, again: bool = False) -> bool:
        """Measure a candidate, more shortly if it is done `again`; False (and the reason in `failed`) if it
        cannot be run."""
        try:
            runs = Runs(candidate, self.device, self._held)
            forward_s, backward_s = runs.measured(again=again)
            launched = runs.launched() if self.launches else ()
        except _FAILURES as error:
            told = next(iter(str(error).splitlines()), "")
            self.failures += 1
            self.failed[candidate.node.op_name] = f"{type(error).__name__}: {told}"[:200]
            self._recover(candidate.node.op_name)
            return False
        for work, batches in ((candidate.forward, forward_s), (candidate.backward, backward_s)):
            if work is not None and batches:
                shapes = self.batches.setdefault(key_of(work), {})
                shapes.setdefault((work.operands, work.outputs), (work, []))[1].extend(batches)
        for work, found in zip((candidate.forward, candidate.backward), launched, strict=False):
            if work is not None:
                self.launched.setdefault(work, []).append(found)
        return True

    def runnable(self, candidate: Candidate) -> Callable[[], Again] | None:
        """A function that runs a candidate as often as one batch has it; None if it cannot be run."""
        with contextlib.suppress(*_FAILURES):
            runs = Runs(candidate, self.device, self._held)
            runs.prepare()
            return runs.again
        return None

    def launching_among(self, candidates: Iterable[Candidate]) -> tuple[float, float | None]:
        """How much longer launching takes on a GPU where one operator follows another, as in a step, than
        where one of them is launched over and over again, as it is measured; and for how long a thread
        launches before it has to wait for the GPU, if it ever has to. 1 and None elsewhere."""
        runs: list[Runs] = []
        for candidate in candidates if self.launches else ():
            with contextlib.suppress(*_FAILURES):
                own = Runs(candidate, self.device)
                own.prepare()
                runs.append(own)
        found = []
        for _ in range(BATCHES if runs else 0):
            with contextlib.suppress(*_FAILURES):
                found.append(in_turn_s(runs) / sum(sum(own.launching_s()) for own in runs))
        return median(found) if found else 1.0, ahead_s(runs) if runs else None

    def measure_hidden(self, candidate: Candidate) -> None:
        """Measure what a candidate's passes take of memory beside tensors; if it is any, also what they take
        where what they read first is a part of a larger tensor, which may be copied."""
        with contextlib.suppress(*_FAILURES):
            passes, runs = (candidate.forward, candidate.backward), Runs(candidate, self.device)
            taken = runs.hidden_bytes()
            apart = runs.hidden_bytes(is_apart=True) if any(taken) else taken
            for work, *both in zip(passes, taken, apart, strict=True):
                if work is not None:
                    self.hidden_bytes[work], self.apart_bytes[work] = both

    def measure_updates(self, sizes: Iterable[int] | None = None) -> None:
        """Measure updates of weights of some sizes (SGD with momentum, one weight among several)."""
        for size_bytes in UPDATE_SIZES if sizes is None else sizes:
            with contextlib.suppress(RuntimeError, MemoryError):
                self.updates.setdefault(size_bytes, []).extend(update_batches(size_bytes, self.device))

    @property
    def profile(self) -> Profile:
        """All that was measured so far."""
        times = {
            key: tuple(
                Measured(
                    work.operands,
                    work.outputs,
                    *self._told(found),
                    work.flops,
                    work.size_bytes,
                    self._launched(self.launched.get(work, ())),
                )
                for work, found in shapes.values()
            )
            for key, shapes in self.batches.items()
        }
        updates = tuple(Updated(size, *self._told(found)) for size, found in self.updates.items() if found)
        return Profile(self.device.kind, self.device.software, times, updates)

    @property
    def doubt(self) -> float:
        """How well half of the times are told, as a part of them: about a standard error of the middle."""
        told = [batches for shapes in self.batches.values() for _, batches in shapes.values()]
        return median(map(_doubt, told)) if told else 0.0

    def _told(self, batches: Sequence[float]) -> tuple[float, float]:
        """The statistic and relative spread, with as many digits as mean something."""
        seconds = self.statistic(batches)
        if len(batches) < 2 or seconds <= 0:
            return float(f"{seconds:.{DIGITS}g}"), 0.0
        low, middle, high = quantiles(batches, n=4)
        return float(f"{seconds:.{DIGITS}g}"), float(f"{(high - low) / 2 / middle:.2g}")

    def _launched(self, found: Sequence[Launched]) -> Launched | None:
        if not found:
            return None
        kernels_s, _ = self._told([each.kernels_s for each in found])
        launching_s, _ = self._told([each.launching_s for each in found])
        return Launched(kernels_s, launching_s)

    def _recover(self, op_name: str) -> None:
        """Give memory back; a GPU that an operator has brought down cannot be measured any further."""
        if not self.device.is_cuda:
            return
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            raise CostError(
                f"the GPU stopped working at operator '{op_name}' ({self.failed[op_name]}); what was measured"
                " before is in the cache"
            ) from None


def _doubt(batches: Sequence[float]) -> float:
    """The same of one operator; everything, if there is one batch."""
    if len(batches) < 2:
        return 1.0
    low, middle, high = quantiles(batches, n=4)
    return (high - low) / max(middle, 1e-12) / sqrt(len(batches))
