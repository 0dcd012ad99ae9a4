"""The joint search: what it finds, what it promises, how it ends, and that what it finds trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.graphs import layers

from soapstone.cli.main import main
from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import Machine, preset
from soapstone.ops import Kind
from soapstone.plans import planned, read_plan, simulation, write_plan
from soapstone.search.baselines import data_parallel, single_device
from soapstone.search.baselines.taso_then_flexflow import fastest_on_one_device
from soapstone.search.exact import exact_search
from soapstone.search.find import SEARCHES, Options, find
from soapstone.search.mcmc import RULES, Budget
from soapstone.search.report import StopReason
from soapstone.search.unity import joint, selecting, views
from soapstone.search.unity.alike import Bench, together
from soapstone.search.unity.joint import Setting, unity
from soapstone.search.unity.mapping import Mapped, Mapper, weight_bytes
from soapstone.search.unity.selecting import Candidate, Direction, Selection, directions, rewritings
from soapstone.search.unity.splitting import LEAST_NODES, parts
from soapstone.search.unity.views import Range, candidates, whole
from soapstone.strategy.blocks import blocks
from soapstone.strategy.placement import placed
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.flat import FlatProblem, native_tasks

COSTS = AnalyticCosts()
FEW = Budget(None, 60)


def sums(width: int = 512, batch: int = 64) -> Graph:
    """Two products with one input are added up: one with the sum of their weights does the same."""
    b = GraphBuilder("sums")
    x = b.input("x", (batch, width), samples=0)
    (one,) = b.add("linear", [x, b.weight("one.weight", (width, width)), None], name="one")
    (two,) = b.add("linear", [x, b.weight("two.weight", (width, width)), None], name="two")
    (y,) = b.add("add", [one, two], name="add")
    (y,) = b.add("relu", [y], name="relu")
    (y,) = b.add("linear", [y, b.weight("out.weight", (4, width)), None], name="out")
    (loss,) = b.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return b.graph(loss=loss)


def towers(count: int, width: int = 256) -> Graph:
    """Layers that do not read from each other, joined at the end; each is too small to be split well."""
    b = GraphBuilder("towers")
    ends = []
    for i in range(count):
        x = b.input(f"x{i}", (4, width), samples=0)
        (y,) = b.add("linear", [x, b.weight(f"{i}.weight", (width, width)), None], name=f"tower{i}")
        ends += b.add("relu", [y], name=f"relu{i}")
    (y,) = b.add("concat", ends, {"dim": 1}, name="concat")
    (loss,) = b.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return b.graph(loss=loss)


def options(search: str, proposals: int = 60, seed: int = 0) -> Options:
    return Options(search, Budget(None, proposals), seed)


def test_rewriting_and_placing_together_beats_every_placement_of_the_original() -> None:
    """The exact search proves what the graph as it is can do at best; the joint search does better."""
    graph, machine = sums(512, 4096), preset("p100:1x2")
    exact = exact_search(graph, machine, COSTS, proposals=50)
    assert exact.is_optimal
    found = find(graph, machine, COSTS, options("unity"))
    assert "add-linear" in found.rewrites
    assert found.makespan_s < 0.99 * exact.makespan_s
    assert found.makespan_s == native_tasks(found.strategy, machine, COSTS).simulated()[2]
    assert {v.name for v in found.strategy.graph.values.values() if v.role == "weight"} == {
        "one.weight", "two.weight", "out.weight"
    }  # fmt: skip


def test_what_cannot_be_rewritten_is_placed_nearly_as_well_as_can_be() -> None:
    graph, machine = towers(2), preset("p100:1x2")
    exact = exact_search(graph, machine, COSTS, proposals=50)
    found = find(graph, machine, COSTS, options("unity", 400))
    assert exact.makespan_s * (1 - 1e-9) <= found.makespan_s <= 1.05 * exact.makespan_s


@pytest.mark.parametrize("search", ["unity", "auto"])
def test_with_proposals_the_search_depends_on_the_seed_alone(search: str) -> None:
    graph, machine = sums(), preset("p100:1x2")
    one, two = (find(graph, machine, COSTS, options(search)) for _ in range(2))
    assert (one.strategy, one.makespan_s, one.rewrites) == (two.strategy, two.makespan_s, two.rewrites)
    assert one.method == search
    assert one.proposals == sum(start.proposals for start in one.starts) > 0
    assert [p.best_s for p in one.curve] == sorted((p.best_s for p in one.curve), reverse=True)


@pytest.mark.parametrize("name", ["xdl", "candle_uno"])
def test_auto_is_never_worse_than_the_chains_it_contains(name: str) -> None:
    graph, machine = load(name, devices=4, tiny=True).captured().graph, preset("p100:1x4")
    chains = find(graph, machine, COSTS, options("mcmc", 40))
    assert find(graph, machine, COSTS, options("auto", 40)).makespan_s <= chains.makespan_s


@pytest.mark.parametrize("name", ["xdl", "mlp"])
def test_with_proposals_joint_is_never_worse_than_sequential(name: str) -> None:
    """The space of sequential optimization is part of the joint one, and is searched just as long."""
    graph, machine = load(name, devices=4, tiny=True).captured().graph, preset("p100:1x4")
    setting = Setting(machine, COSTS, Budget(None, 40), 0, 2, "momentum", 0.0)
    fast = fastest_on_one_device(graph, machine, COSTS)
    sequential = unity(fast, setting, rewrites=False)
    assert unity(graph, setting).makespan_s <= sequential.makespan_s


@pytest.mark.parametrize("search", ["unity", "auto"])
def test_an_interrupted_search_keeps_its_best(search: str) -> None:
    def interrupt(_: float, __: str) -> None:
        raise KeyboardInterrupt

    graph, machine = sums(), preset("p100:1x2")
    given = Options(search, Budget(60.0))
    report = SEARCHES[search](graph, machine, COSTS, given, interrupt)
    assert report.stop is StopReason.INTERRUPTED
    assert report.strategy.checked(machine)
    assert report.elapsed_s < 30


def test_a_search_ends_with_its_seconds() -> None:
    report = find(sums(), preset("p100:1x4"), COSTS, Options("unity", Budget(1.0)))
    assert report.stop is StopReason.BUDGET
    assert report.elapsed_s < 5


def test_what_reading_the_rules_takes_is_not_taken_from_what_rewriting_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that stands still but for the reading, which takes three of five seconds."""
    now, whole_book = [0.0], selecting._all_directions()

    def read() -> tuple[Direction, ...]:
        now[0] += 0.0 if now[0] else 3.0
        return whole_book

    monkeypatch.setattr(selecting, "_all_directions", read)
    budget = Budget(5.0, 20, clock=lambda: now[0])
    setting = Setting(preset("p100:1x2"), COSTS, budget, 0, 1, "momentum", 0.0)
    found = unity(sums(512, 4096), setting)
    assert now[0] == 3.0
    assert "add-linear" in found.rewrites


