"""What a user's own script calls: `soapstone.plan` and `soapstone.parallelize`.

The parts they join do not know each other: `frontends` captures the module, `search` finds a plan, `runtime`
runs it. `soapstone/__init__.py` offers them without importing torch before they are used.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soapstone.cost.choice import costs_for
from soapstone.errors import SearchError, TrainingError
from soapstone.frontends.batchnorm import WHOLE
from soapstone.frontends.capture import capture
from soapstone.frontends.losses import INNER, Loss, WithLoss, with_loss
from soapstone.graph import Graph, Role
from soapstone.machine import Machine, resolve
from soapstone.ops.definitions.dtypes import torch_dtype
from soapstone.plans import Plan, read_plan
from soapstone.runtime.optimizing import OptimizerOf
from soapstone.runtime.run import state_of
from soapstone.runtime.session import joined
from soapstone.runtime.trainer import Options, Trainer
from soapstone.runtime.wire import TIMEOUT_S, Wire
from soapstone.search.find import DEFAULT_BUDGET, DEFAULT_SEARCH, budget_seconds, find, settled
from soapstone.search.find import Options as SearchOptions
from soapstone.search.mcmc import Budget
from soapstone.search.pipelines import Wanted


def plan(  # noqa: PLR0913, one parameter for each thing a user may decide
    model: nn.Module,
    example_inputs: Sequence[Tensor],
    *,
    machine: Machine | str,
    loss: str | Loss | None = None,
    budget: str | float | None = None,
    proposals: int | None = None,
    search: str = DEFAULT_SEARCH,
    seed: int = 0,
    threads: int | None = None,
    costs: str = "auto",
    optimizer: str = "momentum",
    slack: float = 0.0,
    stages: int | None = None,
    micro_batches: int | None = None,
    batch_norm: str = WHOLE,
) -> Plan:
    """The best way that a search finds to train the model on a machine.

    The model returns its loss, or `loss` is added to it, as `soapstone plan --loss` would; the example inputs
    are those of one step, all samples of it. `machine` is what `--machine` takes. `budget` is seconds or a
    text such as "5m", 30 s if nothing is said; with `proposals`, the plan depends on the seed alone, so that
    every rank of a run finds the same. With `stages` or `micro_batches` it is a pipeline of so many. With
    `batch_norm="local"` batch norms take each shard's own statistics, as DDP does. Ctrl-C ends the search
    with the best plan so far.
    """
    found = machine if isinstance(machine, Machine) else resolve(machine)
    name = type(model).__name__
    wrapped, inputs = with_loss(model, tuple(example_inputs), loss, name)
    names = wrapped.input_names(len(inputs))
    graph = capture(wrapped, inputs, name, prefix=INNER, input_names=names, batch_norm=batch_norm).graph
    if budget is None and proposals is None:
        budget = DEFAULT_BUDGET
    try:
        seconds = None if budget is None else budget_seconds(str(budget))
    except ValueError as error:
        raise SearchError(f"the budget {error}") from None
    workers = threads or len(os.sched_getaffinity(0))
    wanted = Wanted(stages, micro_batches)
    if wanted != Wanted():
        search = "pipeline"
    options = SearchOptions(search, Budget(seconds, proposals), seed, workers, optimizer, slack, wanted)
    chosen = costs_for(found, costs, graph=graph)
    return settled(find(graph, found, chosen, options), found, chosen, "", options).plan


def parallelize(  # noqa: PLR0913, one parameter for each thing a user may decide
    model: nn.Module,
    plan: Plan | Path | str,
    *,
    optimizer: Optimizer | OptimizerOf,
    loss: str | Loss | None = None,
    device: str = "cpu",
    clip_norm: float | None = None,
    accumulate: int = 1,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    fuse: bool = True,
    replay: bool = True,
    weights: str = "flush",
    wire: Wire | None = None,
) -> Trainer:
    """A Trainer of the model under a plan, on this rank.

    The model is a whole one, the same on every rank (seed its initialisation); the trainer takes from it
    what this rank needs. `optimizer` is one made for its parameters, or a function that makes one: its
    parameters become the rank's part of the weights. `loss` is what the plan's capture was told. A rank
    waits `timeout_s` for another before it gives up. `fuse=False` takes every task back by itself, for
    traces. `replay=False` runs every step on a lone GPU from Python, and records none. Under torchrun the
    ranks find each other by themselves; `wire` is for those who have joined them already. `weights="2bw"`
    takes gradients at the weights one update older, as PipeDream-2BW does.
    """
    found = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    prefix = INNER if isinstance(model, WithLoss) else ""
    named: dict[str, Tensor] = {
        name.removeprefix(prefix): tensor
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    parameters = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
    wire = wire or joined(device, timeout_s)
    with wire.telling():
        state = state_of(found.graph, named, constants_of(found.graph, model, loss))
        options = Options(clip_norm, accumulate, seed, fuse, replay, weights=weights)
        return Trainer(found, state, parameters, optimizer, wire, options)


def constants_of(graph: Graph, model: nn.Module, loss: str | Loss | None = None) -> Mapping[str, Tensor]:
    """The elements of a graph's constants (masks, positions, tables), which a plan does not hold: the
    model is captured once more where there are any."""
    wanted = [value for value in graph.with_role(Role.CONSTANT) if value.fill is None]
    if not wanted:
        return {}
    inputs = [torch.zeros(v.shape, dtype=torch_dtype(v.dtype)) for v in graph.with_role(Role.INPUT)]
    names = [value.name for value in graph.with_role(Role.INPUT)]
    if not isinstance(model, WithLoss):
        known = inspect.signature(model.forward).parameters
        by_name = names if list(known)[: len(names)] != names and all(n in known for n in names) else []
        model, inputs = _wrapped(model, inputs, loss, graph.name, by_name)
    captured = capture(model, inputs, graph.name, prefix=INNER, input_names=names, samples=graph.sample_count)
    for value in wanted:
        found = captured.graph.values.get(value.name)
        if value.name not in captured.constants or found is None or found.shape != value.shape:
            raise TrainingError(
                f"the model has no constant '{value.name}' of shape {list(value.shape)}, which the plan's"
                " model has: make the plan anew"
            )
    return captured.constants


def _wrapped(
    model: nn.Module, inputs: list[Tensor], loss: str | Loss | None, name: str, names: list[str]
) -> tuple[nn.Module, list[Tensor]]:
    wrapped, tensors = with_loss(model, inputs, loss, name, names)
    return wrapped, list(tensors)
