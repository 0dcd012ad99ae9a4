"""Plans as DTensor scripts: those that are expressible train to the same losses, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from oracles.dtensorcases import MODELS, alone, under_script
from oracles.ranks import Ranks

from soapstone.errors import PlanError
from soapstone.frontends.capture import capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.report.dtensor import expressed, script, styles
from soapstone.report.ways import Way
from soapstone.search.baselines import data_parallel
from soapstone.search.baselines.megatron import Groups
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

TWO, FOUR = (0, 1), (0, 1, 2, 3)
STEPS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


@cache
def graph_of(model: str) -> Graph:
    module, inputs = MODELS[model]()
    return capture(module, list(inputs), model, samples=8).graph


def strategy_of(
    model: str, devices: int, changes: Mapping[str, Placement], rest: Callable[[str], Placement] | None = None
) -> Strategy:
    """Data parallelism but for the layers given, by their modules, and the rest if it is said."""
    graph, machine = graph_of(model), preset(f"cpu:1x{devices}")
    found = dict(data_parallel(graph, machine).placements)
    for block in Strategy(graph, found).blocks:
        if block.leader.scope in changes:
            found[block.name] = changes[block.leader.scope]
        elif rest is not None:
            found[block.name] = rest(graph.sample_dims[block.name])
    return Strategy(graph, found).checked(machine)


def script_of(strategy: Strategy, devices: int) -> str:
    machine = preset(f"cpu:1x{devices}")
    return script(Plan(strategy, machine, simulation(strategy, machine).prediction))


def rows_of_two(dim: str) -> Placement:
    """Two rows of samples, the same on both devices of a row."""
    return placed({dim: 2}, FOUR, copies=2)


PAIR = {"wide": placed({"o": 2}, TWO), "narrow": placed({"i": 2}, TWO)}
HYBRID = {
    "wide": placed({"b": 2, "o": 2}, FOUR),
    "narrow": placed({"b": 2, "i": 2}, FOUR),
    "last": placed({"b": 2, "o": 2}, FOUR),
}
TIED_ROWS = {"table": placed({"b1": 2, "v": 2}, FOUR), "head": placed({"b1": 2, "o": 2}, FOUR)}


@pytest.mark.parametrize(
    ("model", "devices", "changes", "rest", "local"),
    [
        ("dense", 2, {}, None, {"wide.weight": [16, 32], "conv.weight": [2, 1, 3, 3]}),
        (
            "dense",
            2,
            {"wide": placed({"o": 2}, TWO)},
            None,
            {"wide.weight": [8, 32], "narrow.weight": [8, 16]},
        ),
        (
            "dense",
            2,
            {"narrow": placed({"i": 2}, TWO)},
            None,
            {"wide.weight": [16, 32], "narrow.weight": [8, 8]},
        ),
        ("dense", 2, PAIR, lambda _: Placement((), TWO, 2), {"narrow.weight": [8, 8]}),
        ("dense", 4, HYBRID, None, {"wide.weight": [8, 32], "narrow.weight": [8, 8], "last.bias": [2]}),
        ("dense", 4, HYBRID, rows_of_two, {"wide.weight": [8, 32], "conv.weight": [2, 1, 3, 3]}),
        ("words", 4, TIED_ROWS, rows_of_two, {"table.weight": [6, 8]}),
        ("words", 4, TIED_ROWS, None, {"table.weight": [6, 8]}),
    ],
    ids=["samples", "columns", "rows", "pair", "hybrid", "hybrid-copies", "tied-copies", "tied-samples"],
)
def test_the_script_trains_to_the_losses_of_one_process(
    ranks: Ranks,
    model: str,
    devices: int,
    changes: Mapping[str, Placement],
    rest: Callable[[str], Placement] | None,
    local: Mapping[str, list[int]],
) -> None:
    text = script_of(strategy_of(model, devices, changes, rest), devices)
    for losses, shapes in ranks.run(under_script, devices, model, text, STEPS, False):
        assert losses == pytest.approx(alone(model, STEPS), rel=1e-5)
        assert {name: shapes[name] for name in local} == local


@pytest.mark.parametrize(("model", "changes"), [("dense", HYBRID), ("words", TIED_ROWS)])
def test_weights_may_be_sharded_over_the_rows_of_the_mesh(
    ranks: Ranks, model: str, changes: Mapping[str, Placement]
) -> None:
    text = script_of(strategy_of(model, 4, changes), 4)
    whole = ranks.run(under_script, 4, model, text, 1, False)
    for (losses, shapes), (_, before) in zip(
        ranks.run(under_script, 4, model, text, STEPS, True), whole, strict=True
    ):
        assert losses == pytest.approx(alone(model, STEPS), rel=1e-5)
        assert sum(map(_count, shapes.values())) < 0.6 * sum(map(_count, before.values()))


def _count(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_local_statistics_of_a_batch_norm_are_those_of_plain_modules(ranks: Ranks) -> None:
    """Statistics of the whole batch have no layout; each shard's own need none."""
    machine, (module, inputs) = preset("cpu:1x2"), MODELS["normed"]()
    with pytest.raises(PlanError, match="joins statistics of all samples"):
        script_of(strategy_of("normed", 2, {}), 2)
    graph = capture(module, list(inputs), "normed", batch_norm="local").graph
    text = script_of(data_parallel(graph, machine), 2)
    for losses, _ in ranks.run(under_script, 2, "normed", text, STEPS, False):
        assert losses == pytest.approx(alone("normed", STEPS, parts=2), rel=1e-9)


