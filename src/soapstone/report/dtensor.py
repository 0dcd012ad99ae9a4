"""A plan as a script for plain PyTorch: `parallelize_module` with DTensor layouts on a mesh of one dim.

What can be said so: every block is split along samples over all devices, in their order; and linear layers
may be split along their outputs (`ColwiseParallel`) or along their sums (`RowwiseParallel`) instead. Between
them activations are split along samples, except from a column-parallel layer to row-parallel ones, where
they stay split along features, as in the plan. Weights of blocks split along samples are whole on every
device, as the plan has them, and their gradients are summed by an all-reduce.

Everything else stands in the way, and `script` says which nodes and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from string import Template

from soapstone.errors import PlanError
from soapstone.graph import Graph, Role
from soapstone.ops import Kind
from soapstone.plans import Plan
from soapstone.report.decisions import weights
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

MOST_NAMED = 5
"""[choice] How many of the nodes that stand in the way are named."""

PARALLEL_MODULES = frozenset({"linear"})
"""The operators whose modules `ColwiseParallel` and `RowwiseParallel` know, and plans split alike."""


class Way(StrEnum):
    """How DTensor runs a block."""

    SAMPLES = "along samples"
    COLUMNS = "ColwiseParallel"
    ROWS = "RowwiseParallel"


@dataclass(frozen=True)
class Style:
    """A parallel style for one module: which way, and whether its input or output stays split along
    features."""

    module: str
    way: Way
    stays_split: bool

    @property
    def text(self) -> str:
        """The style as Python."""
        here, there = ("input", "output") if self.way is Way.ROWS else ("output", "input")
        layout = "Shard(-1)" if self.stays_split else "Shard(0)"
        return f"{self.way}({there}_layouts=Shard(0), {here}_layouts={layout})"


def script(plan: Plan) -> str:
    """The script, or an error that names the nodes that stand in the way."""
    found = styles(plan.strategy, len(plan.machine.devices))
    template = (resources.files("soapstone.report") / "dtensor.py.txt").read_text(encoding="utf-8")
    lines = "".join(f"    {style.module!r}: {style.text},\n" for style in found)
    return Template(template).substitute(
        title=repr(f"{plan.graph.name} on {plan.machine.name}"),
        devices=len(plan.machine.devices),
        axes=[value.samples for value in plan.graph.with_role(Role.INPUT)],
        styles=f"{{\n{lines}}}" if lines else "{}",
    )


def styles(strategy: Strategy, device_count: int) -> tuple[Style, ...]:
    """The styles of the modules that are not split along samples."""
    if strategy.pipeline is not None:
        raise PlanError("the plan is a pipeline of micro-batches, which DTensor layouts cannot say.")
    ways: dict[str, Way] = {}
    objections: dict[str, str] = {}
    for block in strategy.blocks:
        found = way_of(strategy.graph, block, strategy.placements[block.name], device_count)
        if isinstance(found, Way):
            ways[block.name] = found
        else:
            objections[block.name] = found
    objections |= _shared(strategy, ways)
    if objections:
        named = "; ".join(f"'{name}' {why}" for name, why in list(objections.items())[:MOST_NAMED])
        more = f"; and {len(objections) - MOST_NAMED} more" if len(objections) > MOST_NAMED else ""
        raise PlanError(f"the plan cannot be said in DTensor layouts on a mesh of one dim: {named}{more}.")
    split = _split_between(strategy, ways)
    return tuple(
        Style(_module(strategy.graph, block), ways[block.name], block.name in split)
        for block in strategy.blocks
        if ways[block.name] is not Way.SAMPLES
    )


def way_of(graph: Graph, block: Block, placement: Placement, device_count: int) -> Way | str:
    """How DTensor would run a block; if it cannot, why."""
    if placement.devices != tuple(range(device_count)):
        return f"runs on devices {', '.join(map(str, placement.devices))}, not on all in their order"
    if len(placement.degrees) > 1:
        return "is split along several dims"
    if not placement.degrees:
        return Way.SAMPLES if not weights(graph, block) or device_count == 1 else "is computed in copies"
    dim, kind = placement.degrees[0][0], graph.kinds(block.leader)[placement.degrees[0][0]]
    if dim == graph.sample_dims.get(block.name):
        joins = [n.name for n in block.nodes if graph.signature(n).shared]
        return f"joins statistics of all samples in '{joins[0]}'" if joins else Way.SAMPLES
    if block.leader.op_name not in PARALLEL_MODULES or not _module(graph, block):
        return f"is split along {kind}({dim}), and is no linear layer of its own"
    match kind:
        case Kind.PARAMETER:
            return Way.COLUMNS
        case Kind.REDUCTION:
            return Way.ROWS
        case Kind.SAMPLE | Kind.ATTRIBUTE:
            return f"is split along {kind}({dim})"


def _module(graph: Graph, block: Block) -> str:
    """The module whose weights a block reads; empty if these are of several, or not one module's own."""
    sources = [graph.value(name).sources or (name,) for name in weights(graph, block)]
    modules = {source[0].rpartition(".")[0] for source in sources}
    names = {source[0].rpartition(".")[2] for source in sources}
    is_plain = len(modules) == 1 and names <= {"weight", "bias"} and all(len(s) == 1 for s in sources)
    return modules.pop() if is_plain else ""


def _shared(strategy: Strategy, ways: Mapping[str, Way]) -> dict[str, str]:
    """The split layers whose weights another block reads, too."""
    found: dict[str, str] = {}
    for block in strategy.blocks:
        own = set(weights(strategy.graph, block))
        others = [b.name for b in strategy.blocks if b is not block and own & set(weights(strategy.graph, b))]
        if ways.get(block.name, Way.SAMPLES) is not Way.SAMPLES and others:
            found[block.name] = f"shares its weights with '{others[0]}'"
    return found


def _split_between(strategy: Strategy, ways: Mapping[str, Way]) -> frozenset[str]:
    """The column-parallel blocks whose readers are all row-parallel, and these readers, where all that they
    read comes from such blocks: between them nothing has to move."""
    home = {name: block for block in strategy.blocks for name in block.writes}
    from_to: list[tuple[str, str]] = []
    for block in strategy.blocks:
        read = dict.fromkeys(name for node in block.nodes for name in node.reads if name in home)
        from_to += [(home[name].name, block.name) for name in read if home[name] is not block]
    kept = {name for name, way in ways.items() if way is not Way.SAMPLES}
    while True:
        broken = {
            end
            for a, b in from_to
            for end in (a, b)
            if end in kept
            and (ways[end] is (Way.COLUMNS if end == a else Way.ROWS))
            and not (a in kept and b in kept and ways[a] is Way.COLUMNS and ways[b] is Way.ROWS)
        }
        ends = {end for pair in from_to for end in pair}
        broken |= {name for name in kept if name not in ends}
        if not broken:
            return frozenset(kept)
        kept -= broken
