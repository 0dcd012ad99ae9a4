"""A planning problem for the native core: operators gone, only dims, affine maps and figures left.

`native_tasks` is the task graph of `build.task_graph` made by the native core; the two agree to the
bit, which the property tests hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.fit import Curve
from soapstone.cost.profile import op_key
from soapstone.cost.work import is_free
from soapstone.errors import StrategyError
from soapstone.graph import ITEM_BYTES, Graph, Node, Role
from soapstone.machine import DeviceKind, Machine
from soapstone.machine.machine import ONE_DEVICE
from soapstone.ops import Kind
from soapstone.ops.signature import Affine, Signature
from soapstone.strategy.blocks import Block, blocks, passes_sums
from soapstone.strategy.pipeline import Turns, micro_dim
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buckets import shelves
from soapstone.tasks.kept import Kept, kept
from soapstone.tasks.task import TaskKind

KINDS = tuple(TaskKind)
"""The kinds of tasks in the order of the native core's numbers."""


@dataclass(frozen=True)
class FlatTasks:
    """A task graph as arrays, in task order. Resources are devices first, then links."""

    kind: NDArray[np.uint8]
    resource: NDArray[np.int32]
    duration_s: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    after_begin: NDArray[np.int64]
    after: NDArray[np.int32]
    resources: tuple[str, ...]

    def simulated(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Start and end of every task, and the makespan."""
        return native.simulate(
            self.duration_s, self.resource, self.after_begin, self.after, len(self.resources)
        )


class FlatProblem:
    """A graph's blocks and a machine, as the native core takes them. Dims of the kinds in `without` are not
    split, but for those that count samples. In buckets, small gradients are summed together (`buckets`)."""

    without: frozenset[Kind] = frozenset()

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        costs: AnalyticCosts,
        apart: frozenset[str] = frozenset(),
        without: frozenset[Kind] = frozenset(),
        *,
        in_buckets: bool = False,
    ) -> None:
        self.graph, self.machine, self.costs, self.without = graph, machine, costs, without
        self.blocks = blocks(graph, apart)
        self.number = {block.name: i for i, block in enumerate(self.blocks)}
        self._home = {name: i for i, block in enumerate(self.blocks) for name in block.writes}
        self._values, self._weights = self._exchanged(), self._trained()
        self.native = native.Problem(
            self._machine_data(),
            [self._block_data(block) for block in self.blocks],
            [self._value_data(name) for name in self._values],
            [self._weight_data(name) for name in self._weights],
            self.curves,
            in_buckets,
        )

    @cached_property
    def curves(self) -> list[native.TimeCurve]:
        """The measured times that nodes refer to by number, as far as nodes have been described."""
        return []

    @cached_property
    def _curve_numbers(self) -> dict[int, int]:
        return {}

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """The names of all resources, by number."""
        return (*(d.name for d in self.machine.devices), *(link.name for link in self.machine.links))

    def degrees(self, block: Block, placement: Placement) -> list[int]:
        """The degree of each of the leader's dims."""
        return [placement.degree_of.get(dim, 1) for dim in self.graph.signature(block.leader).sizes]

    def value_number(self, name: str) -> int | None:
        """The number of a value that some block reads and another writes; None for any other."""
        return self._values.get(name)

    def place(self, target: native.PlannedTasks | native.Proposals, strategy: Strategy) -> None:
        """Place every block as a strategy of the same blocks says."""
        for block in self.blocks:
            self.place_block(target, block, strategy.placements[block.name], strategy.turns[block.name])

    def place_block(
        self,
        target: native.PlannedTasks | native.Proposals,
        block: Block,
        placement: Placement,
        turns: Turns,
    ) -> None:
        """Place one block, whose shards take such turns."""
        number, degrees = self.number[block.name], self.degrees(block, placement)
        devices = list(placement.devices)
        if not target.place(number, degrees, placement.copies, devices, turns.count, turns.in_flight):
            raise StrategyError(f"block '{block.name}' cannot be split by {placement.degree_of}")

    def _exchanged(self) -> dict[str, int]:
        """The values that one block writes and another reads, numbered."""
        read = {
            name
            for i, block in enumerate(self.blocks)
            for node in block.nodes
            for name in node.reads
            if self._home.get(name, i) != i
        }
        return {name: i for i, name in enumerate(name for name in self.graph.values if name in read)}

    def _trained(self) -> dict[str, int]:
        """The weights that some block reads and that get gradients, numbered."""
        read = {
            name
            for block in self.blocks
            for node in block.nodes
            if any(out in self.graph.differentiable for out in node.outputs)
            for name in node.reads
        }
        trained = self.graph.differentiable & read
        return {name: i for i, name in enumerate(name for name in self._weight_numbers if name in trained)}

    @cached_property
    def _shelves(self) -> dict[str, int]:
        return shelves(self.graph)

    @cached_property
    def _kept(self) -> dict[str, Kept]:
        """What the backward pass of each node needs."""
        return {node.name: kept(self.graph, node) for block in self.blocks for node in block.nodes}

    @cached_property
    def _kept_outputs(self) -> frozenset[str]:
        """The values that are needed by some backward pass. A view is no memory of its own: what it is a
        view of is needed instead."""
        found: set[str] = set()
        seen: dict[str, str] = {}  # what a value is only a view of
        for block in self.blocks:
            for position, node in enumerate(block.nodes):
                needs = self._kept[node.name]
                read = [node.operands[i] for i in needs.operands]
                found.update(operand for operand in read if isinstance(operand, str))
                found.update(node.outputs if needs.output else ())
                carried = node.operands[block.carried[position - 1]] if position and node.op.is_view else None
                if isinstance(carried, str):
                    seen |= dict.fromkeys(node.outputs, carried)
        for node in reversed(self.graph.nodes):
            for name in node.outputs:
                if name in found and name in seen:
                    found.remove(name)
                    found.add(seen[name])
        return frozenset(found)

    @cached_property
    def _value_numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.graph.producers)}

    @cached_property
    def _weight_numbers(self) -> dict[str, int]:
        read = dict.fromkeys(name for node in self.graph.nodes for name in node.reads)
        weights = [name for name in read if self.graph.value(name).role is Role.WEIGHT]
        return {name: i for i, name in enumerate(weights)}

    def _machine_data(self) -> native.MachineData:
        machine, data = self.machine, native.MachineData()
        count = len(machine.devices)
        kinds = list(dict.fromkeys(device.kind for device in machine.devices))
        data.device_count, data.link_count = count, len(machine.links)
        data.kind = [kinds.index(device.kind) for device in machine.devices]
        data.link = list(machine.pairs.link)
        data.bandwidth = list(machine.pairs.bandwidth_bytes_per_s)
        data.latency = list(machine.pairs.latency_s)
        # Of kinds with measured times these are the updates' own: compute has its curves.
        data.launch_s = [self.costs.update_rate(kind)[0] for kind in kinds]
        data.memory_bytes_per_s = [self.costs.update_rate(kind)[1] for kind in kinds]
        data.message_s = [kind.message_overhead_s for kind in kinds]
        data.update_bytes_per_byte = self.costs.update_bytes_per_byte
        data.sums_by_one_device = machine.sums == ONE_DEVICE
        self._kinds: list[DeviceKind] = kinds
        return data

    def _value_data(self, name: str) -> native.ValueData:
        value, data = self.graph.value(name), native.ValueData()
        data.rank = len(value.shape)
        data.item_bytes = ITEM_BYTES[value.dtype]
        data.is_differentiable = name in self.graph.differentiable
        data.number = self._value_numbers[name]
        return data

    def _weight_data(self, name: str) -> native.WeightData:
        value, data = self.graph.value(name), native.WeightData()
        data.rank = len(value.shape)
        data.item_bytes = ITEM_BYTES[value.dtype]
        data.number = self._weight_numbers[name]
        data.shelf = self._shelves[name]
        return data

    def _block_data(self, block: Block) -> native.BlockData:
        data = native.BlockData()
        data.nodes = [self._node_data(block, n) for n in range(len(block.nodes))]
        data.needs_backward = any(name in self.graph.differentiable for name in block.writes)
        data.passes_sums = passes_sums(self.graph, block)
        signature = self.graph.signature(block.leader)
        dim = micro_dim(self.graph, block, 1)
        data.sample_dim = -1 if dim is None else list(signature.sizes).index(dim)
        return data

    def _node_data(self, block: Block, position: int) -> native.NodeData:
        node, data = block.nodes[position], native.NodeData()
        signature = self.graph.signature(node)
        dims = list(signature.sizes)
        data.sizes = list(signature.sizes.values())
        data.is_splittable = [dim in signature.splits for dim in dims]
        if self.without and not position:
            kinds, sample = self.graph.kinds(node), self.graph.sample_dims.get(node.name)
            kept = [dim == sample or kinds.get(dim) not in self.without for dim in dims]
            data.is_splittable = [a and b for a, b in zip(data.is_splittable, kept, strict=True)]
        data.is_summed = [dim in signature.summed_dims for dim in dims]
        data.is_shared = [dim in signature.shared for dim in dims]
        data.is_gathered = [dim in node.op.gathers for dim in dims]
        data.factored = [[dims.index(dim) for dim in group] for group in signature.factored]
        data.synchronises = node.op.joins_statistics(node.attrs)
        if position:
            data.carried = block.carried[position - 1]
        data.flops = node.op.flop_count(signature)
        dtypes = [self.graph.value(name).dtype for name in node.outputs if self.graph.value(name).is_float]
        dtype = dtypes[0] if dtypes else self.graph.value(node.outputs[0]).dtype
        data.flops_per_s = [kind.peak_flops_per_s_in(dtype) * self.costs.most_flops for kind in self._kinds]
        wanted = [o for o in node.operands if isinstance(o, str) and o in self.graph.differentiable]
        data.forward_curve = self._curves_of(node, dtype, 0)
        data.backward_curve = self._curves_of(node, dtype, len(wanted))
        data.operands = [self._operand(block, node, signature, i) for i in range(len(node.operands))]
        data.outputs = [self._output(node, signature, i) for i in range(len(node.outputs))]
        data.writes_gradient = any(name in self.graph.differentiable for name in node.outputs)
        data.has_backward = data.writes_gradient and any(
            operand in self.graph.differentiable for operand in node.operands if isinstance(operand, str)
        )
        data.is_free_forward = is_free(self.graph, node, backward=False)
        data.is_free_backward = is_free(self.graph, node, backward=True)
        return data

    def _curves_of(self, node: Node, dtype: str, gradients: int) -> list[int]:
        """The number of a node's curve for each kind of device; none at all where nothing was measured."""
        key = op_key(node.op_name, tuple(sorted(node.attrs.items())), dtype, gradients)
        found = [self.costs.curve(key, kind) for kind in self._kinds]
        if all(curve is None for curve in found):
            return []
        return [-1 if curve is None else self._curve_number(curve) for curve in found]

    def _curve_number(self, curve: Curve) -> int:
        if id(curve) not in self._curve_numbers:  # the costs keep it, and its id with it
            data = native.TimeCurve()
            data.base_s, data.s_per_flop = curve.plane.base_s, curve.plane.s_per_flop
            data.s_per_byte = curve.plane.s_per_byte
            data.least_s_per_flop, data.least_s_per_byte = curve.least_s_per_flop, curve.least_s_per_byte
            data.shapes, data.seconds = list(map(list, curve.shapes)), list(curve.seconds)
            self._curve_numbers[id(curve)] = len(self.curves)
            self.curves.append(data)
        return self._curve_numbers[id(curve)]

    def _operand(self, block: Block, node: Node, signature: Signature, position: int) -> native.Access:
        operand, access = node.operands[position], native.Access()
        axes = signature.operands[position]
        access.is_present = isinstance(operand, str) and axes is not None
        if not isinstance(operand, str) or axes is None:
            return access
        value = self.graph.value(operand)
        access.is_finishing = position in signature.finishing
        access.is_gathered = any(dim in node.op.gathers for axis in axes for dim in axis.dims)
        access.wants_gradient = operand in self.graph.differentiable
        access.is_kept = position in self._kept[node.name].operands
        access.item_bytes = ITEM_BYTES[value.dtype]
        access.shape = list(value.shape)
        access.axes = [_axis(axis, signature) for axis in axes]
        if operand not in block.writes:
            access.value = self._values.get(operand, -1)
        for n, other in enumerate(block.nodes):
            if operand in other.outputs:
                access.inner_node, access.inner_output = n, other.outputs.index(operand)
        access.weight = self._weights.get(operand, -1)
        return access

    def _output(self, node: Node, signature: Signature, position: int) -> native.Access:
        access, value = native.Access(), self.graph.value(node.outputs[position])
        access.value = self._values.get(value.name, -1)
        access.item_bytes = ITEM_BYTES[value.dtype]
        access.shape = list(value.shape)
        access.is_kept = value.name in self._kept_outputs
        access.axes = [_axis(axis, signature) for axis in signature.outputs[position]]
        return access


def _axis(axis: Affine, signature: Signature) -> native.Axis:
    dims, data = list(signature.sizes), native.Axis()
    data.offset, data.divisor = axis.const, axis.divisor
    data.dims = [dims.index(dim) for dim, _ in axis.terms]
    data.strides = [stride for _, stride in axis.terms]
    return data


def native_tasks(
    strategy: Strategy, machine: Machine, costs: AnalyticCosts, *, in_buckets: bool = False
) -> FlatTasks:
    """The task graph of one training iteration, by the native core."""
    strategy.checked(machine)
    problem = FlatProblem(strategy.graph, machine, costs, strategy.apart, in_buckets=in_buckets)
    planned = native.PlannedTasks(problem.native)
    problem.place(planned, strategy)
    return FlatTasks(*planned.flat(), problem.resources)
