"""Why a block is placed as it is: what its alternatives would take, what its placement moves, and what of
the machine would have to change for another choice to win.

Every number is a simulation of the whole iteration with this one block placed otherwise and all others as
they were decided. Alternatives are all ways to split the block, on the devices it has now, on those of its
neighbours, and on the first ones of the machine; so is the block on fewer or more devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from soapstone.errors import PlanError, StrategyError
from soapstone.graph import Graph, Role
from soapstone.machine import Machine
from soapstone.plans import Plan
from soapstone.report.resimulation import Resimulation
from soapstone.strategy.blocks import Block
from soapstone.strategy.layout import layout as layout_of
from soapstone.strategy.layout import layouts
from soapstone.strategy.pipeline import one_of, repeated
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.placed import BACKWARD, FORWARD, SEAM, VALUE, WEIGHT
from soapstone.tasks.task import COMPUTE_KINDS, Key, TaskGraph

MOST_CANDIDATES = 400
"""[choice] The most alternatives that are simulated: those with the most parts come first."""

FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""[choice] How many times faster or slower a part of the machine is tried."""

BETTER = 1e-3
"""[choice] Another choice wins when it is faster by more than this part."""

CONTENDERS = 24
"""[choice] How many of the best alternatives are tried on a changed machine."""


@dataclass(frozen=True)
class Alternative:
    """A placement that was not chosen, and how long an iteration takes with it."""

    placement: Placement
    split: str
    makespan_s: float


@dataclass(frozen=True)
class Caused:
    """Bytes that move because of a block's placement: `role` says whether for what it reads, what it writes,
    its partial sums, or its weights' gradients."""

    what: str
    role: str
    kind: str
    size_bytes: int
    tasks: int


@dataclass(frozen=True)
class Turning:
    """The smallest change of the machine, of those tried, at which another choice wins."""

    part: str
    factor: float
    alternative: Alternative
    decided_s: float


@dataclass(frozen=True)
class Explanation:
    """All that is to be said about one block. Where an alternative is faster on the machine as it is,
    `is_beaten`, there are no turning points."""

    block: Block
    placement: Placement
    split: str
    makespan_s: float
    alternatives: tuple[Alternative, ...]
    caused: tuple[Caused, ...]
    turnings: tuple[Turning, ...]

    @property
    def is_beaten(self) -> bool:
        """Whether an alternative is faster as it is."""
        return bool(self.alternatives) and _wins(self.alternatives[0], self.makespan_s)


def _wins(other: Alternative, decided_s: float) -> bool:
    return other.makespan_s < decided_s * (1 - BETTER)


def block_named(strategy: Strategy, name: str) -> Block:
    """The block of a node, by the name of the node or of the module that it came from."""
    for block in strategy.blocks:
        if any(node.name == name for node in block.nodes):
            return block
    for block in strategy.blocks:
        if any(node.scope == name for node in block.nodes):
            return block
    names = [node.name for block in strategy.blocks for node in block.nodes]
    names += [node.scope for block in strategy.blocks for node in block.nodes if node.scope]
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"for example '{names[0]}'."
    raise PlanError(f"the plan places no node '{name}'; {hint}")


def explained(plan: Plan, block: Block, tasks: TaskGraph) -> Explanation:
    """The explanation of one block; `tasks` is the plan's task graph."""
    resimulation = Resimulation(plan.strategy, plan.machine, plan.cost_model)
    found = alternatives(resimulation, block)
    is_beaten = bool(found) and _wins(found[0], resimulation.makespan_s)
    return Explanation(
        block,
        plan.strategy.placements[block.name],
        split_text(plan.graph, block, plan.strategy.placements[block.name], plan.strategy.micro_batches),
        resimulation.makespan_s,
        found,
        caused(plan.strategy, block, tasks),
        () if is_beaten else tuple(turnings(plan, block, found[:CONTENDERS])),
    )


def split_text(graph: Graph, block: Block, placement: Placement, micro_batches: int = 1) -> str:
    """A placement's split in words: `sample(b) 4 × 2 copies`, `whole`; of one of its micro-batches."""
    placement = one_of(graph, block, placement, micro_batches)
    kinds = graph.kinds(block.leader)
    texts = [f"{kinds[dim]}({dim}) {degree}" for dim, degree in placement.degrees]
    if placement.copies > 1:
        texts.append(f"{placement.copies} copies")
    return " × ".join(texts) or "whole"


def alternatives(resimulation: Resimulation, block: Block) -> tuple[Alternative, ...]:
    """What could have been chosen instead, the fastest first."""
    graph = resimulation.problem.graph
    count = resimulation.strategy.micro_batches
    found = [
        Alternative(other, split_text(graph, block, other, count), resimulation.otherwise_s(block, other))
        for other in candidates(resimulation.strategy, block, len(resimulation.problem.machine.devices))
    ]
    return tuple(sorted(found, key=lambda each: (each.makespan_s, each.placement.devices, each.split)))


