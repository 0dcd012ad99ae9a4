"""Baselines: legal for every model they say they apply to, and what their papers say they are."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.graphs import graphs
from oracles.strategies import MACHINES

from soapstone.cli.main import main
from soapstone.cost.analytic import AnalyticCosts
from soapstone.errors import StrategyError
from soapstone.frontends.source import load
from soapstone.frontends.zoo import ZOO
from soapstone.graph import Graph, GraphBuilder, Role
from soapstone.machine import Machine, preset
from soapstone.ops import Kind
from soapstone.search.baselines import BASELINES, applicable, baseline, data_parallel
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.colocrl import Training, colocrl, learned
from soapstone.search.baselines.layers import layers
from soapstone.search.baselines.megatron import Groups
from soapstone.search.baselines.registry import Given
from soapstone.search.baselines.scoring import Scorer
from soapstone.search.baselines.simple import uneven
from soapstone.search.baselines.taso_then_flexflow import taso_then_flexflow
from soapstone.search.baselines.wu import depths
from soapstone.sim.reference import simulate
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.task import TaskKind

FOUR, TWO_BY_TWO = preset("p100:1x4"), preset("k80:2x2")
COSTS = AnalyticCosts()
BRIEF = Training(updates=2, samples=2)
COMPUTE = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.UPDATE)

EXPERTS = {
    "krizhevsky": {"lenet", "alexnet", "inception_v3", "resnet101", "resnext50"},
    "wu": {"rnntc", "rnnlm", "nmt"},
    "megatron": {"bert_large", "gpt2", "llama_1b", "llama_8b", "vit_l", "moe"},
    "dlrm_expert": {"dlrm", "xdl"},
}
"""The models of the zoo that each expert's strategy is for."""


SEARCHING = {"colocrl", "taso_then_flexflow"}
"""The baselines that take long; they are tried with less to do."""


@cache
def tiny(name: str) -> Graph:
    return load(name, devices=4, tiny=True).captured().graph


def degrees(strategy: Strategy) -> dict[str, dict[str, int]]:
    return {name: dict(placement.degrees) for name, placement in strategy.placements.items()}


@pytest.mark.parametrize("name", ZOO)
def test_every_baseline_that_applies_gives_a_legal_strategy(name: str) -> None:
    graph = tiny(name)
    found = {each.name for each in applicable(graph, TWO_BY_TWO)}
    for each in (BASELINES[name] for name in found - SEARCHING):
        strategy = each.build(Given(graph, TWO_BY_TWO, COSTS, 0))
        strategy.checked(TWO_BY_TWO)
    colocrl(graph, TWO_BY_TWO, COSTS, 0, BRIEF).checked(TWO_BY_TWO)
    if name in ("lenet", "dlrm", "rnnlm"):
        taso_then_flexflow(graph, TWO_BY_TWO, COSTS, 0, 5).checked(TWO_BY_TWO)
    assert found & EXPERTS.keys() == {expert for expert, models in EXPERTS.items() if name in models}
    assert found >= BASELINES.keys() - EXPERTS.keys()


@settings(max_examples=30, deadline=None)
@given(graphs(), st.sampled_from(MACHINES))
def test_every_baseline_that_applies_is_legal_on_any_graph_and_machine(graph: Graph, name: str) -> None:
    machine = preset(name)
    for each in applicable(graph, machine):
        if each.name not in SEARCHING:
            each.build(Given(graph, machine, COSTS, 0)).checked(machine)
    colocrl(graph, machine, COSTS, 0, BRIEF).checked(machine)


@pytest.mark.parametrize("machine", ["cpu:1x1", "cpu:1x3"])
@pytest.mark.parametrize("model", ["lenet", "rnnlm", "dlrm", "gpt2"])
def test_few_and_odd_devices_do_as_well(model: str, machine: str) -> None:
    devices = preset(machine)
    for each in applicable(tiny(model), devices):
        if each.name not in SEARCHING:
            each.build(Given(tiny(model), devices, COSTS, 0)).checked(devices)


