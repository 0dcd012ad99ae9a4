"""Where in the user's code something happened, as ` at model.py:12 (return self.fc(x))`.

Where torch's own layer is to blame, it is named as well. The user's code is what lies neither in torch,
nor in Python's own library, nor in this package; so a model of another package (transformers) counts as
the user's.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_OURS = Path(__file__).parent
_TRACER = _OURS / "program.py"
_TORCH = Path(torch.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_LONGEST_LINE = 80
_TRACE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>\w+))?')


def place_of_error(error: BaseException) -> str:
    """The innermost line of the user's code on the way to an error; empty if there is none."""
    return _innermost((f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__))


def place_of_call() -> str:
    """The innermost line of the user's code that is running, within the model that is being traced."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack()]
    start = max((i for i, (file, _, _) in enumerate(frames) if Path(file) == _TRACER), default=0)
    return _innermost(frames[start:])


def place_in_trace(trace: str | None) -> str:
    """The innermost line of the user's code in a stack trace that torch keeps as text."""
    return _innermost((m["file"], int(m["line"]), m["name"]) for m in _TRACE_LINE.finditer(trace or ""))


def _innermost(frames: Iterable[tuple[str, int, str | None]]) -> str:
    inside = ""
    for file, line, name in reversed(list(frames)):
        if _is_users(file):
            code = linecache.getline(file, line).strip()
            shown = code if len(code) <= _LONGEST_LINE else code[:_LONGEST_LINE].rstrip() + " ..."
            return f" at {Path(file).name}:{line}" + (f" ({shown})" if shown else "") + inside
        if not inside and _is_layer(file):
            inside = f" inside torch's {Path(file).stem if name in (None, 'forward') else name}"
    return ""


def _is_layer(file: str) -> bool:
    """Whether it is the code of one of torch's own layers or functions, and not of their machinery."""
    path = Path(file)
    return _TORCH / "nn" in path.parents and path.name != "module.py"


def _is_users(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or _OURS in path.parents or _TORCH in path.parents:
        return False
    return _STANDARD not in path.parents or "site-packages" in path.parts
