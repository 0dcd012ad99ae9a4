"""A real run's timeline, read from the trace that `soapstone train --trace` writes.

Its events carry the ids of the plan's tasks, so that each can be set beside its prediction. A trace of
another plan, or another program's, is refused in one sentence.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soapstone.errors import PlanError
from soapstone.report.trace import MICROSECONDS
from soapstone.tasks.task import TaskGraph


@dataclass(frozen=True)
class Actual:
    """When every task of a real step began and ended, by its id."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return max(self.end_s, default=0.0)


def read_actual(path: Path, graph: TaskGraph) -> Actual:
    """The times of a trace file for the tasks of a plan."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such trace; `soapstone train --trace` writes one.") from None
    except OSError as error:
        raise PlanError(f"{path}: the trace cannot be read ({error.strerror}); check it.") from None
    except (ValueError, RecursionError):
        raise PlanError(f"{path}: this is not JSON, so it is no trace; check the file.") from None
    return actual_from(document, graph, str(path))


def actual_from(document: object, graph: TaskGraph, source: str) -> Actual:
    """The times that a trace document has for the tasks of a plan."""
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise PlanError(f"{source}: this is no trace: it has no list 'traceEvents'.")
    start_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            number, begin, length = _event(event, source)
            if number >= len(graph.tasks) or graph.tasks[number].name != event.get("name"):
                raise PlanError(
                    f"{source}: task {number} is {event.get('name')!r}, which it is not in the plan: this is "
                    "the trace of another plan; train this one with --trace."
                )
            start_s[number], end_s[number] = begin, begin + length
    missing = len(graph.tasks) - len(start_s)
    if missing:
        raise PlanError(
            f"{source}: the trace lacks {missing} of the plan's {len(graph.tasks)} tasks; it is of another "
            "plan, or cut off."
        )
    numbers = range(len(graph.tasks))
    return Actual(tuple(start_s[i] for i in numbers), tuple(end_s[i] for i in numbers))


def _event(event: dict[str, Any], source: str) -> tuple[int, float, float]:
    """The task, start and length of an event, in seconds."""
    args = event.get("args")
    number = args.get("id") if isinstance(args, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise PlanError(f"{source}: an event has no task id; `soapstone train --trace` writes them.")
    times = [event.get("ts"), event.get("dur")]
    if not all(
        isinstance(t, int | float) and not isinstance(t, bool) and math.isfinite(t) and t >= 0 for t in times
    ):
        raise PlanError(f"{source}: the event of task {number} has no times 'ts' and 'dur'.")
    begin, length = (float(t) / MICROSECONDS for t in times if t is not None)
    return number, begin, length
