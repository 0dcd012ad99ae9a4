"""Free values: what a rank makes for itself from the batch, constants and buffers, without weights.

They are computed whole, by torch's own functions, before the tasks of a step; what depends on no input
and on no buffer that changes is computed once. Of a Part of a batch only this rank's rows are right in
them, which is all that its shards read; sums over samples are added up over ranks (`rows`), and waited for
when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soapstone.errors import TrainingError
from soapstone.graph import Graph, Node, Operand, Role, Value
from soapstone.ops.box import whole
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.op import Shard
from soapstone.ops.signature import IterationBox
from soapstone.runtime.noderun import NodeRun, Read
from soapstone.runtime.part import Part, part_shape, sample_axes
from soapstone.runtime.ports import index_of
from soapstone.runtime.rows import Rows, points_of, runs
from soapstone.runtime.wire import Pending, Wire
from soapstone.strategy.blocks import free_values

Batch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class FreeValues:
    """The free values of one rank, by name; `buffers` are the module's, kept between steps."""

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        wire: Wire,
        rows: Rows,
    ) -> None:
        self.graph, self.wire, self.place = graph, wire, wire.device
        place = wire.device
        self.inputs = list(graph.with_role(Role.INPUT))
        self.rows, self._owned = rows.read[wire.rank], runs(rows.owned[wire.rank])
        self._axes = sample_axes(graph)
        self._sums = rows.sums
        self._pending: Pending | None = None  # the sums over samples, under way
        self._late: dict[str, None] = {}  # what has to wait for them
        self.holds_still = False  # whether every batch is copied to the same memory
        self._is_part = False
        self._rooms: dict[str, Tensor] = {}  # whole inputs, of which a Part fills the rows
        self.buffers = {name: tensor.detach().to(place).clone() for name, tensor in buffers.items()}
        fixed = {value.name: _constant(value, constants, place) for value in graph.with_role(Role.CONSTANT)}
        free = free_values(graph)
        changing = {value.name for value in self.inputs} | {*graph.updates, *graph.counters}
        self._each_step: list[NodeRun] = []
        self._partial_sums: dict[str, list[NodeRun]] = {}
        self._tensors: dict[str, Tensor] = {**fixed, **self.buffers}
        for node in graph.nodes:
            if not all(name in free for name in node.outputs):
                continue
            if any(name in changing for name in node.reads):
                changing.update(node.outputs)
                self._each_step.append(self._ready(node))
            else:
                self._run(self._ready(node))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._late:
            self.finish()
        return self._tensors[name]

    def held(self) -> list[Tensor]:
        """What stays from step to step: the batch, buffers, constants, and what follows from these alone."""
        anew = {name for run in self._each_step for name in run.node.outputs}
        return [*self.buffers.values(), *(t for name, t in self._tensors.items() if name not in anew)]

    def take(self, batch: Batch | Part) -> None:
        """Take a batch, or the rows of one that this rank reads."""
        self._is_part = isinstance(batch, Part)
        tensors = self._ordered(batch.tensors if isinstance(batch, Part) else batch)
        for value, tensor in zip(self.inputs, tensors, strict=True):
            axis = self._axes.get(value.name)
            is_few = axis is not None and len(self.rows) != value.shape[axis]
            if self._is_part and is_few:
                assert axis is not None
                part = _checked(value, tensor, part_shape(value, axis, len(self.rows)))
                self._tensors[value.name] = self._filled(value, axis, part)
                continue
            given = _checked(value, tensor, value.shape)
            if is_few and not self._sums and given.device.type != self.place.type:
                assert axis is not None
                self._tensors[value.name] = self._filled(value, axis, self._own_rows(given, axis))
            elif self.holds_still:
                self._tensors[value.name] = self._room(value).copy_(given, non_blocking=True)
            else:
                self._tensors[value.name] = given.to(self.place)

    @property
    def is_shared(self) -> bool:
        """Whether sums over samples have to be added up over ranks, since each has a part of the batch."""
        return self._is_part and bool(self._sums) and self.wire.size > 1

    def compute(self) -> None:
        """Compute what follows from the batch."""
        self._tensors.update(self.buffers)
        if self.is_shared:
            self._run_with_sums()
            return
        for run in self._each_step:
            self._run(run)

    def _run_with_sums(self) -> None:
        """Compute all that needs no sum over samples, and have those sums added up over ranks."""
        partial: list[Tensor] = []
        for run in self._each_step:
            node = run.node
            if node.name in self._sums:
                partial.append(self._partial(node))
                self._late.update(dict.fromkeys(node.outputs))
            elif any(name in self._late for name in node.reads):
                self._late.update(dict.fromkeys(node.outputs))
            else:
                self._run(run)
        self._pending = self.wire.report(torch.stack(partial), "sums over samples")

    def _partial(self, node: Node) -> Tensor:
        """A sum over the samples that this rank answers for."""
        if node.name not in self._partial_sums:
            signature, count = self.graph.signature(node), self.graph.sample_count
            assert count is not None
            boxes = [points_of(signature, self._sums[node.name], samples, count) for samples in self._owned]
            self._partial_sums[node.name] = [self._ready(node, box) for box in boxes]
        total = torch.zeros((), dtype=torch.float64, device=self.place)
        for run in self._partial_sums[node.name]:
            (made,) = _made(run)
            total += made
        return total

    def finish(self) -> None:
        """Wait for the sums over samples, and compute what follows from them."""
        if self._pending is None:
            return
        totals, self._pending = self._pending.wait(), None
        late, self._late = self._late, {}
        sums = [run.node for run in self._each_step if run.node.name in self._sums]
        for node, total in zip(sums, totals, strict=True):
            (name,) = node.outputs
            self._tensors[name] = total.to(torch_dtype(self.graph.value(name).dtype))
        for run in self._each_step:
            if run.node.name not in self._sums and any(name in late for name in run.node.outputs):
                self._run(run)

    def _filled(self, value: Value, axis: int, part: Tensor) -> Tensor:
        """A whole input with the rank's rows in their places; nobody reads the others."""
        room, rows = self._room(value), self.rows
        if rows and self._is_run:
            room.narrow(axis, rows[0], len(rows)).copy_(part)
        elif rows:
            room.index_copy_(axis, torch.tensor(rows, device=self.place), part.to(self.place))
        return room

    def _own_rows(self, tensor: Tensor, axis: int) -> Tensor:
        """The rank's rows of a whole input: what is far away is not all fetched."""
        if not self.rows or self._is_run:
            return tensor.narrow(axis, self.rows[0] if self.rows else 0, len(self.rows))
        return tensor.index_select(axis, torch.tensor(self.rows, device=tensor.device))

    @property
    def _is_run(self) -> bool:
        """Whether the rank's rows follow each other."""
        return bool(self.rows) and self.rows[-1] - self.rows[0] == len(self.rows) - 1

    def _room(self, value: Value) -> Tensor:
        """Memory for a whole input, the same for every batch."""
        if value.name not in self._rooms:
            dtype = torch_dtype(value.dtype)
            self._rooms[value.name] = torch.zeros(value.shape, dtype=dtype, device=self.place)
        return self._rooms[value.name]

    def _ordered(self, batch: Batch) -> list[Tensor]:
        """The batch's tensors in the order of the graph's inputs."""
        names = [value.name for value in self.inputs]
        if isinstance(batch, Mapping):
            if set(batch) != set(names):
                raise TrainingError(
                    f"the batch has {', '.join(map(str, batch))} where the model takes {', '.join(names)}"
                )
            return [batch[name] for name in names]
        tensors = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(tensors) != len(names):
            raise TrainingError(
                f"the batch has {len(tensors)} tensors where the model takes {len(names)}: {', '.join(names)}"
            )
        return tensors

    def _run(self, run: NodeRun) -> None:
        self._tensors.update(zip(run.node.outputs, _made(run), strict=True))

    def _ready(self, node: Node, box: IterationBox | None = None) -> NodeRun:
        """A node on a part of its points, or on all of them."""
        signature, dtype = self.graph.signature(node), self.graph.value(node.outputs[0]).dtype
        shard = Shard(signature, box or signature.points, dtype=dtype, device=str(self.place))
        run = NodeRun(node, shard)
        run.reads = [self._read(operand, shard, i) for i, operand in enumerate(node.operands)]
        return run

    def _read(self, operand: Operand, shard: Shard, number: int) -> Read:
        """What a shard reads of an operand: a number, nothing, or a part of a free value."""
        if not isinstance(operand, str):
            return lambda: operand
        region, tensors = shard.signature.read(number, shard.box), self._tensors
        if region.is_empty:
            return lambda: None
        index = index_of(region.box, whole(self.graph.value(operand).shape))
        return (lambda: tensors[operand]) if index is None else (lambda: tensors[operand][index])


def _made(run: NodeRun) -> Sequence[Tensor]:
    with torch.no_grad():
        return run.compute(run.fetch())


def _constant(value: Value, constants: Mapping[str, Tensor], place: torch.device) -> Tensor:
    if value.name in constants:
        return constants[value.name].detach().to(place)
    if value.fill is None:
        raise TrainingError(
            f"the elements of constant '{value.name}' are not known: capture the model with its weights"
        )
    return torch.full(value.shape, value.fill, dtype=torch_dtype(value.dtype), device=place)


def _checked(value: Value, tensor: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TrainingError(f"input '{value.name}' of the batch is no tensor but {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise TrainingError(
            f"input '{value.name}' of the batch has shape {list(tensor.shape)} where the plan is for"
            f" {list(shape)}"
        )
    if tensor.dtype != torch_dtype(value.dtype):
        raise TrainingError(
            f"input '{value.name}' of the batch is {tensor.dtype} where the plan is for"
            f" {torch_dtype(value.dtype)}"
        )
    return tensor
