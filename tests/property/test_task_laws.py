"""Laws of the task graph, held against brute force: sets of elements instead of boxes.

Nothing here asks `soapstone.tasks.exchange` what should move. What a shard reads and writes comes from
the operators (tested on their own); from there, elements are followed one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import product
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.strategies import pipelined, planned

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import ITEM_BYTES, Graph, Node, Role
from soapstone.machine import Machine
from soapstone.ops.box import Box
from soapstone.sim.reference import simulate
from soapstone.strategy.blocks import Block, free_values
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.exchange import Pattern
from soapstone.tasks.segments import STATISTICS_NUMBERS, segmented
from soapstone.tasks.task import COMPUTE_KINDS, Key, Task, TaskGraph, TaskKind

Element = tuple[int, ...]
Elements = frozenset[Element]
Moved = Counter[tuple[str, int, int]]
"""Communication tasks by kind, elements that one device gives another, and devices."""

FORWARD, BACKWARD = 0, 1
COMPUTE, SEAM, VALUE, WEIGHT = 0, 1, 2, 3


def built(strategy: Strategy, machine: Machine) -> TaskGraph:
    return task_graph(strategy, machine, AnalyticCosts())


def elements(box: Box | None) -> Elements:
    return frozenset() if box is None else frozenset(product(*(range(lo, hi) for lo, hi in box)))


@dataclass(frozen=True)
class Place:
    """A shard of a block, as one of its devices runs it."""

    block: int
    shard: int
    copy: int
    device: int


class Facts:
    """What follows from a strategy without any exchange: who reads and writes which elements."""

    def __init__(self, strategy: Strategy, machine: Machine) -> None:
        self.strategy, self.machine, self.graph = strategy, machine, strategy.graph
        self.layouts = [strategy.layouts[block.name] for block in strategy.blocks]
        self.placements = [strategy.placements[block.name] for block in strategy.blocks]
        self.segments = [
            segmented(layout, placement, strategy.turns[block.name])
            for block, layout, placement in zip(strategy.blocks, self.layouts, self.placements, strict=True)
        ]
        self.values = {name: number for number, name in enumerate(self.graph.producers)}
        read = dict.fromkeys(name for node in self.graph.nodes for name in node.reads)
        self.weights = [name for name in read if self.graph.value(name).role is Role.WEIGHT]

    def places(self, block: int) -> Iterator[Place]:
        for shard in range(self.layouts[block].parts):
            for copy, device in enumerate(self.placements[block].devices_of(shard)):
                yield Place(block, shard, copy, device)

    def forward(self, place: Place, segment: int) -> Key:
        return (FORWARD, place.block, COMPUTE, segment, place.shard, place.copy)

    def backward(self, place: Place, segment: int) -> Key:
        last = self.segments[place.block].count - 1
        return (BACKWARD, self.from_last(place.block), COMPUTE, last - segment, place.shard, place.copy)

    def from_last(self, block: int) -> int:
        return len(self.layouts) - 1 - block

    def writers(self) -> Iterator[tuple[str, int, int]]:
        """Every value that a block writes: (name, block, node)."""
        for b, block in enumerate(self.strategy.blocks):
            for n, node in enumerate(block.nodes):
                for name in node.outputs:
                    yield name, b, n

    def readers(self, name: str, home: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Every (block, node, operand) that reads a value, outside of the block that writes it."""
        for b, block in enumerate(self.strategy.blocks):
            for n, node in enumerate(block.nodes):
                for i, operand in enumerate(node.operands):
                    if operand == name and b != home:
                        yield b, n, i

    def written(self, block: int, node: int, name: str, shard: int) -> tuple[int, Elements]:
        """The summand that a shard's part of a value is, and its elements."""
        layout = self.layouts[block]
        box = layout.writes(node, layout.block.nodes[node].outputs.index(name))[shard]
        partial = node == 0 and not layout.block.followers
        return layout.summands[shard] if partial else 0, elements(box)

    def gives_gradient(self, block: int, node: int) -> bool:
        return any(o in self.graph.differentiable for o in self.strategy.blocks[block].nodes[node].outputs)

    def computed_by(self, block: int, node: int) -> dict[object, list[int]]:
        """The shards of a block by the part of a node that they compute; copies of one part are alike."""
        found: dict[object, list[int]] = {}
        for shard, box in enumerate(self.layouts[block].boxes[node]):
            found.setdefault(tuple(box.items()), []).append(shard)
        return found

    def devices(self, block: int, shards: Iterable[int]) -> list[int]:
        return sorted({d for shard in shards for d in self.placements[block].devices_of(shard)})


