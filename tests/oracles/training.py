"""The same training twice: under a plan on several ranks, and by plain PyTorch in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oracles import beltcases
from oracles.ranks import TIMEOUT_S, Ranks
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.zoo import ZOO
from soapstone.machine import preset
from soapstone.plans import Plan, read_plan, simulation, write_plan
from soapstone.runtime.belts import local_belts
from soapstone.runtime.mailbox import local_mailbox
from soapstone.runtime.run import state_of
from soapstone.runtime.trainer import Options, Trainer
from soapstone.runtime.wire import Wire
from soapstone.strategy.strategy import Strategy

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to train: an optimizer of torch with its arguments, and what a Trainer is told beside it."""

    optimizer: str = "SGD"
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01, "momentum": 0.9})
    options: Options = field(default_factory=Options)
    decay: float | None = None  # of the learning rate, by each step
    by_belts: bool = False  # whether messages go as those of GPUs that ranks share

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer for these parameters."""
        return getattr(torch.optim, self.optimizer)(parameters, **self.arguments)


@cache
def tiny(name: str, steps: int) -> tuple[nn.Module, list[tuple[Tensor, ...]], Captured]:
    """The tiny model of the zoo in double precision, without dropout, and a batch for each step."""
    torch.manual_seed(0)
    model = ZOO[name]
    options = {"dropout": 0.0} if "dropout" in model.options else {}
    module = model.build(tiny=True, **options).double()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    batches = [
        tuple(
            t.double() if t.is_floating_point() else t
            for t in model.inputs(4, tiny=True, seed=step, **options)
        )
        for step in range(steps)
    ]
    return module, batches, capture(module, batches[0], name)


def named_tensors(module: nn.Module, prefix: str = "") -> Tensors:
    """All parameters and buffers, tied ones under each of their names."""
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name.removeprefix(prefix): tensor.detach() for name, tensor in found}


def planned(strategy: Strategy, devices: int, folder: Path) -> str:
    """The path of a plan file for a strategy on so many CPU devices."""
    machine = preset(f"cpu:1x{devices}")
    simulated = simulation(strategy.checked(machine), machine)
    path = folder / f"plan{len(list(folder.iterdir()))}.json"
    write_plan(Plan(strategy, machine, simulated.prediction, "test"), path)
    return str(path)


def trained_by_ranks(  # noqa: PLR0917, a case has many parts
    ranks: Ranks,
    strategy: Strategy,
    devices: int,
    captured: Captured,
    module: nn.Module,
    batches: Sequence[Any],
    recipe: Recipe,
    folder: Path,
    resume: Path | None = None,
    save: Path | None = None,
) -> tuple[list[float], Tensors]:
    """The losses and the final state of training under a strategy."""
    path = planned(strategy, devices, folder)
    answers = ranks.run(
        train_case,
        devices,
        path,
        plain(named_tensors(module)),
        plain(captured.constants),
        [_plain_batch(b) for b in batches],
        recipe,
        None if resume is None else str(resume),
        None if save is None else str(save),
    )
    losses, state = answers[0]
    for other, _ in answers:
        assert other == losses, "ranks report different losses"
    return losses, {name: torch.from_numpy(array) for name, array in state.items()}


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _plain_batch(batch: Any) -> Any:
    return [_plain_batch(b) for b in batch] if isinstance(batch, tuple | list) else batch.numpy()


def _batch(batch: Any) -> Any:
    return [_batch(b) for b in batch] if isinstance(batch, list) else torch.from_numpy(batch)


def train_case(  # noqa: PLR0917, a case has many parts
    rank: int,
    size: int,
    path: str,
    named: Any,
    constants: Any,
    batches: Any,
    recipe: Recipe,
    resume: str | None = None,
    save: str | None = None,
) -> tuple[list[float], Any]:
    """What each rank does."""
    trainer = trainer_of(rank, size, path, named, constants, recipe)
    trainer.optimizer.register_step_post_hook(_spoil)
    scheduler = _scheduler(trainer.optimizer, recipe)
    if resume is not None:
        trainer.load(resume)
    losses = []
    for batch in batches:
        losses.append(trainer.step(_batch(batch)))
        if scheduler is not None:
            scheduler.step()
    if save is not None:
        trainer.save(save)
        trainer.export(Path(save) / "model.safetensors")
    found = trainer.state_dict()
    return losses, {name: t.numpy() for name, t in found.items()} if rank == 0 else {}


def trainer_of(
    rank: int, size: int, path: str, named: Any, constants: Any, recipe: Recipe, device: str = "cpu"
) -> Trainer:
    """A rank's trainer."""
    plan = read_plan(Path(path))
    tensors = {name: torch.from_numpy(array).clone() for name, array in named.items()}
    state = state_of(plan.graph, tensors, {k: torch.from_numpy(v) for k, v in constants.items()})
    parameters = {
        source: nn.Parameter(tensors[source])
        for value in plan.graph.values.values()
        if value.role == "weight"
        for source in value.sources[:1]
    }
    shares = (device == "cpu" or recipe.by_belts) and "LOCAL_RANK" in os.environ
    store = dist.distributed_c10d._get_default_store() if shares else None
    mailbox = local_mailbox(rank, store) if shares else None
    assert shares == (mailbox is not None) or os.environ["LOCAL_WORLD_SIZE"] == "1"
    place = torch.device(device)
    wire = Wire(rank, size, place, TIMEOUT_S, mailbox)
    if recipe.by_belts:
        assert mailbox is not None
        of_gpus = place.type == "cuda"
        belts = local_belts(mailbox, place, store) if of_gpus else beltcases.belts_of(mailbox)
        assert belts is not None, "belts are refused"
        wire = Wire(rank, size, place, TIMEOUT_S, belts=belts)
    return Trainer(plan, state, parameters, recipe.optimizer_of, wire, recipe.options)


def _spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Optimizers may change gradients where they lie; other ranks must have read what is theirs by then."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)


def _scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    if recipe.decay is None:
        return None
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, recipe.decay)


def trained_plainly(
    module: nn.Module,
    batches: Sequence[Any],
    recipe: Recipe,
    loss_of: Callable[[nn.Module, Any, int], Tensor] | None = None,
) -> tuple[list[float], Tensors]:
    """The losses and the final state of training by PyTorch alone."""
    model = deepcopy(module).train()
    optimizer = recipe.optimizer_of(model.parameters())
    scheduler = _scheduler(optimizer, recipe)
    losses = []
    for step, batch in enumerate(batches):
        micro = [batch] if recipe.options.accumulate == 1 else batch
        optimizer.zero_grad()
        total = 0.0
        for part in micro:
            loss = model(*part) if loss_of is None else loss_of(model, part, step)
            (loss / len(micro)).backward()
            total += loss.item() / len(micro)
        if recipe.options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.options.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses, named_tensors(model)


def assert_same(
    ours: tuple[list[float], Tensors],
    theirs: tuple[list[float], Tensors],
    rtol: float = 1e-9,
    atol: float = 1e-10,
) -> None:
    """Losses and state agree."""
    torch.testing.assert_close(
        torch.tensor(ours[0], dtype=torch.float64),
        torch.tensor(theirs[0], dtype=torch.float64),
        rtol=rtol,
        atol=atol,
    )
    for name, tensor in ours[1].items():
        torch.testing.assert_close(
            tensor, theirs[1][name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
