"""Pipelines worked out by hand: makespans, memory, stages, what is refused, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.work import Work
from soapstone.errors import SearchError, StrategyError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import DeviceKind, preset
from soapstone.plans import simulation
from soapstone.runtime.order import execution_order
from soapstone.search.baselines.pipeline import balanced
from soapstone.search.mcmc import Budget
from soapstone.search.pipelines import Wanted, pipeline_search
from soapstone.sim.memory import peak_memory
from soapstone.sim.reference import Timeline, simulate
from soapstone.strategy.document import document_of, strategy_from
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import COMPUTE_KINDS, TaskGraph, TaskKind

FORWARD_S, BACKWARD_S = 2.0, 3.0
BATCH, WIDTH = 24, 8


class Even:
    """A layer takes 2 s forward and 3 s backward for each micro-batch, all else nothing."""

    def compute_s(self, work: Work, kind: DeviceKind) -> float:
        del kind
        if work.op_name != "linear":
            return 0.0
        return BACKWARD_S if work.is_backward else FORWARD_S

    def update_s(self, size_bytes: int, kind: DeviceKind) -> float:
        del size_bytes, kind
        return 0.0


def layers(count: int) -> Graph:
    """So many dense layers one after the other, and a sum."""
    build = GraphBuilder("layers")
    x = build.input("x", (BATCH, WIDTH))
    for i in range(count):
        (x,) = build.add("linear", [x, build.weight(f"w{i}", (WIDTH, WIDTH)), None], name=f"fc{i}")
        (x,) = build.add("tanh", [x], name=f"tanh{i}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def one_each(graph: Graph, stages: int) -> Strategy:
    """The layers on one device each, the loss on the last."""
    blocks = Strategy(graph, {}).blocks
    return Strategy(graph, {b.name: placed({}, [min(i, stages - 1)]) for i, b in enumerate(blocks)})


def timed(strategy: Strategy, stages: int) -> tuple[TaskGraph, Timeline]:
    """The task graph on devices between which nothing takes time, and its timeline."""
    built = task_graph(strategy, preset(f"p100:1x{stages}"), Even())
    tasks = tuple(t if t.kind in COMPUTE_KINDS else replace(t, duration_s=0.0) for t in built.tasks)
    instant = replace(built, tasks=tasks)
    return instant, simulate(instant)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 24])
def test_the_makespan_of_equal_stages(stages: int, count: int, schedule: Schedule) -> None:
    """Every micro-batch takes its time once in the slowest stage, and once in each of the others."""
    pipeline = one_each(layers(stages), stages).pipelined(Pipeline(count, schedule))
    assert len(pipeline.stages) == stages
    _, timeline = timed(pipeline, stages)
    assert timeline.makespan_s == (count + stages - 1) * (FORWARD_S + BACKWARD_S)


def ahead(tasks: TaskGraph, timeline: Timeline, device: str, count: int) -> int:
    """The most micro-batches that a device has taken forward and not yet back, by its first layer's tasks."""
    events = [
        (timeline.end_s[i], -1) if task.kind is TaskKind.BACKWARD else (timeline.start_s[i], 1)
        for i, task in enumerate(tasks.tasks)
        if task.resource == device and task.name.startswith("fc") and task.kind is not TaskKind.UPDATE
    ]
    assert len(events) == 2 * count
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def test_a_stage_runs_ahead_of_its_backward_pass_by_the_stages_after_it() -> None:
    stages, count = 4, 8
    one = one_each(layers(stages), stages)
    devices = [device.name for device in preset(f"p100:1x{stages}").devices]
    in_turn = timed(one.pipelined(Pipeline(count)), stages)
    assert [ahead(*in_turn, device, count) for device in devices] == [4, 3, 2, 1]
    at_once = timed(one.pipelined(Pipeline(count, Schedule.GPIPE)), stages)
    assert [ahead(*at_once, device, count) for device in devices] == [8, 8, 8, 8]


