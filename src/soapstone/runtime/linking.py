"""A rank's part of the task graph, linked: every exchange becomes ports, every task an action.

The task graph says which boxes move between whom (`TaskGraph.exchanges`); this module finds the tensors
behind them. A source of

    a value's exchange          is what a shard of the writing block left, a sink what readers take
    its gradient's exchange     is what a reading node's backward pass left, a sink what writers take
    a seam                      is what a shard of the block left for the others (`seams`)

and the gradients of weights are `weights`' matter. Messages are numbered through all exchanges, the same
on every rank: the number is the tag by which the two ends of a message know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from soapstone.graph import Graph
from soapstone.ops.box import Box, Interval, intersection, volume
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.ops.op import Shard
from soapstone.runtime.collectives import Chosen
from soapstone.runtime.localshard import Made
from soapstone.runtime.noderun import NodeRun
from soapstone.runtime.ports import Arrival, Departure, Inbox, Outlet, Port
from soapstone.runtime.seams import Statistics, StatisticsDeparture
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.exchange import Exchange, Pattern
from soapstone.tasks.placed import BACKWARD, FORWARD, SEAM, VALUE, Placed, placed_blocks, readers_of
from soapstone.tasks.segments import Seam
from soapstone.tasks.task import Key, TaskGraph

Where = tuple[int, int, int]
"""A copy of a shard: block, shard, copy."""
Task = tuple[Where, int]
"""A compute task of this rank, forward or backward: a copy of a shard, and a segment."""


@dataclass
class Ports:
    """The messages of one move: what this rank receives and sends."""

    arrivals: list[Arrival] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    pattern: Pattern = Pattern.TRANSFER
    ranks: Sequence[int] = ()


class Links:
    """Everything one rank's tasks read, leave, send and receive."""

    def __init__(
        self,
        strategy: Strategy,
        tasks: TaskGraph,
        rank: int,
        place: torch.device,
        collectives: Chosen = frozenset(),
        deferred: frozenset[Key] = frozenset(),
    ) -> None:
        self.graph: Graph = strategy.graph
        self.deferred = deferred
        self.tasks, self.rank, self.place, self.collectives = tasks, rank, place, collectives
        self.blocks = placed_blocks(strategy)
        self.readers = readers_of(self.blocks)
        self.home = {name: p for p in self.blocks for name in p.block.writes}
        self.local: list[Where] = [
            (p.number, shard, copy)
            for p in self.blocks
            for shard, copy, device in p.shards()
            if device == rank
        ]
        self.local_of: dict[int, list[Where]] = {p.number: [] for p in self.blocks}
        for where in self.local:
            self.local_of[where[0]].append(where)
        self.made: dict[tuple[Where, str], Made] = {}
        self.inboxes: dict[tuple[str, Box], Inbox] = {}
        self.gradients: dict[tuple[Where, int, int], Outlet] = {}  # by shard, node and operand
        self.statistics: dict[tuple[Where, int], Statistics] = {}  # by shard and node
        self.sums: dict[tuple[Where, int], Inbox] = {}  # by shard and output of the leader
        self.partials: dict[tuple[Where, int], Outlet] = {}
        self.sum_gradients: dict[tuple[Where, int], Outlet] = {}
        self.moves: dict[tuple[Key, int], Ports] = {}
        self.left_by: dict[int, Task] = {}  # id of a gradient's outlet -> the backward task that fills it
        self.wanted_by: dict[int, list[Task]] = {}  # id of a gradient's inbox -> those that read it
        self.taken_by: dict[int, list[Inbox]] = {}  # id of a gradient's outlet -> where it goes here
        self.read_by: dict[int, tuple[Where, int, int]] = {}  # id of a gradient's outlet -> whose it is
        self.sent: set[int] = set()  # ids of the outlets that are sent to other ranks
        self.node_runs: dict[tuple[Where, int], NodeRun] = {}
        self.ports: list[Port] = []  # all that a step fills, to be emptied after it
        self._numbers = self._numbered()
        self._link()

    def outlet(self, box: Box) -> Outlet:
        """An outlet that is emptied after each step."""
        outlet = Outlet(box)
        self.ports.append(outlet)
        return outlet

    def block(self, where: Where) -> Placed:
        """The block that a shard is of."""
        return self.blocks[where[0]]

    def device_of(self, where: Where) -> int:
        """Where a copy of a shard runs."""
        number, shard, copy = where
        return self.blocks[number].placement.devices_of(shard)[copy]

    def takers_of(self, gradient: Outlet) -> frozenset[int]:
        """The ids of the inboxes and messages of this rank that take from the outlet of a gradient."""
        return frozenset(self._takers.get(id(gradient), ()))

    @cached_property
    def _takers(self) -> Mapping[int, set[int]]:
        found = {port: set(map(id, inboxes)) for port, inboxes in self.taken_by.items()}
        for ports in self.moves.values():
            for departure in ports.departures:
                for outlet, _ in departure.outlets:
                    found.setdefault(id(outlet), set()).add(id(departure))
        return found

    def needs_backward(self, where: Where) -> bool:
        """Whether a gradient flows through the block."""
        return any(name in self.graph.differentiable for name in self.block(where).block.writes)

    def _numbered(self) -> Mapping[tuple[Key, int], int]:
        """The number of the first message of each move."""
        numbers: dict[tuple[Key, int], int] = {}
        count = 0
        for key in sorted(self.tasks.exchanges):
            for m, move in enumerate(self.tasks.exchanges[key].moves):
                numbers[key, m] = count
                count += len(move.transfers)
        return numbers

    def _link(self) -> None:
        for where in self.local:
            placed = self.block(where)
            for n, node in enumerate(placed.block.nodes):
                for i, name in enumerate(node.outputs):
                    box = placed.layout.writes(n, i)[where[1]]
                    self.made[where, name] = Made(name, self.outlet(box))
        for number, name in enumerate(self.graph.producers):
            if name not in self.home:
                continue
            writer = self.home[name]
            forward = self.tasks.exchanges.get((FORWARD, writer.number, VALUE, number))
            if forward is not None:
                self._value(name, writer, (FORWARD, writer.number, VALUE, number), forward)
            backward = self.tasks.exchanges.get((BACKWARD, writer.from_last, VALUE, number))
            if backward is not None:
                self._gradient(name, writer, (BACKWARD, writer.from_last, VALUE, number), backward)
        for placed in self.blocks:
            for segment, seams in enumerate(placed.segments.seams):
                for number, seam in enumerate(seams):
                    link = self._statistics_seam if seam.is_mutual else self._partial_seam
                    link(placed, segment, number, seam)

    # -- values -------------------------------------------------------------------------------------

    def _value(self, name: str, writer: Placed, key: Key, exchange: Exchange) -> None:
        node, output = next(
            (n, made.outputs.index(name)) for n, made in enumerate(writer.block.nodes) if name in made.outputs
        )
        boxes = writer.layout.writes(node, output)

        def outlet(source: int) -> Outlet:
            wanted = exchange.sources[source]
            where = next(
                where
                for where in self.local_of[writer.number]
                if boxes[where[1]] == wanted.box and writer.layout.summand_of(where[1]) == wanted.summand
            )
            return self.made[where, name].outlet

        dtype = self._dtype(name)
        adds = len({source.summand for source in exchange.sources}) > 1
        for sink, inbox in self._connected(key, exchange, dtype, name, adds, outlet).items():
            self.inboxes[name, exchange.sinks[sink].box] = inbox

    def _gradient(self, name: str, writer: Placed, key: Key, exchange: Exchange) -> None:
        givers = [
            (placed, n, i, shards)
            for placed, n, i in self.readers.get(name, ())
            if name not in placed.block.writes
            if any(made in self.graph.differentiable for made in placed.block.nodes[n].outputs)
            for shards in placed.layout.alike(n)
            if placed.layout.reads(n, i)[shards[0]] is not None
        ]
        assert len(givers) == len(exchange.sources), f"the gradient of '{name}' has other givers"

        def outlet(source: int) -> Outlet:
            placed, n, i, shards = givers[source]
            shard, copy = next(placed.on(self.rank, shards))
            where = (placed.number, shard, copy)
            if (where, n, i) not in self.gradients:
                self.gradients[where, n, i] = self.outlet(exchange.sources[source].box)
            found = self.gradients[where, n, i]
            self.left_by[id(found)] = (where, placed.segments.reads_in[n])
            self.read_by[id(found)] = (where, n, i)
            return found

        node = next(n for n, made in enumerate(writer.block.nodes) if name in made.outputs)
        boxes = writer.layout.writes(node, writer.block.nodes[node].outputs.index(name))
        inboxes = self._connected(key, exchange, self._dtype(name), f"{name} gradient", True, outlet)
        for sink, inbox in inboxes.items():
            for port, _, _ in inbox.parts:
                self.taken_by.setdefault(id(port), []).append(inbox)
            takers = [
                where for where in self.local_of[writer.number] if boxes[where[1]] == exchange.sinks[sink].box
            ]
            self.wanted_by[id(inbox)] = [(where, writer.segments.writes_in[node]) for where in takers]
            for where in takers:
                self.made[where, name].givers.append(inbox)

    # -- seams --------------------------------------------------------------------------------------

    def _seam_keys(self, placed: Placed, segment: int, number: int) -> tuple[Key, Key]:
        back = placed.segments.count - 1 - segment
        return (
            (FORWARD, placed.number, SEAM, segment, number),
            (BACKWARD, placed.from_last, SEAM, back, number),
        )

    def _partial_seam(self, placed: Placed, segment: int, number: int, seam: Seam) -> None:
        key, _ = self._seam_keys(placed, segment, number)
        exchange = self.tasks.exchanges[key]
        name = placed.block.leader.outputs[number]
        boxes = placed.layout.writes(0, number)
        own = self.local_of[placed.number]
        for where in own:
            self.partials[where, number] = self.outlet(boxes[where[1]])
            gradient = self.sum_gradients[where, number] = self.outlet(boxes[where[1]])
            self.left_by[id(gradient)] = (where, segment + 1)

        def outlet(source: int) -> Outlet:
            shard, copy = next(placed.on(self.rank, seam.behind[source]))
            return self.partials[(placed.number, shard, copy), number]

        if key in self.deferred:  # each goes on with its own part
            for where in own:
                inbox = Inbox(boxes[where[1]], self._dtype(name), self.place, True)
                inbox.connect(self.partials[where, number], inbox.box)
                self.ports.append(inbox)
                self.sums[where, number] = inbox
            return
        inboxes = self._connected(key, exchange, self._dtype(name), f"{name} sums", True, outlet)
        for sink, inbox in inboxes.items():
            for where in own:
                if boxes[where[1]] == exchange.sinks[sink].box:
                    self.sums[where, number] = inbox

    def _statistics_seam(self, placed: Placed, segment: int, number: int, seam: Seam) -> None:
        del number
        node = placed.segments.parts[segment][-1].node
        forward, backward = self._seam_keys(placed, segment, 0)
        own = self.local_of[placed.number]
        if not own:
            return
        is_double = self._dtype(placed.block.nodes[node].outputs[0]) is torch.float64
        dtype = torch.float64 if is_double else torch.float32
        flat = [(Interval(0, volume(source.box)),) for source in seam.sources]
        source_of = {shard: i for i, shards in enumerate(seam.behind) for shard in shards}
        for where in own:
            box = flat[source_of[where[1]]]
            statistics = Statistics(self.node_run(where, node), self.outlet(box), self.outlet(box))
            self.statistics[where, node] = statistics
            self.left_by[id(statistics.gradient)] = (where, segment + 1)

        def first(source: int) -> Statistics:
            shard, copy = next(placed.on(self.rank, seam.behind[source]))
            return self.statistics[(placed.number, shard, copy), node]

        name = f"{placed.block.name} statistics"
        exchange = _flattened(self.tasks.exchanges[forward])
        merge = self.statistics[own[0], node].merge
        found = self._contributions(
            forward,
            exchange,
            dtype,
            name,
            lambda i: first(i).own,
            lambda *args: StatisticsDeparture(*args, merge=merge),
        )
        for sink, parts in found.items():
            for where in own:
                if self._seam_sink(seam, where) != seam.sinks[sink].box:
                    continue
                statistics = self.statistics[where, node]
                mine = source_of[where[1]]
                statistics.parts = [
                    statistics.own if source == mine and isinstance(port, Outlet) else port
                    for _, source, port, _ in sorted(parts, key=lambda part: part[1])
                ]
        if backward not in self.tasks.exchanges:
            return
        exchange = _flattened(self.tasks.exchanges[backward])
        inboxes = self._connected(
            backward, exchange, dtype, f"{name} gradient", True, lambda i: first(i).gradient
        )
        for sink, inbox in inboxes.items():
            for where in own:
                if self._seam_sink(seam, where) == seam.sinks[sink].box:
                    self.statistics[where, node].total = inbox

    def _seam_sink(self, seam: Seam, where: Where) -> Box:
        return next(s.box for s, shards in zip(seam.sources, seam.behind, strict=True) if where[1] in shards)

    # -- exchanges ----------------------------------------------------------------------------------

    def _connected(
        self,
        key: Key,
        exchange: Exchange,
        dtype: torch.dtype,
        name: str,
        adds: bool,
        outlet: Callable[[int], Outlet],
    ) -> dict[int, Inbox]:
        """An inbox for each sink on this rank, by the sink's number."""
        found = self._contributions(key, exchange, dtype, name, outlet, Departure)
        inboxes: dict[int, Inbox] = {}
        for k, sink in enumerate(exchange.sinks):
            if sink.device != self.rank:
                continue
            inboxes[k] = Inbox(sink.box, dtype, self.place, adds)
            self.ports.append(inboxes[k])
            total = self._total(key)
            if total is not None:
                inboxes[k].connect(total, sink.box)
                continue
            for _, _, port, overlap in sorted(found.get(k, []), key=lambda part: part[:2]):
                inboxes[k].connect(port, overlap)
        return inboxes

    def _total(self, key: Key) -> Arrival | None:
        """Where an all-reduce leaves the sum of all there is in an exchange, if it is one."""
        ports = self.moves.get((key, 0))
        if ports is None or ports.pattern is not Pattern.ALL_REDUCE:
            return None
        return min(ports.arrivals, key=lambda arrival: arrival.peer)

    def _contributions(
        self,
        key: Key,
        exchange: Exchange,
        dtype: torch.dtype,
        name: str,
        outlet: Callable[[int], Outlet],
        departure: Callable[..., Departure],
    ) -> dict[int, list[tuple[int, int, Outlet | Arrival, Box]]]:
        """For each sink on this rank what comes to it: (device, first source, port, box)."""
        found: dict[int, list[tuple[int, int, Outlet | Arrival, Box]]] = {}
        for m, move in enumerate(exchange.moves):
            pattern = move.pattern if (key, m) in self.collectives else Pattern.TRANSFER
            if departure is not Departure:  # statistics are merged and not added
                pattern = Pattern.ALL_GATHER if pattern is Pattern.ALL_REDUCE else Pattern.TRANSFER
            ports = Ports(pattern=pattern, ranks=move.devices)
            for tag, part in enumerate(move.transfers, self._numbers[key, m]):
                if part.receiver == self.rank:
                    arrival = Arrival(part.box, dtype, part.sender, tag, name)
                    ports.arrivals.append(arrival)
                    self.ports.append(arrival)
                    for sink in part.sinks:
                        found.setdefault(sink, []).append((part.sender, part.sources[0], arrival, part.box))
                if part.sender == self.rank:
                    outlets = [outlet(source) for source in part.sources]
                    self.sent.update(map(id, outlets))
                    ports.departures.append(departure(part.box, dtype, part.receiver, tag, name, outlets))
            if ports.arrivals or ports.departures:
                self.moves[key, m] = ports
        for source, sink in exchange.local:
            if exchange.sinks[sink].device == self.rank:
                overlap = intersection(exchange.sources[source].box, exchange.sinks[sink].box)
                assert overlap is not None
                found.setdefault(sink, []).append((self.rank, source, outlet(source), overlap))
        return found

    def _dtype(self, name: str) -> torch.dtype:
        dtype = torch_dtype(self.graph.value(name).dtype)
        assert dtype is not None
        return dtype

    def node_run(self, where: Where, node: int) -> NodeRun:
        """A node of a local shard."""
        if (where, node) not in self.node_runs:
            placed = self.block(where)
            made = placed.block.nodes[node]
            signature = self.graph.signature(made)
            box = placed.layout.boxes[node][where[1]]
            dtype = self.graph.value(made.outputs[0]).dtype
            shard = Shard(signature, box, dtype=dtype, device=str(self.place))
            self.node_runs[where, node] = NodeRun(made, shard)
        return self.node_runs[where, node]


def _flattened(exchange: Exchange) -> Exchange:
    """An exchange of boxes that move whole, as boxes of one axis."""

    def flat(box: Box) -> Box:
        return (Interval(0, volume(box)),)

    # Sources and sinks that share no element keep apart: only their numbers are used from here on.
    return replace(
        exchange,
        sources=tuple(replace(s, box=flat(s.box)) for s in exchange.sources),
        sinks=tuple(replace(s, box=flat(s.box)) for s in exchange.sinks),
        moves=tuple(
            replace(move, transfers=tuple(replace(t, box=flat(t.box)) for t in move.transfers))
            for move in exchange.moves
        ),
    )
