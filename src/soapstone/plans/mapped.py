"""A PCG with machine mappings and a Graph with a Strategy: two writings of one thing (Unity 3).

    pcg_of        writes a strategy as a PCG: parallel operators stand where a value is read otherwise than it
                  lies, and every block's leader has a machine mapping: the device of each of its tasks
    strategy_of   reads it back: the degrees of an operator are those of its operands' axes

`strategy_of(pcg_of(s)) == s`, devices, blocks and all. A follower has no mapping: it runs where its block
does. `views` shows mappings as the grids of devices that they are: 1-D, 2-D, 3-D or more.

What a PCG cannot say is refused: the order of a pipeline's micro-batches, copies of a shard (parallel
operators make copies, and none takes them away), a join split along the axis it joins, statistics over a
split dim, a bias under a split sum, a window over an axis that has no equal parts, and a graph with parallel
operators of its own (ZeRO's), which could not be told from those that are written. Nor can a strategy say
that values are cut in time, or that partial sums pass through an operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from soapstone.errors import StrategyError
from soapstone.graph import Graph, Node
from soapstone.graph.graph import Operand, Role, Value
from soapstone.ops.op import Attr
from soapstone.strategy.blocks import Block, blocks
from soapstone.strategy.document import placement_of
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy
from soapstone.subst.layout import Layout, Objection, carriers, is_parallel, output_layouts, whole
from soapstone.subst.pcg import Pcg, pcg, without_parallel_nodes
from soapstone.subst.words import Typed


@dataclass(frozen=True)
class MachineView:
    """A machine mapping as a grid (Unity 3.2, Figure 7): the task at (i, j, ...) runs on the device
    `first` + i * strides[0] + j * strides[1] + ...; it has as many axes as sizes, the outermost first."""

    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices, row by row."""
        return tuple(
            self.first + sum(i * stride for i, stride in zip(at, self.strides, strict=True))
            for at in product(*map(range, self.sizes))
        )


def machine_view(devices: Sequence[int]) -> MachineView | None:
    """The grid of fewest axes, rows as long as they can be, that has these devices; None where none has."""
    rest, sizes, strides = list(devices), list[int](), list[int]()
    while len(rest) > 1:
        stride, length = rest[1] - rest[0], 2
        while length < len(rest) and rest[length] - rest[length - 1] == stride:
            length += 1
        while len(rest) % length:
            length -= 1
        sizes.insert(0, length)
        strides.insert(0, stride)
        rest = rest[::length]
        if length == 1:
            return None
    view = MachineView(devices[0], tuple(sizes), tuple(strides))
    return view if view.devices == tuple(devices) else None


@dataclass(frozen=True)
class MappedPcg:
    """A PCG, and by the names of operators the devices of their tasks: row by row along the dims that are
    split, copies side by side. An operator without a mapping runs with the one whose result it reads."""

    pcg: Pcg
    mappings: Mapping[str, tuple[int, ...]]

    @property
    def views(self) -> dict[str, MachineView | None]:
        """The mappings as grids of devices, as far as they are."""
        return {name: machine_view(devices) for name, devices in self.mappings.items()}


def in_order(graph: Graph) -> MappedPcg:
    """A PCG with the plainest mappings: the tasks of every operator on devices 0, 1, 2, ... An operator that
    is kept apart from what it could follow, by a parallel operator, has a mapping of its own."""
    found, plain = pcg(graph), without_parallel_nodes(graph)
    leaders = [block.leader for block in blocks(plain, _kept_apart(graph, plain))]
    counts = {node.name: _degrees(found, graph.node(node.name))[1] for node in leaders}
    return MappedPcg(found, {name: tuple(range(count)) for name, count in counts.items()})


def _kept_apart(graph: Graph, plain: Graph) -> frozenset[str]:
    """The nodes that would follow another in the plain graph, but read it through a parallel operator."""
    return frozenset(
        node.name
        for block in blocks(plain)
        for node in block.followers
        for read, moved in zip(node.operands, graph.node(node.name).operands, strict=True)
        if read in block.writes and read != moved
    )


