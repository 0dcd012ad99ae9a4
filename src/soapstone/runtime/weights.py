"""What a rank holds of the weights: the boxes that its shards read, as parameters, and nothing else.

Boxes that overlap are held together, in the smallest box around them; what no shard reads of a weight is
held by the first of its holders, since an optimizer may change it all the same. For each piece of a
weight that several ranks hold, the gradient is added up among them:

    each giver contributes once     shards that compute the same part (copies, and followers of a split
                                    sum) have equal gradients: the first of them counts, unless all
                                    holders have all gradients already and nothing moves
    replicas stay identical         what ranks add up is one all-reduce, the same bits for everyone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from soapstone.graph import Graph, Node, Role, Value
from soapstone.ops.box import Box, Interval, contains, intersection
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.runtime.ports import Index, index_of
from soapstone.tasks.exchange import Exchange
from soapstone.tasks.placed import BACKWARD, WEIGHT, Placed
from soapstone.tasks.task import Key


@dataclass(frozen=True)
class Piece:
    """A part of a weight that is all alike: the ranks that hold it, and the key of the exchange that
    adds up its gradient. `is_summed` says whether anything needs to be added up."""

    weight: str
    box: Box
    holders: tuple[int, ...]
    key: Key
    is_summed: bool


class Holding:
    """A box of a weight on this rank."""

    def __init__(self, weight: str, box: Box, parameter: nn.Parameter) -> None:
        self.weight, self.box, self.parameter = weight, box, parameter
        self._readers: Counter[Box] = Counter()
        self._parts: dict[Box, Tensor] = {}
        self._is_apart = False
        self._on_gradient: Callable[[Tensor], None] | None = None

    def keep_apart(self) -> None:
        """Let its gradient have memory of its own, whatever autograd finds: a view of a tensor that others
        have, too (another weight of the same sum, a message under way) would be summed, scaled or added to
        together with theirs."""
        if not self._is_apart and self.parameter.requires_grad:
            self.parameter.register_hook(_own_memory)
        self._is_apart = True

    def watch(self, on_gradient: Callable[[Tensor], None]) -> None:
        """Have something called after autograd has added to the gradient of all of it, or of a part."""
        self._on_gradient = on_gradient
        self.parameter.register_post_accumulate_grad_hook(on_gradient)

    def expect(self, box: Box) -> None:
        """There is one more node that reads this part in a step."""
        self._readers[box] += 1

    def read(self, box: Box) -> Tensor:
        """A part of it, for all who read the same in a step: a leaf of autograd's, since a view of the whole
        would have a gradient of the whole's size, from every call of autograd. It may be a copy
        (`is_copied`)."""
        if box == self.box:
            return self.parameter
        if box not in self._parts:
            self._parts[box] = self._part(box)
        return self._parts[box]

    def _part(self, box: Box) -> Tensor:
        part = self.contents(box)
        if part.device.type == "cpu" or is_copied(box, self.box, self._readers[box]):
            part = part.contiguous()  # itself, unless it is cut inside
        if self.parameter.requires_grad:
            part.requires_grad_().register_post_accumulate_grad_hook(partial(self._add, box))
        return part

    def _add(self, box: Box, part: Tensor) -> None:
        """Add the gradient of a part to that of the whole."""
        assert part.grad is not None
        with torch.no_grad():
            self.gradient(box).add_(part.grad)
        part.grad = None
        if self._on_gradient is not None:
            self._on_gradient(self.parameter)

    def contents(self, box: Box) -> Tensor:
        """What a part of it holds."""
        index = index_of(box, self.box)
        return self.parameter.detach() if index is None else self.parameter.detach()[index]

    def clear(self) -> None:
        """Forget parts: an update is to come."""
        self._parts.clear()

    def gradient(self, box: Box) -> Tensor:
        """The gradient of a part of it, to be read or written; zero if there was none."""
        return self.gradient_at(index_of(box, self.box))

    def gradient_at(self, index: Index) -> Tensor:
        """The same of the part at a place."""
        gradient = self.parameter.grad
        if gradient is None:
            gradient = self.parameter.grad = torch.zeros_like(self.parameter)
        return gradient if index is None else gradient[index]


def _own_memory(gradient: Tensor) -> Tensor | None:
    """A copy of a gradient that is a view; None to leave another as it is."""
    return None if gradient._base is None else gradient.clone()


def gradients_are_views(node: Node) -> bool:
    """Whether autograd makes the gradients of what a node reads by looking at its output's in another way.
    Autograd itself sees to it that no two have one tensor, but not that no two views of it are taken."""
    return node.op.is_view or node.op_name == "concat"


def is_copied(box: Box, held: Box, readers: int) -> bool:
    """Whether a part of a weight that so many nodes read is copied for them on a GPU: operators of weights
    with more than two axes (gates, units and inputs of recurrent cells) lay a part that is cut inside out
    anew, and keep that until they are taken back, once for every step of a sequence. On a CPU any such part
    is copied: products take longer with one ([measured] an Arm core, 32 rows, 128 of 256 inputs of 1,000
    outputs: 0.6 instead of 0.3 ms, where a copy takes 0.06)."""
    return len(box) > 2 and readers > 1 and any(a != b for a, b in zip(box[1:], held[1:], strict=True))


@dataclass(frozen=True)
class Reader:
    """An operand that is a weight: node `node` of a block reads it."""

    placed: Placed
    node: int
    operand: int


class Weights:
    """Who reads, holds and adds up what, for all ranks."""

    def __init__(self, graph: Graph, blocks: Sequence[Placed], exchanges: Mapping[Key, Exchange]) -> None:
        self.graph = graph
        self.readers: dict[str, list[Reader]] = {}
        for placed in blocks:
            for n, node in enumerate(placed.block.nodes):
                for i, operand in enumerate(node.operands):
                    if isinstance(operand, str) and graph.value(operand).role is Role.WEIGHT:
                        self.readers.setdefault(operand, []).append(Reader(placed, n, i))
        names = dict.fromkeys(name for node in graph.nodes for name in node.reads)
        self.numbers = {n: i for i, n in enumerate(n for n in names if graph.value(n).role is Role.WEIGHT)}
        self._exchanges: dict[str, list[tuple[Key, Exchange]]] = {}
        by_number = {number: name for name, number in self.numbers.items()}
        for key in sorted(exchanges):
            if key[0] == BACKWARD and key[2] == WEIGHT:
                self._exchanges.setdefault(by_number[key[3]], []).append((key, exchanges[key]))

    @cached_property
    def pieces(self) -> Mapping[str, tuple[Piece, ...]]:
        """The pieces of each trained weight."""
        return {name: tuple(self._pieces(name)) for name in self._exchanges}

    def _pieces(self, name: str) -> Iterator[Piece]:
        found = self._exchanges[name]
        moves = any(exchange.moves for _, exchange in found)
        for key, exchange in found:
            holders = tuple(sorted({sink.device for sink in exchange.sinks}))
            yield Piece(name, exchange.sinks[0].box, holders, key, moves and len(holders) > 1)

    def contributes(self, reader: Reader, shard: int, copy: int, device: int) -> bool:
        """Whether the gradient that this shard's copy computes of the weight is the one that counts."""
        name = reader.placed.block.nodes[reader.node].operands[reader.operand]
        if not isinstance(name, str) or name not in self.pieces:
            return False
        alike = next(group for group in reader.placed.layout.alike(reader.node) if shard in group)
        first = reader.placed.placement.devices_of_all(alike)[0]
        if any(piece.is_summed for piece in self.pieces[name]) and device != first:
            return False
        return (shard, copy) == next(reader.placed.on(device, alike))

    def boxes_on(self, device: int) -> dict[str, list[Box]]:
        """What a device holds of each weight, in boxes that do not overlap."""
        held: dict[str, list[Box]] = {}
        for value in self.graph.with_role(Role.WEIGHT):
            read = sorted({box for box, devices in self._reads(value.name).items() if device in devices})
            idle = [box for box, owner in self.owned[value.name] if owner == device]
            boxes = _apart(read)
            boxes += [box for box in idle if not any(contains(own, box) for own in boxes)]
            if boxes:
                held[value.name] = boxes
        return held

    @cached_property
    def owned(self) -> Mapping[str, tuple[tuple[Box, int], ...]]:
        """Every weight in boxes that together are all of it, each with the one device that answers for
        it: in a checkpoint, in a norm."""
        return {value.name: tuple(self._owned(value)) for value in self.graph.with_role(Role.WEIGHT)}

    def _owned(self, value: Value) -> Iterator[tuple[Box, int]]:
        reads = self._reads(value.name)
        first = min((device for devices in reads.values() for device in devices), default=0)
        for atom in _atoms(value.shape, list(reads)):
            holders = [min(devices) for box, devices in reads.items() if contains(box, atom)]
            yield atom, min(holders, default=first)

    def _reads(self, name: str) -> dict[Box, list[int]]:
        """The boxes that are read of a weight, and the devices that do."""
        found: dict[Box, list[int]] = {}
        for reader in self.readers.get(name, []):
            boxes = reader.placed.layout.reads(reader.node, reader.operand)
            for shard, box in enumerate(boxes):
                if box is not None:
                    found.setdefault(box, []).extend(reader.placed.placement.devices_of(shard))
        return found


