"""The wire: messages and collectives between ranks, all of them asynchronous.

What torch.distributed asks of its users, and this module sees to: a tensor that is sent is contiguous,
and it and its Work live until the send is done; a receive has room for exactly what comes; process
groups are made by all ranks in the same order, and once (each costs milliseconds, threads and file
descriptors). Ranks of one computer leave messages and sums for each other in memory that they share: CPU
ranks do so themselves (`mailbox`), GPUs that are shared do it beside their computing (`belts`). What gloo
carries for GPUs is staged in host memory (`staging`).

A wait that fails, because a rank is gone or because nothing came in time, says what it was for; rank 0
asks the others what they were waiting for and says it in one sentence.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle
from math import prod
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soapstone.errors import TrainingError
from soapstone.runtime.belts import Belts
from soapstone.runtime.lanes import Mark
from soapstone.runtime.mailbox import IN_PARTS_BYTES, Letter, Mailbox
from soapstone.runtime.staging import Staging

TIMEOUT_S = 300.0
"""[choice] How long a rank waits for another before it gives up."""

GATHERING_S = 2.0
"""[choice] How long rank 0 waits for the others to say what they were waiting for."""


LANES = 2
"""[choice] Groups over which sums, and the parts of a large one, go in turns, where gloo serves GPUs: each
has threads of its own, and one sum keeps one of them busy."""

LANE_BYTES = 16 * 2**20
"""[choice] The parts of a large sum, of which the first is on its way while the next is copied."""


_WAITED, _FAILED = "soapstone/waited/", "soapstone/failed/"
"""Under these names ranks leave in the store what they waited for, and why they ended."""


_NOTHING = torch.empty(0)


def _nothing() -> None:
    """What is to be done when something is there, where that it is there is enough."""


class Pending:
    """A message or collective under way; `wait` gives the tensor that it brings."""

    __slots__ = ("brought", "buffer", "on_done", "what", "wire", "work")

    def __init__(self, wire: Wire, work: Any, buffer: Tensor, what: str) -> None:
        self.wire, self.work, self.buffer, self.what = wire, work, buffer, what
        self.on_done: Callable[[], None] | None = None
        self.brought: Tensor | None = None

    def once(self) -> Tensor:
        """The tensor, for several who wait for it."""
        if self.brought is None:
            self.brought = self.wait()
        return self.brought

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        self._wait()
        return self.wire.brought(self.buffer)

    def _wait(self) -> None:
        if self.work is not None:
            start = perf_counter()
            try:
                self.work.wait()
            except RuntimeError as error:
                raise self.wire.failure(self.what, error) from error
            self.wire.waited_s += perf_counter() - start
        if self.on_done is not None:
            self.on_done()

    def told(self) -> Tensor:
        """The same, wherever the host reads it soonest."""
        return self.wait()

    def borrow(self) -> Tensor:
        """The tensor, once it is there, for use until `give_back`."""
        return self.wait()

    def give_back(self) -> None:
        """Have done with what was borrowed."""


class Lent(Pending):
    """A message in the memory of its sender."""

    __slots__ = ("dtype", "shape")

    def __init__(
        self, wire: Wire, letter: Letter, shape: Sequence[int], dtype: torch.dtype, what: str
    ) -> None:
        super().__init__(wire, letter, _NOTHING, what)
        self.shape, self.dtype = tuple(shape), dtype

    def wait(self) -> Tensor:
        """A copy of the tensor, once it is there."""
        found = self.borrow().clone()
        self.give_back()
        return found

    def borrow(self) -> Tensor:
        """The tensor where it lies, once it is there, for use until `give_back`."""
        self._wait()
        found: Tensor = self.work.content(self.dtype, self.shape, prod(self.shape))
        return found

    def give_back(self) -> None:
        """Let the sender have its memory again."""
        self.work.give_back()


class Carried(Pending):
    """A message or sum that the GPU itself waits for: what is launched after `wait` comes after it."""

    __slots__ = ("belts", "mark")

    def __init__(self, wire: Wire, belts: Belts, mark: Mark, buffer: Tensor, what: str) -> None:
        super().__init__(wire, None, buffer, what)
        self.belts, self.mark = belts, mark

    def wait(self) -> Tensor:
        """The tensor, for what is launched from now on. Whoever wants to know when it is there, waits."""
        if self.on_done is not None:
            start = perf_counter()
            self._reach()
            self.wire.waited_s += perf_counter() - start
            self.on_done()
        self.mark.hold_back()
        return self.buffer

    def _reach(self) -> None:
        try:
            self.belts.reach(self.mark, self.wire.timeout_s)
        except RuntimeError as error:
            raise self.wire.failure(self.what, error) from error


class Told(Pending):
    """A sum of few numbers that the host is to know, over GPUs of one computer."""

    __slots__ = ("belts", "copied")

    def __init__(self, wire: Wire, belts: Belts, tensor: Tensor, ready: Any, what: str) -> None:
        self.belts = belts
        staged, self.copied = belts.told(tensor, ready)
        super().__init__(wire, None, staged, what)

    def wait(self) -> Tensor:
        """The sum, once it is there."""
        return self.wire.brought(self.told())

    def told(self) -> Tensor:
        """The sum on the host, which does not wait for what else its GPU was given to do."""
        try:
            self.belts.reach(self.copied, self.wire.timeout_s)
            ranks = sorted(self.belts.ranks)
            self.belts.mailbox.sum_up(self.buffer, ranks, 0, self.wire.timeout_s).wait()
        except RuntimeError as error:
            raise self.wire.failure(self.what, error) from error
        return self.buffer


class Returned(Pending):
    """A sum that comes back to the memory of what was added up."""

    __slots__ = ("place",)

    def __init__(self, wire: Wire, work: Any, staged: Tensor, place: Tensor, what: str) -> None:
        super().__init__(wire, work, staged, what)
        self.place = place

    def wait(self) -> Tensor:
        """The sum, once it is there."""
        self._wait()
        return self.place.copy_(self.buffer, non_blocking=True)


class Together:
    """A sum whose parts went on their own, and come back to where they were."""

    __slots__ = ("parts", "whole")

    def __init__(self, parts: Sequence[Pending], whole: Tensor) -> None:
        self.parts, self.whole = parts, whole

    @property
    def on_done(self) -> Callable[[], None] | None:
        """What is called when the last part is there."""
        return self.parts[-1].on_done

    @on_done.setter
    def on_done(self, call: Callable[[], None] | None) -> None:
        self.parts[-1].on_done = call

    def once(self) -> Tensor:
        """The sum, for several who wait for it."""
        for part in self.parts:
            part.once()
        return self.whole

    def wait(self) -> Tensor:
        """The sum, once all of it is there."""
        for part in self.parts:
            part.wait()
        return self.whole


class Slot:
    """A part of what a collective brings; None where it brings nothing here."""

    __slots__ = ("on_done", "part", "shape", "shared")

    def __init__(self, shared: Pending | Together, part: slice | None, shape: Sequence[int]) -> None:
        self.shared, self.part, self.shape = shared, part, tuple(shape)
        self.on_done: Callable[[], None] | None = None

    def wait(self) -> Tensor | None:
        """The part, once it is there."""
        if self.on_done is not None and self.shared.on_done is None:
            self.shared.on_done = _nothing  # somebody wants to know when it is there
        whole = self.shared.once()
        if self.on_done is not None:
            self.on_done()
        return None if self.part is None else whole.view(-1)[self.part].view(self.shape)

    def borrow(self) -> Tensor | None:
        """The part, once it is there, for use until `give_back`."""
        return self.wait()

    def give_back(self) -> None:
        """Have done with what was borrowed."""


class Wire:
    """What one rank says to the others. `device` is where its tensors live."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        timeout_s: float = TIMEOUT_S,
        mailbox: Mailbox | None = None,
        belts: Belts | None = None,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.device = device or torch.device("cpu")
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
        self.backend = "gloo" if backend == "gloo" else "nccl"
        self.host = torch.device("cpu") if backend == "gloo" else self.device
        is_staged = self.device.type == "cuda" and self.host.type == "cpu" and size > 1
        self._staging = Staging(self.device) if is_staged else None
        self.mailbox, self.belts = mailbox, belts
        if mailbox is not None and len(mailbox.ranks) == size:
            self.backend = "memory"
        if belts is not None and len(belts.ranks) == size:
            self.backend = "belts"
        self._back: Any = None  # a group for messages to ranks before this one, once it is made
        self._groups: dict[tuple[int, ...], Any] = {}
        self._channels: dict[tuple[int, ...], int] = {}
        self._lanes: dict[tuple[int, ...], Iterator[Any]] = {}
        self._sent: list[Pending] = []
        self.waited_s = 0.0  # in all, since the start

    @property
    def neighbours(self) -> frozenset[int]:
        """The ranks with whom this one shares memory that messages lie in."""
        return frozenset() if self.mailbox is None else frozenset(self.mailbox.ranks)

    @property
    def posts_aside(self) -> bool:
        """Whether what is posted is taken when an event says that it is there, and not before."""
        return self._staging is not None

    def _out(
        self,
        tensor: Tensor,
        what: str,
        post: Any,
        *args: Any,
        ready: torch.cuda.Event | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Post a tensor, from host memory where that is needed: what was posted, and its work."""
        if self._staging is not None and tensor.device != self.host:
            return self._staging.out(tensor, lambda staged: post(staged, *args, **options), ready)
        self._drain()
        staged = tensor.detach().to(self.host).contiguous()
        return staged, self._posted(what, post, staged, *args, **options)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._staging is not None:
            return self._staging.room(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self.host)

    def _drain(self) -> None:
        if self._staging is not None:
            self._staging.drain()

    def brought(self, buffer: Tensor) -> Tensor:
        """A tensor that has arrived, where this rank's tensors live."""
        if buffer.device == self.device:
            return buffer
        return buffer.to(self.device) if self._staging is None else self._staging.into(buffer)

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the process groups that will be needed; every rank must ask for the same ones. Messages to and
        from a rank have a connection each: gloo's is slower where both go over it at once ([measured] 8 MiB
        each way between two ranks at 1 Gb/s: 115 to 140 ms, and 71 one way)."""
        if self._back is None and self.backend == "gloo" and self._staging is None and self.size > 1:
            self._back = self._made(range(self.size))
        for ranks in sorted({tuple(sorted(group)) for group in groups}):
            self._channels.setdefault(ranks, 1 + len(self._channels))
            if ranks not in self._groups and self.backend not in ("memory", "belts"):
                made = [self._made(ranks) for _ in range(1 if self._staging is None else LANES)]
                self._groups[ranks], self._lanes[ranks] = made[0], cycle(made)

    def _made(self, ranks: Sequence[int]) -> Any:
        """A new process group."""
        what, limit = f"the group of ranks {', '.join(map(str, ranks))}", timedelta(seconds=self.timeout_s)
        return self._posted(what, dist.new_group, list(ranks), timeout=limit)

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> None:
        """Send a tensor, which must not change until `settle`."""
        if self.mailbox is not None and peer in self.mailbox.ranks:
            self._posted(what, self.mailbox.send, tensor.detach(), peer, tag, self.timeout_s)
            return
        if self.belts is not None and peer in self.belts.ranks:
            self.belts.send(tensor.detach(), peer)
            return
        staged, work = self._out(tensor, what, dist.isend, peer, group=self._way(self.rank, peer), tag=tag)
        self._sent.append(Pending(self, work, staged, f"rank {peer} to take '{what}'"))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, what: str) -> Pending:
        """Receive a tensor."""
        told = f"'{what}' from rank {peer}"
        if self.mailbox is not None and peer in self.mailbox.ranks:
            return Lent(self, self.mailbox.receive(peer, tag, self.timeout_s), shape, dtype, told)
        if self.belts is not None and peer in self.belts.ranks:
            room, mark = self.belts.receive(shape, dtype, peer)
            return Carried(self, self.belts, mark, room, told)
        buffer = self._room(shape, dtype)
        work = self._posted(what, dist.irecv, buffer, peer, group=self._way(peer, self.rank), tag=tag)
        return Pending(self, work, buffer, told)

    def _way(self, sender: int, receiver: int) -> Any:
        """The group by which a message goes; None for the usual one."""
        return self._back if receiver < sender else None

    def sum_up(
        self, tensor: Tensor, ranks: Sequence[int], what: str, ready: torch.cuda.Event | None = None
    ) -> Pending | Together:
        """Add a tensor up over ranks; it is overwritten where it is contiguous. It is there already, or when
        an event comes."""
        told = f"the sum of '{what}' over ranks {', '.join(map(str, ranks))}"
        if self.mailbox is not None and self.mailbox.ranks.issuperset(ranks):
            return self._summed(tensor, ranks, self._channels[tuple(sorted(ranks))], what, told)
        if self.belts is not None and self.belts.ranks.issuperset(ranks):
            flat = tensor.detach().contiguous()
            mark = self.belts.sum_up(flat.view(-1), ranks, ready)
            return Carried(self, self.belts, mark, flat, told)

        def under_way(part: Tensor, group: Any) -> Pending:
            staged, work = self._out(part, what, dist.all_reduce, ready=ready, group=group, async_op=True)
            if staged.data_ptr() == part.data_ptr():
                return Pending(self, work, staged, told)
            return Returned(self, work, staged, part, told)

        whole, lanes = tensor.detach().contiguous(), self._lanes[tuple(sorted(ranks))]
        if self._staging is None or whole.nbytes <= LANE_BYTES:
            return under_way(whole, next(lanes))
        parts = whole.view(-1).split(LANE_BYTES // whole.itemsize)
        return Together([under_way(part, next(lanes)) for part in parts], whole)

    def _summed(self, tensor: Tensor, ranks: Sequence[int], channel: int, what: str, told: str) -> Pending:
        """A sum over ranks of this computer."""
        assert self.mailbox is not None
        flat = tensor.detach().contiguous()
        work = self._posted(what, self.mailbox.sum_up, flat, ranks, channel, self.timeout_s)
        return Pending(self, work, flat, told)

    def bucket(self, count: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        """A tensor whose sums over ranks need no copy of it; None where any other is as good."""
        if self.mailbox is None or not self.mailbox.ranks.issuperset(ranks):
            return None
        if count * dtype.itemsize <= IN_PARTS_BYTES:
            return None
        return self.mailbox.kept(count, dtype)

    def read_by_all(self, bucket: Tensor, what: str) -> None:
        """Wait until others have done with a bucket's sum."""
        if self.mailbox is not None and self.mailbox.block_of(bucket) is not None:
            self._posted(what, self.mailbox.wait_until_read, bucket, self.timeout_s)

    def gather_up(self, tensor: Tensor, ranks: Sequence[int], what: str) -> Pending | Together:
        """Everyone's tensor of this shape, one after the other in the order of the ranks. In shared memory
        they are rows of a sum, to which all others add nothing."""
        if any(box is not None and box.ranks.issuperset(ranks) for box in (self.mailbox, self.belts)):
            rows = torch.zeros((len(ranks), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            rows[sorted(ranks).index(self.rank)] = tensor.detach()
            return self.sum_up(rows, ranks, what)
        room, group = self._room((len(ranks), *tensor.shape), tensor.dtype), self._group(ranks)
        _, work = self._out(
            tensor, what, lambda own: dist.all_gather(list(room), own, group=group, async_op=True)
        )
        return Pending(self, work, room, f"'{what}' of ranks {', '.join(map(str, ranks))}")

    def swap(self, tensor: Tensor, ranks: Sequence[int], count: int, what: str) -> Pending:
        """What each of the others has for this rank, so many elements each, in the order of the ranks;
        `tensor` is what it has for them."""
        room, group = self._room(tensor.shape, tensor.dtype), self._group(ranks)
        cuts = [0 if rank == self.rank else count for rank in sorted(ranks)]
        _, work = self._out(
            tensor,
            what,
            lambda own: dist.all_to_all_single(room, own, cuts, cuts, group=group, async_op=True),
        )
        return Pending(self, work, room, f"'{what}' from ranks {', '.join(map(str, ranks))}")

    def scatter_sum(self, tensor: Tensor, ranks: Sequence[int], count: int, what: str) -> Pending:
        """The sum over ranks of this rank's part of a tensor, so many elements."""
        room, group = self._room((count,), tensor.dtype), self._group(ranks)
        _, work = self._out(
            tensor, what, lambda own: dist.reduce_scatter_tensor(room, own, group=group, async_op=True)
        )
        return Pending(self, work, room, f"the sum of '{what}' over ranks {', '.join(map(str, ranks))}")

    def _group(self, ranks: Sequence[int]) -> Any:
        return self._groups[tuple(sorted(ranks))]

    def report(self, tensor: Tensor, what: str, ready: torch.cuda.Event | None = None) -> Pending:
        """Add a tensor up over all ranks, apart from all other sums: it may be asked for at another
        place in the order on each rank."""
        if self.size == 1:
            return Pending(self, None, tensor, what)
        told = f"the sum of '{what}' over all ranks"
        if self.backend == "memory":
            return self._summed(tensor, range(self.size), 0, what, told)
        if self.belts is not None and self.backend == "belts":
            return Told(self, self.belts, tensor, ready, told)
        staged, work = self._out(tensor, what, dist.all_reduce, ready=ready, async_op=True)
        return Pending(self, work, staged, told)

    def shared(
        self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int, what: str
    ) -> Tensor:
        """The owner's tensor, on every rank; others give None."""
        if self.size == 1 and tensor is not None:
            return tensor
        buffer = self._room(shape, dtype) if tensor is None else tensor.to(self.host).contiguous()
        self._drain()
        work = self._posted(what, dist.broadcast, buffer, owner, async_op=True)
        return Pending(self, work, buffer, f"'{what}' from rank {owner}").wait()

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        if self.belts is not None:
            self.belts.settle()
        sent, self._sent = self._sent, []
        for message in sent:
            message.wait()

    def agree(self, text: str, what: str) -> None:
        """Refuse to go on unless every rank says the same text; `what` names it."""
        if self.size == 1:
            return
        texts = self.told_by_all(text, what)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise TrainingError(f"rank {rank} has another {what} than rank 0: start all with the same")

    def meet(self, what: str) -> None:
        """Wait until every rank has come here."""
        if self.size > 1 and self.backend == "memory":
            self._summed(torch.zeros(1), range(self.size), 0, what, f"all ranks to come to the {what}").wait()
        elif self.size > 1:
            token = torch.zeros(1, device=self.host)
            self._drain()
            work = self._posted(what, dist.all_reduce, token, async_op=True)
            Pending(self, work, token, f"all ranks to come to the {what}").wait()
            if token.is_cuda:  # where only the stream waits
                torch.cuda.synchronize(token.device)

    def told_by_all(self, text: str, what: str) -> list[str]:
        """What each rank says, on every rank. It travels as bytes: nothing is pickled."""
        if self.size == 1:
            return [text]
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.host)
        lengths = self._gathered(torch.tensor([own.numel()], device=self.host), what)
        room = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device=self.host)
        room[: own.numel()] = own
        return [
            bytes(said[: int(length)].tolist()).decode()
            for said, length in zip(self._gathered(room, what), lengths, strict=True)
        ]

    def _gathered(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Everyone's tensor of this shape."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._drain()
        work = self._posted(what, dist.all_gather, found, tensor, async_op=True)
        Pending(self, work, tensor, f"the {what} of all ranks").wait()
        return found

    # -- when something goes wrong ------------------------------------------------------------------

    def _posted(self, what: str, post: Any, *args: Any, **options: Any) -> Any:
        try:
            return post(*args, **options)
        except RuntimeError as error:
            raise self.failure(f"'{what}'", error) from error

    def tell(self, sentence: str) -> None:
        """Say why this rank ends, for rank 0 to repeat."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError, ValueError, AttributeError):
                dist.distributed_c10d._get_default_store().set(f"{_FAILED}{self.rank}", sentence)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Whatever is raised within is told to the other ranks too."""
        try:
            yield
        except Exception as error:
            self.tell(str(error) or type(error).__name__)
            raise

    def failure(self, what: str, error: BaseException) -> TrainingError:
        """What to say when a wait failed; rank 0 says it for all."""
        if self.belts is not None:
            self.belts.let_go()
        others, failed = self._said_by_others(what, "timed out" in str(error).lower())
        if failed:
            return TrainingError("; ".join(f"rank {rank}: {failed[rank]}" for rank in sorted(failed)))
        # Whoever runs out of time first breaks the others' waits, so it is enough that one did.
        came_to_nothing = any(timed_out for _, timed_out in others.values())
        waited = {rank: said for rank, (said, _) in others.items()}
        gone = [rank for rank in range(self.size) if rank not in waited]
        told = "; ".join(f"rank {rank} waited for {waited[rank]}" for rank in sorted(waited))
        if came_to_nothing and not gone:
            return TrainingError(f"no rank went on for {self.timeout_s:g} s: {told}")
        names = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}" if gone else "a rank"
        why = f"did not answer for {self.timeout_s:g} s" if came_to_nothing else "ended"
        return TrainingError(f"training stopped because {names} {why}: {told}")

    def _said_by_others(
        self, what: str, timed_out: bool
    ) -> tuple[dict[int, tuple[str, bool]], dict[int, str]]:
        """What this rank and the others were waiting for, and whether they ran out of time; and why any
        of them ended. Only rank 0 asks, the others just say what they waited for."""
        waited = {self.rank: (what, timed_out)}
        failed: dict[int, str] = {}
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{_WAITED}{self.rank}", json.dumps([what, timed_out]))
            until = monotonic() + GATHERING_S
            while self.rank == 0 and monotonic() < until and len(waited) + len(failed) < self.size:
                for rank in range(1, self.size):
                    if rank not in failed and store.check([f"{_FAILED}{rank}"]):
                        failed[rank] = store.get(f"{_FAILED}{rank}").decode()
                    if rank not in waited and store.check([f"{_WAITED}{rank}"]):
                        said, late = json.loads(store.get(f"{_WAITED}{rank}"))
                        waited[rank] = (said, late)
                sleep(0.05)
        return waited, failed