def candidates(strategy: Strategy, block: Block, device_count: int) -> tuple[Placement, ...]:
    """Other placements of a block, each once."""
    if strategy.pipeline is not None:
        return _candidates_in_stage(strategy, block)
    own = strategy.placements[block.name]
    pools = [own.devices, *_neighbours(strategy, block), tuple(range(device_count))]
    found: dict[Placement, None] = {}
    for parts in sorted(range(1, device_count + 1), reverse=True):
        if device_count % parts and parts != len(own.devices):
            continue
        for layout in layouts(strategy.graph, block, parts):
            for pool in pools:
                devices = tuple(dict.fromkeys((*pool, *range(device_count))))[:parts]
                found.setdefault(placed(dict(layout.degrees), devices))
    found.setdefault(Placement((), tuple(range(device_count)), device_count))
    found.pop(own, None)
    return tuple(found)[:MOST_CANDIDATES]


def _candidates_in_stage(strategy: Strategy, block: Block) -> tuple[Placement, ...]:
    """Other placements of a block on the devices of its stage, in as many micro-batches."""
    assert strategy.pipeline is not None
    one, count = strategy.of_one(), strategy.pipeline.micro_batches
    stage = next((stage for stage in strategy.stages if block.name in stage), (block.name,))
    devices = sorted({device for name in stage for device in one.placements[name].devices})
    found: dict[Placement, None] = {}
    for parts in range(len(devices), 0, -1):
        for layout in layouts(strategy.graph, block, parts):
            try:
                own = repeated(strategy.graph, block, placed(dict(layout.degrees), devices[:parts]), count)
                layout_of(strategy.graph, block, own.degree_of)
            except StrategyError:
                continue
            found.setdefault(own)
    found.pop(strategy.placements[block.name], None)
    return tuple(found)[:MOST_CANDIDATES]


def _neighbours(strategy: Strategy, block: Block) -> list[tuple[int, ...]]:
    """The devices of the blocks that write what this one reads, and that read what it writes."""
    read = {name for node in block.nodes for name in node.reads}
    near = [
        other
        for other in strategy.blocks
        if other is not block
        and (other.writes & read or any(block.writes & set(node.reads) for node in other.nodes))
    ]
    return list(dict.fromkeys(strategy.placements[other.name].devices for other in near))


def caused(strategy: Strategy, block: Block, tasks: TaskGraph) -> tuple[Caused, ...]:
    """What moves because of a block's placement, the most bytes first."""
    graph = strategy.graph
    values = list(graph.producers)
    read = dict.fromkeys(name for node in graph.nodes for name in node.reads)
    weights = [name for name in read if graph.value(name).role is Role.WEIGHT]
    own = {name for node in block.nodes for name in node.reads}
    number, count = strategy.blocks.index(block), len(strategy.blocks)

    def role(key: Key) -> tuple[str, str] | None:
        is_own = key[1] == (number if key[0] == FORWARD else count - 1 - number)
        back = "'s gradient" if key[0] == BACKWARD else ""
        if key[2] == SEAM and is_own:
            return (block.name + back, "partial sums")
        if key[2] == VALUE and values[key[3]] in block.writes:
            return (values[key[3]] + back, "written")
        if key[2] == VALUE and values[key[3]] in own:
            return (values[key[3]] + back, "read")
        if key[2] == WEIGHT and weights[key[3]] in own:
            return (weights[key[3]] + back, "weight")
        return None

    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for task in tasks.tasks:
        if task.kind not in COMPUTE_KINDS:
            found = role(task.key)
            if found is not None:
                sums[*found, task.kind.value].append(task.size_bytes)
    together = [Caused(*key, sum(sizes), len(sizes)) for key, sizes in sums.items()]
    return tuple(sorted(together, key=lambda each: (-each.size_bytes, each.what)))


def parts_tried(plan: Plan) -> tuple[str, ...]:
    """The parts of a machine that are tried faster and slower. Measured times say nothing of devices that
    are not as they were measured."""
    links = ("links",) if plan.machine.links else ()
    return (*links, "devices") if plan.costs == "analytic" else links


def turnings(plan: Plan, block: Block, contenders: Sequence[Alternative]) -> Iterator[Turning]:
    """For each part of the machine, in each direction, the smallest change that makes another choice win."""
    if not contenders:
        return
    for part in parts_tried(plan):
        scaled = with_links if part == "links" else with_devices
        for direction in (1, -1):
            for factor in FACTORS:
                scale = factor**direction
                machine = scaled(plan.machine, scale)
                again = Resimulation(plan.strategy, machine, plan.cost_model)
                tried = [
                    replace(each, makespan_s=again.otherwise_s(block, each.placement)) for each in contenders
                ]
                best = min(tried, key=lambda each: each.makespan_s)
                if _wins(best, again.makespan_s):
                    yield Turning(part, scale, best, again.makespan_s)
                    break


def with_links(machine: Machine, factor: float) -> Machine:
    """The machine with the bandwidth of every link so many times as large."""
    links = [
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor) for link in machine.links
    ]
    return replace(machine, links=tuple(links))


def with_devices(machine: Machine, factor: float) -> Machine:
    """The machine with every device so many times as fast, in arithmetic and in memory bandwidth."""
    devices = []
    for device in machine.devices:
        kind = replace(
            device.kind,
            peak_flops_per_s={name: rate * factor for name, rate in device.kind.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=device.kind.memory_bandwidth_bytes_per_s * factor,
        )
        devices.append(replace(device, kind=kind))
    return replace(machine, devices=tuple(devices))
