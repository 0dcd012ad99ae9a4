"""Generation and proof together, and what there is to say about the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from soapstone.ops import Op
from soapstone.subst.costing import changes_cost
from soapstone.subst.emitting import emitted
from soapstone.subst.families import FAMILIES, Family
from soapstone.subst.generate import generate
from soapstone.subst.proving import TIMEOUT_MS
from soapstone.subst.rulebook import Entry, named
from soapstone.subst.term import Rule
from soapstone.subst.verifying import Judged, judge, status

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
