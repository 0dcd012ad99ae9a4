"""torch and Z3, and what needs torch to be defined, imported when they are first used.

Operator definitions say how torch computes them, but planning never runs one: importing
`soapstone.ops` must not import torch. Searches use rules that are proved already, so Z3 waits as
well. The names here stand for the modules and fetch them on first use.
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
    import z3

    from soapstone.ops.definitions import shared_statistics
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")
    z3 = LazyModule("z3")
    shared_statistics = LazyModule("soapstone.ops.definitions.shared_statistics")

__all__ = ["F", "shared_statistics", "torch", "z3"]
