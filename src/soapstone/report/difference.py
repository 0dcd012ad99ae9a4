"""What differs between two plans of one model, and what each difference is worth.

Each layer that is placed otherwise in the second plan is taken over into the first, alone, and the whole
iteration is simulated again; and the other way round, the second plan is simulated without it. The two
need not agree: differences help or hinder each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from soapstone.errors import PlanError
from soapstone.machine import Machine
from soapstone.machine.units import counted
from soapstone.plans import Plan
from soapstone.report.decisions import layers
from soapstone.report.explanation import split_text
from soapstone.report.resimulation import Resimulation
from soapstone.strategy.blocks import Block
from soapstone.strategy.strategy import Strategy


@dataclass(frozen=True)
class Change:
    """One layer of which `blocks` blocks are placed otherwise. `alone_s` is the first plan's time with this
    change only, `without_s` the second's without it. Splits and devices are those of the first such block."""

    layer: str
    blocks: int
    first_split: str
    second_split: str
    first_devices: tuple[int, ...]
    second_devices: tuple[int, ...]
    alone_s: float
    without_s: float


@dataclass(frozen=True)
class Difference:
    """Two plans on one machine."""

    machine: Machine
    first_s: float
    second_s: float
    changes: tuple[Change, ...]
    same_blocks: int


def difference(first: Plan, second: Plan) -> Difference:
    """What differs; both plans are simulated on the first one's machine, which must have as many devices,
    and with its costs."""
    _check(first, second)
    machine = first.machine
    one, two = (Resimulation(plan.strategy, machine, first.cost_model) for plan in (first, second))
    changes = []
    same = 0
    for layer in layers(first.strategy):
        moved = [
            block
            for block in layer.blocks
            if first.strategy.placements[block.name] != second.strategy.placements[block.name]
        ]
        same += len(layer.blocks) - len(moved)
        if moved:
            changes.append(_change(layer.name, moved, one, two))
    changes.sort(key=lambda change: change.alone_s)
    return Difference(machine, one.makespan_s, two.makespan_s, tuple(changes), same)


def _rewrites(plan: Plan) -> list[str]:
    """The rules by which the search rewrote a plan's graph, each once."""
    found = (plan.search or {}).get("rewrites")
    return sorted({str(name) for name in found}) if isinstance(found, list | tuple) else []


def _check(first: Plan, second: Plan) -> None:
    if first.graph != second.graph:
        is_rewritten = bool(_rewrites(first) or _rewrites(second))
        if is_rewritten and (first.model, first.graph.sample_count) == (
            second.model,
            second.graph.sample_count,
        ):
            told = [
                f"{which} by {', '.join(_rewrites(plan))}"
                for which, plan in (("first", first), ("second", second))
                if _rewrites(plan)
            ]
            raise PlanError(
                f"the search rewrote the graph of a plan (the {' and the '.join(told)}), so that the layers "
                "cannot be set beside each other: compare plans of `soapstone plan --search mcmc`, which "
                "leaves graphs as they are."
            )
        sizes = [
            f"'{plan.graph.name}' with {len(plan.graph.nodes)} nodes and {plan.graph.sample_count} samples"
            for plan in (first, second)
        ]
        raise PlanError(
            f"the plans are of different graphs ({', '.join(sizes)}): compare plans of one model and batch."
        )
    counts = [len(plan.machine.devices) for plan in (first, second)]
    if counts[0] != counts[1]:
        raise PlanError(
            f"the plans are for {counted(counts[0], 'device')} ({first.machine.name}) and {counts[1]} "
            f"({second.machine.name}): compare plans for equally many."
        )
    if first.strategy.pipeline != second.strategy.pipeline:
        raise PlanError(
            "the plans run their batches in different micro-batches or orders, so their layers cannot be "
            "exchanged one by one: compare plans of one pipeline, or `soapstone simulate` both."
        )
    if first.strategy.apart != second.strategy.apart:
        apart = sorted(first.strategy.apart ^ second.strategy.apart)
        raise PlanError(
            f"only one of the plans keeps node '{apart[0]}' apart: they have no blocks in common."
        )


def _change(name: str, moved: list[Block], one: Resimulation, two: Resimulation) -> Change:
    def splits(strategy: Strategy) -> tuple[str, tuple[int, ...]]:
        placement = strategy.placements[moved[0].name]
        return split_text(strategy.graph, moved[0], placement, strategy.micro_batches), placement.devices

    first_split, first_devices = splits(one.strategy)
    second_split, second_devices = splits(two.strategy)
    return Change(
        name,
        len(moved),
        first_split,
        second_split,
        first_devices,
        second_devices,
        one.with_s({block.name: two.strategy.placements[block.name] for block in moved}),
        two.with_s({block.name: one.strategy.placements[block.name] for block in moved}),
    )