@dataclass(frozen=True)
class Held:
    """Elements of one summand, and the devices that have them."""

    summand: object
    elements: Elements
    devices: tuple[int, ...]


Sent = dict[tuple[int, int, Elements], list[frozenset[Held]]]
"""For a giver, a taker and elements: the sets of sources that are added up and sent."""


def expected(machine: Machine, held: list[Held], wanted: set[tuple[int, Elements]]) -> Moved:
    """What has to move so that every device gets the elements it wants, of every summand."""
    sent: Sent = {}
    turns = sorted({device for device, wish in wanted if wish})
    for device, wish in wanted:
        parts: dict[tuple[int, Elements], set[Held]] = {}
        for source in held:
            overlap = source.elements & wish
            if overlap and device not in source.devices:
                widest = max(machine.bandwidth(d, device) for d in source.devices)
                near = sorted(d for d in source.devices if machine.bandwidth(d, device) == widest)
                giver = near[turns.index(device) % len(near)]
                parts.setdefault((giver, overlap), set()).add(source)
        for (giver, overlap), sources in parts.items():
            same = sent.setdefault((giver, device, overlap), [])
            if frozenset(sources) not in same:
                same.append(frozenset(sources))
    found: Moved = Counter()
    for group in components({(a, b) for a, b, _ in sent}):
        found += collected(group, {move: sources for move, sources in sent.items() if move[0] in group})
    return found


def components(pairs: set[tuple[int, int]]) -> list[set[int]]:
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching]
        groups.append(set(pair).union(*touching))
    return groups


def collected(group: set[int], sent: Sent) -> Moved:
    """One collective if the moves among these devices form one, else each for itself."""
    transfers: Moved = Counter(("transfer", len(box), 2) for (_, _, box), sums in sent.items() for _ in sums)
    n, by_pair = len(group), {(a, b): box for a, b, box in sent}
    sizes = {len(box) for box in by_pair.values()}
    if transfers.total() != n * (n - 1) or len(by_pair) != n * (n - 1) or len(sizes) != 1:
        return transfers
    (size,) = sizes
    sources = [source for sums in sent.values() for given in sums for source in given]
    adds = any(a.summand != b.summand and a.elements & b.elements for a in sources for b in sources)
    boxes = set(by_pair.values())
    sent = {a: {box for (s, _), box in by_pair.items() if s == a} for a in group}
    received = {b: {box for (_, r), box in by_pair.items() if r == b} for b in group}
    if adds and len(boxes) == 1:
        return Counter({("all_reduce", size, n): n})
    if adds and len(boxes) == n and all(len(s) == 1 for s in received.values()):
        return Counter({("reduce_scatter", size, n): n})
    if not adds and len(boxes) == n and all(len(s) == 1 for s in sent.values()):
        return Counter({("all_gather", size, n): n})
    if not adds and len(boxes) == n * (n - 1):
        return Counter({("all_to_all", size, n): n})
    return transfers


def bytes_of(kind: str, size: int, count: int, item_bytes: int) -> int:
    """What a task of a collective of `count` devices moves over its link."""
    if kind == "transfer":
        return size * item_bytes
    return (
        2 * (count - 1) * size * item_bytes // count
        if kind == "all_reduce"
        else ((count - 1) * size * item_bytes)
    )


def moved(graph: TaskGraph, *base: int) -> Counter[tuple[str, int]]:
    """The communication tasks whose keys start so, by kind and bytes."""
    return Counter(
        (t.kind.value, t.size_bytes)
        for t in graph.tasks
        if t.key[: len(base)] == base and t.kind not in COMPUTE_KINDS
    )


