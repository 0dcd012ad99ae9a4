"""LeNet on scikit-learn's handwritten digits, split over the ranks that torchrun starts.

    torchrun --nproc-per-node 4 examples/digits.py [--epochs 20] [--losses losses.json]

The plan is found by a search, the same one on every rank. On four devices, with its ten small gradients
summed together, it is data parallel. Any plan trains the same network.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import soapstone

BATCH = 64
TESTED = 360


class LeNet(nn.Module):
    """Two convolutions, a pool and three linear layers; `forward` gives the training loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        self.dropout = nn.Dropout(0.3)

    def logits(self, images: Tensor) -> Tensor:
        """The score of each digit."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2)
        x = F.relu(self.fc1(self.dropout(x).flatten(1)))
        return self.fc3(F.relu(self.fc2(self.dropout(x))))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self.logits(images), labels)


def digits() -> tuple[Tensor, Tensor]:
    """1797 images of 8 x 8 pixels, shuffled, and their labels."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images[order], torch.tensor(found.target)[order]


def batches(images: Tensor, labels: Tensor, epochs: int, rows: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches, in another order each epoch; of each batch the rows that a rank reads."""
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for at in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[at : at + BATCH][rows]
            yield images[chosen], labels[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--losses", type=Path, help="write the losses of all steps here, as JSON")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = LeNet()
    example = (torch.zeros(BATCH, 1, 8, 8), torch.zeros(BATCH, dtype=torch.int64))
    machine = f"cpu:1x{os.environ.get('WORLD_SIZE', '1')}"
    plan = soapstone.plan(model, example, machine=machine, proposals=300)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = soapstone.parallelize(model, plan, optimizer=optimizer, device=arguments.device)

    images, labels = digits()
    source = partial(batches, images[TESTED:], labels[TESTED:], arguments.epochs)
    losses = [trainer.step(batch) for batch in trainer.batches(source)]
    model.load_state_dict(trainer.state_dict())
    model.eval()
    if trainer.wire.rank == 0:
        with torch.no_grad():
            right = (model.logits(images[:TESTED]).argmax(1) == labels[:TESTED]).float().mean().item()
        print(f"{len(losses)} steps, loss {losses[-1]:.4f}, accuracy {right:.4f}")
        if arguments.losses is not None:
            arguments.losses.write_text(json.dumps({"losses": losses, "accuracy": right}))


if __name__ == "__main__":
    main()
