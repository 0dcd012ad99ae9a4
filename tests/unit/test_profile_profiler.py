"""Measuring operators on this computer: what is measured, not how long it takes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import pytest
from oracles.ranks import Ranks
from oracles.wirecases import measuring_seen

from soapstone.cost.at_hand import device_at_hand, kind_named
from soapstone.cost.candidates import Candidate, candidates, candidates_of, spread_out, weighty_first
from soapstone.cost.profile import flat_shape, key_of
from soapstone.cost.profiler import Profiler
from soapstone.errors import CostError
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.runtime.profiling import IN_STEP, measured_at_once
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import baseline


def tiny(model: str) -> Graph:
    return normed() if model == "normed" else load(model, tiny=True, devices=2).captured().graph


def normed() -> Graph:
    """A convolution whose batch statistics are taken over shards."""
    build = GraphBuilder("normed")
    x = build.input("x", (4, 2, 6, 6))
    (y,) = build.add("conv2d", [x, build.weight("w", (4, 2, 3, 3)), None], {"ph": 1, "pw": 1}, name="conv")
    scale, shift = build.weight("scale", (4,)), build.weight("shift", (4,))
    (y,) = build.add("batch_norm", [y, scale, shift, None, None], name="norm")
    (loss,) = build.add("sum", [y], {"dim": (0, 1, 2, 3)}, name="loss")
    return build.graph(loss=loss)


@pytest.fixture(autouse=True)
def _one_short_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soapstone.cost.runs.BATCHES", 2)
    monkeypatch.setattr("soapstone.cost.runs.BATCH_S", 1e-5)


@pytest.mark.parametrize("model", ["lenet", "dlrm", "normed"])
def test_every_shard_of_a_model_can_be_measured(model: str) -> None:
    """Convolutions with halos, embeddings, losses, statistics: each gets a time."""
    listed = candidates(tiny(model), [1, 2])
    profiler = Profiler(device_at_hand("cpu"))
    assert [c.node.op_name for c in listed if not profiler.measure(c)] == []
    assert profiler.failed == {}
    times = {(key, m.shape): m for key, found in profiler.profile.times.items() for m in found}
    for candidate in listed:
        for work in candidate.works:
            assert times[key_of(work), flat_shape(work.operands, work.outputs)].seconds > 0


def test_what_cannot_be_run_is_left_out() -> None:
    graph = tiny("lenet")
    candidate = next(c for c in candidates(graph, [1]) if c.node.op_name == "conv2d")
    broken = replace(candidate, node=replace(candidate.node, attrs={"sh": 0}))
    broken.__dict__.update(forward=candidate.forward, backward=candidate.backward)
    profiler = Profiler(device_at_hand("cpu"))
    assert not profiler.measure(broken)
    assert list(profiler.failed) == ["conv2d"]
    assert profiler.profile.count == 0
    assert profiler.measure(candidate)


def test_updates_are_measured() -> None:
    profiler = Profiler(device_at_hand("cpu"))
    profiler.measure_updates([256, 4096])
    assert [u.size_bytes for u in profiler.profile.updates] == [256, 4096]
    assert all(u.seconds > 0 for u in profiler.profile.updates)


def test_times_are_in_doubt_as_far_as_batches_differ_and_are_few() -> None:
    profiler = Profiler(device_at_hand("cpu"))
    assert profiler.doubt == 0.0
    key = key_of(candidates(tiny("lenet"), [1])[0].works[0])

    def doubt(batches: list[float]) -> float:
        profiler.batches[key] = dict.fromkeys(("one", "other"), (None, batches))
        return profiler.doubt

    assert doubt([2.0] * 4) == 0.0
    assert doubt([1.0, 2.0, 3.0] * 4) == pytest.approx(2 * doubt([1.0, 2.0, 3.0] * 16), rel=0.2)
    assert doubt([1.9, 2.0, 2.1]) == pytest.approx(doubt([19.0, 20.0, 21.0]))
    assert doubt([1.0]) > doubt([1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("doubts", "times"),
    [([0.0], 3), ([0.5, 0.1, 0.05, 0.03, 0.02, 0.01], 5), ([0.5], 16)],
    ids=["steady", "unsteady", "never steady"],
)
def test_ranks_measure_until_times_are_told_and_all_get_the_mean(doubts: list[float], times: int) -> None:
    ranks = Ranks(2)
    (calls, seconds), other = ranks.run(measuring_seen, 2, doubts)
    ranks.close()
    assert other == (calls, seconds)
    assert calls == times
    assert seconds == [pytest.approx(0.0015)]


class _Fickle:
    """A profiler for which a second of the clock passes with each measurement, and that cannot run 'b'."""

    doubt = 1.0

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def measure(self, candidate: Candidate, *, again: bool = False) -> bool:
        self.seen.append((candidate.node.op_name, again))
        return candidate.node.op_name != "b"


@pytest.mark.parametrize("budget_s", [1e9, 40.5, 16.5, 8.5])
def test_what_cannot_be_run_is_not_tried_again_and_time_ends_any_round(
    budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*"abc", *(f"d{i}" for i in range(17))]
    profiler, told = _Fickle(), list[int]()
    monkeypatch.setattr("soapstone.runtime.profiling.monotonic", lambda: float(len(profiler.seen)))
    todo = [SimpleNamespace(node=SimpleNamespace(op_name=name)) for name in names]
    done = measured_at_once(
        profiler,  # type: ignore[arg-type]
        todo,  # type: ignore[arg-type]
        Wire(0, 1),
        budget_s,
        lambda number, _: told.append(number),
    )
    once = [name for name, again in profiler.seen if not again]
    assert once == names[: len(once)]
    assert done == len(once) == max(told)
    assert [name for name, again in profiler.seen if again and name == "b"] == []
    later = [name for name, again in profiler.seen if again]
    if budget_s < len(names):
        assert (len(once), later) == (min(len(names), IN_STEP * ceil(budget_s / IN_STEP)), [])
    elif budget_s < 100:
        assert len(profiler.seen) <= budget_s + IN_STEP
        assert later[:19] == [name for name in reversed(names) if name != "b"]
    else:
        assert len(later) == 15 * 19


def test_any_beginning_has_the_ends_of_every_operator() -> None:
    """The first round has the largest shard of each operator, the second the smallest."""
    listed = candidates(tiny("lenet"), [1, 2])
    ordered = spread_out(listed)
    assert sorted(map(id, ordered)) == sorted(map(id, listed))
    operators = {key_of(c.works[0]) for c in listed}
    first = ordered[: len(operators)]
    assert {key_of(c.works[0]) for c in first} == operators
    for candidate in first:
        same = [c for c in listed if key_of(c.works[0]) == key_of(candidate.works[0])]
        assert candidate.works[0].flops == max(c.works[0].flops for c in same)


def test_what_strategies_take_most_of_is_measured_first_after_one_of_every_operator() -> None:
    """A strategy that is there three times weighs three times as much."""
    graph, machine = tiny("lenet"), preset("cpu:1x2")
    spread, alone = (baseline(name, graph, machine) for name in ("data_parallel", "single_device"))
    used = [list(each.layouts.values()) for each in (spread, spread, spread, alone)]
    listed = candidates_of([layout for each in used for layout in each])
    ordered = weighty_first(listed, used, lambda work: work.flops)
    assert sorted(map(id, ordered)) == sorted(map(id, listed))
    operators = {key_of(c.works[0]) for c in listed}
    first = ordered[: len(operators)]
    assert {key_of(c.works[0]) for c in first} == operators
    in_parts = {c.works for c in candidates_of(spread.layouts.values())}
    assert all(c.works in in_parts for c in first)
    rest = [c for c in listed if c.works in in_parts and c not in first]
    assert ordered[len(operators)].works[0].flops == max(c.works[0].flops for c in rest)


def test_software_is_part_of_a_device() -> None:
    alone, shared = device_at_hand("cpu", threads=1), device_at_hand("cpu", threads=2, ranks=2)
    assert alone.software["torch"] == shared.software["torch"]
    assert alone.software != shared.software
    with pytest.raises(CostError, match="no device 'tpu'"):
        device_at_hand("tpu")


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_kinds_are_known_by_their_drivers_names(driver: str, kind: str) -> None:
    assert kind_named(driver) == kind