def in_bytes(want: Moved, item_bytes: int) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for (kind, size, devices), tasks in want.items():
        found[kind, bytes_of(kind, size, devices, item_bytes)] += tasks
    return found


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_the_makespan_is_bounded_by_its_longest_path_and_its_busiest_resource(
    plan: tuple[Strategy, Machine],
) -> None:
    graph = built(*plan)
    timeline = simulate(graph)
    path = [0.0] * len(graph.tasks)
    for number in TopologicalSorter(dict(enumerate(graph.after))).static_order():
        before = max((path[a] for a in graph.after[number]), default=0.0)
        path[number] = before + graph.tasks[number].duration_s
    busy: Counter[str] = Counter()
    for task in graph.tasks:
        busy[task.resource] += task.duration_s  # type: ignore[assignment]
    assert timeline.makespan_s == max(timeline.end_s)
    assert timeline.makespan_s >= max(path) * (1 - 1e-12)
    assert timeline.makespan_s >= max(busy.values()) * (1 - 1e-12)


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_a_task_starts_when_it_is_ready_and_its_resource_is_free(plan: tuple[Strategy, Machine]) -> None:
    """start = max(ready, end of the task before on the resource), in the order of (ready, id). A task
    that takes no time (a view) may make another ready at the same moment, after one with a larger id."""
    graph = built(*plan)
    timeline = simulate(graph)
    ready = [max((timeline.end_s[a] for a in after), default=0.0) for after in graph.after]
    takes_time = all(task.duration_s > 0 for task in graph.tasks)
    for resource in graph.resources:
        own = [t for t, task in enumerate(graph.tasks) if task.resource == resource]
        own.sort(key=lambda t: (timeline.start_s[t], timeline.end_s[t]))
        free_s = 0.0
        for number in own:
            assert timeline.start_s[number] == max(ready[number], free_s)
            free_s = timeline.end_s[number]
            assert free_s == timeline.start_s[number] + graph.tasks[number].duration_s
        places = [(ready[t], t if takes_time else 0) for t in own]
        assert places == sorted(places)


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_every_element_read_was_written_and_brought(plan: tuple[Strategy, Machine]) -> None:
    """Each element that a shard reads, in every summand, comes from a task of its own device or by a
    move to its device, and the reading task waits for it."""
    facts, graph = Facts(*plan), built(*plan)
    for name, home, node in facts.writers():
        places = list(facts.places(home))
        parts = {place: facts.written(home, node, name, place.shard) for place in places}
        segment = facts.segments[home].writes_in[node]
        keys = {place: facts.forward(place, segment) for place in places}
        summands = {(s, e) for s, own in parts.values() for e in own}
        for block, n, i in facts.readers(name, home):
            for place in facts.places(block):
                read = elements(facts.layouts[block].reads(n, i)[place.shard])
                needed = {(s, e) for s, e in summands if e in read}
                task = facts.forward(place, facts.segments[block].reads_in[n])
                givers = arriving(
                    graph, facts, task, place.device, (FORWARD, home, VALUE, facts.values[name])
                )
                got = {
                    (parts[giver][0], e) for giver in places if keys[giver] in givers for e in parts[giver][1]
                }
                assert {e for _, e in needed} == read
                assert needed <= got


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_every_gradient_is_summed_over_all_that_read(plan: tuple[Strategy, Machine]) -> None:
    """The backward task of a writer waits for the gradient of each of its elements from every part of
    every node that read it; a part that several shards compute counts once."""
    facts, graph = Facts(*plan), built(*plan)
    for name, home, node in facts.writers():
        if name not in facts.graph.differentiable:
            continue
        parts = [
            (number, elements(facts.layouts[b].reads(n, i)[shards[0]]), b, n, shards)
            for number, (b, n, i, shards) in enumerate(
                (b, n, i, shards)
                for b, n, i in facts.readers(name, home)
                if facts.gives_gradient(b, n)
                for shards in facts.computed_by(b, n).values()
            )
        ]
        base = (BACKWARD, facts.from_last(home), VALUE, facts.values[name])
        for place in facts.places(home):
            _, own = facts.written(home, node, name, place.shard)
            task = facts.backward(place, facts.segments[home].writes_in[node])
            givers = arriving(graph, facts, task, place.device, base)
            for _, read, b, n, shards in parts:
                keys = {
                    facts.backward(giver, facts.segments[b].reads_in[n])
                    for giver in facts.places(b)
                    if giver.shard in shards
                }
                assert keys & givers or not own & read


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_devices_take_the_messages_that_come_to_them(plan: tuple[Strategy, Machine]) -> None:
    """A device has a task for what each move brings it, as long as its messages take, which all that wait for
    the move wait for; sums of all bring no messages."""
    _, machine = plan
    graph = built(*plan)
    overhead_s = [device.kind.message_overhead_s for device in machine.devices]
    takes: dict[Key, list[Task]] = {}
    for task in graph.tasks:
        if task.kind is TaskKind.TAKE:
            takes.setdefault(task.key[:-1], []).append(task)
        elif task.kind in COMPUTE_KINDS and all(overhead_s):
            kinds = {graph.tasks[before].kind for before in graph.after[graph.ids[task.key]]}
            assert kinds <= COMPUTE_KINDS | {TaskKind.ALL_REDUCE}
    for base, exchange in graph.exchanges.items():
        for number, move in enumerate(exchange.moves):
            found = takes.pop((*base, number), [])
            messages = Counter(part.receiver for part in move.transfers)
            if move.pattern is Pattern.ALL_REDUCE:
                assert not found
                continue
            hops = tuple(t.key for t in graph.tasks if t.key[:-1] == (*base, number) and t not in found)
            assert {task.resource: task.duration_s for task in found} == {
                machine.devices[device].name: count * overhead_s[device]
                for device, count in messages.items()
                if overhead_s[device]
            }
            assert all(task.after == hops for task in found)
    assert not takes


