"""torch, imported when an operator first runs.

Operator definitions say how torch computes them, but planning never runs one: importing
`soapstone.ops` must not import torch. The names here stand for the modules and fetch them on
first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """A module that is imported when an attribute of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")

__all__ = ["F", "torch"]
