"""A plan as a script for plain PyTorch: `parallelize_module` along one axis of a mesh, data parallelism along
the other.

`mesh.on_mesh` says whether a strategy has layouts; here they become parallel styles of the modules, the axes
along which a batch is cut, and the gradients that are summed over a row as well. Weights that the plan keeps
whole are kept whole; the script shards them over the data axis (`fully_shard`) if its user asks for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template

from soapstone.errors import PlanError
from soapstone.graph import Graph, Node, Role
from soapstone.plans import Plan
from soapstone.report.mesh import Mesh, on_mesh
from soapstone.report.ways import (
    CONVERTING,
    Split,
    Way,
    data_operand,
    module_of,
    plain_weights,
    read_axis,
    written_axis,
)
from soapstone.strategy.blocks import Block
from soapstone.strategy.strategy import Strategy

MOST_NAMED = 5
"""[choice] How many of the nodes that stand in the way are named."""


@dataclass(frozen=True)
class Style:
    """A parallel style for one module: the layouts of what it takes and gives, as Python."""

    module: str
    way: Way
    takes: str
    gives: str
    stays_split: bool

    @property
    def text(self) -> str:
        """The style as Python. What stays split along features remains a DTensor, so that views and
        attention after it mean what they say."""
        local = ", use_local_output=False" if self.stays_split else ""
        return f"{self.way}(input_layouts={self.takes}, output_layouts={self.gives}{local})"


def script(plan: Plan) -> str:
    """The script, or an error that names the nodes that stand in the way."""
    mesh = expressed(plan.strategy, len(plan.machine.devices))
    template = (resources.files("soapstone.report") / "dtensor.py.txt").read_text(encoding="utf-8")
    found = styles(mesh)
    return Template(template).substitute(
        title=repr(f"{plan.graph.name} on {plan.machine.name}"),
        devices=len(plan.machine.devices),
        data=mesh.data,
        tensor=mesh.tensor,
        inputs=_table({name: repr(cut) for name, cut in inputs(mesh).items()}),
        styles=_table({style.module: style.text for style in found}),
        tied=_table({name: repr(own) for name, own in tied(mesh).items()}),
        row_sums=_listed(summed_over_rows(mesh)),
        loss_parts=mesh.data * (mesh.tensor if _is_loss_split(mesh) else 1),
    )


def expressed(strategy: Strategy, device_count: int) -> Mesh:
    """The strategy on a mesh, or an error that names the nodes that stand in the way."""
    if strategy.pipeline is not None:
        raise PlanError("the plan is a pipeline of micro-batches, which DTensor layouts cannot say.")
    mesh = on_mesh(strategy, device_count)
    found = list((mesh.objections or _differently_called(mesh)).items())
    if found:
        named = "; ".join(f"'{name}' {why}" for name, why in found[:MOST_NAMED])
        more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise PlanError(
            f"the plan cannot be said in DTensor layouts, not even on a mesh of {mesh.data} x {mesh.tensor}: "
            f"{named}{more}."
        )
    return mesh


def styles(mesh: Mesh) -> tuple[Style, ...]:
    """The styles of the modules that are split along their weights."""
    return tuple(dict.fromkeys(_styles(mesh).values()))


def tied(mesh: Mesh) -> dict[str, str]:
    """The parameters that are another one by another name, where a style would make two of them."""
    graph, modules = mesh.strategy.graph, {style.module for style in _styles(mesh).values()}
    return {
        name: value.sources[0]
        for value in graph.with_role(Role.WEIGHT)
        for name in value.sources[1:]
        if name.rpartition(".")[0] in modules
    }


def _styles(mesh: Mesh) -> dict[str, Style]:
    """The style of each block that has one."""
    chosen = (block for block in mesh.strategy.blocks if mesh.ways[block.name] in CONVERTING)
    return {block.name: _style(mesh, block) for block in chosen}


def _differently_called(mesh: Mesh) -> dict[str, str]:
    """The blocks of a module that is called more than once and would need a style for each."""
    first: dict[str, Style] = {}
    return {
        name: f"is another call of '{style.module}', in another layout"
        for name, style in _styles(mesh).items()
        if first.setdefault(style.module, style) != style
    }


def _style(mesh: Mesh, block: Block) -> Style:
    graph, leader, way = mesh.strategy.graph, block.leader, mesh.ways[block.name]
    at = data_operand(graph, leader)
    value = leader.operands[at]
    assert isinstance(value, str)
    homes = {name: other.name for other in mesh.strategy.blocks for name in other.writes}
    taken = mesh.splits[homes[value]] if value in homes else mesh.input_splits.get(value, Split.WHOLE)
    given = mesh.splits[block.name]
    takes, gives = _sample_axes(graph, leader, at)
    stays_split = way is Way.COLUMNS and given is Split.FEATURES
    return Style(module_of(graph, block), way, _layout(taken, takes), _layout(given, gives), stays_split)


def _layout(split: Split, sample_axis: int) -> str:
    match split:
        case Split.SAMPLES:
            return f"Shard({sample_axis})"
        case Split.WHOLE:
            return "Replicate()"
        case Split.FEATURES:
            return "Shard(-1)"


def _sample_axes(graph: Graph, node: Node, operand: int) -> tuple[int, int]:
    """The axes that count samples, of what a layer reads and of what it writes; 0 if there are none."""
    sample = graph.sample_dims.get(node.name)
    if sample is None or graph.signature(node).sizes[sample] == 1:
        return 0, 0
    return read_axis(graph, node, operand, sample) or 0, written_axis(graph, node, sample) or 0


def inputs(mesh: Mesh) -> dict[str, tuple[int, bool] | None]:
    """For each input, the axis along which it is cut and whether along rows as well; None if it is whole."""
    return {
        value.name: None
        if value.samples is None
        else (value.samples, mesh.input_splits[value.name] is Split.SAMPLES and mesh.tensor > 1)
        for value in mesh.strategy.graph.with_role(Role.INPUT)
    }


def summed_over_rows(mesh: Mesh) -> tuple[str, ...]:
    """The parameters whose gradients are sums over a row, too: those that a part of its samples met."""
    graph, found = mesh.strategy.graph, dict[str, None]()
    if mesh.tensor > 1:
        for block in mesh.strategy.blocks:
            names = plain_weights(graph, block, mesh.ways[block.name])
            if mesh.splits[block.name] is Split.SAMPLES:
                found |= dict.fromkeys(
                    source for name in names for source in graph.value(name).sources or (name,)
                )
    return tuple(found)


def _is_loss_split(mesh: Mesh) -> bool:
    graph = mesh.strategy.graph
    last = next((b for b in mesh.strategy.blocks if graph.loss in b.writes), mesh.strategy.blocks[-1])
    return mesh.splits[last.name] is Split.SAMPLES


def _table(lines: Mapping[str, str]) -> str:
    text = "".join(f"    {name!r}: {line},\n" for name, line in lines.items())
    return f"{{\n{text}}}" if lines else "{}"


def _listed(names: tuple[str, ...]) -> str:
    text = "".join(f"    {name!r},\n" for name in names)
    return f"{{\n{text}}}" if names else "set()"