def arriving(graph: TaskGraph, facts: Facts, task: Key, device: int, base: Key) -> set[Key]:
    """The compute tasks whose results a task waits for: on its own device, or by moves to it."""
    found: set[Key] = set()
    by_key = {t.key: t for t in graph.tasks}
    name = facts.machine.devices[device].name
    moves: dict[Key, list[Task]] = {}
    waits: set[Key] = set()
    for key in by_key[task].after:
        waits.update(by_key[key].after if by_key[key].kind is TaskKind.TAKE else [key])
    for key in waits:
        before = by_key[key]
        if before.kind in COMPUTE_KINDS:
            assert before.resource == name
            found.add(key)
        elif key[: len(base)] == base:
            moves.setdefault(key[:-1], []).append(before)
    for hops in moves.values():
        if hops[0].kind.value == "transfer":
            assert hops[0].name.endswith(f" to {name}")
        else:
            assert len(hops) == sum(
                t.key[:-1] == hops[0].key[:-1] and t.kind is not TaskKind.TAKE for t in graph.tasks
            )
        for hop in hops:
            found.update(hop.after)
    return found


@given(planned())
@settings(max_examples=40, deadline=None)
def test_values_move_as_sets_of_elements_say(plan: tuple[Strategy, Machine]) -> None:
    """What moves of each value and of its gradient, by kind and bytes."""
    facts, graph = Facts(*plan), built(*plan)
    free = free_values(facts.graph)
    for name, home, node in facts.writers():
        assert name not in free
        held: dict[tuple[int, Elements], set[int]] = {}
        wanted_back: set[tuple[int, Elements]] = set()
        for place in facts.places(home):
            part = facts.written(home, node, name, place.shard)
            held.setdefault(part, set()).add(place.device)
            wanted_back.add((place.device, part[1]))
        wanted: set[tuple[int, Elements]] = set()
        back: list[Held] = []
        for b, n, i in facts.readers(name, home):
            reads = facts.layouts[b].reads(n, i)
            wanted |= {(p.device, elements(reads[p.shard])) for p in facts.places(b)}
            for number, shards in enumerate(facts.computed_by(b, n).values()):
                if facts.gives_gradient(b, n):
                    devices = tuple(facts.devices(b, shards))
                    back.append(Held((b, n, i, number), elements(reads[shards[0]]), devices))
        sources = [Held(s, own, tuple(sorted(devices))) for (s, own), devices in held.items()]
        item = ITEM_BYTES[facts.graph.value(name).dtype]
        number = facts.values[name]
        assert_moved(graph, (FORWARD, home, VALUE, number), facts.machine, sources, wanted, item)
        if name in facts.graph.differentiable and wanted:
            base = (BACKWARD, facts.from_last(home), VALUE, number)
            assert_moved(graph, base, facts.machine, back, wanted_back, item)


def assert_moved(
    graph: TaskGraph,
    base: Key,
    machine: Machine,
    held: list[Held],
    wanted: set[tuple[int, Elements]],
    item_bytes: int,
) -> None:
    assert moved(graph, *base) == in_bytes(expected(machine, held, wanted), item_bytes)


