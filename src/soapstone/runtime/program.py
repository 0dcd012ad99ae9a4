"""The program of one rank: its actions in the order of all ranks, with every read of every node bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from soapstone.graph import Graph, Operand, Role
from soapstone.ops.box import Box, whole
from soapstone.runtime.actions import Action, Backward, Exchanged, Forward, ReportLoss, SumGradients
from soapstone.runtime.buckets import bucketed
from soapstone.runtime.inputs import FreeValues
from soapstone.runtime.linking import Links, Where
from soapstone.runtime.listing import Listed, listed
from soapstone.runtime.localshard import (
    Entrance,
    LocalSegment,
    LocalShard,
    Made,
    fixed,
    free_part,
    leaf_box,
    linked_box,
    weight_part,
)
from soapstone.runtime.noderun import NodeRun, Read
from soapstone.runtime.ports import Inbox, Outlet, Port, index_of
from soapstone.runtime.region import Region
from soapstone.runtime.regions import drop_part, found_regions, linked_writer
from soapstone.runtime.releasing import releases
from soapstone.runtime.weights import Held, Piece, Reader, Weights, gradients_are_views
from soapstone.strategy.blocks import free_values
from soapstone.tasks.placed import FORWARD


class Seed:
    """The gradient of the loss by one of its terms, divided by the number of batches of one step."""

    def __init__(self, like: Outlet, weight: float) -> None:
        self.scale = 1.0
        self.like, self.weight = like, weight

    def take(self) -> Tensor | None:
        """A scalar."""
        assert self.like.tensor is not None
        return torch.full_like(self.like.tensor, self.scale * self.weight)


class Program:
    """What one rank does in a step."""

    def __init__(
        self,
        links: Links,
        order: Sequence[int],
        weights: Weights,
        held: Held,
        free: FreeValues,
        *,
        fuse: bool = True,
    ) -> None:
        self.links, self.weights, self.held, self.free = links, weights, held, free
        self.graph: Graph = links.graph
        self.rank = links.rank
        self.names = free_values(links.graph)
        self.seeds: list[Seed] = []
        self.loss_outlets = self._loss()
        self.shards: dict[Where, LocalShard] = {}
        self.entrances: dict[tuple[int, int, frozenset[int]], Entrance] = {}
        self._read_by: dict[LocalSegment, list[Port]] = {}
        # Gradients that cross from one segment to the one before.
        self._taken_by: dict[Region, list[Port]] = {}
        tasks = listed(links, weights, order)
        self.regions = found_regions(links, tasks, fuse)
        for where in links.local:
            self._build(where)
        actions = self._actions(tasks)
        self.actions: list[Action] = bucketed(actions, self.graph) if fuse else actions
        self.releases = self._releases()

    # -- the loss -----------------------------------------------------------------------------------

    def _loss(self) -> list[tuple[Outlet, float]]:
        """What this rank adds to the loss, weighted; every shard of a term starts the backward pass."""
        found: list[tuple[Outlet, float]] = []
        for name, weight in self.graph.loss_terms.items():
            writer = self.links.home[name]
            first: dict[int, Where] = {}  # summand -> the copy that counts
            for place, (shard, copy, _) in enumerate(writer.shards()):
                summand = place if self.links.deferred else writer.layout.summand_of(shard)
                first.setdefault(summand, (writer.number, shard, copy))
            for where in self.links.local_of[writer.number]:
                seed = Seed(self.links.made[where, name].outlet, weight)
                self.links.made[where, name].givers.append(seed)
                self.seeds.append(seed)
            counted = [where for where in first.values() if self.links.device_of(where) == self.rank]
            found += [(self.links.made[where, name].outlet, weight) for where in counted]
        return found

    def _releases(self) -> list[list[Port]]:
        """The ports to be emptied after each action."""
        taken = {region: list(ports) for region, ports in self._taken_by.items()}
        for (where, segment), region in self.regions.items():
            placed = self.links.block(where)
            for n, node in enumerate(placed.block.nodes):
                if placed.segments.writes_in[n] == segment:
                    givers = [g for name in node.outputs for g in self.links.made[where, name].givers]
                    taken.setdefault(region, []).extend(g for g in givers if isinstance(g, Inbox | Outlet))
        for (where, n), statistics in self.links.statistics.items():
            before = self.regions.get((where, self.links.block(where).segments.reads_in[n]))
            if before is not None and statistics.total is not None:
                taken.setdefault(before, []).append(statistics.total)
        return releases(self.actions, self._read_by, taken, self._kept())

    def _kept(self) -> list[Outlet]:
        """What is needed until the end of the step: the loss, and what buffers will hold."""
        names = {*self.graph.loss_terms, *self.graph.updates.values()}
        return [made.outlet for (_, name), made in self.links.made.items() if name in names]

    # -- the order ----------------------------------------------------------------------------------

    def _actions(self, tasks: Sequence[Listed]) -> list[Action]:
        actions: list[Action] = []
        started: set[int] = set()
        loss_at = max((i for i, (_, key, _) in enumerate(tasks) if key[0] == FORWARD), default=-1)
        for i, (number, key, what) in enumerate(tasks):
            if isinstance(what, Piece):
                actions.append(SumGradients(number, [what]))
            elif isinstance(what, Exchanged):
                actions.append(what)
            elif key[0] == FORWARD:
                where, segment = what
                actions.append(Forward(number, self.shards[where].segments[segment]))
            else:
                region = self.regions[what]
                actions.append(Backward(number, region, region.number not in started))
                started.add(region.number)
            if i == loss_at:
                actions.append(ReportLoss())
        if loss_at < 0:
            actions.insert(0, ReportLoss())
        return actions

    # -- reads --------------------------------------------------------------------------------------

    def _build(self, where: Where) -> None:
        """The segments of a local shard, with the actions of each."""
        placed = self.links.block(where)
        shard = self.shards[where] = LocalShard(placed.name_of(where[1], where[2], 0))
        last = {
            o: n for n, node in enumerate(placed.block.nodes) for o in node.reads if o in placed.block.writes
        }
        shard.segments = [
            LocalSegment(shard, self.regions.get((where, s))) for s in range(placed.segments.count)
        ]
        for n in range(len(placed.block.nodes)):
            run = self.links.node_run(where, n)
            reads = [self._read(where, n, i) for i in range(len(run.node.operands))]
            run.reads = reads
            made = [self.links.made[where, name] for name in run.node.outputs]
            for each in made:
                each.is_read_within = each.name in last
                each.is_left = id(each.outlet) in self._left
            first, end = placed.segments.reads_in[n], placed.segments.writes_in[n]
            segments = shard.segments[first : end + 1]
            self._read_by.setdefault(segments[-1], []).extend(each.outlet for each in made)
            if (where, n) in self.links.statistics:
                self._add_statistics(where, n, segments, made)
            elif first == end:
                segments[0].actions.append(_computing(run, segments[0], made))
            else:
                self._add_partial(where, run, segments, made)
            done = [name for name, reader in last.items() if reader == n and name in placed.block.writes]
            if done:
                segments[-1].actions.append(_dropping(shard, done))

    @cached_property
    def _left(self) -> set[int]:
        """The ids of the outlets that somebody takes from."""
        found = {id(port) for inbox in self.links.inboxes.values() for port, _, _ in inbox.parts}
        found |= self.links.sent
        return found | {id(outlet) for outlet in self._kept()}

    def _add_partial(
        self, where: Where, run: NodeRun, segments: Sequence[LocalSegment], made: Sequence[Made]
    ) -> None:
        """A leader of which this shard has a partial sum: leave that, and go on with the sum."""
        before, after = segments
        partials = [self.links.partials[where, i] for i in range(len(made))]
        sums = [self.links.sums[where, i] for i in range(len(made))]
        gradients = [self.links.sum_gradients[where, i] for i in range(len(made))]

        def compute() -> None:
            for tensor, outlet, gradient in zip(run.compute(run.fetch()), partials, gradients, strict=True):
                outlet.put(tensor)
                if before.region is not None:
                    before.region.root(tensor, [gradient])

        def go_on() -> None:
            for each, inbox, gradient in zip(made, sums, gradients, strict=True):
                after.keep(each, leaf_box(inbox, after.region, gradient)())

        before.actions.append(compute)
        after.actions.append(go_on)
        if before.region is not None:
            self._taken_by.setdefault(before.region, []).extend(gradients)
        self._read_by.setdefault(after, []).extend(sums)  # and partial sums, where these are taken from them

    def _add_statistics(
        self, where: Where, n: int, segments: Sequence[LocalSegment], made: Sequence[Made]
    ) -> None:
        """A node that takes statistics over a split dim."""
        statistics = self.links.statistics[where, n]
        before, after = segments
        again = [
            self._read_again(read, operand, before, after)
            for read, operand in zip(statistics.node.reads, statistics.node.node.operands, strict=True)
        ]
        before.actions.append(lambda: statistics.before(before))
        after.actions.append(lambda: statistics.after(after, again, made))
        self._read_by.setdefault(after, []).extend([statistics.own, *statistics.parts])

    def _read_again(
        self, read: Read, operand: Operand, before: LocalSegment, after: LocalSegment
    ) -> Callable[[Any], Any]:
        """An operand of the segment before, read once more in the segment after."""
        if not isinstance(operand, str) or operand in self.names:
            return lambda tensor: tensor
        if self.graph.value(operand).role is Role.WEIGHT:
            return lambda _: read()
        gradient = self.links.outlet(())
        if before.region is not None:
            self._taken_by.setdefault(before.region, []).append(gradient)

        def bridged(tensor: Tensor) -> Tensor:
            if before.region is not None:
                before.region.root(tensor, [gradient])
            return after.bridge(f"{operand} again", tensor, gradient)

        return bridged

    def _read(self, where: Where, n: int, i: int) -> Read:
        """An operand of a node of a local shard."""
        placed = self.links.block(where)
        operand = placed.block.nodes[n].operands[i]
        box = placed.layout.reads(n, i)[where[1]]
        if not isinstance(operand, str):
            return fixed(operand)
        if box is None:
            return fixed(None)
        value = self.graph.value(operand)
        if operand in self.names:
            return free_part(self.free, operand, index_of(box, whole(value.shape)))
        if value.role is Role.WEIGHT:
            contributes = self.weights.contributes(Reader(placed, n, i), where[1], where[2], self.rank)
            returns_views = gradients_are_views(placed.block.nodes[n])
            return weight_part(self.held.holding(operand, box), box, contributes, returns_views)
        if operand in placed.block.writes:
            return self._own_read(where, n, operand, box)
        return self._box_read(where, n, i, operand, box)

    def _own_read(self, where: Where, n: int, name: str, box: Box) -> Read:
        """A value that the shard itself made."""
        placed = self.links.block(where)
        values = self.shards[where].values
        writer = next(k for k, node in enumerate(placed.block.nodes) if name in node.outputs)
        index = index_of(box, self.links.made[where, name].outlet.box)
        at, there = placed.segments.reads_in[n], placed.segments.writes_in[writer]
        if at == there:
            return (lambda: values[name]) if index is None else (lambda: values[name][index])
        segment = self.shards[where].segments[at]
        gradient = segment.gradients.get(name)
        if gradient is None:
            gradient = segment.gradients[name] = self.links.outlet(())
            self.links.made[where, name].givers.append(gradient)

        def bridged() -> Tensor:
            leaf = segment.bridge(name, values[name], gradient)
            return leaf if index is None else leaf[index]

        return bridged

    def _box_read(self, where: Where, n: int, i: int, name: str, box: Box) -> Read:
        """A box of another block's value: linked where autograd carries its gradient, else a leaf."""
        task = (where, self.links.block(where).segments.reads_in[n])
        inbox = self.links.inboxes[name, box]
        gradient = self.links.gradients.get((where, n, i))
        region = self.regions.get(task)
        self._read_by.setdefault(self.shards[where].segments[task[1]], []).append(inbox)
        if gradient is not None and region is not None:
            writer = linked_writer(self.links, gradient)
            if writer is not None and self.regions.get(writer) is region:
                drop_part(self.links, gradient)
                ((port, index, _),) = inbox.parts
                assert isinstance(port, Outlet)
                return linked_box(port, index)
        if region is None or gradient is None:
            return leaf_box(inbox, region, gradient)
        key = (id(inbox), region.number, self.links.takers_of(gradient))
        if key not in self.entrances:
            self.entrances[key] = Entrance(inbox, region)
        return self.entrances[key].add(gradient)


def _dropping(shard: LocalShard, names: Sequence[str]) -> Callable[[], None]:
    """Let go of values that no later node of the shard reads."""

    def drop() -> None:
        for name in names:
            shard.values.pop(name, None)

    return drop


def _computing(run: NodeRun, segment: LocalSegment, made: Sequence[Made]) -> Callable[[], None]:
    if len(made) == 1:
        (only,) = made
        return lambda: segment.keep(only, run.compute(run.fetch())[0])

    def compute() -> None:
        for each, tensor in zip(made, run.compute(run.fetch()), strict=True):
            segment.keep(each, tensor)

    return compute