@pytest.mark.parametrize("name", ["krizhevsky", "optcnn", "colocrl", "random"])
def test_the_command_line_takes_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", "--model", "lenet", "--tiny", "--machine", "p100:1x4", "--strategy", name])
    assert (code, capsys.readouterr().out.splitlines()[0]) == (0, f"lenet on p100:1x4, strategy {name}")


def test_the_command_line_says_why_a_strategy_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", "--model", "lenet", "--tiny", "--machine", "p100:1x4", "--strategy", "wu"])
    message = "soapstone: strategy 'wu' does not apply to 'lenet': it has no recurrent layers\n"
    assert (code, *capsys.readouterr()) == (2, "", message)


@pytest.mark.parametrize("name", ["random", "colocrl", "optcnn"])
def test_a_seed_gives_the_same_strategy_again(name: str) -> None:
    graph = tiny("lenet")
    first, again = (baseline(name, graph, FOUR, seed=3) for _ in range(2))
    assert first.placements == again.placements


def test_another_seed_gives_another_random_strategy() -> None:
    graph = tiny("lenet")
    one, two = (baseline("random", graph, FOUR, seed=seed) for seed in (0, 1))
    assert one.placements != two.placements


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("krizhevsky", "nmt", "it has no convolutions"),
        ("krizhevsky", "vit_l", "its dense layers compute more than its convolutions"),
        ("wu", "alexnet", "it has no recurrent layers"),
        ("megatron", "mlp", "it has no attention"),
        ("megatron", "nmt", "no attention lies between dense layers"),
        ("dlrm_expert", "mlp", "it has no embedding tables"),
        ("dlrm_expert", "gpt2", "it has only one embedding table"),
        ("dlrm_expert", "nmt", "less than half of its parameters"),
    ],
)
def test_what_does_not_apply_says_why(name: str, model: str, reason: str) -> None:
    with pytest.raises(StrategyError, match=f"strategy '{name}' does not apply to '{model}': {reason}"):
        baseline(name, tiny(model), FOUR)


@pytest.mark.parametrize(
    ("batch", "width", "note"),
    [
        (16, 4, None),
        (10, 2, "is over 2 of 4 devices: the batch of 10 does not divide by 4; a batch of 12 would"),
        (9, 3, "is over 3 of 4 devices: the batch of 9 does not divide by 4; a batch of 12 would"),
    ],
)
def test_data_parallelism_takes_the_most_devices_that_share_the_batch_evenly(
    batch: int, width: int, note: str | None
) -> None:
    graph = load("lenet", batch=batch, devices=4, tiny=True).captured().graph
    shared = data_parallel(graph, FOUR)
    assert {(placement.devices, placement.copies) for placement in shared.placements.values()} == {
        (tuple(range(width)), 1)
    }
    assert uneven(shared, FOUR) == (None if note is None else f"data parallelism {note}")
    alone = data_parallel(graph, preset(f"p100:1x{width}"))
    assert degrees(shared) == degrees(alone)


def test_a_batch_that_no_two_devices_share_is_computed_by_all() -> None:
    graph = load("lenet", batch=7, devices=4, tiny=True).captured().graph
    shared = data_parallel(graph, FOUR)
    assert {placement.copies for placement in shared.placements.values()} == {4}
    told = "data parallelism computes the whole batch on every device: the batch of 7 does not divide by 4; "
    assert uneven(shared, FOUR) == f"{told}a batch of 8 would"


def test_what_has_no_samples_is_where_the_batch_is() -> None:
    """A weight made of another is needed on the two devices that share ten samples, and nowhere else."""
    build = GraphBuilder("net")
    (made,) = build.add("square", [build.weight("w", (16, 16))], name="made")
    (y,) = build.add("linear", [build.input("x", (10, 16)), made, None], name="dense")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    placements = data_parallel(build.graph(loss=loss), FOUR).placements
    assert placements["dense"].devices == (0, 1)
    assert (placements["made"].devices, placements["made"].copies) == ((0, 1), 2)


def test_krizhevsky_splits_dense_layers_by_parameters_and_nothing_else_so() -> None:
    graph = tiny("alexnet")
    strategy = baseline("krizhevsky", graph, FOUR)
    for block in strategy.blocks:
        split = degrees(strategy)[block.name]
        if block.name.startswith("linear"):
            assert split == {"o": 4}
            assert graph.kinds(block.leader)["o"] is Kind.PARAMETER
        else:
            assert split == {graph.sample_dims[block.name]: 4}


