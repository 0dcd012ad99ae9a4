"""What part of a network a block is, told from the notation of its leader and never from its name.

    contraction   multiplies a weight with data and sums over a dim that both have
    convolution   a contraction that reads its data through a window: an index such as h*s+r
    dense layer   any other contraction
    table         a weight of which only the rows that an index points at are read
    attention     multiplies data with data and sums over a dim that both have
    recurrence    a contraction that, directly or through others, reads what the same weights made

Experts' strategies (Krizhevsky 2014, Wu et al. 2016, Megatron, DLRM) are stated in these words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from soapstone.graph import Graph, Node, Role
from soapstone.ops import Affine, Kind
from soapstone.search.baselines.simple import flops
from soapstone.strategy.blocks import Block, blocks


@dataclass(frozen=True)
class Anatomy:
    """A graph's blocks, and what each of them is."""

    graph: Graph

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The graph's blocks, in its order."""
        return blocks(self.graph)

    @cached_property
    def home(self) -> dict[str, str]:
        """The block that writes each value, by name."""
        return {name: block.name for block in self.blocks for name in block.writes}

    @cached_property
    def before(self) -> dict[str, tuple[str, ...]]:
        """For each block the blocks it reads from, by name."""
        return {
            block.name: tuple(
                dict.fromkeys(
                    self.home[name]
                    for node in block.nodes
                    for name in node.reads
                    if self.home.get(name, block.name) != block.name
                )
            )
            for block in self.blocks
        }

    @cached_property
    def convolutions(self) -> tuple[Block, ...]:
        """The blocks led by convolutions."""
        return tuple(b for b in self.blocks if self._is_contraction(b.leader) and self._slides(b.leader))

    @cached_property
    def dense_layers(self) -> tuple[Block, ...]:
        """The blocks led by dense layers."""
        return tuple(b for b in self.blocks if self._is_contraction(b.leader) and not self._slides(b.leader))

    @cached_property
    def tables(self) -> tuple[Block, ...]:
        """The blocks led by a lookup in a trained table, one for each sample."""
        return tuple(b for b in self.blocks if self._looks_up(b.leader))

    @cached_property
    def attentions(self) -> tuple[Block, ...]:
        """The blocks led by a product of data with data."""
        return tuple(block for block in self.blocks if self._multiplies_data(block.leader))

    @cached_property
    def recurrent_layers(self) -> tuple[Block, ...]:
        """The blocks led by a step of a recurrent layer, or by all of its steps."""
        return tuple(
            block
            for block in self.blocks
            if self._is_contraction(block.leader)
            and (self._runs_over_whole_dim(block.leader) or block.name in self._reusing)
        )

    @cached_property
    def steps(self) -> tuple[Block, ...]:
        """The dense layers that are one step of a recurrent layer that is unrolled, or share weights like
        one."""
        return tuple(block for block in self.dense_layers if block.name in self._reusing)

    def flops_of(self, chosen: tuple[Block, ...]) -> float:
        """Floating-point operations of the forward pass of some blocks."""
        return sum(flops(self.graph, block) for block in chosen)

    def weights_of(self, node: Node) -> Iterator[str]:
        """The trained values that a node reads as weights."""
        return (name for name in node.reads if self.graph.value(name).role is Role.WEIGHT)

    def dim_of_kind(self, block: Block, kind: Kind) -> str | None:
        """The first dim of the block's leader that is of this kind."""
        return next((dim for dim, own in self.graph.kinds(block.leader).items() if own is kind), None)

    def _is_contraction(self, node: Node) -> bool:
        return bool(self.contracted(node))

    def contracted(self, node: Node) -> frozenset[str]:
        """The summed dims that index a weight and data alike."""
        in_weights, in_data = set[str](), set[str]()
        for operand, access in zip(node.operands, self.graph.signature(node).operands, strict=True):
            dims = {dim for axis in access or () for dim in axis.dims}
            (in_weights if operand in self.graph.weight_made else in_data).update(dims)
        return frozenset(self.graph.signature(node).summed_dims) & in_weights & in_data

    def _slides(self, node: Node) -> bool:
        """Whether it reads data through a window: an index that mixes a summed dim with a parallel one."""
        signature = self.graph.signature(node)

        def mixes(axis: Affine) -> bool:
            return len({dim in signature.output_dims for dim in axis.dims}) > 1

        return any(
            mixes(axis)
            for operand, access in zip(node.operands, signature.operands, strict=True)
            if operand not in self.graph.weight_made
            for axis in access or ()
        )

    def _multiplies_data(self, node: Node) -> bool:
        signature, seen = self.graph.signature(node), set[str]()
        for operand, access in zip(node.operands, signature.operands, strict=True):
            dims = {dim for axis in access or () for dim in axis.dims} - signature.output_dims
            if operand in self.home and seen & dims:
                return True
            seen |= dims if operand in self.home else set()
        return False

    def _looks_up(self, node: Node) -> bool:
        return bool(node.op.gathers) and any(self.weights_of(node)) and node.name in self.graph.sample_dims

    def _runs_over_whole_dim(self, node: Node) -> bool:
        """Whether it goes along a dim of data that must stay whole, as a layer over a sequence does."""
        signature = self.graph.signature(node)
        in_weights = {
            dim
            for operand, access in zip(node.operands, signature.operands, strict=True)
            if operand in self.graph.weight_made
            for axis in access or ()
            for dim in axis.dims
        }
        return any(dim in signature.output_dims and dim not in in_weights for dim in signature.whole)

    @cached_property
    def _reusing(self) -> frozenset[str]:
        """The blocks that depend on one that shares a weight with them, and those they depend on so."""
        found, users = set[str](), dict[str, list[Block]]()
        above: dict[str, frozenset[str]] = {}
        for block in self.blocks:
            names = self.before[block.name]
            above[block.name] = frozenset(names).union(*(above[name] for name in names if name in above))
            for weight in self.weights_of(block.leader):
                for other in users.setdefault(weight, []):
                    if other.name in above[block.name] and other.leader.op is block.leader.op:
                        found |= {other.name, block.name}
                users[weight].append(block)
        return frozenset(found)
