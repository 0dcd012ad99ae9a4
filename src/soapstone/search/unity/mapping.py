"""Machine mappings by dynamic programming (Unity 5.2): where every block of a graph runs, at the least sum.

The cost of a graph is Unity's: what blocks and exchanges take on their own, added up where one comes after
the other (`part_costs`: each term is simulated by the native core), the larger one where two sides run beside
each other. For a part of the graph between two blocks, `Table` has the least cost for every placement of
either:

    sequence split   a block that all paths go through: the tables before and after it are joined by taking
                     the best of its placements                                        -> `_in_sequence`
    parallel split   parts that do not depend on each other: one after the other on all devices (the sum),
                     or beside each other, the devices divided between them (the larger) -> `_side_by_side`
    neither          a knot: its blocks are given the choices that `elimination` finds best for each
                     placement of the block after it                                   -> `_knot`

Tables are kept by what their part of the graph looks like, not by its names: equal layers have one table, and
a candidate that a rewrite changed in one place has all others already.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import ITEM_BYTES, Graph, Role
from soapstone.machine import Machine
from soapstone.ops import Kind as DimKind
from soapstone.ops.box import volume
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.elimination import Problem, minimum
from soapstone.search.baselines.part_costs import PartCosts, connections
from soapstone.search.unity.tables import Costs, Table, at_once, best_of, reordered, share_of, summed
from soapstone.search.unity.views import Range, candidates, whole
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layout
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

MOST_EFFORT, EFFORT_BEFORE_DEVICES = 3_000_000, 25
"""[choice] A simulated placement, or pair of them, is an effort of this number and one for each device. After
so much of it, devices are no longer divided between parallel sides: a count, and not a time, so that the
result does not depend on the clock. It is about 10 s."""

RICH_EDGES, POOR_EDGES = 16, 48
"""[choice] A graph with at most so few kinds of edges has more placements looked at on many devices, one with
more than so many fewer (`views.candidates`)."""

MOST_DIVISIONS = 4
"""[choice] How often a range of devices is divided again."""

KNOTTED = 60
"""[choice] A knot of more blocks is given one set of choices only."""


@dataclass(frozen=True)
class Mapped:
    """A graph with the mapping of least cost."""

    strategy: Strategy
    cost_s: float


@dataclass(frozen=True)
class Kind:
    """Blocks that look alike, in the order of the graph; the placements that are looked at on all devices;
    what they take together at least."""

    names: tuple[str, ...]
    placements: tuple[Placement, ...]
    work_s: float


@dataclass(frozen=True)
class End:
    """The block before or after a part (None at the beginning and the end of the graph), and its range."""

    block: int | None
    where: Range


class Mapper:
    """Finds mappings on one machine, for any number of graphs. `byte_s` is what a byte of weights on a device
    adds to the cost: more than nothing where memory is scarce. `shown` is the part of the gradients' exchange
    that is counted: less than all where it is behind the backward pass of other blocks. Dims of the kinds in
    `without` are left whole. When it `is_late`, devices are no longer divided."""

    def __init__(
        self,
        machine: Machine,
        costs: AnalyticCosts,
        without: frozenset[DimKind] = frozenset(),
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.machine, self.costs, self.without, self.is_late = machine, costs, without, is_late
        self.byte_s, self.shown = 0.0, 1.0
        self.where = whole(machine)
        self.parts: PartCosts | None = None
        self.ids: dict[Hashable, int] = {}
        self.placements: dict[tuple[int, Range], tuple[Placement, ...]] = {}
        self.own: dict[tuple[int, Range], Costs] = {}
        self.tables: dict[Hashable, Table] = {}
        self.richness: int | None = None

    def mapped(self, graph: Graph) -> Mapped:
        """The mapping of least cost."""
        return _Mapping(self, graph).mapped()

    def kinds(self, graph: Graph) -> tuple[Kind, ...]:
        """The kinds of blocks of a graph."""
        return _Mapping(self, graph).every_kind()

    def counting(self, byte_s: float = 0.0, shown: float = 1.0) -> Mapper:
        """A mapper that counts otherwise. Simulated times are the same, and are kept."""
        other = Mapper(self.machine, self.costs, self.without, self.is_late)
        other.byte_s, other.shown = byte_s, shown
        other.parts, other.ids, other.placements = self.parts, self.ids, self.placements
        other.richness = self.richness
        return other

    def costs_of(self, graph: Graph) -> PartCosts:
        """The costs of a graph's parts."""
        if self.parts is None:
            self.parts = PartCosts(graph, self.machine, self.costs)
        return self.parts.of(graph)

    def id_of(self, shape: Hashable) -> int:
        """A number for a shape, the same for equal ones."""
        return self.ids.setdefault(shape, len(self.ids))


