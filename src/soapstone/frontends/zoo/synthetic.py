"""Example inputs: random tensors that depend on a seed and on nothing else.

Values are drawn on the CPU whatever the default device is, so that the same seed means the same
batch everywhere. On the meta device nothing is drawn: only shapes and types are wanted there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Synthetic:
    """A stream of random tensors on the current default device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._device = torch.get_default_device()

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and deviation 1, such as normalized pixels."""
        if self._device.type == "meta":
            return torch.empty(shape)
        return torch.randn(shape, generator=self._generator, device="cpu").to(self._device)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Integers from 0 to `below` - 1, such as class labels and token ids."""
        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.int64)
        drawn = torch.randint(below, shape, generator=self._generator, device="cpu")
        return drawn.to(self._device)
