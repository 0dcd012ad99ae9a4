"""Strategies as documents: plain mappings, lists and numbers that JSON and YAML can both hold.

    default: data_parallel              # files written by hand: what the blocks not named below do
    apart: [relu1]                      # nodes that lead blocks of their own
    pipeline:                           # if the batch runs in micro-batches
      micro_batches: 4
      schedule: 1f1b                    # or gpipe; 1f1b if left out
    placements:
      fc1:                              # a block, by its leader; or any node, which then stands apart
        degrees: {b: 2, o: 2}           # parts along each dim that is split
        devices: [0, 1, 2, 3]           # of the shards, in row-major order; 0, 1, 2, ... if left out
        copies: 1

With a pipeline, placements are those of one micro-batch. The law is
`strategy_from(document_of(s), s.graph, ...) == s`. `docs/guide/strategies-by-hand.md` is the user's page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import yaml

from soapstone.errors import MachineError, StrategyError
from soapstone.graph import Graph
from soapstone.machine.checks import did_you_mean
from soapstone.machine.cursor import Cursor
from soapstone.machine.yamlfile import loaded
from soapstone.ops.box import Interval
from soapstone.strategy.blocks import blocks
from soapstone.strategy.layout import layout
from soapstone.strategy.pipeline import Pipeline, Schedule
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

MOST_SHARDS = 65_536
"""[choice] The most shards and copies of one placement: beyond any machine, so a slip of the hand."""

Named = Callable[[str], Strategy]
"""The strategy of a name, for the graph and machine at hand."""


def document_of(strategy: Strategy) -> dict[str, object]:
    """The strategy as nested mappings and lists."""
    pipeline = strategy.pipeline
    return {
        "apart": sorted(strategy.apart),
        **({} if pipeline is None else {"pipeline": _pipeline_document(pipeline)}),
        "placements": {
            name: {
                "degrees": dict(placement.degrees),
                "devices": list(placement.devices),
                "copies": placement.copies,
            }
            for name, placement in strategy.of_one().placements.items()
        },
    }


def _pipeline_document(pipeline: Pipeline) -> dict[str, object]:
    return {"micro_batches": pipeline.micro_batches, "schedule": pipeline.schedule.value}


def strategy_from(document: object, graph: Graph, source: str, named: Named | None = None) -> Strategy:
    """The strategy that `document` describes; `source` is what errors call it.

    `named` finds what `default` names; without it every block must have its placement.
    """
    try:
        fields = Cursor(document, source).fields(optional=("default", "apart", "pipeline", "placements"))
        apart = [item.text() for item in fields["apart"].items()] if "apart" in fields else []
        entries = fields["placements"].entries() if "placements" in fields else {}
        for name in [*apart, *entries]:
            _check_node(graph, name, source)
        placements = {name: _placement_from(entry, graph, name) for name, entry in entries.items()}
        chosen = fields["default"].text() if "default" in fields else None
        pipeline = _pipeline_from(fields["pipeline"], graph) if "pipeline" in fields else None
    except MachineError as error:  # a cursor's sentence about a place of the document
        raise StrategyError(str(error)) from None
    stated = _with_leaders(Strategy(graph, placements, frozenset(apart)))
    if chosen is not None:
        if named is None:
            raise StrategyError(f"{source}: default has no meaning here; give every block a placement.")
        other = named(chosen)
        stated, pipeline = completed(stated, other.of_one()), pipeline or other.pipeline
    stated = _with_legal_layouts(stated, source)
    if pipeline is None:
        return stated
    try:
        return _with_legal_layouts(stated.pipelined(pipeline), source)
    except StrategyError as error:
        sentence = str(error)
        raise StrategyError(sentence if sentence.startswith(source) else f"{source}: {sentence}") from None


def _pipeline_from(entry: Cursor, graph: Graph) -> Pipeline:
    fields = entry.fields(("micro_batches",), optional=("schedule",))
    count = fields["micro_batches"].whole_number(1, MOST_SHARDS)
    if graph.sample_count is None or graph.sample_count % count:
        raise fields["micro_batches"].refused(
            f"is {count}, which does not divide the {graph.sample_count or 'uncounted'} samples of a step."
        )
    schedule = fields["schedule"].text() if "schedule" in fields else Schedule.ONE_F_ONE_B.value
    if schedule not in list(Schedule):
        raise fields["schedule"].refused(f"is {schedule!r}{did_you_mean(schedule, map(str, Schedule))}")
    return Pipeline(count, Schedule(schedule))


def _check_node(graph: Graph, name: str, source: str) -> None:
    names = [node.name for node in graph.nodes]
    if name not in names:
        raise StrategyError(f"{source}: the graph has no node {name!r}{did_you_mean(name, names)}")
    if name in graph.loss_tail:
        raise StrategyError(
            f"{source}: node {name!r} only adds up the loss, so it runs nowhere; leave it out."
        )
    if not any(name in (node.name for node in block.nodes) for block in blocks(graph)):
        raise StrategyError(
            f"{source}: node {name!r} depends on inputs alone, so each device computes the part it needs; "
            "leave it out."
        )


def _placement_from(entry: Cursor, graph: Graph, name: str) -> Placement:
    fields = entry.fields(optional=("degrees", "devices", "copies"))
    given = fields["degrees"].entries() if "degrees" in fields else {}
    dims = graph.signature(graph.node(name)).sizes
    for dim in given:
        if dim not in dims:
            raise entry.refused(f"splits {dim!r}, which is no dim of {name!r}{did_you_mean(dim, dims)}")
    degrees = {dim: given[dim].whole_number(1, size) for dim, size in dims.items() if dim in given}
    copies = fields["copies"].whole_number(1, MOST_SHARDS) if "copies" in fields else 1
    count = prod(degrees.values()) * copies
    if count > MOST_SHARDS:
        raise entry.refused(f"asks for {count} shards and copies; {MOST_SHARDS} are the most.")
    if "devices" in fields:
        devices = tuple(item.whole_number(0, MOST_SHARDS) for item in fields["devices"].items())
        if len(devices) != count:
            raise entry.refused(
                f"lists {len(devices)} devices for {count // copies} shards in {copies} copies; list {count}."
            )
    else:
        devices = tuple(range(count))
    return Placement(tuple((dim, n) for dim, n in degrees.items() if n > 1), devices, copies)


def _with_leaders(strategy: Strategy) -> Strategy:
    """The strategy in which every node that has a placement leads a block."""
    while True:
        leaders = {block.name for block in strategy.blocks}
        followers = strategy.placements.keys() - leaders
        if not followers:
            return strategy
        strategy = Strategy(strategy.graph, strategy.placements, strategy.apart | followers)


def _with_legal_layouts(strategy: Strategy, source: str) -> Strategy:
    """The strategy itself, if every block has a placement and can be split so."""
    for block in strategy.blocks:
        if block.name not in strategy.placements:
            raise StrategyError(
                f"{source}: block {block.name!r} has no placement; add one, or name a default such as "
                "data_parallel."
            )
        try:
            layout(strategy.graph, block, strategy.placements[block.name].degree_of)
        except StrategyError as error:
            raise StrategyError(f"{source}: {error}") from None
    return strategy


def completed(strategy: Strategy, other: Strategy) -> Strategy:
    """The strategy, with blocks that it does not place where another one has their leaders."""
    placements = {
        block.name: strategy.placements.get(block.name) or placement_of(other, block.name)
        for block in strategy.blocks
    }
    return Strategy(strategy.graph, placements, strategy.apart)


def placement_of(strategy: Strategy, name: str) -> Placement:
    """The placement that a node has as a part of its block, written as if it led one."""
    block = next(block for block in strategy.blocks if any(node.name == name for node in block.nodes))
    number = [node.name for node in block.nodes].index(name)
    placement = strategy.placements[block.name]
    if number == 0:
        return placement
    signature = strategy.graph.signature(block.nodes[number])
    devices: dict[tuple[Interval, ...], list[int]] = {}
    for shard, box in enumerate(strategy.layouts[block.name].boxes[number]):
        devices.setdefault(_corners(box), []).extend(placement.devices_of(shard))
    first = strategy.layouts[block.name].boxes[number][0]
    degrees = {dim: size // first[dim].length for dim, size in signature.sizes.items()}
    shards = signature.shards(degrees)
    return Placement(
        tuple((dim, degree) for dim, degree in degrees.items() if degree > 1),
        tuple(device for box in shards for device in devices[_corners(box)]),
        len(devices[_corners(first)]),
    )


def _corners(box: Mapping[str, Interval]) -> tuple[Interval, ...]:
    return tuple(box[dim] for dim in sorted(box))


def read_strategy(path: Path, graph: Graph, named: Named) -> Strategy:
    """The strategy that a JSON or YAML file describes."""
    return strategy_from(_document_in(path), graph, str(path), named)


def _document_in(path: Path) -> object:
    try:
        text = path.read_bytes().decode("utf-8")
        document = json.loads(text) if path.suffix.lower() == ".json" else loaded(text)
    except OSError as error:
        raise StrategyError(
            f"{path}: the strategy file cannot be read ({error.strerror}); check the path."
        ) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StrategyError(f"{path}: this is no YAML or JSON of a strategy ({reason}).") from None
    if document is None:
        raise StrategyError(f"{path}: the strategy file is empty; write at least 'default: data_parallel'.")
    return document