class _Mapping:
    """One graph."""

    def __init__(self, mapper: Mapper, graph: Graph) -> None:
        self.mapper, self.graph = mapper, graph
        self.parts = mapper.costs_of(graph)
        anatomy = Anatomy(graph)
        self.blocks = anatomy.blocks
        number = {block.name: i for i, block in enumerate(self.blocks)}
        self.before = [tuple(number[name] for name in anatomy.before[block.name]) for block in self.blocks]
        self.after: list[list[int]] = [[] for _ in self.blocks]
        for i, before in enumerate(self.before):
            for j in before:
                self.after[j].append(i)
        self.kinds = [
            mapper.id_of((self.parts.shape(block), graph.sample_dims.get(block.name)))
            for block in self.blocks
        ]
        self.joints: dict[tuple[int, int], int] = {}
        if mapper.richness is None:
            edges = {
                (self.kinds[j], self.kinds[i], self._joint(j, i))
                for i, js in enumerate(self.before)
                for j in js
            }
            mapper.richness = (len(edges) <= RICH_EDGES) + (len(edges) <= POOR_EDGES)

    def mapped(self) -> Mapped:
        everything = self.mapper.where
        ends = End(None, everything), End(None, everything)
        order = self._order
        table = self._between(*ends, order, everything, 0)
        chosen = dict(zip(order, table.pick(0, 0), strict=True))
        placements = {block.name: chosen[i] for i, block in enumerate(self.blocks)}
        return Mapped(Strategy(self.graph, placements), float(table.cost_s[0, 0]))

    def every_kind(self) -> tuple[Kind, ...]:
        where, members = self.mapper.where, dict[int, list[int]]()
        for i, kind in enumerate(self.kinds):
            members.setdefault(kind, []).append(i)
        return tuple(
            Kind(
                tuple(self.blocks[i].name for i in own),
                self._placements(own[0], where),
                len(own) * float(self._own(own[0], where).min()),
            )
            for own in members.values()
        )

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The blocks in an order in which they can run; what is computed from weights alone comes right
        before the first that reads it."""
        left = [sum(not self._is_loose(j) for j in before) for before in self.before]
        ready = [i for i, count in enumerate(left) if not count and not self._is_loose(i)]
        heapify(ready)
        order: dict[int, None] = {}
        while ready:
            i = heappop(ready)
            order |= dict.fromkeys([j for j in self.before[i] if self._is_loose(j)])
            order[i] = None
            for j in self.after[i]:
                left[j] -= 1
                if not left[j]:
                    heappush(ready, j)
        return (*order, *(i for i in range(len(self.blocks)) if i not in order))

    # -- one block, one edge ---------------------------------------------------------------------------

    def _placements(self, block: int, where: Range) -> tuple[Placement, ...]:
        """What is possible of what is looked at."""
        key = (self.kinds[block], where)
        if key not in self.mapper.placements:
            given = candidates(
                self.graph,
                self.blocks[block],
                where,
                richness=self.mapper.richness or 0,
                without=self.mapper.without,
            )
            compute_s = self.parts.block(self.blocks[block], given).compute_s
            possible = tuple(p for p, s in zip(given, compute_s, strict=True) if np.isfinite(s))
            self.mapper.placements[key] = possible
        return self.mapper.placements[key]

    def _own(self, block: int, where: Range) -> Costs:
        """What a block costs by itself under each placement."""
        key = (self.kinds[block], where)
        if key not in self.mapper.own:
            placements = self._placements(block, where)
            found = self.parts.block(self.blocks[block], placements)
            own = found.compute_s + self.mapper.shown * found.sync_s
            if self.mapper.byte_s:
                held = [weight_bytes(self.graph, self.blocks[block], p) for p in placements]
                own = own + self.mapper.byte_s * np.array(held, dtype=np.float64)
            self.mapper.own[key] = own
        return self.mapper.own[key]

    def _edge(self, a: End, b: End) -> Costs:
        """What travels from one block to another, and back."""
        if a.block is None or b.block is None:
            return np.zeros((self._width(a), self._width(b)))
        before, after = self._placements(a.block, a.where), self._placements(b.block, b.where)
        if a.block not in self.before[b.block]:
            return np.zeros((len(before), len(after)))
        return self.parts.exchange_s(self.blocks[a.block], self.blocks[b.block], before, after)

    def _width(self, end: End) -> int:
        return 1 if end.block is None else len(self._placements(end.block, end.where))

    def _joint(self, i: int, j: int) -> int:
        """A number for the way in which one block reads another."""
        if (i, j) not in self.joints:
            self.joints[i, j] = self.mapper.id_of(connections(self.blocks[i], self.blocks[j]))
        return self.joints[i, j]

    # -- parts of the graph ----------------------------------------------------------------------------

    def _between(self, a: End, b: End, inner: tuple[int, ...], where: Range, depth: int) -> Table:
        """The table of the blocks that lie between two."""
        key = self._key(a, b, inner, where, depth)
        if key not in self.mapper.tables:
            self.mapper.tables[key] = self._worked_out(a, b, inner, where, depth)
        return self.mapper.tables[key]

    def _key(self, a: End, b: End, inner: tuple[int, ...], where: Range, depth: int) -> Hashable:
        place = {i: n for n, i in enumerate(inner)}
        ends = tuple((None if end.block is None else self.kinds[end.block], end.where) for end in (a, b))
        edges = []
        for n, i in [*enumerate(inner), (len(inner), b.block)]:
            for j in () if i is None else self.before[i]:
                at = place.get(j, -1 if j == a.block else None)
                if at is not None and i is not None:
                    edges.append((at, n, self._joint(j, i)))
        return where, depth, ends, tuple(self.kinds[i] for i in inner), tuple(edges)

    def _worked_out(self, a: End, b: End, inner: tuple[int, ...], where: Range, depth: int) -> Table:
        if not inner:
            return Table(self._edge(a, b), lambda _, __: ())
        sides = self._sides(inner)
        direct = self._edge(a, b)
        if len(sides) > 1:
            table = self._side_by_side(a, b, sides, where, depth)
            places = {i: n for n, i in enumerate(i for side in sides for i in side)}
            order = [places[i] for i in inner]
            return Table(direct + table.cost_s, lambda x, y: reordered(table.pick(x, y), order))
        cuts = self._cuts(a, b, inner)
        table = self._in_sequence(a, b, inner, cuts, where, depth) if cuts else self._knot(a, b, inner, where)
        return Table(direct + table.cost_s, table.pick)

    def _sides(self, inner: Sequence[int]) -> list[tuple[int, ...]]:
        """The parts that do not read from each other, each in order."""
        among, side_of = set(inner), dict[int, int]()
        for start in inner:
            left = [start] if start not in side_of else []
            while left:
                i = left.pop()
                if i not in side_of:
                    side_of[i] = start
                    left += [j for j in (*self.before[i], *self.after[i]) if j in among]
        sides: dict[int, list[int]] = {}
        for i in inner:
            sides.setdefault(side_of[i], []).append(i)
        return [tuple(side) for side in sides.values()]

    def _cuts(self, a: End, b: End, inner: tuple[int, ...]) -> list[int]:
        """The places in `inner` of the blocks that all paths between the ends go through: nothing is read
        past them. What begins here begins at the end before, but for what is computed from weights alone."""
        place = {i: n for n, i in enumerate(inner)}
        last = len(inner)
        reach = max(
            (n for n, i in enumerate(inner) if a.block in self.before[i] or self._begins(i, place)), default=0
        )
        cuts = []
        for n, i in enumerate(inner):
            if reach <= n:
                cuts.append(n)
            read_at = [last if j == b.block else place.get(j, 0) for j in self.after[i]]
            reach = max(reach, *read_at, 0)
        return cuts

    def _begins(self, i: int, place: Mapping[int, int]) -> bool:
        return not self._is_loose(i) and not any(j in place for j in self.before[i])

    def _is_loose(self, i: int) -> bool:
        """Whether a block is computed from weights alone: it may run at any time before it is read."""
        return not self.before[i] and self.blocks[i].name not in self.graph.sample_dims

    def _in_sequence(
        self, a: End, b: End, inner: tuple[int, ...], cuts: Sequence[int], where: Range, depth: int
    ) -> Table:
        ends = [a, *(End(inner[n], where) for n in cuts), b]
        spans = [inner[i + 1 : j] for i, j in pairwise([-1, *cuts, len(inner)])]
        steps = [
            self._between(before, after, span, where, depth)
            for (before, after), span in zip(pairwise(ends), spans, strict=True)
        ]
        total, choices = steps[0].cost_s, list[NDArray[np.intp]]()
        for end, step in zip(ends[1:-1], steps[1:], strict=True):
            assert end.block is not None
            options = (total + self._own(end.block, where))[:, :, np.newaxis] + step.cost_s
            choices.append(options.argmin(axis=1))
            total = options.min(axis=1)
        placements = [self._placements(inner[n], where) for n in cuts]

        def pick(x: int, y: int) -> tuple[Placement, ...]:
            chosen = [y]
            for best in reversed(choices):
                chosen.append(int(best[x, chosen[-1]]))
            chosen.append(x)
            chosen.reverse()
            found = list(steps[0].pick(x, chosen[1]))
            for n, options in enumerate(placements, 1):
                found.append(options[chosen[n]])
                found += steps[n].pick(chosen[n], chosen[n + 1])
            return tuple(found)

        return Table(total, pick)

    # -- sides -----------------------------------------------------------------------------------------

    def _side_by_side(
        self, a: End, b: End, sides: Sequence[tuple[int, ...]], where: Range, depth: int
    ) -> Table:
        """One side after the other on all devices, or some beside the others on a part of the devices
        each."""
        if len(sides) == 1:
            return self._alone(a, b, sides[0], where, depth)
        options = [summed([self._alone(a, b, side, where, depth) for side in sides])]
        if where.count > 1 and depth < MOST_DIVISIONS and self._may_divide:
            works = [self._work_s(side) for side in sides]
            for one, two in where.divisions():
                first = share_of(works, one.count / where.count)
                options.append(
                    at_once(
                        self._side_by_side(a, b, sides[:first], one, depth + 1),
                        self._side_by_side(a, b, sides[first:], two, depth + 1),
                    )
                )
        return best_of(options)

    @property
    def _may_divide(self) -> bool:
        effort = self.parts.evaluated * (EFFORT_BEFORE_DEVICES + len(self.mapper.machine.devices))
        return effort < MOST_EFFORT and not self.mapper.is_late()

    def _alone(self, a: End, b: End, side: tuple[int, ...], where: Range, depth: int) -> Table:
        """A side without what its ends tell each other directly."""
        table = self._between(a, b, side, where, depth)
        return Table(table.cost_s - self._edge(a, b), table.pick)

    def _work_s(self, side: Sequence[int]) -> float:
        """What a side computes on one device."""
        first = Range(0, 1, 1)
        return sum(float(self._own(i, first).min()) for i in side)

    def _knot(self, a: End, b: End, inner: tuple[int, ...], where: Range) -> Table:
        """Blocks that neither split takes apart: good choices for each placement of the block after them."""
        sets: dict[tuple[int, ...], None] = {}
        for y in range(self._width(b)) if len(inner) <= KNOTTED else (None,):
            sets[self._chosen(a, b, inner, where, y)] = None
        return best_of([self._fixed(a, b, inner, where, chosen) for chosen in sets])

    def _chosen(
        self, a: End, b: End, inner: tuple[int, ...], where: Range, after: int | None
    ) -> tuple[int, ...]:
        """The choices of least cost for the blocks of a knot; those of its ends are free, or given."""
        ends = [*(End(i, where) for i in inner), a, b]
        single = [self._own(i, where) for i in inner]
        single += [np.zeros(self._width(a)), np.zeros(self._width(b))]
        if after is not None:
            single[-1] = np.where(np.arange(self._width(b)) == after, 0.0, 1e9)
        pairs = {}
        for i, one in enumerate(ends):
            for j, two in enumerate(ends):
                if two.block is not None and one.block is not None and one.block in self.before[two.block]:
                    table = self._edge(one, two)
                    pairs[min(i, j), max(i, j)] = table if i < j else table.T
        found = minimum(Problem(single, pairs), [0] * len(ends))
        return found.choices[: len(inner)]

    def _fixed(self, a: End, b: End, inner: tuple[int, ...], where: Range, chosen: Sequence[int]) -> Table:
        """The table of a knot whose blocks have their placements."""
        at = dict(zip(inner, chosen, strict=True))
        cost_s = np.zeros((self._width(a), self._width(b)))
        for i, c in at.items():
            here = End(i, where)
            cost_s = cost_s + self._own(i, where)[c]
            cost_s = cost_s + self._edge(a, here)[:, c][:, np.newaxis] + self._edge(here, b)[c]
            for j in self.before[i]:
                if j in at:
                    cost_s = cost_s + self._edge(End(j, where), here)[at[j], c]
        placements = tuple(self._placements(i, where)[c] for i, c in at.items())
        return Table(cost_s, lambda _, __: placements)


def weight_bytes(graph: Graph, block: Block, placement: Placement) -> int:
    """The most bytes of weights that a shard of the block reads."""
    cut = layout(graph, block, placement.degree_of)
    held = 0
    for n, node in enumerate(block.nodes):
        for i, operand in enumerate(node.operands):
            if isinstance(operand, str) and graph.value(operand).role is Role.WEIGHT:
                boxes = [volume(box) for box in cut.reads(n, i) if box is not None]
                held += max(boxes, default=0) * ITEM_BYTES[graph.value(operand).dtype]
    return held