def test_megatron_of_a_llama_trains_to_the_losses_of_one_process(ranks: Ranks) -> None:
    text = script_of(Groups(graph_of("llama"), 4, 2).strategy, 4)
    assert "q_proj': ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local" in text
    for losses, shapes in ranks.run(under_script, 4, "llama", text, 2, True):
        assert losses == pytest.approx(alone("llama", 2), rel=1e-4)
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == [8, 32]


def test_nothing_moves_between_a_column_and_a_row_parallel_layer() -> None:
    found = styles(expressed(strategy_of("dense", 2, PAIR), 2))
    assert [(style.module, style.way, style.stays_split) for style in found] == [
        ("wide", Way.COLUMNS, True),
        ("narrow", Way.ROWS, False),
    ]
    assert found[0].gives == found[1].takes == "Shard(-1)"
    alone_found = styles(expressed(strategy_of("dense", 2, {"wide": PAIR["wide"]}), 2))
    assert alone_found[0].text == "ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))"


def test_samples_may_be_on_any_axis() -> None:
    found = {style.module: style for style in styles(expressed(strategy_of("words", 4, TIED_ROWS), 4))}
    assert found["table"].gives == "Shard(1)"
    assert (found["head"].takes, found["head"].gives) == ("Shard(1)", "Shard(1)")


def test_the_order_of_dims_does_not_matter_but_that_of_devices_does() -> None:
    columns_first = Placement((("o", 2), ("b", 2)), (0, 2, 1, 3))
    mesh = expressed(strategy_of("dense", 4, HYBRID | {"wide": columns_first}), 4)
    assert (mesh.data, mesh.tensor, mesh.ways["linear"]) == (2, 2, Way.COLUMNS)
    with pytest.raises(PlanError, match=r"'linear' is split along parameter.* in another order of devices"):
        expressed(strategy_of("dense", 4, HYBRID | {"wide": Placement((("o", 2), ("b", 2)), FOUR)}), 4)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("dense", {"wide": Placement((), (1,))}, "'linear' runs on device 1, not once on each device"),
        ("dense", {"wide": placed({"b": 2}, (1, 0))}, "'linear' has its samples in another order of devices"),
        ("dense", {"wide": Placement((), TWO, 2)}, "'linear' reads '.*', which is split along samples"),
        (
            "dense",
            {"conv": placed({"o": 2}, TWO)},
            r"is split along parameter\(o\), and is no linear layer or embedding of its own",
        ),
        (
            "words",
            {"head": placed({"o": 2}, TWO)},
            "shares a weight with 'embedding', which is split otherwi",
        ),
        ("words", {"mix": placed({"b": 2}, TWO)}, r"is split along attribute\(b\)"),
    ],
)
def test_what_has_no_layouts_is_refused_with_the_nodes(
    model: str, changes: Mapping[str, Placement], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        script_of(strategy_of(model, 2, changes), 2)


def test_all_that_stands_in_the_way_is_counted() -> None:
    everywhere: Any = dict.fromkeys(["wide", "narrow", "last", "conv"], Placement((), (1,)))
    with pytest.raises(PlanError, match=r"'conv2d' runs on device 1.*'linear_2' runs on device 1"):
        script_of(strategy_of("dense", 2, everywhere), 2)
