"""`soapstone rules`: find, prove and look at substitutions."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from soapstone.cli.output import console, print_json, progress

if TYPE_CHECKING:
    from soapstone.subst.rulebook import Book, Entry

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
BookOption = Annotated[
    Path | None,
    typer.Option(
        "--book", help="A .rules file, or a directory of them, in place of the rules that are built in."
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.01,
        help="Seconds that Z3 may take for one rule (default: 30, before which its count of steps ends).",
    ),
]

_LONGEST_MS = 2**31 - 1
"""What Z3 can count."""

app = typer.Typer(no_args_is_help=True, help="Substitutions: graphs that compute the same, found and proved.")


def register(parent: typer.Typer) -> None:
    """Add `rules` to the command line."""
    parent.add_typer(app, name="rules")


def _milliseconds(timeout_s: float | None) -> int:
    from soapstone.subst.proving import TIMEOUT_MS

    if timeout_s is None:
        return TIMEOUT_MS
    if not math.isfinite(timeout_s):
        raise typer.BadParameter(f"--timeout is a number of seconds, not {timeout_s}.")
    return min(int(timeout_s * 1000), _LONGEST_MS)


def _read(book: Path | None) -> Book:
    """The book that was asked for, in which there are rules."""
    from soapstone.errors import RuleError
    from soapstone.subst.rulebook import read, shipped

    found = shipped() if book is None else read(book)
    if not found.entries:
        raise RuleError(f"{book} has no rules; write one a line, 'name | variables | left | right'")
    return found


@app.command()
def generate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A directory to write the proved rules to.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option("--family", help="Enumerate only this family; may be given again.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", help="Emit only the rules of this operator; may be given again."),
    ] = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find rules by enumeration and from the operators' definitions, and prove them.

    All graphs of a few nodes are compared by their fingerprints; equal ones become rules unless smaller rules
    imply them. What parallelises an operator follows from its notation. Every rule is then run on random
    tensors, device by device, and proved by Z3 for all sizes and degrees. Only proved rules are written.

    With --op and no --family nothing is enumerated: the rules of one operator take a second.

    Examples:

        soapstone rules generate
        soapstone rules generate -o my-rules
        soapstone rules generate --op conv2d --json
        soapstone rules generate --family batches --op sdpa
    """
    from soapstone.ops import lookup
    from soapstone.subst.census import take_census
    from soapstone.subst.families import FAMILIES
    from soapstone.subst.rulebook import SUFFIX, write

    known = {each.name: each for each in FAMILIES}
    for name in family or []:
        if name not in known:
            raise typer.BadParameter(f"there is no family '{name}'; there are {', '.join(known)}.")
    chosen = [known[name] for name in family] if family else [] if op else list(FAMILIES)
    ops = [lookup(name) for name in op] if op else [] if family else None
    if output is not None:
        _make_directory(output)
    begun = time.perf_counter()
    with progress("rules", 1.0) as show:
        census = take_census(chosen, ops, _milliseconds(timeout), lambda what, done: show(done, what))
    elapsed_s = time.perf_counter() - begun
    if output is not None:
        for name, entries in census.entries().items():
            if entries:
                write(output / f"{name}{SUFFIX}", entries, f"Written by `soapstone rules generate`: {name}.")
    families = {
        name: {"found": census.count(None, name), **{s: census.count(s, name) for s in STATUSES}}
        for name in census.judged
    }
    if as_json:
        print_json(
            {
                "families": families,
                "found": census.count(),
                **{wanted: census.count(wanted) for wanted in STATUSES},
                "cost_changing": census.cost_changing,
                "graphs": census.graphs,
                "elapsed_s": elapsed_s,
                "rules": [{"name": rule.name, "rule": str(rule)} for rule in census.proved()],
            }
        )
        return
    table = Table("family", box=SIMPLE_HEAD)
    for heading in ("found", *STATUSES):
        table.add_column(heading, justify="right")
    for name, counts in families.items():
        table.add_row(name, *(f"{number:,}" for number in counts.values()))
    screen = console()
    screen.print(table)
    screen.print(
        f"{census.count('proved'):,} rules proved in {elapsed_s:.1f} s; "
        f"{census.cost_changing:,} change the cost."
    )


STATUSES = ("proved", "refuted", "unknown")


