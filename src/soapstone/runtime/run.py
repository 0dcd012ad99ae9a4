"""A run: a plan, the module's tensors and the ranks, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from soapstone.errors import TrainingError
from soapstone.graph import Graph, Role
from soapstone.runtime.collectives import USED, chosen
from soapstone.runtime.deferring import deferred
from soapstone.runtime.executor import Executor
from soapstone.runtime.inputs import FreeValues
from soapstone.runtime.linking import Links
from soapstone.runtime.order import execution_order
from soapstone.runtime.program import Program
from soapstone.runtime.rows import rows_of
from soapstone.runtime.weights import Held, Weights
from soapstone.runtime.wire import Wire
from soapstone.sim.reference import Timeline
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.exchange import Pattern
from soapstone.tasks.placed import placed_blocks
from soapstone.tasks.task import TaskGraph


@dataclass(frozen=True)
class State:
    """What a graph needs beside its batch: weights and buffers under the graph's names and in its
    shapes, and the elements of its constants."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def state_of(graph: Graph, named: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> State:
    """The state of a graph, from the parameters and buffers of the module it was captured from."""
    found: dict[Role, dict[str, Tensor]] = {Role.WEIGHT: {}, Role.BUFFER: {}}
    for role, tensors in found.items():
        for value in graph.with_role(role):
            own = next((named[source] for source in value.sources if source in named), None)
            if own is None:
                raise TrainingError(f"the model has no '{value.sources[0]}', which the plan's model has")
            stored = value.stored_shape or value.shape
            if tuple(own.shape) != stored:
                raise TrainingError(
                    f"'{value.sources[0]}' of the model has shape {list(own.shape)} where the plan's has"
                    f" {list(stored)}"
                )
            tensors[value.name] = own.detach().reshape(value.shape)
    return State(found[Role.WEIGHT], found[Role.BUFFER], constants)


@dataclass(frozen=True)
class Run:
    """One rank's part in training under a strategy."""

    strategy: Strategy
    weights: Weights
    held: Held
    free: FreeValues
    executor: Executor


def started(  # noqa: PLR0913, all that a run is made of
    strategy: Strategy,
    tasks: TaskGraph,
    timeline: Timeline,
    state: State,
    wire: Wire,
    *,
    seed: int = 0,
    fuse: bool = True,
    replay: bool = True,
    collectives: Sequence[Pattern] | None = None,
) -> Run:
    """Link this rank's part of the task graph to the state's tensors. `collectives` are those that the
    backend does better than messages (None: as `USED` has it)."""
    graph = strategy.graph
    if graph.loss is None or graph.loss not in graph.differentiable:
        raise TrainingError(f"model '{graph.name}' has no loss that depends on a weight: nothing to train")
    blocks = placed_blocks(strategy)
    weights = Weights(graph, blocks, tasks.exchanges)
    held = Held(weights, wire.rank, wire.device)
    held.load(state.weights)
    free = FreeValues(graph, state.constants, state.buffers, wire, rows_of(graph, blocks, wire.size))
    used = USED[wire.backend] if collectives is None else collectives
    summed = [p.holders for pieces in weights.pieces.values() for p in pieces if p.is_summed]
    everyone = tuple(range(wire.size))  # one group for all of them is worth its price in any case
    moves, groups = chosen(tasks, used, [*summed, everyone])
    unsummed = deferred(graph, blocks, tasks.exchanges) if fuse else frozenset()
    links = Links(strategy, tasks, wire.rank, wire.device, moves, unsummed)
    program = Program(links, execution_order(tasks, timeline), weights, held, free, fuse=fuse)
    wire.prepare([*summed, *groups])
    return Run(strategy, weights, held, free, Executor(program, wire, seed, replays=replay))
