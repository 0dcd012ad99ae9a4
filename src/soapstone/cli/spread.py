"""Options that several commands share are written once, as a frozen dataclass of annotated fields.

A command takes such a class as one parameter; `spread` shows typer one option for each of its fields, and
hands the command the object made from what the user gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer sees it; options stand where their group stood, those without default first."""
    hints = get_type_hints(command, include_extras=True)
    shown: list[Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[name] = hint
            shown += _options(hint)
        else:
            shown.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    called.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
    del called.__wrapped__  # typer would read the command's own hints
    return called


def _options(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
