"""Graphs for Graphviz: a plan's blocks with what flows between them, and its task graph."""

from __future__ import annotations

from soapstone.plans import Plan, Simulation
from soapstone.report.decisions import devices_text
from soapstone.report.explanation import split_text
from soapstone.tasks.task import COMPUTE_KINDS

SHAPES = {"forward": "box", "backward": "box", "update": "box", "transfer": "ellipse"}
STYLES = {"forward": "solid", "backward": "dashed", "update": "dotted", "transfer": "solid"}
"""Collectives, which are in neither, are hexagons."""


def quoted(text: str) -> str:
    """A text as DOT has it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def graph_dot(plan: Plan) -> str:
    """The blocks of a plan: how each is split and where it runs, and the values that go between them."""
    strategy = plan.strategy
    home = {name: block.name for block in strategy.blocks for name in block.writes}
    lines = [f"digraph {quoted(plan.graph.name)} {{", "  node [shape=box, fontname=sans];"]
    for block in strategy.blocks:
        placement = strategy.placements[block.name]
        where = devices_text(sorted(set(placement.devices)), plan.machine)
        operators = ", ".join(dict.fromkeys(node.op_name for node in block.nodes))
        split = split_text(plan.graph, block, placement, strategy.micro_batches)
        label = f"{block.name}\n{operators}\n{split}\n{where}"
        lines.append(f"  {quoted(block.name)} [label={quoted(label)}];")
    for block in strategy.blocks:
        read = dict.fromkeys(name for node in block.nodes for name in node.reads)
        for name in read:
            if home.get(name, block.name) != block.name:
                shape = "×".join(map(str, plan.graph.value(name).shape)) or "scalar"
                lines.append(f"  {quoted(home[name])} -> {quoted(block.name)} [label={quoted(shape)}];")
    return "\n".join([*lines, "}"]) + "\n"


def tasks_dot(simulated: Simulation, title: str) -> str:
    """The task graph: a cluster for each resource that has tasks, an edge for each dependency."""
    graph, timeline = simulated.tasks, simulated.timeline
    lines = [f"digraph {quoted(title)} {{", "  rankdir=LR; node [fontname=sans];"]
    by_resource: dict[str, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        by_resource.setdefault(task.resource, []).append(number)
    for place, name in enumerate(name for name in graph.resources if name in by_resource):
        lines.append(f"  subgraph cluster_{place} {{ label={quoted(name)};")
        for number in by_resource[name]:
            task = graph.tasks[number]
            shape, style = SHAPES.get(task.kind, "hexagon"), STYLES.get(task.kind, "solid")
            text = f"{task.name}\n{timeline.start_s[number]:.3g} s + {task.duration_s:.3g} s"
            if task.kind not in COMPUTE_KINDS:
                text += f"\n{task.size_bytes} B"
            lines.append(f"    t{number} [label={quoted(text)}, shape={shape}, style={style}];")
        lines.append("  }")
    for number, after in enumerate(graph.after):
        lines += [f"  t{before} -> t{number};" for before in after]
    return "\n".join([*lines, "}"]) + "\n"