def test_krizhevsky_exchanges_no_gradient_of_a_dense_layer() -> None:
    graph = tiny("alexnet")
    tasks = task_graph(baseline("krizhevsky", graph, FOUR), FOUR, COSTS).tasks
    reduced = {task.name.partition(" gradient")[0] for task in tasks if task.kind is TaskKind.ALL_REDUCE}
    weights = {value.name for value in graph.values.values() if value.role is Role.WEIGHT}
    assert reduced & weights == {name for name in weights if name.startswith("features")}


def test_wu_gives_steps_of_a_layer_one_device_on_each_node() -> None:
    graph = tiny("rnntc")
    strategy = baseline("wu", graph, TWO_BY_TWO)
    places: dict[str, set[tuple[int, ...]]] = {}
    for block in strategy.blocks:
        placement = strategy.placements[block.name]
        assert degrees(strategy)[block.name] == {graph.sample_dims[block.name]: 2}
        first, second = placement.devices
        assert second == first + 2  # the same place on the other node
        places.setdefault(block.leader.scope, set()).add(placement.devices)
    assert all(len(each) == 1 for each in places.values())
    lstm = [places[f"lstm.cells.{layer}"] for layer in range(4)]
    assert lstm == [{(0, 2)}, {(0, 2)}, {(1, 3)}, {(1, 3)}]


def test_encoder_and_decoder_layers_are_equally_deep() -> None:
    graph = tiny("nmt")
    depth = depths(Anatomy(graph))
    found = {(graph.node(name).scope, depth) for name, depth in depth.items()}
    for layer in range(2):
        assert (f"encoder.cells.{layer}", layer + 1) in found
        assert (f"decoder.cells.{layer}", layer + 1) in found
    assert dict(found)["attention.combine"] < dict(found)["projection"]


def test_steps_are_one_layer_and_layers_without_steps_stay_apart() -> None:
    scopes = [
        sorted({block.leader.scope for block in layer.blocks}) for layer in layers(Anatomy(tiny("rnnlm")))
    ]
    assert [scope for scope in scopes if scope != [""]] == [
        ["embedding"],
        ["lstm.cells.0"],
        ["lstm.cells.1"],
        ["decoder"],
    ]
    for name in ("alexnet", "bert_large", "inception_v3"):
        assert all(len(layer.blocks) == 1 for layer in layers(Anatomy(tiny(name))))


def test_dlrm_expert_gives_each_table_a_device_and_the_rest_samples() -> None:
    graph = tiny("dlrm")
    strategy = baseline("dlrm_expert", graph, FOUR)
    tables = {block.name for block in Anatomy(graph).tables}
    held = [strategy.placements[name].devices for name in tables]
    assert all(len(devices) == 1 for devices in held)
    counts = [sum((device,) == each for each in held) for device in range(4)]
    assert sorted(counts) == [1, 2, 2, 2]  # seven tables
    for name, split in degrees(strategy).items():
        if name not in tables:
            assert split == {graph.sample_dims[name]: 4}


def test_dlrm_expert_spreads_tables_over_devices_to_spare() -> None:
    graph = tiny("xdl")
    machine = preset("p100:2x4")
    strategy = baseline("dlrm_expert", graph, machine).checked(machine)
    tables = [strategy.placements[block.name] for block in Anatomy(graph).tables]
    assert [dict(placement.degrees) for placement in tables] == [{"e": 2}] * 4
    assert sorted(device for placement in tables for device in placement.devices) == list(range(8))