def test_starts_that_are_slower_than_the_mapping_are_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what chains make of them in a short time, what is better than the mapping goes on; where it is far
    better, so do all starts that chains have alone."""
    graph, machine = load("nmt", devices=4, tiny=True).captured().graph, preset("p100:1x4")
    setting = Setting(machine, COSTS, Budget(None, 400), 0, 1, "momentum", 0.0)
    slow = single_device(graph, machine)
    given = Candidate(graph, Mapped(slow, 1.0))
    poor = setting.score(given, slow, setting.bench(graph))
    monkeypatch.setattr(joint, "WORTH", 1.0 / 50)  # all starts are far from it
    trial, _ = joint._with_experts(poor, poor, setting, {})
    assert trial is not None
    assert {"data_parallel", "model_parallel", "random"} <= {start.name for start in trial.starts}
    assert all(start.proposals <= 40 for start in trial.starts)
    assert trial.makespan_s < poor.makespan_s
    monkeypatch.setattr(joint, "WORTH", 0.5)
    _, (chains,) = joint._with_experts(poor, poor, setting, {})
    assert chains.starts == RULES["mcmc"].starts
    assert set(chains.known) == {"best trial"}
    good = replace(poor, makespan_s=trial.makespan_s / 2)
    monkeypatch.setattr(joint, "WORTH", 1.2)
    _, (chains,) = joint._with_experts(good, good, setting, {})
    assert set(chains.known) == {"best mapping"}


def test_auto_goes_on_from_the_trial_of_what_is_slower_than_the_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint, "WORTH", 0.0)
    graph, machine = load("nmt", devices=4, tiny=True).captured().graph, preset("p100:1x4")
    setting = Setting(machine, COSTS, Budget(None, 50), 0, 1, "momentum", 0.0)
    names = [start.name for start in unity(graph, setting, rewrites=False, experts=True).starts]
    assert names[0] == "mappings"
    assert {"random", "data_parallel", "model_parallel"} <= set(names[1:5])


def small_memory(machine: Machine, memory_bytes: int) -> Machine:
    devices = [replace(d, kind=replace(d.kind, memory_bytes=memory_bytes)) for d in machine.devices]
    return Machine(machine.name, tuple(devices), machine.links, machine.switches)


def test_memory_is_respected() -> None:
    """Weights of 2 x 16 MiB, three numbers each: whole copies do not fit in 80 MiB, halves do."""
    graph, machine = sums(2048), small_memory(preset("p100:1x2"), 80 << 20)
    assert not simulation(data_parallel(graph, machine), machine).prediction.fits(machine)
    found = find(graph, machine, COSTS, options("unity"))
    assert found.fits
    assert simulation(found.strategy, machine).prediction.fits(machine)


def test_devices_are_divided_between_sides_that_do_not_depend_on_each_other() -> None:
    """Eight small towers on four devices: each device has two of them to itself."""
    machine = preset("p100:1x4")
    mapped = Mapper(machine, COSTS).mapped(towers(8))
    used = [mapped.strategy.placements[f"tower{i}"].devices for i in range(8)]
    assert all(len(devices) == 1 for devices in used)
    assert sorted(used) == sorted([(i,) for i in range(4)] * 2)


def test_equal_parts_are_worked_out_once() -> None:
    graph, machine = load("bert_large", devices=4, tiny=True).captured().graph, preset("p100:1x4")
    mapper = Mapper(machine, COSTS)
    first = mapper.mapped(graph)
    assert mapper.parts is not None
    evaluated, tables = mapper.parts.evaluated, len(mapper.tables)
    assert mapper.mapped(graph) == first
    assert (mapper.parts.evaluated, len(mapper.tables)) == (evaluated, tables)


def test_views_of_a_machine() -> None:
    """2-D mappings go over nodes with one dim and within them with the other."""
    graph, machine = sums(), preset("summit:2x6")
    everything = whole(machine)
    assert everything == Range(0, 12, 6)
    assert everything.across[:4] == (0, 6, 1, 7)
    block = next(block for block in blocks(graph) if block.name == "one")
    found = candidates(graph, block, everything)
    assert placed({"o": 2}, (0, 6)) in found
    assert all(len(set(p.devices)) == len(p.devices) for p in found)
    assert all(one.count + two.count == 12 for one, two in everything.divisions())
    assert weight_bytes(graph, block, placed({"o": 2}, (0, 1))) == 512 * 256 * 4


def test_views_in_three_dimensions() -> None:
    """Nodes in groups: samples over groups and over the devices of a node, outputs over a group's nodes; and
    samples over the nodes, outputs and sums over the devices of each."""
    graph, everything = sums(512, 96), whole(preset("summit:4x6"))
    order = everything.across_groups(2)
    assert order[:4] == (0, 6, 1, 7)
    assert order[12:14] == (12, 18)
    block = next(block for block in blocks(graph) if block.name == "one")
    found = candidates(graph, block, everything, richness=2)
    assert placed({"b": 12, "o": 2}, order) in found
    assert placed({"b": 12, "o": 2}, order) not in candidates(graph, block, everything, richness=0)
    wide, cube = sums(36, 96), whole(preset("summit:4x6"))
    block = next(block for block in blocks(wide) if block.name == "one")
    three = [p for p in candidates(wide, block, cube, richness=2) if len(p.degrees) == 3]
    assert placed({"b": 4, "o": 2, "i": 3}, range(24)) in three
    assert all(sorted(p.devices) == list(range(24)) for p in three)


def test_samples_need_not_divide_by_the_number_of_devices() -> None:
    """Sixteen samples on three devices are placed on two of them; on twelve devices, on eight."""
    few, many = whole(preset("p100:1x3")), whole(preset("p100:3x4"))
    graph = sums(512, 16)
    block = next(block for block in blocks(graph) if block.name == "one")
    assert placed({"b": 2}, (0, 1)) in candidates(graph, block, few)
    assert placed({"b": 8}, range(8)) in candidates(graph, block, many)
    assert [(one.count, two.count) for one, two in few.divisions()] == [(1, 2), (2, 1)]


def test_a_device_more_makes_no_mapping_slower() -> None:
    """Nothing here divides by three, and layers on three devices were left whole."""
    graph = layers(6, 512, 4096)
    two, three = (Mapper(preset(name), COSTS).mapped(graph).cost_s for name in ("p100:1x2", "p100:1x3"))
    assert three <= two


def test_dims_of_a_kind_may_be_left_whole() -> None:
    graph, everything = sums(), whole(preset("p100:1x4"))
    block = next(block for block in blocks(graph) if block.name == "one")
    without = frozenset({Kind.REDUCTION, Kind.PARAMETER})
    found = candidates(graph, block, everything, without=without)
    assert {dim for p in found for dim, _ in p.degrees} == {"b"}


def test_layers_that_look_alike_are_moved_together() -> None:
    """From data parallelism, whose gradients are far more than the activations here, to layers that are split
    along outputs and sums."""
    graph, machine = layers(6, 1024, 8), preset("p100:1x4")
    bench = Bench(FlatProblem(graph, machine, COSTS), machine, "momentum")
    start = data_parallel(graph, machine)
    bench.place(start.placements)
    before_s = bench.makespan_s
    found, trials = together(bench, Mapper(machine, COSTS), start, lambda: False)
    assert trials > 0
    assert found.makespan_s < 0.5 * before_s
    assert found.makespan_s == native_tasks(found.strategy, machine, COSTS).simulated()[2]
    splits = [set(dict(found.strategy.placements[f"layer{i}"].degrees)) for i in range(6)]
    assert not any("b" in own for own in splits)
    assert {"i"} in splits
    assert {"o"} in splits
    assert together(bench, Mapper(machine, COSTS), start, lambda: True)[1] == 0


def test_a_view_of_one_s_own_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two triples of a Summit node in turn, for what is split over all six devices; nothing elsewhere."""
    monkeypatch.setattr(views, "VIEWS", {})
    views.register_view("sockets", lambda where: [where.first + i for i in (0, 3, 1, 4, 2, 5)])
    graph, machine = sums(384), preset("summit:1x6")
    block = next(block for block in blocks(graph) if block.name == "one")
    found = candidates(graph, block, whole(machine))
    assert placed({"o": 6}, (0, 3, 1, 4, 2, 5)) in found
    assert all(p.devices == tuple(range(len(p.devices))) for p in found if p.parts < 6)


