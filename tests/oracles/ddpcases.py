"""What ranks run to compare with DistributedDataParallel: the same model, batches and optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BATCH, STEPS = 8, 4


class Net(nn.Module):
    """Two convolutions, each with a batch norm; a constant of many numbers; a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4, momentum=0.3),
            nn.ReLU(),
        )
        self.out = nn.Linear(4 * 3 * 3, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        shades = torch.linspace(0.5, 1.5, 6, dtype=images.dtype)
        return nn.functional.cross_entropy(self.out(self.layers(images * shades).flatten(1)), labels)


def net() -> tuple[Net, tuple[Tensor, Tensor]]:
    """The model, the same everywhere, and its first batch."""
    torch.manual_seed(3)
    return Net().double(), batches()[0]


def synchronised() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same model with statistics of all ranks under DDP."""
    module, batch = net()
    return nn.SyncBatchNorm.convert_sync_batchnorm(module), batch


def batches() -> list[tuple[Tensor, Tensor]]:
    """A batch for each step; samples differ in scale, so that halves have other statistics."""
    drawn = torch.Generator().manual_seed(7)
    scale = torch.linspace(1.0, 3.0, BATCH, dtype=torch.float64).view(-1, 1, 1, 1)
    return [
        (
            scale * torch.randn(BATCH, 2, 6, 6, dtype=torch.float64, generator=drawn),
            torch.randint(5, (BATCH,), generator=drawn),
        )
        for _ in range(STEPS)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all these runs."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def under_ddp(rank: int, size: int) -> tuple[list[float], dict[str, Any]]:
    """The mean losses of DDP, and the state of this rank."""
    module, _ = net()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = sgd(model.parameters())
    losses = []
    for images, labels in batches():
        optimizer.zero_grad()
        loss = model(images.chunk(size)[rank], labels.chunk(size)[rank])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses, {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def under_saved_plan(rank: int, size: int, path: str) -> tuple[list[float], dict[str, Any]]:
    """The losses and the state under a plan file."""
    del rank, size
    return _trained(net()[0], path)


def under_own_plan(rank: int, size: int, makes: str, batch_norm: str) -> tuple[list[float], dict[str, Any]]:
    """The losses and the state under data parallelism of the graph that `soapstone.plan` has, made by the
    rank itself."""
    del rank
    import soapstone
    from soapstone.plans import Plan, simulation
    from soapstone.search.baselines import data_parallel

    module, batch = globals()[makes]()
    found = soapstone.plan(
        module,
        batch,
        machine=f"cpu:1x{size}",
        search="mcmc",
        proposals=1,
        costs="analytic",
        batch_norm=batch_norm,
    )
    strategy = data_parallel(found.graph, found.machine)
    return _trained(module, Plan(strategy, found.machine, simulation(strategy, found.machine).prediction))


def _trained(module: nn.Module, plan: Any) -> tuple[list[float], dict[str, Any]]:
    import soapstone

    trainer = soapstone.parallelize(module, plan, optimizer=sgd(module.parameters()), timeout_s=20.0)
    losses = [trainer.step(batch) for batch in batches()]
    return losses, {name: tensor.numpy() for name, tensor in trainer.state_dict().items()}
