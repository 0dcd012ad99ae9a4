"""What `soapstone models` says about each model, captured once and kept beside the zoo.

Capturing all full-size models takes minutes, so the figures are kept in `summary.json`. They are not
typed in: `tests/e2e/test_zoo_capture.py` captures every model, compares, and rewrites the file when
run with `--update-golden`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources


@dataclass(frozen=True)
class Summary:
    """One model at its published size; flops are those of a forward pass."""

    name: str
    description: str
    batch_per_device: int
    parameters: int
    nodes: int
    flops_per_sample: float


def summaries() -> list[Summary]:
    """All models of the zoo, in its order."""
    text = resources.files("soapstone.frontends").joinpath("zoo", "summary.json").read_text(encoding="utf-8")
    return [Summary(**entry) for entry in json.loads(text)]


def as_text(entries: list[Summary]) -> str:
    """The content of the file."""
    return json.dumps([asdict(entry) for entry in entries], indent=1) + "\n"