@given(planned() | pipelined())
@settings(max_examples=40, deadline=None)
def test_weight_gradients_move_as_sets_of_elements_say(plan: tuple[Strategy, Machine]) -> None:
    """For each set of elements of a weight that the same shards read, their devices all-reduce."""
    facts, graph = Facts(*plan), built(*plan)
    for number, name in enumerate(facts.weights):
        read = [
            (facts.devices(b, shards), elements(facts.layouts[b].reads(n, i)[shards[0]]))
            for b, n, i in facts.readers(name)
            for shards in facts.computed_by(b, n).values()
        ]
        alike: dict[tuple[int, ...], set[Element]] = {}
        for element in set().union(*(own for _, own in read)):
            alike.setdefault(tuple(s for s, (_, own) in enumerate(read) if element in own), set()).add(
                element
            )
        total = 0.0
        for sources, own in alike.items():
            held = [Held(s, frozenset(own), tuple(read[s][0])) for s in sources]
            wanted = {(device, frozenset(own)) for s in held for device in s.devices}
            want = expected(facts.machine, held, wanted)
            for (kind, size, devices), tasks in want.items():
                assert kind in ("transfer", "all_reduce")
                each = 2 * (devices - 1) / devices if kind == "all_reduce" else 1
                total += each * size * tasks
        first = max(facts.from_last(b) for b, _, _ in facts.readers(name))
        found = [t for t in graph.tasks if t.key[:4] == (BACKWARD, first, WEIGHT, number)]
        item = ITEM_BYTES[facts.graph.value(name).dtype]
        rounded_down = total * item - sum(t.size_bytes for t in found)
        assert -1e-6 <= rounded_down <= len(found)
        holders = {device for devices, own in read if own for device in devices}
        updates = [t for t in graph.tasks if t.key[:2] == (2, number)]
        assert [t.key[2] for t in updates] == sorted(holders)


@given(planned())
@settings(max_examples=40, deadline=None)
def test_seams_move_as_sets_of_elements_say(plan: tuple[Strategy, Machine]) -> None:
    """Partial sums before a follower, and statistics over a split dim, with their gradients."""
    facts, graph = Facts(*plan), built(*plan)
    for b, block in enumerate(facts.strategy.blocks):
        want: Counter[tuple[str, int]] = Counter()
        want_back: Counter[tuple[str, int]] = Counter()
        layout = facts.layouts[b]
        passes = facts.graph.loss in block.writes  # a divided sum, which is divided part by part
        if block.followers and len(set(layout.summands)) > 1 and not passes:
            for name in block.leader.outputs:
                boxes = [elements(box) for box in layout.writes(0, block.leader.outputs.index(name))]
                held = [
                    Held(layout.summands[s], own, tuple(facts.devices(b, [s]))) for s, own in enumerate(boxes)
                ]
                wanted = {(p.device, boxes[p.shard]) for p in facts.places(b)}
                item = ITEM_BYTES[facts.graph.value(name).dtype]
                want += in_bytes(expected(facts.machine, held, wanted), item)
        for n, node in enumerate(block.nodes):
            if is_shared_over_a_split(facts, b, n, node):
                channels = [
                    frozenset(product(range(*box["c"]), range(STATISTICS_NUMBERS))) for box in layout.boxes[n]
                ]
                held = [
                    Held(number, channels[shards[0]], tuple(facts.devices(b, shards)))
                    for number, shards in enumerate(facts.computed_by(b, n).values())
                ]
                wanted = {(p.device, channels[p.shard]) for p in facts.places(b)}
                statistics = in_bytes(expected(facts.machine, held, wanted), 4)
                want += statistics
                want_back += statistics
        assert moved(graph, FORWARD, b, SEAM) == want
        assert moved(graph, BACKWARD, facts.from_last(b), SEAM) == want_back


def is_shared_over_a_split(facts: Facts, block: int, number: int, node: Node) -> bool:
    statistics = node.op.statistics
    boxes = facts.layouts[block].boxes[number]
    return statistics is not None and any(
        len({box[dim] for box in boxes}) > 1 for dim in statistics.dims if dim in boxes[0]
    )


