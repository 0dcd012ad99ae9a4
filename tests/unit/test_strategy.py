"""Blocks, layouts, placements, and strategies written as documents or by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soapstone.errors import StrategyError
from soapstone.graph import Graph, GraphBuilder
from soapstone.machine import preset
from soapstone.search.baselines import baseline, data_parallel
from soapstone.strategy.blocks import blocks
from soapstone.strategy.document import document_of, placement_of, read_strategy, strategy_from
from soapstone.strategy.layout import layout, layouts
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

MACHINE = preset("p100:1x4")


def names(graph: Graph, apart: frozenset[str] = frozenset()) -> list[list[str]]:
    return [[node.name for node in block.nodes] for block in blocks(graph, apart)]


def network() -> Graph:
    """x (8, 16) -> fc1 (8, 32) -> relu -> fc2 (8, 4) -> loss."""
    build = GraphBuilder("network")
    x = build.input("x", (8, 16))
    (h,) = build.add("linear", [x, build.weight("w1", (32, 16)), None], name="fc1")
    (r,) = build.add("relu", [h], name="relu")
    (y,) = build.add("linear", [r, build.weight("w2", (4, 32)), None], name="fc2")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def test_elementwise_nodes_follow() -> None:
    assert names(network()) == [["fc1", "relu"], ["fc2"], ["loss"]]
    assert names(network(), frozenset({"relu"})) == [["fc1"], ["relu"], ["fc2"], ["loss"]]


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("slice", {"dim": 1, "start": 0, "end": 4}),
        ("select", {"dim": 1, "index": 0}),
        ("pad", {"pads": ((0, 4),)}),
        ("diagonal", {}),
    ],
)
def test_what_reads_only_a_part_does_not_follow(op: str, attrs: dict[str, object]) -> None:
    """A shard of the leader would have nothing, or not all, of what a shard of the reader needs."""
    build = GraphBuilder("part")
    (y,) = build.add("linear", [build.input("x", (8, 8)), build.weight("w", (8, 8)), None], name="fc")
    (z,) = build.add(op, [y], attrs, name="part")  # type: ignore[arg-type]
    assert names(build.graph(outputs=[z])) == [["fc"], ["part"]]


def test_what_joins_several_does_not_follow_one_of_them() -> None:
    build = GraphBuilder("join")
    x = build.input("x", (8, 8))
    parts = [
        build.add("linear", [x, build.weight(f"w{i}", (8, 8)), None], name=f"fc{i}")[0] for i in range(2)
    ]
    (z,) = build.add("concat", parts, {"dim": 1}, name="joined")
    assert names(build.graph(outputs=[z])) == [["fc0"], ["fc1"], ["joined"]]


def test_a_shard_must_have_all_it_reads_of_its_block() -> None:
    """y + transpose(y): a shard with some rows of y does not have the same columns."""
    build = GraphBuilder("turned")
    (y,) = build.add("linear", [build.input("x", (8, 8)), build.weight("w", (8, 8)), None], name="fc")
    (t,) = build.add("permute", [y], {"dims": (1, 0)}, name="turned")
    (z,) = build.add("add", [y, t], name="sum")
    graph = build.graph(outputs=[z])
    (block,) = blocks(graph)
    with pytest.raises(
        StrategyError, match="a shard of 'sum' would read what another shard of the block wrote"
    ):
        layout(graph, block, {"b": 2})
    # Partial sums are whole before a follower sees them, so the summed dim may be split.
    assert [dict(found.degrees) for found in layouts(graph, block, 2)] == [{"i": 2}]


def test_shards_that_compute_the_same_are_alike() -> None:
    graph = network()
    found = layout(graph, blocks(graph)[0], {"b": 2, "i": 2})
    assert found.alike(0) == ((0,), (1,), (2,), (3,))
    assert found.alike(1) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("degrees", "devices", "copies"), [((("b", 1),), (0,), 1), ((), (0,), 0), ((("b", 2),), (0, 1, 2), 1)]
)
def test_an_impossible_placement_cannot_be_made(
    degrees: tuple[tuple[str, int], ...], devices: tuple[int, ...], copies: int
) -> None:
    with pytest.raises(StrategyError):
        Placement(degrees, devices, copies)


def test_checking_names_what_is_wrong() -> None:
    graph, whole = network(), Placement((), (0,))
    good = {"fc1": whole, "fc2": whole, "loss": whole}
    assert Strategy(graph, good).checked(MACHINE)
    with pytest.raises(
        StrategyError, match="places 'fc3', which leads no block of the graph; did you mean 'fc"
    ):
        Strategy(graph, {**good, "fc3": whole}).checked(MACHINE)
    with pytest.raises(StrategyError, match="no placement for block 'loss'"):
        Strategy(graph, {"fc1": whole, "fc2": whole}).checked(MACHINE)
    with pytest.raises(StrategyError, match="'fc2' is placed on device 4; the machine has 0 to 3"):
        Strategy(graph, {**good, "fc2": Placement((), (4,))}).checked(MACHINE)
    with pytest.raises(StrategyError, match="dim 'b' of size 8 does not divide into 3 equal parts"):
        Strategy(graph, {**good, "fc2": placed({"b": 3}, (0, 1, 2))}).checked(MACHINE)


def test_a_graph_without_blocks_has_one_strategy() -> None:
    build = GraphBuilder("free")
    (y,) = build.add("mul", [build.input("x", (8,)), 2.0], name="double")
    assert Strategy(build.graph(outputs=[y]), {}).checked(MACHINE).blocks == ()


def test_documents_read_back() -> None:
    graph = network()
    placements = {
        "fc1": placed({"b": 2, "o": 2}, (3, 1, 0, 2)),
        "relu": Placement((), (0, 1), copies=2),
        "fc2": placed({"b": 2}, (0, 0)),
        "loss": Placement((), (3,)),
    }
    strategy = Strategy(graph, placements, frozenset({"relu"}))
    document = json.loads(json.dumps(document_of(strategy)))
    assert document["placements"]["fc1"] == {
        "degrees": {"b": 2, "o": 2},
        "devices": [3, 1, 0, 2],
        "copies": 1,
    }
    assert strategy_from(document, graph, "here") == strategy


def by_hand(document: object, graph: Graph | None = None) -> Strategy:
    found = graph or network()
    return strategy_from(document, found, "mine.yaml", lambda name: baseline(name, found, MACHINE))


def test_what_is_not_placed_by_hand_does_as_the_default_does() -> None:
    strategy = by_hand({"default": "data_parallel", "placements": {"fc2": {"degrees": {"b": 2, "o": 2}}}})
    default = data_parallel(strategy.graph, MACHINE)
    assert strategy.placements == {**default.placements, "fc2": placed({"b": 2, "o": 2}, (0, 1, 2, 3))}
    assert by_hand({"default": "single_device"}) == baseline("single_device", network(), MACHINE)


def test_a_follower_placed_by_hand_stands_apart() -> None:
    strategy = by_hand({"default": "data_parallel", "placements": {"relu": {"devices": [2]}}})
    assert strategy.apart == {"relu"}
    assert strategy.placements["relu"] == Placement((), (2,))
    assert strategy.placements["fc1"] == placed({"b": 4}, (0, 1, 2, 3))


def test_a_follower_left_alone_keeps_its_place() -> None:
    """A node that stands apart without a placement of its own stays where its block was."""
    strategy = by_hand({"default": "data_parallel", "apart": ["relu"]})
    assert strategy.placements["relu"] == placed({"b": 4}, (0, 1, 2, 3))


def test_the_place_of_a_follower_is_that_of_its_boxes() -> None:
    build = GraphBuilder("turned")
    (y,) = build.add("linear", [build.input("x", (8, 8)), build.weight("w", (4, 8)), None], name="fc")
    (t,) = build.add("permute", [y], {"dims": (1, 0)}, name="turned")
    graph = build.graph(outputs=[t])
    strategy = Strategy(graph, {"fc": placed({"b": 2, "o": 2}, (0, 1, 2, 3))})
    # Shard (row b, column o) of fc is shard (row o, column b) of its transpose, whose dims count from
    # its own first axis.
    assert placement_of(strategy, "turned") == placed({"b": 2, "a": 2}, (0, 2, 1, 3))
    # Shards of a split sum all have the whole sum: copies of the follower.
    summed = Strategy(graph, {"fc": placed({"i": 2}, (3, 1))})
    assert placement_of(summed, "turned") == Placement((), (3, 1), copies=2)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "mine.yaml: the document must be a mapping of fields"),
        (
            {"placement": {}},
            "mine.yaml: the document has the unknown field 'placement'; did you mean 'placements'?",
        ),
        ({"placements": {"fc9": {}}}, "the graph has no node 'fc9'; did you mean 'fc"),
        ({"apart": ["rely"]}, "the graph has no node 'rely'; did you mean 'relu'?"),
        ({"apart": "relu"}, "mine.yaml: apart must be a list"),
        (
            {"placements": {"fc1": {"degree": {"b": 2}}}},
            "placements.fc1 has the unknown field 'degree'; did you mean 'degrees'?",
        ),
        (
            {"placements": {"fc1": {"degrees": {"batch": 2}}}},
            "placements.fc1 splits 'batch', which is no dim of 'fc1'",
        ),
        ({"placements": {"fc1": {"degrees": {"b": 0}}}}, "must be a whole number from 1 to 8, not 0"),
        ({"placements": {"fc1": {"degrees": {"b": True}}}}, "must be a whole number from 1 to 8, not True"),
        (
            {"placements": {"fc1": {"degrees": {"b": 2}, "devices": [0]}}},
            "lists 1 devices for 2 shards in 1 copies",
        ),
        ({"placements": {"fc1": {"copies": 70_000}}}, "must be a whole number from 1 to 65536"),
        (
            {"placements": {"fc1": {"devices": [-1]}}},
            "placements.fc1.devices[0] must be a whole number from 0",
        ),
        (
            {"default": "data_parallel", "placements": {"fc1": {"degrees": {"b": 3}}}},
            "does not divide into 3",
        ),
        ({"placements": {"fc1": {}}}, "mine.yaml: block 'fc2' has no placement; add one, or name a default"),
        ({"default": "data_paralel"}, "there is no strategy 'data_paralel'"),
    ],
)
def test_a_wrong_document_is_refused_in_one_sentence(document: object, sentence: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        by_hand(document)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_default_has_no_meaning_in_a_plan() -> None:
    with pytest.raises(StrategyError, match="default has no meaning here"):
        strategy_from({"default": "data_parallel"}, network(), "plan")


def test_nodes_that_follow_from_inputs_alone_cannot_be_placed() -> None:
    build = GraphBuilder("free")
    (half,) = build.add("mul", [build.input("x", (8, 16)), 0.5], name="half")
    (y,) = build.add("linear", [half, build.weight("w", (4, 16)), None], name="fc")
    with pytest.raises(StrategyError, match="node 'half' depends on inputs alone"):
        by_hand({"placements": {"half": {}}}, build.graph(outputs=[y]))


@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"default": "data_parallel", "placements": {"fc2": {"devices": [1]}}}', encoding="utf-8")
    graph = network()
    found = read_strategy(path, graph, lambda chosen: baseline(chosen, graph, MACHINE))
    assert found.placements["fc2"] == Placement((), (1,))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.yaml", b"", "is empty"),
        ("a.yaml", b"a: [", "this is no YAML or JSON"),
        ("a.json", b"{", "this is no YAML or JSON"),
        ("a.yaml", b"\xff\xfe\x00", "this is no YAML or JSON"),
        ("a.yaml", b"!!python/object/apply:os.system ['true']", "this is no YAML or JSON"),
        ("b.yaml", None, "cannot be read"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StrategyError) as refusal:
        read_strategy(path, network(), lambda _: Strategy(network(), {}))
    assert str(refusal.value).startswith(f"{path}: ")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