def strategy_of(mapped: MappedPcg) -> Strategy:
    """The strategy that a PCG with mappings is."""
    graph = mapped.pcg.graph
    plain = without_parallel_nodes(graph)
    usual = blocks(plain)
    apart = frozenset(mapped.mappings.keys() - {block.name for block in usual})
    _check_names(mapped.mappings, usual, blocks(plain, apart))
    placements = {}
    for name, devices in mapped.mappings.items():
        degrees, count = _degrees(mapped.pcg, graph.node(name))
        if count != len(devices):
            raise StrategyError(f"'{name}' has {count} tasks and a mapping of {len(devices)} devices")
        placements[name] = placed(degrees, devices, count // prod(degrees.values()))
    strategy = Strategy(plain, placements, apart)
    _check_followers(mapped.pcg, strategy)
    return strategy


def _check_names(mappings: Mapping[str, object], usual: Sequence[Block], chosen: Sequence[Block]) -> None:
    """Refuse mappings of what has no tasks, and tasks that have no mapping."""
    with_tasks = {node.name for block in usual for node in block.nodes}
    for name in mappings:
        if name not in with_tasks:
            raise StrategyError(f"there is a mapping for '{name}', which is no operator that has tasks")
    for block in chosen:
        if block.name not in mappings:
            raise StrategyError(f"'{block.name}' has tasks and no mapping")


def _check_followers(found: Pcg, strategy: Strategy) -> None:
    """Refuse a PCG in which an operator without a mapping is split otherwise than the one it follows."""
    for block in strategy.blocks:
        for node in block.followers:
            degrees, _ = _degrees(found, found.graph.node(node.name))
            if {d: n for d, n in degrees.items() if n > 1} != placement_of(strategy, node.name).degree_of:
                raise StrategyError(
                    f"'{node.name}' is split otherwise than '{block.name}', which it follows; give it a "
                    "mapping of its own"
                )


def _degrees(found: Pcg, node: Node) -> tuple[dict[str, int], int]:
    """The degree of each dim of an operator, and how many tasks it has."""
    signature = found.graph.signature(node)
    layouts = {i: found.layouts[o] for i, o in enumerate(node.operands) if isinstance(o, str)}
    if any(layout.partials != 1 for layout in layouts.values()):
        raise StrategyError(f"partial sums pass through '{node.name}', which a strategy cannot say")
    if any(piece != 1 for layout in layouts.values() for piece in layout.pieces):
        raise StrategyError(f"'{node.name}' reads what is cut in time, which a strategy cannot say")
    degrees = dict.fromkeys(signature.sizes, 1)
    for i, layout in layouts.items():
        for dim, degree in zip(carriers(signature, i), layout.degrees, strict=True):
            if dim is not None:
                degrees[dim] = int(str(degree))
    counts = {int(str(layout.parts)) for layout in layouts.values()}
    return degrees, max(counts, default=1)


def pcg_of(strategy: Strategy) -> MappedPcg:
    """The PCG that a strategy is; an error names the first block that a PCG has no way to say."""
    return _Writing(strategy).written()


class _Writing:
    """A graph being given parallel operators."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.graph = strategy, strategy.graph
        self.values: dict[str, Value] = dict(self.graph.values)
        self.nodes: list[Node] = []
        self.layouts = {
            name: whole(len(value.shape))
            for name, value in self.values.items()
            if value.role is not Role.COMPUTED
        }
        self.made: dict[tuple[str, Layout], str] = {}

    def written(self) -> MappedPcg:
        if self.strategy.pipeline is not None:
            raise StrategyError("a pipeline's micro-batches have an order, which a PCG cannot say")
        own = next((node.name for node in self.graph.nodes if is_parallel(node.op_name)), None)
        if own is not None:
            raise StrategyError(
                f"'{own}' is a parallel operator of the graph itself, which a PCG cannot tell from its own"
            )
        home = {node.name: block for block in self.strategy.blocks for node in block.nodes}
        for node in self.graph.nodes:
            block = home.get(node.name)
            degrees: Mapping[str, int] = {}
            if block is not None:
                if self.strategy.placements[block.name].copies > 1:
                    raise StrategyError(
                        f"block '{block.name}' has copies, which a PCG cannot take away again"
                    )
                degrees = placement_of(self.strategy, node.name).degree_of
            self._add(node, degrees)
        values = {n: v for n, v in self.values.items() if n in self.layouts}
        graph = replace(self.graph, values=values, nodes=tuple(self.nodes))
        devices = {name: placement.devices for name, placement in self.strategy.placements.items()}
        return MappedPcg(pcg(graph), devices)

    def _add(self, node: Node, degrees: Mapping[str, int]) -> None:
        signature, parts = self.graph.signature(node), prod(degrees.values())
        operands: list[Operand] = []
        given: list[Layout | None] = []
        for i, operand in enumerate(node.operands):
            if not isinstance(operand, str):
                operands.append(operand)
                given.append(None)
                continue
            axes = tuple(1 if dim is None else degrees.get(dim, 1) for dim in carriers(signature, i))
            wanted = Layout(axes, copies=parts // prod(axes))
            shape = self.values[operand].shape
            if Typed(shape, wanted).is_uneven:
                raise StrategyError(
                    f"'{node.name}' reads '{operand}' of shape {list(shape)} in the parts {wanted}, which "
                    "are not equal, as they are in a PCG"
                )
            operands.append(self._laid_out(operand, wanted))
            given.append(wanted)
        shown = {
            dim for i, layout in enumerate(given) if layout is not None for dim in carriers(signature, i)
        }
        hidden = [dim for dim, degree in degrees.items() if degree > 1 and dim not in shown]
        if hidden:
            raise StrategyError(f"'{node.name}' is split along '{hidden[0]}', which no axis of a PCG shows")
        found = output_layouts(node.op, signature, node.attrs, given)
        if isinstance(found, Objection):
            raise StrategyError(f"'{node.name}' cannot be split by {dict(degrees)} in a PCG: {found.reason}")
        self.layouts |= dict(zip(node.outputs, found, strict=True))
        self.nodes.append(replace(node, operands=tuple(operands)))

    def _laid_out(self, name: str, wanted: Layout) -> str:
        """A value, laid out as it is wanted: put together first, where it lies otherwise."""
        if self.layouts[name] == wanted:
            return name
        if (name, wanted) not in self.made:
            lies, found = self.layouts[name], name
            for axis, degree in enumerate(lies.degrees):
                found = self._changed("combine", found, degree, axis)
            found = self._changed("reduce", found, lies.partials)
            for axis, degree in enumerate(wanted.degrees):
                found = self._changed("partition", found, degree, axis)
            self.made[name, wanted] = self._changed("replicate", found, wanted.copies)
        return self.made[name, wanted]

    def _changed(self, op_name: str, name: str, degree: object, axis: int | None = None) -> str:
        """A value after a parallel operator; itself where the degree is one."""
        if degree == 1:
            return name
        attrs: dict[str, Attr] = {"degree": int(str(degree))}
        if axis is not None:
            attrs["dim"] = axis
        node = Node(_fresh(f"{name}.{op_name}", self.values), op_name, (name,), (), attrs)
        node = replace(node, outputs=(node.name,))
        signature = node.op.signature([self.values[name].shape], attrs)
        found = output_layouts(node.op, signature, attrs, [self.layouts[name]])
        assert not isinstance(found, Objection)
        self.values[node.name] = Value(node.name, self.values[name].shape, self.values[name].dtype)
        self.layouts[node.name] = found[0]
        self.nodes.append(node)
        return node.name


def _fresh(name: str, taken: Mapping[str, object]) -> str:
    number, found = 0, name
    while found in taken:
        number += 1
        found = f"{name}.{number}"
    return found
