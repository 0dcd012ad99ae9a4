"""Measuring operators on the device at hand (FlexFlow 5.1): the one place in `cost` that runs torch.

A candidate's operands are made up, its forward and its backward pass are run in batches after a warm-up,
as the runtime runs them: the forward pass keeps what the backward pass needs, many backward passes are one
call of autograd. The time of a run is a batch's divided by its runs; the median over batches and their
spread are kept. On a GPU a batch is launched at once and waited for at its end, so that launches overlap
with work as they do in training; where it is asked for, the time of the kernels alone and that of launching
them are taken too. On one thread of a CPU the clock is the thread's own: it stands still while
the system lets another process run. As in a step, a run finds its weights in no cache, nor, on a CPU, the
memory that it writes to (`MOST_COPIES`, `HELD_BYTES`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from soapstone.cost.among import CYCLES_PER_S, ahead_s, in_turn_s
from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Launched, Measured, OpKey, Profile, Updated, key_of
from soapstone.cost.watch import Watch
from soapstone.cost.work import Work
from soapstone.errors import CostError, SoapstoneError
from soapstone.graph import Role
from soapstone.machine.device import KINDS
from soapstone.machine.heap import keep_freed_memory
from soapstone.ops.box import shape_of
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.op import Shard, Statistics

if TYPE_CHECKING:
    from soapstone.cost.count import Count

BATCHES = 7
"""[choice] Batches of a measurement: enough for quartiles."""

BATCH_S = 0.004
"""[choice] Seconds of a batch: far above the clock's resolution, short enough for thousands of shapes."""

MOST_RUNS = 64
"""[choice] Runs in a batch of something very short."""

LONGEST_S = 3.0
"""[choice] After so many seconds on one shape, fewer batches must do."""

MEMORY_SHARE = 0.4
"""[choice] The part of free memory that a batch may take, by its own count of bytes."""

LAUNCHED_RUNS = 6
"""[choice] Runs that are launched at least, where it is asked what launching one more takes."""

CACHE_TIMES, MOST_COPIES = 2, 8
"""[choice] Runs take turns with copies of their weights, so many at most, which together are as large as all
weights of the model, but no larger than so many times a GPU's cache, or what is held on CPUs: in a step all
other weights come between two uses of one ([measured] RNNTC's LSTM cells, of 32 MiB each, on a quarter of an
H200, whose cache has 50 MB: by one copy a step on one device was to take 116 ms, and took 127; AlexNet's
dense layers on an x86 core: 0.9 and 0.6 ms by one copy, 1.3 to 1.6 and 0.9 in a step)."""

HELD_BYTES = 2**27
"""[choice] What runs on CPUs make is held until so much was made since: a step's tensors find their memory in
no cache either, since all of a step lies between two uses of it ([measured] a small GPT-2 in micro-batches on
an x86 core, whose cache has 36 MB: steps take 1.15 to 1.5 times as long as runs that find what the last ones
let go; a third of that is so told)."""

KERNEL_BATCHES = 3
HEAD_START = 1.5
"""[choice] Batches of kernels alone: the GPU is kept waiting for so many times the time that launching them
takes, and finds all of them launched."""

UPDATE_SIZES = tuple(4 * 4**i for i in range(3, 13))
"""[choice] Bytes of the weights whose update is measured: 256 B to 64 MB."""

DIGITS = 4
"""Significant digits of a time that are kept: the spread is in the second."""


@dataclass(frozen=True)
class Device:
    """Where to measure: torch's name of it, what machines call such a device, and the software on it."""

    place: str
    kind: str
    software: dict[str, str]

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.place.startswith("cuda")

    @property
    def clock(self) -> Callable[[], float]:
        """What times are taken by."""
        return thread_time if self.software.get("threads") == "1" else perf_counter


SLICES = {50.0: "half", 25.0: "quarter", 12.5: "eighth"}
"""What slices of a GPU are called, by their percentage of its multiprocessors."""


