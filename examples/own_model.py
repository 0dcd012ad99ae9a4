"""Plan a model of your own and train it, in one script.

    torchrun --nproc-per-node 2 examples/own_model.py [--steps 20] [--save weights.safetensors]

Every rank searches by itself: with a budget of proposals the plan depends on the seed alone, so all find the
same one. A plan that took long to find is better kept: `soapstone.plans.write_plan` and `read_plan`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soapstone

WORDS, WIDTH, SAMPLES, LENGTH = 20_000, 64, 32, 16


class Classifier(nn.Module):
    """The mean of a text's word vectors, and two layers: most of its weights are word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 256)
        self.scores = nn.Linear(256, 8)

    def forward(self, texts: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy."""
        means = self.words(texts).mean(1)
        return F.cross_entropy(self.scores(F.relu(self.hidden(means))), labels)


def batch() -> tuple[Tensor, Tensor]:
    """Texts whose first word says what they are about."""
    texts = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return texts, texts[:, 0] % 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, help="write the trained weights here")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier()
    machine = f"cpu:1x{os.environ.get('WORLD_SIZE', '1')}"
    plan = soapstone.plan(model, batch(), machine=machine, proposals=200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = soapstone.parallelize(model, plan, optimizer=optimizer)
    losses = [trainer.step(batch()) for _ in range(arguments.steps)]
    model.load_state_dict(trainer.state_dict())  # on every rank: the plain module, trained
    if arguments.save is not None:
        trainer.export(arguments.save)
    if trainer.wire.rank == 0:
        used = {device for placement in plan.strategy.placements.values() for device in placement.devices}
        noun = "device" if len(used) == 1 else "devices"
        print(f"{len(used)} {noun} at work, loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")


if __name__ == "__main__":
    main()