def test_memory_is_that_of_the_micro_batches_in_flight() -> None:
    """A layer keeps its input and its output (tanh's gradient needs it): the input is the output of the
    layer before, which moves to its device. So each micro-batch in flight takes two tensors on a stage in
    the middle. One forward, one backward, the peak is where the last of them is computed, and there is one
    more, which the layer gives its tanh; all at once, it is where the first is taken back."""
    stages, count = 4, 8
    one = one_each(layers(stages), stages)
    tensor_bytes = BATCH // count * WIDTH * 4
    kept = {}
    for schedule in Schedule:
        tasks, timeline = timed(one.pipelined(Pipeline(count, schedule)), stages)
        memory = peak_memory(tasks, timeline, stages)
        kept[schedule] = [m.parts.get("activations", 0) + m.parts.get("received", 0) for m in memory]
    in_turn, at_once = kept[Schedule.ONE_F_ONE_B], kept[Schedule.GPIPE]
    assert in_turn[1:3] == [(2 * 3 + 1) * tensor_bytes, (2 * 2 + 1) * tensor_bytes]
    assert at_once[1:3] == [2 * 8 * tensor_bytes] * 2
    assert all(a < b for a, b in zip(in_turn, at_once, strict=True))


def test_stages_are_the_blocks_that_share_devices() -> None:
    graph = layers(4)
    names = [block.name for block in Strategy(graph, {}).blocks]
    on = {"fc0": [0, 1], "fc1": [1], "fc2": [2, 3], "fc3": [3], "loss": [2]}
    one = Strategy(graph, {n: placed({"b": len(on[n])}, on[n]) for n in names})
    assert one.pipelined(Pipeline(2)).stages == (("fc0", "fc1"), ("fc2", "fc3", "loss"))
    assert one.stages == ()


def test_a_placement_of_one_micro_batch_is_repeated() -> None:
    """Dims are in the order of the output, `b o`; shards of one micro-batch lie next to each other."""
    graph = layers(1)
    one = Strategy(graph, {"fc0": placed({"b": 2, "o": 2}, [3, 1, 2, 0]), "loss": Placement((), (0,))})
    three = one.pipelined(Pipeline(3))
    assert three.placements["fc0"] == placed({"b": 6, "o": 2}, [3, 1, 2, 0] * 3)
    assert three.placements["loss"].degree_of == {"a": 3}
    assert three.turns["fc0"].lanes == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
    assert three.of_one() == one


def test_unequal_micro_batches_are_refused() -> None:
    one = Strategy(layers(1), {"fc0": placed({"b": 8}, range(8)), "loss": Placement((), (0,))})
    with pytest.raises(StrategyError, match="24 samples into 8 parts of 4 micro-batches"):
        one.pipelined(Pipeline(4))


def test_micro_batches_on_different_devices_are_no_pipeline() -> None:
    spread = Strategy(
        layers(1), {"fc0": placed({"b": 2}, [0, 1]), "loss": placed({"b": 2}, [0, 0])}, pipeline=Pipeline(2)
    )
    with pytest.raises(StrategyError, match="micro-batches of block 'fc0' run on different devices"):
        spread.checked(preset("p100:1x2"))
    uncut = replace(spread, placements={"fc0": placed({"b": 3}, [0] * 3), "loss": placed({"a": 2}, [0, 0])})
    with pytest.raises(StrategyError, match="block 'fc0' is split into 3 parts along its samples"):
        uncut.of_one()


# -- what brings micro-batches together -------------------------------------------------------------


def normalized() -> Graph:
    build = GraphBuilder("normalized")
    x = build.input("x", (8, 4, 2, 2))
    (y,) = build.add("conv2d", [x, build.weight("w", (4, 4, 1, 1)), None], name="conv")
    scale, shift = build.weight("scale", (4,)), build.weight("shift", (4,))
    (y,) = build.add("batch_norm", [y, scale, shift, None, None], name="norm")
    (loss,) = build.add("sum", [y], {"dim": (0, 1, 2, 3)}, name="loss")
    return build.graph(loss=loss)


