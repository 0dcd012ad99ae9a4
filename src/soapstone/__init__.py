"""Soapstone: decide how to split a deep-learning model over many devices, and train it that way."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.api import parallelize, plan

__all__ = ["__version__", "parallelize", "plan"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What scripts call is imported when it is first asked for: it brings torch with it."""
    if name in ("parallelize", "plan"):
        return getattr(import_module("soapstone.api"), name)
    raise AttributeError(f"module 'soapstone' has no attribute '{name}'")