def test_parts_are_cut_where_the_fewest_rules_are() -> None:
    """A chain of thirty nodes, with a rule's application across its middle."""
    b = GraphBuilder("chain")
    x = b.input("x", (4, 8))
    for i in range(30):
        (x,) = b.add("linear", [x, b.weight(f"w{i}", (8, 8)), None], name=f"n{i}")
    graph = b.graph(outputs=[x])
    found = parts(graph, [("n9", "n11"), ("n17", "n20")])
    assert [len(part) for part in found] == sorted(map(len, found), reverse=True) or len(found) > 1
    assert all(len(part) >= LEAST_NODES for part in found)
    assert all({"n17", "n20"} <= part or not {"n17", "n20"} & part for part in found)
    assert frozenset().union(*found) == {f"n{i}" for i in range(30)}


def test_rules_are_used_only_where_something_may_cost_less() -> None:
    """relu(relu(x)) = relu(x) is worth using in one direction alone."""
    uses = [use for use in directions() if use.rule.name == "relu"]
    assert [use.is_reversed for use in uses] in ([False], [True])
    assert not any(use.rule.is_parallel for use in directions())


def test_graphs_that_differ_in_names_alone_are_one_candidate() -> None:
    selection = Selection(Mapper(preset("p100:1x2"), COSTS), lambda: False, lambda *_: None)
    one, two = sums(), sums()
    renamed = {node.name: f"{node.name}!" for node in two.nodes}
    two = replace(two, nodes=tuple(replace(node, name=renamed[node.name]) for node in two.nodes))
    assert selection.identity(one) == selection.identity(two)
    rewritten = [graph for _, graph in rewritings(one, frozenset(node.name for node in one.nodes))]
    assert selection.identity(one) not in map(selection.identity, rewritten)
    assert len(rewritten) > 1