def squared() -> Graph:
    """A loss that is the square of a sum over the batch."""
    build = GraphBuilder("squared")
    (y,) = build.add("linear", [build.input("x", (8, 4)), build.weight("w", (4, 4)), None], name="fc")
    (total,) = build.add("sum", [y], {"dim": (0, 1)}, name="total")
    (loss,) = build.add("mul", [total, total], name="loss")
    return build.graph(loss=loss)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (normalized(), "block 'conv' needs statistics of the whole batch"),
        (squared(), "block 'total' needs a sum over the whole batch"),
    ],
)
def test_what_needs_the_whole_batch_is_refused_one_by_one_and_runs_all_at_once(
    graph: Graph, reason: str
) -> None:
    machine = preset("p100:1x2")
    blocks = Strategy(graph, {}).blocks
    one = Strategy(graph, {block.name: Placement((), (0,)) for block in blocks})
    with pytest.raises(StrategyError, match=reason):
        one.pipelined(Pipeline(2)).checked(machine)
    found = simulation(one.pipelined(Pipeline(2, Schedule.GPIPE)), machine)
    last = max(i for i, task in enumerate(found.tasks.tasks) if task.kind is TaskKind.UPDATE)
    assert found.timeline.start_s[last] > 0  # so nothing waits for ever


def test_a_loss_that_is_a_weighted_sum_of_sums_needs_nothing_of_the_other_micro_batches() -> None:
    """loss = mean of (sum a / 2, 3 * sum b): each part of each sum starts the backward pass by itself."""
    build = GraphBuilder("weighted")
    x = build.input("x", (8, 4))
    sums = []
    for name in "ab":
        (y,) = build.add("linear", [x, build.weight(f"w{name}", (4, 4)), None], name=name)
        sums += build.add("sum", [y], {"dim": (0, 1)}, name=f"sum {name}")
    (half,) = build.add("div", [sums[0], 2.0], name="half")
    (thrice,) = build.add("mul", [sums[1], 3.0], name="thrice")
    rows = [build.add("reshape", [part], {"shape": (1,)}, name="row")[0] for part in (half, thrice)]
    (both,) = build.add("concat", rows, name="both")
    (loss,) = build.add("mean", [both], {"dims": (0,)}, name="loss")
    graph = build.graph(loss=loss)
    assert graph.loss_terms == {"sum a": 0.25, "sum b": 1.5}
    assert [block.name for block in Strategy(graph, {}).blocks] == ["a", "sum a", "b", "sum b"]
    one = Strategy(graph, {b.name: Placement((), (0,)) for b in Strategy(graph, {}).blocks})
    assert one.pipelined(Pipeline(4)).checked(preset("p100:1x1")).turns["sum a"].in_flight == 1


def test_a_product_of_sums_is_no_weighted_sum() -> None:
    assert squared().loss_terms == {"loss": 1.0}


# -- in writing -------------------------------------------------------------------------------------


def test_a_pipeline_is_written_as_the_placements_of_one_micro_batch() -> None:
    graph = layers(2)
    one = Strategy(
        graph, {"fc0": placed({"b": 2}, [0, 1]), "fc1": placed({"o": 2}, [2, 3]), "loss": placed({}, [3])}
    )
    strategy = one.pipelined(Pipeline(4, Schedule.GPIPE))
    document = document_of(strategy)
    assert document["pipeline"] == {"micro_batches": 4, "schedule": "gpipe"}
    assert document["placements"] == document_of(one)["placements"]
    assert strategy_from(document, graph, "it") == strategy


def named(name: str) -> Strategy:
    return one_each(layers(3), 3) if name == "stages" else one_each(layers(3), 3).pipelined(Pipeline(6))


def test_a_default_may_be_a_pipeline_or_become_one() -> None:
    graph = layers(3)
    by_hand = {"default": "stages", "pipeline": {"micro_batches": 4}}
    assert strategy_from(by_hand, graph, "it", named) == one_each(graph, 3).pipelined(Pipeline(4))
    assert strategy_from({"default": "piped"}, graph, "it", named) == named("piped")


