"""Generation and proof together, and what there is to say about the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from soapstone.ops import Op
from soapstone.subst.emitting import emitted
from soapstone.subst.families import FAMILIES, Family
from soapstone.subst.generate import generate
from soapstone.subst.layout import Objection, is_parallel
from soapstone.subst.proving import TIMEOUT_MS
from soapstone.subst.rulebook import Entry, named
from soapstone.subst.sizes import shapes_for, types_for
from soapstone.subst.term import Rule, Side, Term, calls
from soapstone.subst.verifying import Judged, judge, status
from soapstone.subst.words import Context, Typed, applied

OPERATORS = "operators"
"""The name under which rules from operators' definitions go."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Census:
    """All rules that were found, with their verdicts, by family."""

    judged: Mapping[str, tuple[Judged, ...]]
    graphs: int
    pairs: int

    def count(self, wanted: str | None = None, family: str | None = None) -> int:
        """How many rules have a status (any, by default), in a family (in all)."""
        return sum(
            wanted is None or status(found.verdict) == wanted
            for name, rules in self.judged.items()
            for found in rules
            if family is None or name == family
        )

    def proved(self, family: str | None = None) -> list[Rule]:
        """The rules that may be shipped."""
        return [
            found.rule
            for name, rules in self.judged.items()
            for found in rules
            if status(found.verdict) == "proved" and (family is None or name == family)
        ]

    def entries(self) -> dict[str, list[Entry]]:
        """What a book holds: the proved rules of each family."""
        return {
            family: [Entry(rule, family, "proved") for rule in self.proved(family)] for family in self.judged
        }

    @property
    def cost_changing(self) -> int:
        """How many proved rules have sides that cost differently."""
        return sum(changes_cost(rule) for rule in self.proved())


def take_census(
    families: Iterable[Family] = FAMILIES,
    ops: Iterable[Op] | None = None,
    timeout_ms: int = TIMEOUT_MS,
    progress: Progress | None = None,
) -> Census:
    """Generate the rules of families and of operators, and judge every one."""
    show = progress or (lambda _, __: None)
    found = generate(families, lambda name: show(f"enumerating {name}", 0.0))
    groups: dict[str, Sequence[Rule]] = {group.family: group.rules for group in found}
    groups[OPERATORS] = emitted(ops)
    judged: dict[str, tuple[Judged, ...]] = {}
    taken: list[str] = []
    for family, rules in groups.items():
        with_names = named(rules, taken)
        taken += [rule.name or "" for rule in rules if rule.name] or [_base(rule.name) for rule in with_names]
        total = max(1, len(with_names))
        judged[family] = tuple(
            judge(with_names, timeout_ms, lambda n, f=family, t=total: show(f"judging {f}", n / t))  # type: ignore[misc]
        )
    return Census(judged, sum(group.graphs for group in found), sum(group.pairs for group in found))


def _base(name: str) -> str:
    head, dot, tail = name.rpartition(".")
    return head if dot and tail.isdigit() else name


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