def figure_2(*, has_loss: bool) -> Graph:
    """Unity's MLP for MNIST: 64 samples, 784 inputs, 512 hidden, 10 outputs."""
    b = GraphBuilder("figure2")
    x = b.input("x", (64, 784), samples=0)
    (y,) = b.add("linear", [x, b.weight("w1", (512, 784)), None], name="first")
    (y,) = b.add("relu", [y], name="relu")
    (y,) = b.add("linear", [y, b.weight("w2", (10, 512)), None], name="second")
    if not has_loss:
        return b.graph(outputs=[y])
    (y,) = b.add("mse_loss", [y, b.input("wanted", (64, 10), samples=0)], name="loss")
    return b.graph(loss=y)


def test_figure_2_moves_what_the_paper_says_and_the_joint_search_finds_the_optimum() -> None:
    graph, machine = figure_2(has_loss=False), preset("p100:1x2")
    plain = simulation(data_parallel(graph, machine), machine)
    assert plain.tasks.moved_bytes == 4 * 813_056
    theirs = Strategy(graph, {"first": placed({"i": 2}, (0, 1)), "second": placed({"o": 2}, (0, 1))})
    assert simulation(theirs, machine).tasks.moved_bytes == 4 * 131_072
    trained = figure_2(has_loss=True)
    best = exact_search(trained, machine, COSTS, proposals=50)
    found = find(trained, machine, COSTS, options("unity", 200))
    assert best.is_optimal
    assert found.makespan_s == pytest.approx(best.makespan_s, rel=1e-9)
    assert simulation(found.strategy, machine).tasks.moved_bytes <= 4 * 131_072


