"""What ranks run to test an exported script: a few steps of plain PyTorch under it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from oracles import ddpcases

LR = 0.5


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


class Words(nn.Module):
    """An embedding, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next words; a sequence is along the first axis."""
        x = self.table(words)
        x = self.norm(x + torch.tanh(self.mix(x)))
        return nn.functional.cross_entropy(self.head(x).transpose(0, 1).flatten(0, 1), targets.flatten())


def words() -> tuple[Words, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a batch, the same everywhere: samples are along the second axis of the words."""
    torch.manual_seed(0)
    return Words(), (torch.randint(12, (6, 8)), torch.randint(12, (8, 6)))


def llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The zoo's small Llama with a tied head, and a batch."""
    from soapstone.frontends.source import load

    torch.manual_seed(0)
    source = load("llama_1b", tiny=True, batch=8, weights=True)
    return source.module, source.inputs


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "dense": dense,
    "words": words,
    "llama": llama,
    "normed": ddpcases.net,
}


def alone(model_name: str, steps: int, parts: int = 1) -> list[float]:
    """The losses of one process; of a batch in several parts, their mean."""
    model, inputs = MODELS[model_name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        pieces = zip(*(x.chunk(parts) for x in inputs), strict=True)
        loss = torch.stack([model(*piece) for piece in pieces]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def under_script(
    rank: int, size: int, model_name: str, text: str, steps: int, shard_weights: bool
) -> tuple[list[float], dict[str, list[int]]]:
    """The losses under an exported script, and the shapes of the parameters that a rank has."""
    del rank, size
    from torch.distributed.tensor import DTensor

    made = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    mesh = made.make_mesh()
    model, inputs = MODELS[model_name]()
    made.parallelize(model, mesh, shard_weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(made.backward(made.loss_of(model, made.local(inputs, mesh)), model, mesh).item())
        optimizer.step()
    shapes = {
        name: list((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in model.named_parameters()
    }
    return losses, shapes
