"""The report page: its data follow from the simulation, and nothing in it can break the page."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import PlanError
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.ops import Kind
from soapstone.plans import Plan, Prediction, Simulation, simulation
from soapstone.report.figures import Figures, figures
from soapstone.report.page import Rival, page, read_actual
from soapstone.report.page.actual import actual_from
from soapstone.report.page.finding import finding
from soapstone.report.page.occupancy import occupancy
from soapstone.report.page.page import document, why
from soapstone.report.page.picture import boxes, cells
from soapstone.report.page.timeline import TICKS, critical_path, packed
from soapstone.report.page.traffic import traffic
from soapstone.report.svg import strategy_svg
from soapstone.report.trace import trace_document
from soapstone.search.baselines import baseline, data_parallel, single_device
from soapstone.sim.outcome import outcome
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.space import random_strategy
from soapstone.strategy.strategy import Strategy

MACHINE = preset("p100:2x2")
NASTY = "</script><img src=x onerror=alert(1)>&"


def network(name: str = "net", steps: int = 3) -> Graph:
    """Dense layers, the second of them used several times with the same weights, and a sum."""
    build = GraphBuilder(name)
    x = build.input("x", (8, 16))
    (x,) = build.add("linear", [x, build.weight("w1", (32, 16)), None], name="first", scope="first")
    again = build.weight("w2", (32, 32))
    for step in range(steps):
        (x,) = build.add("linear", [x, again, None], name=f"step{step}", scope="steps")
    (x,) = build.add("linear", [x, build.weight("w3", (4, 32)), None], name="last", scope="last")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def plan_of(strategy: Strategy, **fields: Any) -> tuple[Plan, Simulation, Figures]:
    simulated = simulation(strategy, MACHINE)
    plan = Plan(strategy, MACHINE, simulated.prediction, **fields)
    own = figures(outcome(strategy, MACHINE, AnalyticCosts()))
    return plan, simulated, own


def at_random(seed: int) -> tuple[Plan, Simulation, Figures]:
    return plan_of(random_strategy(network(), len(MACHINE.devices), Random(seed)))


def test_samples_run_downwards_and_all_else_to_the_right() -> None:
    placement = placed({"b": 2, "o": 2}, (0, 1, 2, 3))
    assert cells(placement, [Kind.SAMPLE, Kind.PARAMETER]) == (((0,), (1,)), ((2,), (3,)))
    assert cells(placement, [Kind.PARAMETER, Kind.SAMPLE]) == (((0,), (2,)), ((1,), (3,)))
    assert cells(placement, [Kind.PARAMETER, Kind.REDUCTION]) == (((0,), (1,), (2,), (3,)),)
    assert cells(Placement((), (3, 1), 2), []) == (((3, 1),),)


def test_layers_that_share_weights_are_boxed_and_alike_neighbours_folded() -> None:
    whole = single_device(network(), MACHINE)
    other = {"step1": placed({"b": 2}, (0, 1))}
    found = boxes(Strategy(whole.graph, {**whole.placements, **other}).checked(MACHINE))
    assert [(box.name, box.layers, box.shares_weights) for box in found] == [
        ("first", 1, False),
        ("steps", 1, True),
        ("last … loss", 2, False),
    ]
    assert [(tile.count, tile.split) for tile in found[1].tiles] == [
        (1, "whole"),
        (1, "sample(b) 2"),
        (1, "whole"),
    ]
    assert [tile.count for tile in boxes(whole)[1].tiles] == [3]
    assert sum(box.flops_share for box in found) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(6))
def test_the_critical_path_has_no_gap_from_the_start_to_the_end(seed: int) -> None:
    _, simulated, _ = at_random(seed)
    timeline = simulated.timeline
    path = critical_path(simulated.tasks, timeline)
    assert timeline.start_s[path[0]] == 0
    assert timeline.end_s[path[-1]] == timeline.makespan_s
    assert all(timeline.end_s[a] == timeline.start_s[b] for a, b in pairwise(path))


@pytest.mark.parametrize("seed", range(6))
def test_bytes_and_times_add_up(seed: int) -> None:
    _, simulated, own = at_random(seed)
    found = traffic(simulated, MACHINE)
    assert sum(size for _, _, size in found.matrix) == simulated.tasks.moved_bytes
    assert all(a != b for a, b, _ in found.matrix)
    for each, busy_s in zip(found.times, own.busy_s, strict=True):
        assert each.compute_s == pytest.approx(busy_s)
        assert each.compute_s + each.exposed_s + each.idle_s == pytest.approx(own.makespan_s)
        assert each.exposed_s >= 0
        assert each.idle_s >= -1e-12


@pytest.mark.parametrize("seed", range(6))
def test_memory_curves_reach_the_peak_and_no_further(seed: int) -> None:
    plan, simulated, _ = at_random(seed)
    for found, memory in zip(occupancy(plan, simulated, MACHINE), simulated.memory, strict=True):
        assert max(found.curve) == found.peak_bytes == memory.peak_bytes
        assert sum(size for _, size in found.parts) == found.peak_bytes
        assert sum(held.size_bytes for held in found.largest) <= found.peak_bytes


def test_packed_times_are_those_of_the_timeline() -> None:
    _, simulated, _ = at_random(1)
    found, timeline = packed(simulated, MACHINE, None), simulated.timeline

    def numbers(text: str, dtype: str) -> np.ndarray[Any, Any]:
        return np.frombuffer(base64.b64decode(text), dtype)

    ids = numbers(found.ids, "<u4")
    assert sorted(ids) == list(range(len(simulated.tasks.tasks)))
    start = numbers(found.start, "<u4") / TICKS * found.span_s
    assert start == pytest.approx(np.asarray(timeline.start_s)[ids], abs=2 * found.span_s / TICKS)
    lines, name = found.names.split("\n"), numbers(found.name, "<u4")
    for place, number in enumerate(ids):
        task = simulated.tasks.tasks[number]
        assert task.name.startswith(lines[name[place]])
        assert found.rows[numbers(found.row, "<u2")[place]] == task.resource
    rows = numbers(found.row, "<u2")
    assert all(a < b or s <= t for a, b, s, t in zip(rows, rows[1:], start, start[1:], strict=False))


def test_a_real_timeline_is_read_back_from_its_trace(tmp_path: Path) -> None:
    _, simulated, _ = at_random(2)
    path = tmp_path / "trace.json"
    trace = trace_document(simulated.tasks, simulated.timeline, MACHINE, "as it ran")
    path.write_text(json.dumps(trace))
    actual = read_actual(path, simulated.tasks)
    assert actual.start_s == pytest.approx(simulated.timeline.start_s)
    assert actual.makespan_s == pytest.approx(simulated.timeline.makespan_s)


def test_foreign_traces_are_refused(tmp_path: Path) -> None:
    _, simulated, _ = at_random(2)
    _, other, _ = plan_of(data_parallel(network(steps=4), MACHINE))
    trace = trace_document(other.tasks, other.timeline, MACHINE, "another")
    with pytest.raises(PlanError, match="another plan"):
        actual_from(trace, simulated.tasks, "t.json")
    own = trace_document(simulated.tasks, simulated.timeline, MACHINE, "own")
    cut = {**own, "traceEvents": own["traceEvents"][:-3]}
    with pytest.raises(PlanError, match="lacks 3 of the plan's"):
        actual_from(cut, simulated.tasks, "t.json")
    for damaged in (
        [],
        {},
        {"traceEvents": [{"ph": "X"}]},
        {"traceEvents": [{"ph": "X", "args": {"id": 0}}]},
    ):
        with pytest.raises(PlanError, match=r"^t\.json: "):
            actual_from(damaged, simulated.tasks, "t.json")
    with pytest.raises(PlanError, match="no such trace"):
        read_actual(tmp_path / "none.json", simulated.tasks)
    (tmp_path / "text").write_bytes(b"\xff no json")
    with pytest.raises(PlanError, match="not JSON"):
        read_actual(tmp_path / "text", simulated.tasks)


def data_in(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_no_name_can_break_out_of_the_page() -> None:
    strategy = data_parallel(network(NASTY), MACHINE)
    plan, simulated, own = plan_of(strategy, search={"method": NASTY, "curve": [[0.0, 1, 2.0]]})
    text = page(plan, simulated, own, [Rival(NASTY, NASTY, own)])
    assert NASTY not in text
    assert "<img" not in text
    data = data_in(text)
    assert data["model"] == data["rivals"][0]["summary"] == data["finding"]["method"] == NASTY
    assert text.count("<script") == text.count("</script>") == 2


def test_the_page_fetches_nothing() -> None:
    text = page(*at_random(3))
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|@import|url\(|fetch\(|XMLHttpRequest| src=", text)


def test_the_page_says_what_the_plan_predicts() -> None:
    plan, simulated, own = plan_of(data_parallel(network(), MACHINE))
    slow = replace(own, makespan_s=own.makespan_s / 2, bucketed_s=own.bucketed_s * 2, moved_bytes=0)
    found = document(plan, simulated, own, [Rival("data_parallel", "", slow)])
    assert found["makespan_s"] == plan.prediction.makespan_s
    assert (found["bucketed_s"], found["rivals"][0]["bucketed_s"]) == (own.bucketed_s, slow.bucketed_s)
    assert [memory["peak_bytes"] for memory in found["memory"]] == list(plan.prediction.memory_bytes)
    assert found["why"][0].startswith("It is 2 times as fast as data parallelism: a device waits ")
    assert len(found["why"]) == 2
    assert found["finding"] is None
    alone = why(simulated, traffic(simulated, MACHINE), own)
    assert alone[0].startswith("An iteration moves ")


def test_searches_are_read_with_care() -> None:
    found = finding(
        {"method": "mcmc", "curve": [[0.0, 1, 2.0], ["x"], 3, [1.0, 5, 1.5]], "seed": True}, 1.5, 1.5
    )
    assert found is not None
    assert found.curve == ((0.0, 1.0, 2.0), (1.0, 5.0, 1.5))
    assert (found.seed, found.gap) == (None, None)
    bounded = finding({"lower_bound_s": 1.2}, 1.4, 1.5)
    assert bounded is not None
    assert bounded.gap == pytest.approx(0.25)
    exact = finding({"method": "exact", "lower_bound_s": 1.2}, 1.5, 1.4)
    assert exact is not None
    assert exact.gap == pytest.approx(0.25)
    optimal = finding({"is_optimal": True}, 1.5, 1.5)
    assert optimal is not None
    assert (optimal.gap, optimal.proved_among) == (0, "strategies that its search looks at")
    among = finding({"is_optimal": True, "proved_among": "strategies of whole batches"}, 1.5, 1.5)
    assert among is not None
    assert among.proved_among == "strategies of whole batches"
    assert (bounded.proved_among, bounded.bounded_among) == (None, "strategies that its search looks at")
    long = finding({"curve": [[float(i), i, 9.0] for i in range(4001)]}, 9.0, 9.0)
    assert long is not None
    assert len(long.curve) < 2100
    assert long.curve[-1][1] == 4000
    assert finding(None, 1.0, 1.0) is None


def test_the_picture_stands_alone_as_svg() -> None:
    whole = single_device(network(NASTY), MACHINE)
    other = {"step1": placed({"b": 2, "o": 2}, (0, 1, 2, 3)), "last": Placement((), (1, 2), 2)}
    plan, _, _ = plan_of(Strategy(whole.graph, {**whole.placements, **other}).checked(MACHINE))
    root = ET.fromstring(strategy_svg(plan))
    space = {"s": "http://www.w3.org/2000/svg"}
    assert root.findtext("s:title", namespaces=space) == f"{NASTY} on {MACHINE.name}"
    tiles = root.findall("s:g/s:g", space)
    assert [len(tile.findall("s:rect", space)) for tile in tiles] == [1, 1, 4, 1, 2, 1]
    numbers = [text.text for text in tiles[2].findall("s:text", space)]
    assert numbers == ["0", "1", "2", "3"]
    frames = [rect.get("class") for rect in root.findall("s:g/s:rect", space)]
    assert frames == ["box", "box shared", "box", "box"]


def test_the_picture_in_the_readme_is_what_is_drawn_now(update_golden: bool) -> None:
    path = Path(__file__).parents[2] / "docs" / "alexnet.svg"
    machine = preset("p100:1x4")
    graph = load("alexnet", devices=4).captured().graph
    strategy = baseline("krizhevsky", graph, machine)
    drawn = strategy_svg(Plan(strategy, machine, Prediction(0.0, 0, (0, 0, 0, 0))))
    if update_golden:
        path.write_text(drawn, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn
