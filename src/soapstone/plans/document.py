"""Plan files: a plan as JSON, written atomically, and refused in one sentence when it is damaged.

    {"format": "soapstone-plan", "version": 1, "model": "alexnet", "costs": "analytic",
     "optimizer": "momentum", "prediction": {"makespan_s", "moved_bytes", "memory_bytes"},
     "strategy": {...}, "machine": {...}, "graph": {...}, "search": {...} or null, "profiles": [...]}

`profiles` are there when costs are measured: the times that the prediction rests on.

The law is `plan_from(document_of(plan)) == plan`, to the last bit of every number.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from soapstone import graph as graphs
from soapstone import machine as machines
from soapstone.cost import profile as profiles
from soapstone.errors import PlanError, SoapstoneError
from soapstone.files import replace_text
from soapstone.machine.checks import shown
from soapstone.machine.cursor import Cursor
from soapstone.plans.plan import COSTS, Plan, Prediction
from soapstone.sim.memory import STATES_PER_WEIGHT
from soapstone.strategy import document as strategies

FORMAT = "soapstone-plan"
VERSION = 1
MOST_BYTES = 2**63 - 1

_FIELDS = ("format", "version", "model", "costs", "optimizer", "prediction", "strategy", "machine", "graph")

_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a document of the right form and wrong contents may meet on its way to a graph or a machine."""


def document_of(plan: Plan) -> dict[str, Any]:
    """The plan as nested mappings and lists."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model,
        "costs": plan.costs,
        "optimizer": plan.optimizer,
        "prediction": {
            "makespan_s": plan.prediction.makespan_s,
            "moved_bytes": plan.prediction.moved_bytes,
            "memory_bytes": list(plan.prediction.memory_bytes),
        },
        "strategy": strategies.document_of(plan.strategy),
        "machine": machines.document_of(plan.machine),
        "graph": graphs.to_document(plan.graph),
        "search": None if plan.search is None else dict(plan.search),
        **({"profiles": [profiles.document_of(p) for p in plan.profiles.values()]} if plan.profiles else {}),
    }


def plan_from(document: object, source: str) -> Plan:
    """The plan that `document` describes; `source` is what errors call it, usually the file's name."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"{source}: this is not a Soapstone plan; `soapstone plan -o` writes one.")
    if document.get("version") != VERSION:
        raise PlanError(
            f"{source}: the plan has version {shown(document.get('version'))}; this Soapstone reads "
            f"version {VERSION}."
        )
    try:
        return _plan(Cursor(document, source).fields(_FIELDS, optional=("search", "profiles")), source)
    except SoapstoneError as error:
        sentence = str(error)
        raise PlanError(sentence if sentence.startswith(source) else f"{source}: {sentence}") from None
    except _DAMAGE as error:
        raise PlanError(f"{source}: the plan is damaged ({type(error).__name__}: {error}).") from None


def _plan(fields: dict[str, Cursor], source: str) -> Plan:
    graph = graphs.from_document(fields["graph"].value, f"{source}: graph")
    machine = machines.machine_from(fields["machine"].value, f"{source}: machine")
    strategy = strategies.strategy_from(fields["strategy"].value, graph, f"{source}: strategy")
    model, search = fields["model"], fields.get("search")
    costs, measured = _one_of(fields["costs"], COSTS), _profiles(fields.get("profiles"))
    if (costs == "measured") != bool(measured):
        raise fields["costs"].refused(f"is {shown(costs)}, which does not go with its profiles.")
    return Plan(
        strategy.checked(machine),
        machine,
        _prediction(fields["prediction"], len(machine.devices)),
        "" if model.value == "" else model.text(),
        costs,
        _one_of(fields["optimizer"], STATES_PER_WEIGHT),
        None if search is None or search.value is None else {k: c.value for k, c in search.entries().items()},
        measured,
    )


def _profiles(cursor: Cursor | None) -> dict[str, profiles.Profile]:
    items = [] if cursor is None else cursor.items()
    found = [profiles.profile_from(item.value, f"{item.source}: {item.place}") for item in items]
    return {profile.kind: profile for profile in found}


def _prediction(cursor: Cursor, device_count: int) -> Prediction:
    fields = cursor.fields(("makespan_s", "moved_bytes", "memory_bytes"))
    makespan_s = fields["makespan_s"].value
    if not isinstance(makespan_s, float) or not math.isfinite(makespan_s) or makespan_s < 0:
        raise fields["makespan_s"].refused(f"must be a time in seconds, not {shown(makespan_s)}.")
    memory = [item.whole_number(0, MOST_BYTES) for item in fields["memory_bytes"].items()]
    if len(memory) != device_count:
        raise fields["memory_bytes"].refused(
            f"speaks of {len(memory)} devices where the machine has {device_count}."
        )
    return Prediction(makespan_s, fields["moved_bytes"].whole_number(0, MOST_BYTES), tuple(memory))


def _one_of(cursor: Cursor, known: Any) -> str:
    name = cursor.text()
    if name not in known:
        raise cursor.refused(f"is {shown(name)}; this Soapstone knows {', '.join(known)}.")
    return name


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan so that a reader sees the old file or the new one, never half of it."""
    try:
        text = json.dumps(document_of(plan), indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan cannot be written as JSON: {error}") from None
    write_text(text + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file whole, or refuse in one sentence."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise PlanError(
            f"{path}: the file cannot be written ({error.strerror}); choose another place."
        ) from None


def read_plan(path: Path) -> Plan:
    """The plan that a file holds."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such plan; check the path.") from None
    except OSError as error:
        raise PlanError(f"{path}: the plan cannot be read ({error.strerror}); check it.") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: byte {error.start} is not UTF-8 text, so this is no plan.") from None
    if not text.strip():
        raise PlanError(f"{path}: the file is empty; `soapstone plan -o` writes a plan.")
    try:
        document = json.loads(
            text, parse_constant=_refused, parse_float=_finite, object_pairs_hook=_without_repeats
        )
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path}: line {error.lineno}, column {error.colno} is not JSON ({error.msg}); the plan is "
            "damaged or cut off."
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: this is not JSON of a plan ({error}).") from None
    return plan_from(document, str(path))


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number} is no number that a plan may hold")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {shown(twice)} is given twice")
    return found
