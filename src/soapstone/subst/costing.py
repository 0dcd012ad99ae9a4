"""What the two sides of a rule cost, as far as no machine need be known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from soapstone.subst.layout import Objection, is_parallel
from soapstone.subst.sizes import shapes_for, types_for
from soapstone.subst.term import Rule, Side, Term, calls
from soapstone.subst.words import Context, Typed, applied


@dataclass(frozen=True)
class SideCost:
    """What a side of a rule costs, as far as no machine need be known: flops per device, operators that touch
    elements, and data movement."""

    flops: float
    kernels: tuple[str, ...]
    moves: tuple[str, ...]

    def is_at_least(self, other: SideCost) -> bool:
        """Whether it costs what the other costs, or more, on every machine."""
        more = all(
            not Counter(theirs) - Counter(ours)
            for ours, theirs in ((self.kernels, other.kernels), (self.moves, other.moves))
        )
        return more and self.flops >= other.flops


def side_costs(rule: Rule) -> tuple[SideCost, SideCost] | None:
    """The costs of the left and of the right side; None where there are no sizes at which to count them."""
    found = shapes_for(rule)
    if isinstance(found, Objection):
        return None
    types = types_for(rule, *found)
    if isinstance(types, Objection):
        return None
    return _cost(rule.left, types, found[1]), _cost(rule.right, types, found[1])


def changes_cost(rule: Rule) -> bool:
    """Whether the sides differ in flops per device, in operators that touch elements, or in data movement."""
    costs = side_costs(rule)
    return costs is not None and costs[0] != costs[1]


def _cost(side: Side, types: Mapping[Term, Typed], context: Context) -> SideCost:
    flops, kernels, moves = 0.0, Counter[str](), Counter[str]()
    for call in calls(side):
        kind = types[call]
        if is_parallel(call.word):
            moves[f"{call.word} {types[call.args[0]].shape}"] += 1
            continue
        meant = applied(call, [types[arg].shape for arg in call.args], context)
        parts = kind.layout.parts
        assert isinstance(parts, int)
        flops += meant.op.flop_count(meant.signature) / parts
        if not meant.op.is_view:
            kernels[f"{meant.op.name} {kind.shape}"] += 1
    return SideCost(flops, tuple(sorted(kernels.elements())), tuple(sorted(moves.elements())))
