"""What ranks run to test an exported script: a few steps of plain PyTorch under it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn


class Dense(nn.Module):
    """A convolution, and dense layers that can be split in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, kernel_size=3)
        self.wide = nn.Linear(32, 16)
        self.narrow = nn.Linear(16, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = torch.relu(self.conv(images)).flatten(1)
        x = self.narrow(torch.relu(self.wide(x)))
        return nn.functional.cross_entropy(self.last(torch.relu(x)), labels)


def dense() -> tuple[Dense, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a batch, the same everywhere."""
    torch.manual_seed(0)
    return Dense(), (torch.randn(8, 1, 6, 6), torch.randint(4, (8,)))


def alone(steps: int) -> list[float]:
    """The losses of one process."""
    model, inputs = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def under_script(rank: int, size: int, text: str, steps: int) -> tuple[list[float], dict[str, list[int]]]:
    """The losses under an exported script, and the shapes of the parameters that a rank has."""
    del rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    made = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    mesh = init_device_mesh("cpu", (size,))
    model, inputs = dense()
    made.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(made.backward(model(*made.local(inputs, mesh)), model, mesh).item())
        optimizer.step()
    shapes = {
        name: list((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in model.named_parameters()
    }
    return losses, shapes