def device_at_hand(place: str, kind: str | None = None, threads: int | None = None, ranks: int = 1) -> Device:
    """The device of this computer: `cpu` (with so many threads for one rank) or `cuda`, which so many
    ranks will use at once."""
    import torch

    software = {"torch": torch.__version__, "python": platform.python_version()}
    if ranks > 1:
        software["ranks"] = str(ranks)
    if place == "cpu":
        software |= {"processor": _processor(), "threads": str(threads or 1)}
        return Device("cpu", kind or "cpu", software)
    if place != "cuda":
        raise CostError(f"there is no device '{place}': choose cpu or cuda")
    if not torch.cuda.is_available():
        raise CostError("torch finds no GPU here: measure with --device cpu, or import a profile")
    name = torch.cuda.get_device_name()
    software |= {"gpu": name, "cuda": str(torch.version.cuda)}
    return Device("cuda", kind or kind_named(name), software)


def kind_named(name: str) -> str:
    """What machines call a GPU that its driver calls `name`, or the slice of it that this process has."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    found = next((kind for kind in KINDS if any(word.startswith(kind) for word in words)), "-".join(words))
    percent = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    return found if percent >= 100 else f"{found}-{SLICES.get(percent, f'{percent:g}-percent')}"


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def prepare(device: Device) -> None:
    """Set this process up as a rank is: its threads, and memory that stays with it."""
    import torch

    if device.is_cuda:
        return
    torch.set_num_threads(int(device.software["threads"]))
    keep_freed_memory()


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
        self._held = _Held()

    def let_go(self) -> None:
        """Hold nothing any more of what was made."""
        self._held.let_go()

    def measure(self, candidate: Candidate) -> bool:
        """Measure a candidate; False (and the reason in `failed`) if it cannot be run."""
        try:
            runs = _Runs(candidate, self.device, self._held)
            forward_s, backward_s = runs.measured()
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
            runs = _Runs(candidate, self.device, self._held)
            runs.prepare()
            return runs.again
        return None

    def launching_among(self, candidates: Iterable[Candidate]) -> tuple[float, float | None]:
        """How much longer launching takes on a GPU where one operator follows another, as in a step, than
        where one of them is launched over and over again, as it is measured; and for how long a thread
        launches before it has to wait for the GPU, if it ever has to. 1 and None elsewhere."""
        runs: list[_Runs] = []
        for candidate in candidates if self.launches else ():
            with contextlib.suppress(*_FAILURES):
                own = _Runs(candidate, self.device)
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
            passes, runs = (candidate.forward, candidate.backward), _Runs(candidate, self.device)
            taken = runs.hidden_bytes()
            apart = runs.hidden_bytes(is_apart=True) if any(taken) else taken
            for work, *both in zip(passes, taken, apart, strict=True):
                if work is not None:
                    self.hidden_bytes[work], self.apart_bytes[work] = both

    def measure_updates(self, sizes: Iterable[int] | None = None) -> None:
        """Measure updates of weights of some sizes (SGD with momentum, one weight among several)."""
        for size_bytes in UPDATE_SIZES if sizes is None else sizes:
            with contextlib.suppress(RuntimeError, MemoryError):
                self.updates.setdefault(size_bytes, []).extend(_update_batches(size_bytes, self.device))

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


def _has_gradient(operand: Any) -> bool:
    """Whether it is a tensor that has one."""
    return getattr(operand, "grad", None) is not None


def _doubt(batches: Sequence[float]) -> float:
    """The same of one operator; everything, if there is one batch."""
    if len(batches) < 2:
        return 1.0
    low, middle, high = quantiles(batches, n=4)
    return (high - low) / max(middle, 1e-12) / sqrt(len(batches))


def _part(tensor: Any) -> Any:
    """The same as a part of a larger tensor."""
    larger = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1)) if tensor.ndim else tensor
    return larger.narrow(-1, 0, tensor.shape[-1]).copy_(tensor) if tensor.ndim else tensor


@dataclass(frozen=True)
class Again:
    """One more batch of runs: the seconds until all of it had been asked for, and on a GPU, those of its
    kernels when they need not wait for being launched."""

    asking_s: float
    kernels_s: float | None = None


class _Held:
    """Tensors that are held until others of so many bytes came after them."""

    def __init__(self, most_bytes: int = HELD_BYTES) -> None:
        self._tensors: deque[Any] = deque()
        self._bytes, self._most_bytes = 0, most_bytes

    def hold(self, tensors: Iterable[Any]) -> None:
        """Hold these, and let go of the oldest."""
        for tensor in tensors:
            self._tensors.append(tensor)
            self._bytes += tensor.nbytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._tensors.popleft().nbytes

    def let_go(self) -> None:
        """Let go of all."""
        self._tensors.clear()
        self._bytes = 0


class _Runs:
    """One candidate's operands, and how to run it forward and backward many times."""

    def __init__(self, candidate: Candidate, device: Device, held: _Held | None = None) -> None:
        import torch

        self.torch, self.device, self._candidate = torch, device, candidate
        self._held = held or _Held(0)
        self._runs = 1
        self._asked_s = (0.0, 0.0)
        graph, node, box = candidate.graph, candidate.node, candidate.box
        signature = graph.signature(node)
        self.op, self.attrs = node.op, node.attrs
        dtype = graph.value(node.outputs[0]).dtype
        self.shard = Shard(signature, box, dtype=dtype, device="cuda" if device.is_cuda else "cpu")
        self.wanted = [
            i for i, o in enumerate(node.operands) if isinstance(o, str) and o in graph.differentiable
        ]
        self.has_backward = candidate.backward is not None
        self.traced = any(name in graph.differentiable for name in node.outputs)
        limits = [signature.sizes[dim] for dim in self.op.gathers if dim in signature.sizes]
        below = max(1, min(limits, default=1))
        self.size_bytes = sum(work.size_bytes for work in candidate.works)
        self.operands: list[Any] = [
            self._operand(graph.value(o).dtype, signature.read(i, box), below) if isinstance(o, str) else o
            for i, o in enumerate(node.operands)
        ]
        self._in_turn = cycle([self.operands])
        shared = [dim for dim in signature.shared if dim in box and box[dim] != signature.points[dim]]
        self.statistics = self.op.statistics if shared and self.op.joins_statistics(self.attrs) else None
        self.merged = None if self.statistics is None else _merging(self.statistics)

    def _copied(self, room: int) -> list[list[Any]]:
        """The operands, with other copies of weights in each turn; no more than there is room for."""
        graph, node = self._candidate.graph, self._candidate.node
        is_weight = [isinstance(o, str) and graph.value(o).role is Role.WEIGHT for o in node.operands]
        own = [operand for operand, is_own in zip(self.operands, is_weight, strict=True) if is_own]
        size_bytes = sum(weight.nbytes for weight in own if weight is not None)
        read = {name for each in graph.nodes for name in each.reads}
        others = [graph.value(name) for name in read if graph.value(name).role is Role.WEIGHT]
        most_bytes = HELD_BYTES
        if self.device.is_cuda:
            cache_bytes = self.torch.cuda.get_device_properties(self.device.place).L2_cache_size
            most_bytes = CACHE_TIMES * cache_bytes
        all_bytes = min(most_bytes, sum(value.size_bytes for value in others))
        count = max(1, min(MOST_COPIES, room, -(-all_bytes // max(1, size_bytes)))) if size_bytes else 1
        return [
            [
                operand.clone() if turn and is_own and operand is not None else operand
                for operand, is_own in zip(self.operands, is_weight, strict=True)
            ]
            for turn in range(count)
        ]

    def _operand(self, dtype: str, region: Any, below: int) -> Any:
        torch = self.torch
        if region.is_empty:
            return None
        shape, kind, place = shape_of(region.box), torch_dtype(dtype), self.device.place
        assert kind is not None
        if kind.is_floating_point:
            # Positive and below one: fit for logarithms, roots and probabilities alike.
            return torch.rand(shape, device=place).mul_(0.9).add_(0.05).to(kind)
        if kind is torch.bool:
            return torch.rand(shape, device=place) > 0.5
        if kind.is_complex:
            return torch.rand(shape, device=place).to(kind)
        return torch.randint(below, shape, device=place, dtype=kind)

    def measured(self) -> tuple[list[float], list[float]]:
        """Seconds of a run in each batch, forward and backward; no backward where there is none."""
        once_s = self.prepare()
        runs = self._runs
        batches = max(2, min(BATCHES, int(LONGEST_S / max(once_s * runs, 1e-7))))
        forward_s, backward_s = [], []
        for _ in range(batches):
            forward, backward = self._batch(runs)
            forward_s.append(forward / runs)
            backward_s.append(backward / runs)
        return forward_s, backward_s if self.has_backward else []

    def launched(self) -> tuple[Launched, Launched]:
        """The forward and the backward pass on a GPU, each apart for its kernels and for launching them;
        after `measured`."""
        launching_s = self.launching_s()
        asking_s = self._asked_s  # of as many runs at least
        found = [self._kernels_s(self._runs, asking_s) for _ in range(KERNEL_BATCHES)]
        forward, backward = (
            Launched(median(seconds) / self._runs, taken_s)
            for seconds, taken_s in zip(zip(*found, strict=True), launching_s, strict=True)
        )
        return forward, backward

    def launching_s(self) -> tuple[float, float]:
        """Seconds of asking for one more run, forward and backward. What each batch takes beside that (having
        autograd begin, the first kernel after a rest) is as much as several runs ([measured] 0.3 ms, and 0.1
        for taking one more convolution back), and a step has it once."""
        runs = max(self._runs, min(LAUNCHED_RUNS, self._room()))
        one, many = (
            [self._asking_s(count) for _ in range(KERNEL_BATCHES)] for count in (min(1, runs - 1), runs)
        )
        forward_s, backward_s = (
            max(0.0, median(more) - median(less)) / max(1, runs - 1)
            for less, more in zip(zip(*one, strict=True), zip(*many, strict=True), strict=True)
        )
        return forward_s, backward_s

    def _kernels_s(self, runs: int, launching_s: Sequence[float]) -> tuple[float, float]:
        """Seconds of the kernels of so many forward runs, and of their backward runs."""
        torch = self.torch
        given = [self.leaves() for _ in range(runs)]
        made: list[tuple[Any, ...]] = []

        def forward() -> None:
            with torch.set_grad_enabled(self.traced):
                made.extend(self.forward(operands) for operands in given)

        forward_s = self._without_launching(forward, launching_s[0])
        if not self.has_backward:
            return forward_s, 0.0
        roots = [out for outputs in made for out in outputs if out is not None and out.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        return forward_s, self._without_launching(
            lambda: torch.autograd.backward(roots, gradients), launching_s[1]
        )

    def _without_launching(self, launch: Callable[[], None], launching_s: float) -> float:
        """Seconds from the first to the last of some kernels, which the GPU begins with when all of them are
        there."""
        torch = self.torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(CYCLES_PER_S * HEAD_START * launching_s))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _room(self) -> int:
        """How many runs fit in memory together."""
        if self.device.is_cuda:
            free_bytes, _ = self.torch.cuda.mem_get_info()
        else:
            free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        room = int(free_bytes * MEMORY_SHARE) // max(1, 2 * self.size_bytes)
        if room < 1:
            raise MemoryError(f"{self.size_bytes} bytes do not fit")
        return room

    def prepare(self) -> float:
        """Warm up, and see how many runs a batch has; the seconds of one."""
        self._in_turn = cycle(self._copied(self._room()))
        for _ in range(2):
            self._batch(1)
        once_s = sum(self._batch(1))
        self._runs = max(1, min(MOST_RUNS, int(BATCH_S / max(once_s, 1e-7)), self._room()))
        return once_s

    def _batch(self, runs: int) -> tuple[float, float]:
        """Seconds of so many forward runs, and of their backward runs."""
        torch, clock = self.torch, self.device.clock
        given = [self.leaves() for _ in range(runs)]
        with torch.set_grad_enabled(self.traced):
            self._settle()
            start = clock()
            made = [self.forward(operands) for operands in given]
            asked_s = clock() - start
            self._settle()
            forward_s = clock() - start
        if not self.has_backward:
            self._asked_s = asked_s, 0.0
            self._hold(made)
            return forward_s, 0.0
        roots = [out for outputs in made for out in outputs if out is not None and out.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        self._settle()
        start = clock()
        torch.autograd.backward(roots, gradients)
        self._asked_s = asked_s, clock() - start
        self._settle()
        backward_s = clock() - start
        self._hold(
            [*made, gradients, [own.grad for operands in given for own in operands if _has_gradient(own)]]
        )
        return forward_s, backward_s

    def _hold(self, made: Iterable[Iterable[Any]]) -> None:
        """Hold what was made, but for what it was made of."""
        if not self.device.is_cuda:
            self._held.hold(each.detach() for own in made for each in own if self.torch.is_tensor(each))

    def again(self) -> Again:
        """Another batch, forward and backward."""
        asking_s = self._asking_s(self._runs)
        kernels_s = sum(self._kernels_s(self._runs, asking_s)) if self.device.is_cuda else None
        return Again(sum(asking_s), kernels_s)

    def _asking_s(self, runs: int) -> tuple[float, float]:
        """Seconds until so many runs have been asked for, forward and backward."""
        if runs:
            self._batch(runs)
        return self._asked_s if runs else (0.0, 0.0)

    def hidden_bytes(self, *, is_apart: bool = False) -> tuple[int, int]:
        """What a forward and a backward run take at most, beyond what the same tensors without elements do:
        memory that an operator takes inside, which no tensor shows. If it `is_apart`, its first operand is a
        part of a larger tensor."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from soapstone.cost.count import Count

        is_cuda, is_tensor = self.device.is_cuda, self.torch.is_tensor
        first, *others = self.operands
        operands = [_part(first) if is_apart and is_tensor(first) else first, *others]
        for _ in range(2):  # the first run may make what later ones find
            seen = self._highest_bytes(operands, Watch(is_cuda=is_cuda), Watch(is_cuda=is_cuda))
        with FakeTensorMode() as mode:
            shapes = [mode.from_tensor(each) if is_tensor(each) else each for each in operands]
            shown = self._highest_bytes(shapes, Count(is_cuda=is_cuda), Count(is_cuda=is_cuda))
        return max(0, seen[0] - shown[0]), max(0, seen[1] - shown[1])

    def _highest_bytes(
        self, operands: Sequence[Any], forward: Watch | Count, backward: Watch | Count
    ) -> tuple[int, int]:
        """What a forward and a backward run take at most."""
        torch, given = self.torch, self.leaves(operands)
        with torch.set_grad_enabled(self.traced), forward:
            made = self.forward(given)
        if not self.has_backward:
            return forward.highest_bytes(), 0
        roots = [out for out in made if out is not None and out.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        with backward:
            torch.autograd.backward(roots, gradients)
        return forward.highest_bytes(), backward.highest_bytes()

    def leaves(self, operands: Sequence[Any] | None = None) -> list[Any]:
        """The operands, whose weights take turns with their copies, or others like them, as leaves of their
        own where a gradient is wanted."""
        return [
            operand.detach().requires_grad_() if i in self.wanted and operand is not None else operand
            for i, operand in enumerate(next(self._in_turn) if operands is None else operands)
        ]

    def forward(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """What the operator makes of its operands."""
        if self.statistics is None or self.merged is None:
            return self.op.run(operands, self.attrs, self.shard)
        stats = self.merged(self.statistics.local(*operands))
        return self.op.run(operands, self.attrs, self.shard, stats)

    def _settle(self) -> None:
        if self.device.is_cuda:
            self.torch.cuda.synchronize()


def _merging(statistics: Statistics) -> Callable[[Any], Any]:
    """Merges a shard's statistics with as many of another's, and pulls their gradient back, as the runtime
    does it between its calls of autograd."""
    import torch

    class Merged(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, own: Any) -> Any:
            whole = statistics.merge([own, own])
            context.save_for_backward(own, whole)
            return whole

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            own, whole = context.saved_tensors
            return statistics.pull(own, whole, gradient)

    merged: Callable[[Any], Any] = Merged.apply
    return merged


def _update_batches(size_bytes: int, device: Device) -> list[float]:
    """Seconds of updating one weight of this size, among as many as make a batch."""
    import torch

    count = max(1, min(32, (64 * 2**20) // max(size_bytes, 1)))
    weights = [torch.nn.Parameter(torch.zeros(size_bytes // 4, device=device.place)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step: Callable[[], Any] = torch.optim.SGD(weights, lr=1e-3, momentum=0.9).step
    settle: Callable[[], Any] = torch.cuda.synchronize if device.is_cuda else (lambda: None)
    found = []
    for number in range(BATCHES + 2):
        settle()
        start = device.clock()
        step()
        settle()
        if number >= 2:
            found.append((device.clock() - start) / count)
    return found
