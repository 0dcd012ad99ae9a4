"""Plans as DTensor scripts: those that are expressible train to the same losses, others are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from oracles.dtensorcases import alone, dense, under_script
from oracles.ranks import Ranks

from soapstone.errors import PlanError
from soapstone.frontends.capture import capture
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.report.dtensor import Way, script, styles
from soapstone.search.baselines import data_parallel
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

MACHINE = preset("cpu:1x2")
BOTH = (0, 1)
STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def graph() -> Graph:
    module, inputs = dense()
    return capture(module, list(inputs), "dense", input_names=["images", "labels"], samples=8).graph


def strategy_of(graph: Graph, changes: Mapping[str, Placement]) -> Strategy:
    """Data parallelism but for the layers given, by their modules."""
    strategy = data_parallel(graph, MACHINE)
    names = {block.leader.scope: block.name for block in strategy.blocks}
    changed = {names[scope]: placement for scope, placement in changes.items()}
    return Strategy(graph, {**strategy.placements, **changed}).checked(MACHINE)


def plan_of(strategy: Strategy) -> Plan:
    return Plan(strategy, MACHINE, simulation(strategy, MACHINE).prediction)


@pytest.mark.parametrize(
    ("changes", "local"),
    [
        ({}, {"wide.weight": [16, 32], "conv.weight": [2, 1, 3, 3]}),
        ({"wide": placed({"o": 2}, BOTH)}, {"wide.weight": [8, 32], "narrow.weight": [8, 16]}),
        ({"narrow": placed({"i": 2}, BOTH)}, {"wide.weight": [16, 32], "narrow.weight": [8, 8]}),
        (
            {
                "wide": placed({"o": 2}, BOTH),
                "narrow": placed({"i": 2}, BOTH),
                "last": placed({"o": 2}, BOTH),
            },
            {"wide.weight": [8, 32], "narrow.weight": [8, 8], "last.bias": [2]},
        ),
    ],
    ids=["samples", "columns", "rows", "pair"],
)
def test_the_script_trains_to_the_losses_of_one_process(
    ranks: Ranks, graph: Graph, changes: Mapping[str, Placement], local: Mapping[str, list[int]]
) -> None:
    text = script(plan_of(strategy_of(graph, changes)))
    for losses, shapes in ranks.run(under_script, 2, text, STEPS):
        assert losses == pytest.approx(alone(STEPS), rel=1e-5)
        assert {name: shapes[name] for name in local} == local


def test_nothing_moves_between_a_column_and_a_row_parallel_layer(graph: Graph) -> None:
    pair = {"wide": placed({"o": 2}, BOTH), "narrow": placed({"i": 2}, BOTH)}
    found = styles(strategy_of(graph, pair), 2)
    assert [(style.module, style.way, style.stays_split) for style in found] == [
        ("wide", Way.COLUMNS, True),
        ("narrow", Way.ROWS, True),
    ]
    alone_found = styles(strategy_of(graph, {"wide": placed({"o": 2}, BOTH)}), 2)
    assert not alone_found[0].stays_split
    assert alone_found[0].text == "ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wide": Placement((), (1,))}, "runs on devices 1, not on all in their order"),
        ({"wide": placed({"b": 2}, (1, 0))}, "runs on devices 1, 0"),
        ({"wide": Placement((), BOTH, 2)}, "is computed in copies"),
        ({"conv": placed({"o": 2}, BOTH)}, r"is split along parameter\(o\), and is no linear layer"),
    ],
)
def test_what_has_no_layouts_is_refused_with_the_nodes(
    graph: Graph, changes: Mapping[str, Placement], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        script(plan_of(strategy_of(graph, changes)))