def _apart(boxes: list[Box]) -> list[Box]:
    """The boxes, those that overlap replaced by the box around them, until none do."""
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            if intersection(a, b) is not None:
                around = tuple(Interval(min(x.lo, y.lo), max(x.hi, y.hi)) for x, y in zip(a, b, strict=True))
                return _apart(sorted({around, *(box for box in boxes if box not in (a, b))}))
    return boxes


def _atoms(shape: tuple[int, ...], boxes: Sequence[Box]) -> Iterator[Box]:
    """A tensor of this shape, cut at all borders of the boxes."""
    edges = [
        sorted({0, size, *(edge for box in boxes for edge in box[axis])}) for axis, size in enumerate(shape)
    ]
    yield from product(*([Interval(lo, hi) for lo, hi in pairwise(cut)] for cut in edges))


class Held:
    """The weights of one rank."""

    def __init__(self, weights: Weights, device: int, place: torch.device) -> None:
        self.weights, self.device = weights, device
        self.holdings: dict[str, list[Holding]] = {}
        for name, boxes in weights.boxes_on(device).items():
            value = weights.graph.value(name)
            trained = name in weights.pieces
            self.holdings[name] = [
                Holding(name, box, _parameter(box, torch_dtype(value.dtype), place, trained)) for box in boxes
            ]

    def __iter__(self) -> Iterator[Holding]:
        return (holding for held in self.holdings.values() for holding in held)

    def holding(self, name: str, box: Box) -> Holding:
        """The holding that has a box of a weight."""
        return next(held for held in self.holdings[name] if contains(held.box, box))

    def owned(self) -> Iterator[tuple[Holding, Box]]:
        """The boxes that this rank answers for."""
        for name, held in self.weights.owned.items():
            for box, owner in held:
                if owner == self.device:
                    yield self.holding(name, box), box

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values from whole weights, in the graph's shapes."""
        for holding in self:
            whole = tensors[holding.weight].detach()
            index: Index = tuple(slice(*interval) for interval in holding.box)
            holding.parameter.data.copy_(whole[index])


def _parameter(box: Box, dtype: torch.dtype | None, place: torch.device, trained: bool) -> nn.Parameter:
    shape = tuple(interval.length for interval in box)
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=place), requires_grad=trained)
