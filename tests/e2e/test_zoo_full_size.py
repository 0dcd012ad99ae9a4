"""Every model of the zoo at its published size: captured whole, and listed as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from soapstone.frontends import summary
from soapstone.frontends.source import load
from soapstone.frontends.summary import Summary, as_text, summaries
from soapstone.frontends.zoo import ZOO

LISTED = Path(summary.__file__).parent / "zoo" / "summary.json"

PUBLISHED = {
    "alexnet": 61_100_840,
    "inception_v3": 27_161_264,
    "resnet101": 44_549_160,
    "resnext50": 25_028_904,
    "gpt2": 124_439_808,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "vit_l": 304_326_632,
}
"""Parameters, from the papers and model cards."""


@pytest.mark.parametrize("name", ZOO)
def test_full_model_is_captured_whole_and_listed_right(name: str, update_golden: bool) -> None:
    """No opaque node, nothing to warn about, and the figures that `soapstone models` shows."""
    model = ZOO[name]
    captured = load(name).captured()
    graph = captured.graph
    assert not graph.opaque_nodes
    assert not captured.notes
    assert graph.parameter_count == PUBLISHED.get(name, graph.parameter_count)
    assert graph.sample_count == model.batch_per_device
    found = Summary(
        name,
        model.description,
        model.batch_per_device,
        graph.parameter_count,
        len(graph.nodes),
        graph.forward_flops / model.batch_per_device,
    )
    if update_golden:
        known = {entry.name: entry for entry in (summaries() if LISTED.exists() else [])} | {name: found}
        LISTED.write_text(as_text([known[n] for n in ZOO if n in known]), encoding="utf-8")
    assert {entry.name: entry for entry in summaries()}[name] == found


def test_all_models_are_listed_in_order() -> None:
    assert [entry.name for entry in summaries()] == list(ZOO)
