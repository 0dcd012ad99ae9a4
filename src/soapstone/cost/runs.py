"""One operator, run over and over: what a profiler measures.

Operands are made up; forward and backward passes are run in batches after a warm-up, as the runtime runs
them: the forward pass keeps what the backward pass needs, many backward passes are one call of autograd. The
time of a run is a batch's divided by its runs. On a GPU a batch is launched at once and waited for at its
end, so that launches overlap with work as they do in training; where it is asked for, the time of the kernels
alone and that of launching them are taken too. As in a step, a run finds its weights in no cache, nor, on a
CPU, the memory that it writes to (`MOST_COPIES`, `HELD_BYTES`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

from soapstone.cost.among import CYCLES_PER_S
from soapstone.cost.at_hand import Device
from soapstone.cost.candidates import Candidate
from soapstone.cost.profile import Launched
from soapstone.cost.watch import Watch
from soapstone.graph import Role
from soapstone.ops.box import shape_of
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.op import Shard, Statistics

if TYPE_CHECKING:
    from soapstone.cost.count import Count

BATCHES, BATCHES_AGAIN = 7, 2
"""[choice] Batches of a measurement: enough for quartiles, and fewer where the same was measured before. If
the computer's speed changes from second to second, being there at many moments tells more than staying for
long ([measured] two x86 cores, each of them now fast and now 1.6 times as slow, Inception-v3: by two visits
of seven batches within a minute predictions were 25 % too slow in the median, before the fit)."""

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


@dataclass(frozen=True)
class Again:
    """One more batch of runs: the seconds until all of it had been asked for, and on a GPU, those of its
    kernels when they need not wait for being launched."""

    asking_s: float
    kernels_s: float | None = None


class Held:
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


class Runs:
    """One candidate's operands, and how to run it forward and backward many times."""

    def __init__(self, candidate: Candidate, device: Device, held: Held | None = None) -> None:
        import torch

        self.torch, self.device, self._candidate = torch, device, candidate
        self._held = held or Held(0)
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

    def measured(self, *, again: bool = False) -> tuple[list[float], list[float]]:
        """Seconds of a run in each batch, of which there are fewer if it is done `again`, forward and
        backward; no backward where there is none."""
        once_s = self.prepare()
        runs = self._runs
        most = BATCHES_AGAIN if again else BATCHES
        batches = max(2, min(most, int(LONGEST_S / max(once_s * runs, 1e-7))))
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


def _has_gradient(operand: Any) -> bool:
    """Whether it is a tensor that has one."""
    return getattr(operand, "grad", None) is not None


def _part(tensor: Any) -> Any:
    """The same as a part of a larger tensor."""
    larger = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1)) if tensor.ndim else tensor
    return larger.narrow(-1, 0, tensor.shape[-1]).copy_(tensor) if tensor.ndim else tensor


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


def update_batches(size_bytes: int, device: Device) -> list[float]:
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