@given(planned(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_equal_problems_give_equal_tasks(plan: tuple[Strategy, Machine], seed: int) -> None:
    """Neither the order of placements, of values, nor of a machine's links can be seen in the tasks."""
    strategy, machine = plan
    random = Random(seed)

    def shuffled(pairs: Iterable) -> list:
        found = list(pairs)
        random.shuffle(found)
        return found

    graph = replace(strategy.graph, values=dict(shuffled(strategy.graph.values.items())))
    other = Strategy(graph, dict(shuffled(strategy.placements.items())), strategy.apart)
    rewired = Machine(
        machine.name, tuple(shuffled(machine.devices)), tuple(shuffled(machine.links)), machine.switches
    )
    assert built(other, rewired) == built(strategy, machine)


@given(planned(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_another_order_of_nodes_gives_the_same_tasks(plan: tuple[Strategy, Machine], seed: int) -> None:
    """Nodes in another order in which they can run are the same tasks, waiting for the same."""
    strategy, machine = plan
    graph = reordered(strategy.graph, Random(seed))
    other = Strategy(graph, strategy.placements, strategy.apart)
    if members(other.blocks) != members(strategy.blocks):
        return  # a node between two blocks joins the later one
    assert by_name(built(other, machine)) == by_name(built(strategy, machine))


def reordered(graph: Graph, random: Random) -> Graph:
    left, nodes = list(graph.nodes), list[Node]()
    made = {value.name for value in graph.values.values() if value.role is not Role.COMPUTED}
    while left:
        node = random.choice([node for node in left if made.issuperset(node.reads)])
        left.remove(node)
        nodes.append(node)
        made.update(node.outputs)
    return replace(graph, nodes=tuple(nodes))


def members(found: tuple[Block, ...]) -> set[frozenset[str]]:
    return {frozenset(node.name for node in block.nodes) for block in found}


def by_name(graph: TaskGraph) -> Counter[object]:
    said = [(t.kind, t.name, t.resource, t.duration_s, t.size_bytes) for t in graph.tasks]
    return Counter(
        (said[number], tuple(sorted(said[a] for a in after))) for number, after in enumerate(graph.after)
    )


@given(planned(most_copies=1))
@settings(max_examples=40, deadline=None)
def test_gradients_move_as_their_values_do_the_other_way(plan: tuple[Strategy, Machine]) -> None:
    """For a value whose every part is on one device, and whose readers compute every part once, as
    many elements go back over each pair of devices as came."""
    facts, graph = Facts(*plan), built(*plan)
    for name, home, node in facts.writers():
        readers = list(facts.readers(name, home))
        if name not in facts.graph.differentiable or not all(
            facts.gives_gradient(b, n) for b, n, _ in readers
        ):
            continue
        parts = [facts.written(home, node, name, place.shard) for place in facts.places(home)]
        is_once = len(set(parts)) == len(parts)
        for b, n, _ in readers:
            is_once &= all(len(shards) == 1 for shards in facts.computed_by(b, n).values())
        if not is_once:
            continue
        number = facts.values[name]
        there = traffic(graph, FORWARD, home, VALUE, number)
        back = traffic(graph, BACKWARD, facts.from_last(home), VALUE, number)
        assert there == {(b, a): size for (a, b), size in back.items()}


def traffic(graph: TaskGraph, *base: int) -> dict[object, float]:
    """Bytes between pairs of devices; a collective moves the same between all of its devices."""
    found: dict[object, float] = {}
    by_key = {t.key: t for t in graph.tasks}
    moves: dict[Key, list[Task]] = {}
    for task in graph.tasks:
        if task.key[: len(base)] == base and task.kind not in COMPUTE_KINDS:
            moves.setdefault(task.key[:-1], []).append(task)
    for hops in moves.values():
        count, kind = len(hops), hops[0].kind.value
        if kind == "transfer":
            a, b = hops[0].name.rsplit(" ", 3)[1::2]
            found[a, b] = found.get((a, b), 0) + hops[0].size_bytes
            continue
        devices = {by_key[key].resource for key in hops[0].after}
        piece = hops[0].size_bytes / (2 * (count - 1) / count if kind == "all_reduce" else count - 1)
        for a, b in product(devices, devices):
            if a != b:
                found[a, b] = found.get((a, b), 0) + piece
    return found
