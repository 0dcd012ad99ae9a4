"""A node on one shard, ready to be run in every step: what does not change from step to step is worked out
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from soapstone.graph import Node
from soapstone.ops.op import Shard, keywords_of, summed_points

Read = Callable[[], Any]
"""Gives an operand."""


class NodeRun:
    """One node of a local shard."""

    def __init__(self, node: Node, shard: Shard) -> None:
        self.node, self.op, self.shard = node, node.op, shard
        self.seed = 0  # set anew before each step, for an operator that draws random numbers
        self.reads: list[Read] = []
        self.operands: list[Any] = []  # between the parts of a node whose shards share statistics (`seams`)
        wanted = keywords_of(self.op.torch)
        given = {**self.op.complete(node.attrs), "shard": shard, "count": summed_points(shard.signature)}
        self.keywords: dict[str, Any] = {name: value for name, value in given.items() if name in wanted}
        self.takes_stats = "stats" in wanted

    def fetch(self) -> list[Any]:
        """The operands."""
        return [read() for read in self.reads]

    def compute(self, operands: Sequence[Any], stats: Tensor | None = None) -> tuple[Any, ...]:
        """The outputs of this shard."""
        keywords = self.keywords
        if self.op.random:
            fresh = replace(self.shard, seed=self.seed)
            keywords = {**keywords, "shard": fresh} if "shard" in keywords else keywords
        if self.takes_stats:
            keywords = {**keywords, "stats": stats}
        made = self.op.torch(*operands, **keywords)
        return tuple(made) if isinstance(made, tuple | list) else (made,)