MODEL = """
import torch
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(512, 512, bias=False)
        self.two = nn.Linear(512, 512, bias=False)

    def forward(self, x):
        return (self.one(x) + self.two(x)).square().mean()

def sums(batch=64):
    torch.manual_seed(0)
    return Sums(), (torch.randn(batch, 512),)
"""


def test_a_plan_with_a_rewritten_graph_is_written_read_and_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan --search unity`, then `train`: the losses and the checkpoint's names are the original's."""
    (tmp_path / "own.py").write_text(MODEL)
    model, plan, plain = f"{tmp_path / 'own.py'}:sums", tmp_path / "plan.json", tmp_path / "plain.json"
    given = [
        model,
        "--machine",
        "cpu:1x1",
        "--search",
        "unity",
        "--proposals",
        "20",
        "-o",
        str(plan),
        "--json",
    ]
    assert main(["plan", *given]) == 0
    assert "add-linear" in json.loads(capsys.readouterr().out)["search"]["rewrites"]
    found = read_plan(plan)
    assert [node.op_name for node in found.graph.nodes].count("linear") == 1
    machine = preset("cpu:1x1")
    graph = load(model).captured().graph
    strategy = data_parallel(graph, machine)
    write_plan(planned(strategy, machine, simulation(strategy, machine), COSTS, model=model), plain)
    losses = []
    for path in (plan, plain):
        saved = tmp_path / f"{path.stem}.safetensors"
        assert (
            main(["train", str(path), "--steps", "3", "--lr", "0.1", "--export", str(saved), "--json"]) == 0
        )
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    from safetensors.torch import load_file

    one, two = (load_file(tmp_path / f"{path.stem}.safetensors") for path in (plan, plain))
    assert set(one) == set(two) == {"one.weight", "two.weight"}
    for name, tensor in one.items():
        assert tensor.numpy() == pytest.approx(two[name].numpy(), rel=1e-4, abs=1e-6)