def test_colocrl_places_whole_blocks_and_improves_on_its_first_samples() -> None:
    graph = tiny("nmt")
    training = Training(updates=60)
    updates = list(learned(graph, FOUR, COSTS, 0, training))
    assert updates[-1].best_s < min(updates[0].times_s)
    last, first = (sum(sum(each.times_s) for each in part) for part in (updates[-10:], updates[:10]))
    assert last < first
    strategy = colocrl(graph, FOUR, COSTS, 0, training)
    assert all(placement.devices[1:] == () for placement in strategy.placements.values())
    assert Scorer(graph, FOUR, COSTS).makespan_s(strategy) == updates[-1].best_s


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_moves_between_the_columns_and_the_rows_of_a_pair(size: int) -> None:
    graph = tiny("bert_large")
    groups = Groups(graph, 4, size)
    tasks = task_graph(groups.strategy, FOUR, COSTS).tasks
    moved = {task.name.split()[0] for task in tasks if task.kind not in COMPUTE}
    anatomy = groups.anatomy
    rows = {
        name
        for region in groups.regions
        for name, dim in region.items()
        if dim in anatomy.contracted(graph.node(name))
    }
    columns = {name for region in groups.regions for name in region} - rows
    blocks = {block.name: block for block in groups.strategy.blocks}
    assert len(groups.pairs) == 6  # queries, keys and values of two layers
    assert len(rows) == 5  # attention and linear layers of two, and the pooler before its head
    assert not {value for name in columns for value in blocks[name].writes} & moved
    assert all(blocks[name].writes & moved for name in rows - {"linear_15"})


def test_megatron_splits_heads_words_and_rows_and_repeats_the_rest() -> None:
    graph = tiny("bert_large")
    placements = Groups(graph, 4, 2).strategy.placements
    assert dict(placements["embedding"].degrees) == {"b": 2, "v": 2}
    assert dict(placements["linear"].degrees) == {"b": 2, "o": 2}  # queries
    assert dict(placements["matmul"].degrees) == {"b": 2, "b1": 2}  # heads
    assert dict(placements["linear_3"].degrees) == {"b": 2, "i": 2}  # the attention's output
    assert dict(placements["linear_14"].degrees) == {"b": 2, "o": 2}  # words
    assert dict(placements["cross_entropy_loss"].degrees) == {"b": 4}
    norm = placements["layer_norm_1"]
    assert (dict(norm.degrees), norm.copies, norm.devices) == ({"b": 2}, 2, (0, 1, 2, 3))


def test_megatron_follows_gates_and_rotated_heads() -> None:
    graph = tiny("llama_1b")
    regions = Groups(graph, 4, 4).regions
    scopes = [{graph.node(name).scope.rpartition(".")[2] for name in region} for region in regions]
    assert sum("q_proj" in scope for scope in scopes) == 2
    assert sum({"gate_proj", "up_proj", "down_proj"} <= scope for scope in scopes) == 2


def test_megatron_takes_the_fastest_group_size() -> None:
    graph = tiny("gpt2")
    scorer = Scorer(graph, FOUR, COSTS)
    times = [scorer.makespan_s(Groups(graph, 4, size).strategy) for size in (2, 4)]
    assert scorer.makespan_s(baseline("megatron", graph, FOUR)) == min(times)


def test_anatomy_reads_the_notation_and_not_the_window_size() -> None:
    build = GraphBuilder("net")
    x = build.input("x", (4, 3, 8, 8))
    (y,) = build.add("conv2d", [x, build.weight("k", (6, 3, 1, 1)), None], name="one_by_one")
    (y,) = build.add("reshape", [y], {"shape": (4, 6 * 64)}, name="flat")
    (y,) = build.add("linear", [y, build.weight("w", (2, 6 * 64)), None], name="fc")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    anatomy = Anatomy(build.graph(loss=loss))
    assert [block.name for block in anatomy.convolutions] == ["one_by_one"]
    assert [block.name for block in anatomy.dense_layers] == ["fc"]
    assert not anatomy.tables + anatomy.attentions + anatomy.recurrent_layers


@pytest.mark.parametrize("machine", [FOUR, TWO_BY_TWO], ids=lambda machine: machine.name)
def test_scores_are_those_of_the_task_graph(machine: Machine) -> None:
    graph = tiny("lenet")
    scorer = Scorer(graph, machine, COSTS)
    for name in ("data_parallel", "krizhevsky", "random", "data_parallel"):
        strategy = baseline(name, graph, machine)
        assert scorer.makespan_s(strategy) == simulate(task_graph(strategy, machine, COSTS)).makespan_s
    assert data_parallel(graph, machine).placements == baseline("data_parallel", graph, machine).placements
