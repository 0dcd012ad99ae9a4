"""What one training iteration takes, without the task graph that it takes it by.

The native core builds and simulates every task (cpp/plain_builder.h) and lays what devices hold over the
times (cpp/buffers.h). Makespan, bytes and peaks are those of `tasks.build`, `sim.reference` and `sim.memory`
to the bit, which the property tests hold; for hundreds of devices they are there in seconds instead of
minutes. Who wants to see tasks needs the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soapstone import native
from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.sim.memory import OPTIMIZER_STATE, DeviceMemory, filled
from soapstone.strategy.blocks import free_values
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.buffers import Ledger, view_of
from soapstone.tasks.flat import FlatProblem
from soapstone.tasks.placed import Placed, placed_block
from soapstone.tasks.task import BufferKind

KINDS = tuple(BufferKind)
"""The kinds of buffers in the order of the native core's numbers, which ends where planning does."""


@dataclass(frozen=True)
class Outcome:
    """What one iteration takes. `bucketed_s` is its time with the gradients of each shelf summed together, as
    the runtime does it (`tasks.buckets`); the makespan has a sum for each weight, as the searches have it,
    with the latencies of all. `busy_s` is how long each device computes; `gradient_bytes` is the part of
    the moved bytes that sums gradients of weights; `memory` is empty where nobody asked for it."""

    makespan_s: float
    bucketed_s: float
    moved_bytes: int
    gradient_bytes: int
    busy_s: tuple[float, ...]
    memory: tuple[DeviceMemory, ...] = ()


def bucketed_s(strategy: Strategy, machine: Machine, costs: AnalyticCosts) -> float:
    """What `Outcome.bucketed_s` is, by itself."""
    (found_s,) = bucketed_times([strategy], machine, costs)
    return found_s


def bucketed_times(
    strategies: Sequence[Strategy], machine: Machine, costs: AnalyticCosts
) -> tuple[float, ...]:
    """The same for several strategies of one graph."""
    problems: dict[frozenset[str], FlatProblem] = {}
    for strategy in strategies:
        if strategy.apart not in problems:
            graph = strategy.checked(machine).graph
            problems[strategy.apart] = FlatProblem(graph, machine, costs, strategy.apart)
    return tuple(_bucketed_s(problems[strategy.apart], strategy) for strategy in strategies)


def outcome(
    strategy: Strategy, machine: Machine, costs: AnalyticCosts, states_per_weight: int | None = None
) -> Outcome:
    """What a strategy takes on a machine; with its memory where it is said how many numbers an optimizer
    remembers for each weight (`sim.memory.STATES_PER_WEIGHT`)."""
    problem = FlatProblem(strategy.checked(machine).graph, machine, costs, strategy.apart)
    makespan_s, moved, gradients, busy_s, memory = _foretold(problem, strategy, states_per_weight)
    return Outcome(makespan_s, _bucketed_s(problem, strategy), moved, gradients, busy_s, memory)


def peaks(
    strategy: Strategy, machine: Machine, costs: AnalyticCosts, states_per_weight: int
) -> tuple[float, int, tuple[DeviceMemory, ...]]:
    """The makespan, the moved bytes and the memory of an `Outcome`, which are quicker to have than all."""
    problem = FlatProblem(strategy.checked(machine).graph, machine, costs, strategy.apart)
    makespan_s, moved, _, _, memory = _foretold(problem, strategy, states_per_weight)
    return makespan_s, moved, memory


def _foretold(
    problem: FlatProblem, strategy: Strategy, states_per_weight: int | None
) -> tuple[float, int, int, tuple[float, ...], tuple[DeviceMemory, ...]]:
    planned = native.PlannedTasks(problem.native)
    problem.place(planned, strategy)
    if states_per_weight is None:
        makespan_s, moved, gradients, busy_s, _ = planned.foretold([], [], 0)
        return makespan_s, moved, gradients, tuple(busy_s), ()
    placed = [placed_block(strategy, number) for number in range(len(strategy.blocks))]
    ledger = Ledger(strategy.graph)
    held = [held_of(problem, ledger, each) for each in placed]
    inputs = input_bytes(ledger, placed, len(problem.machine.devices))
    makespan_s, moved, gradients, busy_s, highest = planned.foretold(held, inputs, states_per_weight)
    memory = tuple(_memory(*peak, states_per_weight) for peak in highest)
    return makespan_s, moved, gradients, tuple(busy_s), memory


def _bucketed_s(problem: FlatProblem, strategy: Strategy) -> float:
    planned = native.PlannedTasks(problem.native.in_buckets())
    problem.place(planned, strategy)
    return planned.foretold([], [], 0)[0]


def _memory(peak_bytes: int, at_s: float, parts: Sequence[int], states_per_weight: int) -> DeviceMemory:
    told: dict[str, int] = dict(zip(map(str, KINDS), parts, strict=False))
    told[OPTIMIZER_STATE] = states_per_weight * told[BufferKind.WEIGHT]
    return DeviceMemory(peak_bytes, at_s, filled(told))


def held_of(problem: FlatProblem, ledger: Ledger, placed: Placed) -> native.BlockHeld:
    """What the shards of a block write, and when the block itself needs it: `Ledger.activations` with a
    segment for each task, since those of one shard come one after the other."""
    data, held, slot_of = native.BlockHeld(), list[native.HeldData](), dict[str, int]()
    for n, node in enumerate(placed.block.nodes):
        first, last = placed.segments.reads_in[n], placed.segments.writes_in[n]
        seen = view_of(placed, n)
        for i, name in enumerate(node.outputs):
            if seen is None:
                slot_of[name] = len(held)
                held.append(_slot(ledger, placed, n, i, first))
            else:
                slot_of[name] = slot_of[seen]
        used = [slot_of[o] for o in (*node.operands, *node.outputs) if isinstance(o, str) and o in slot_of]
        for slot in used:
            held[slot].needed_in = max(held[slot].needed_in, last)
        for slot in (slot_of[name] for name in ledger.kept_names(node) if name in slot_of):
            known = held[slot].kept_for
            held[slot].kept_for = first if known < 0 else min(known, first)
    data.held = held
    data.outputs = [slot_of[name] for name in placed.block.leader.outputs]
    data.values = list(_read_elsewhere(problem, slot_of))
    return data


def _slot(ledger: Ledger, placed: Placed, node: int, output: int, segment: int) -> native.HeldData:
    slot = native.HeldData()
    slot.size_bytes = ledger.sizes_bytes(placed, node, output)
    slot.made_in = segment
    return slot


def _read_elsewhere(problem: FlatProblem, slot_of: dict[str, int]) -> Iterator[tuple[int, int]]:
    for name, slot in slot_of.items():
        number = problem.value_number(name)
        if number is not None:
            yield number, slot


def input_bytes(ledger: Ledger, placed: Sequence[Placed], device_count: int) -> list[int]:
    """What each device holds of inputs, entered into a ledger that has nothing else."""
    ledger.inputs(placed, free_values(ledger.graph))
    found = [0] * device_count
    for slot in ledger.slots:
        found[slot.device] += slot.size_bytes
    return found