@pytest.mark.parametrize(
    ("pipeline", "sentence"),
    [
        ({"micro_batches": 5}, "it: pipeline.micro_batches is 5, which does not divide the 24 samples"),
        ({"micro_batches": 0}, "it: pipeline.micro_batches must be a whole number from 1"),
        ({"schedule": "1f1b"}, "it: pipeline lacks the field 'micro_batches'"),
        ({"micro_batches": 2, "schedule": "1f2b"}, "it: pipeline.schedule is '1f2b'; did you mean '1f1b'"),
        ({"micro_batches": 2, "stages": 2}, "it: pipeline has the unknown field 'stages'"),
    ],
)
def test_a_damaged_pipeline_is_refused_in_a_sentence(pipeline: Mapping[str, object], sentence: str) -> None:
    with pytest.raises(StrategyError) as refused:
        strategy_from({"default": "stages", "pipeline": pipeline}, layers(3), "it", named)
    assert str(refused.value).startswith(sentence)


# -- cuts and search --------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_no_cut_has_a_faster_slowest_stage(items: list[tuple[int, int]], stages: int) -> None:
    """Against all cuts there are."""
    stages = min(stages, len(items))
    compute, crossing = (np.array(column, dtype=float) for column in zip(*items, strict=True))

    def slowest(starts: list[int]) -> float:
        spans = pairwise([*starts, len(items)])
        return max(max(compute[a:b].sum(), crossing[a] if a else 0.0) for a, b in spans)

    def all_cuts(first: int, left: int) -> list[list[int]]:
        if left == 0:
            return [[]]
        return [
            [at, *rest] for at in range(first, len(items) - left + 1) for rest in all_cuts(at + 1, left - 1)
        ]

    starts, found = balanced(compute, crossing, stages)
    assert found == slowest(starts) == min(slowest([0, *cut]) for cut in all_cuts(1, stages - 1))


def test_the_search_finds_stages_and_is_never_slower_than_its_starts() -> None:
    graph, machine = layers(8), preset("p100:1x4")
    found = pipeline_search(graph, machine, AnalyticCosts(), budget=Budget(None, 60), seed=3)
    assert found.strategy.pipeline is not None
    assert found.makespan_s == min(start.best_s for start in found.starts)
    assert found.makespan_s == simulation(found.strategy, machine).timeline.makespan_s
    again = pipeline_search(graph, machine, AnalyticCosts(), budget=Budget(None, 60), seed=3)
    assert again.strategy == found.strategy
    four = pipeline_search(
        graph, machine, AnalyticCosts(), wanted=Wanted(stages=4, micro_batches=3), budget=Budget(None, 20)
    )
    assert len(four.strategy.stages) == 4
    assert four.strategy.micro_batches == 3


def test_a_pipeline_that_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(SearchError, match="no pipeline of 3 stages with 5 micro-batches for 24 samples on 4"):
        pipeline_search(layers(8), preset("p100:1x4"), AnalyticCosts(), wanted=Wanted(3, 5))


def test_a_run_takes_micro_batches_one_forward_one_backward() -> None:
    """The order in which ranks walk the tasks: with two stages the first is one ahead of the second."""
    stages, count = 2, 4
    tasks, timeline = timed(one_each(layers(stages), stages).pipelined(Pipeline(count)), stages)
    done: dict[str, str] = {}
    for number in execution_order(tasks, timeline):
        task = tasks.tasks[number]
        if task.name.startswith("fc"):
            lane = task.name.partition("[")[2].partition("/")[0]
            done[task.resource] = f"{done.get(task.resource, '')} {task.kind.value[0]}{lane}".strip()
    assert done == {"node0/gpu0": "f1 f2 b1 f3 b2 f4 b3 b4", "node0/gpu1": "f1 b1 f2 b2 f3 b3 f4 b4"}