def _make_directory(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; name a directory.")
    path.mkdir(parents=True, exist_ok=True)


@app.command()
def verify(
    name: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these rules.")] = None,
    book: BookOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> int:
    """Prove rules anew, and say of each that is not proved why. The exit code is 1 if there is one.

    Examples:

        soapstone rules verify
        soapstone rules verify linear-split relu
        soapstone rules verify --book my.rules --json
    """
    from soapstone.ops.proof import Proved, Refuted, Unknown
    from soapstone.subst.verifying import judge, status

    found = _read(book)
    entries = [found.entry(one) for one in name] if name else list(found.entries.values())
    with progress("proving", float(len(entries))) as show:
        judged = list(
            judge([entry.rule for entry in entries], _milliseconds(timeout), lambda n: show(float(n)))
        )
    failed = []
    for each in judged:
        match each.verdict:
            case Proved():
                continue
            case Refuted(reason) | Unknown(reason):
                failed.append((each.rule.name, status(each.verdict), reason))
    counts = Counter(status(each.verdict) for each in judged)
    if as_json:
        print_json(
            {
                "checked": len(judged),
                **{wanted: counts[wanted] for wanted in STATUSES},
                "failures": [{"name": n, "status": s, "reason": r} for n, s, r in failed],
            }
        )
    else:
        for rule_name, verdict, reason in failed:
            print(f"{rule_name}: {verdict}: {reason}")
        print(", ".join(f"{counts[wanted]:,} {wanted}" for wanted in STATUSES))
    return 1 if failed else 0


@app.command("list")
def list_rules(
    pattern: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only rules in which this operator occurs.")
    ] = "",
    book: BookOption = None,
    as_json: JsonOption = False,
) -> None:
    """List rules: name, left side, right side, status.

    Examples:

        soapstone rules list
        soapstone rules list softmax
        soapstone rules list conv2d --json
    """
    entries = list(_read(book).entries.values())
    if pattern:
        entries = _with_word(entries, pattern)
    if as_json:
        print_json(
            {
                "rules": [
                    {"name": e.rule.name, "family": e.family, "status": e.status, "rule": str(e.rule)}
                    for e in entries
                ]
            }
        )
        return
    for entry in entries:
        print(f"{entry.rule.name} | {entry.rule} | {entry.status}")


def _with_word(entries: list[Entry], word: str) -> list[Entry]:
    """The rules in which a word occurs."""
    from soapstone.errors import RuleError
    from soapstone.machine.checks import did_you_mean
    from soapstone.subst.term import calls

    words = {e.rule.name: {call.word for call in calls(e.rule.left + e.rule.right)} for e in entries}
    found = [entry for entry in entries if word in words[entry.rule.name]]
    if not found:
        known = sorted(set().union(*words.values()))
        raise RuleError(f"no rule has the operator '{word}'{did_you_mean(word, known)}")
    return found


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a rule.")],
    book: BookOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one rule: both sides, the sizes at which it was tried, and whether it changes the cost.

    Examples:

        soapstone rules show linear-split
        soapstone rules show relu --json
    """
    from soapstone.errors import RuleError
    from soapstone.subst.costing import changes_cost
    from soapstone.subst.layout import Objection
    from soapstone.subst.sizes import shapes_for

    entry = _read(book).entry(name)
    rule, tried = entry.rule, shapes_for(entry.rule)
    if isinstance(tried, Objection):
        raise RuleError(f"rule '{name}' fits none of the sizes tried: {tried.reason}")
    document = {
        "name": rule.name,
        "family": entry.family,
        "status": entry.status,
        "variables": {
            variable: {"layout": str(layout), "shape_tried": list(tried[0][variable])}
            for variable, layout in rule.variables.items()
        },
        "left": [str(term) for term in rule.left],
        "right": [str(term) for term in rule.right],
        "nodes": rule.size,
        "changes_cost": changes_cost(rule),
    }
    if as_json:
        print_json(document)
        return
    screen = console()
    screen.print(Text(f"{rule.name} ({entry.family}, {entry.status})"))
    for variable, layout in rule.variables.items():
        screen.print(Text(f"  {variable}: layout {layout}, tried as {list(tried[0][variable])}"))
    for one, two in zip(rule.left, rule.right, strict=True):
        screen.print(Text(f"  {one}\n= {two}"))
    screen.print(Text("  changes the cost" if document["changes_cost"] else "  costs the same on both sides"))
