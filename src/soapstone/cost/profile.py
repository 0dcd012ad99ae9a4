"""Profiles: measured times of one kind of device under one set of software, and their files.

    {"format": "soapstone-profile", "version": 1, "kind": "cpu", "software": {"torch": "2.13.0", ...},
     "operators": [{"op", "attrs", "dtype", "gradients",
                    "times": [[operand shapes, output shapes, seconds, spread, flops, bytes], ...]}, ...],
     "updates": [[bytes, seconds, spread], ...]}

Where it was asked for on a GPU, a row goes on with the seconds of the kernels alone and with those of the
thread that launches them.

What is measured is a `Work` (FlexFlow 5.1: the execution time of a task is measured once for each operator
type and output size, and reused): the operator with its attributes, dtype and number of gradients is an
`OpKey`; the shapes that a shard reads and writes tell its times apart. The law is
`profile_from(document_of(profile)) == profile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from soapstone.cost.work import Work
from soapstone.errors import CostError
from soapstone.files import replace_text
from soapstone.ops import Attr, Shape

FORMAT = "soapstone-profile"
VERSION = 1

LONGEST_S = 1e6
"""[choice] No operator takes longer than eleven days: a larger number in a file is damage."""


@dataclass(frozen=True, order=True)
class OpKey:
    """An operator as a time depends on it, but for shapes; `attrs` is JSON text."""

    op_name: str
    attrs: str
    dtype: str
    gradients: int


@dataclass(frozen=True)
class Launched:
    """What a pass takes of a GPU, and what of the thread that launches its kernels: the longer of both, where
    one pass follows the other."""

    kernels_s: float
    launching_s: float


@dataclass(frozen=True)
class Measured:
    """The time of one shape: the median of several runs, and the spread (half the distance between the
    quartiles, divided by the median)."""

    operands: tuple[Shape | None, ...]
    outputs: tuple[Shape, ...]
    seconds: float
    spread: float
    flops: float
    size_bytes: int
    launched: Launched | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shapes as the native core takes them."""
        return flat_shape(self.operands, self.outputs)


@dataclass(frozen=True)
class Updated:
    """The time of updating this much of a weight."""

    size_bytes: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Profile:
    """What was measured on one kind of device: one time for each shape, and in one order."""

    kind: str
    software: Mapping[str, str]
    times: Mapping[OpKey, tuple[Measured, ...]] = field(default_factory=dict)
    updates: tuple[Updated, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "software", MappingProxyType(dict(sorted(self.software.items()))))
        ordered = {key: _ordered(self.times[key]) for key in sorted(self.times)}
        object.__setattr__(self, "times", MappingProxyType(ordered))
        object.__setattr__(self, "updates", tuple(sorted(self.updates, key=_by_size)))

    @property
    def count(self) -> int:
        """How many times it holds."""
        return sum(map(len, self.times.values())) + len(self.updates)

    def of(self, keys: Iterable[OpKey]) -> Profile:
        """The part that speaks of some operators, in any direction and with any attributes."""
        names = {(key.op_name, key.dtype) for key in keys}
        kept = {key: times for key, times in self.times.items() if (key.op_name, key.dtype) in names}
        return Profile(self.kind, self.software, kept, self.updates)

    def merged(self, other: Profile) -> Profile:
        """Both profiles' times; the other's where both have one."""
        times = {key: {m.shape: m for m in found} for key, found in self.times.items()}
        for key, found in other.times.items():
            times.setdefault(key, {}).update({m.shape: m for m in found})
        updates = {each.size_bytes: each for each in (*self.updates, *other.updates)}
        return Profile(
            self.kind,
            other.software,
            {key: tuple(found.values()) for key, found in times.items()},
            tuple(updates.values()),
        )


def mean_of(profiles: Sequence[Profile]) -> Profile:
    """The times in the middle of what several ranks of one kind have measured, each as far as it came."""
    times: dict[OpKey, dict[tuple[int, ...], list[Measured]]] = {}
    updates: dict[int, list[Updated]] = {}
    for profile in profiles:
        for key, found in profile.times.items():
            for measured in found:
                times.setdefault(key, {}).setdefault(measured.shape, []).append(measured)
        for updated in profile.updates:
            updates.setdefault(updated.size_bytes, []).append(updated)
    return Profile(
        profiles[0].kind,
        profiles[0].software,
        {key: tuple(map(_mean, shapes.values())) for key, shapes in times.items()},
        tuple(
            Updated(size, fmean(each.seconds for each in own), fmean(each.spread for each in own))
            for size, own in updates.items()
        ),
    )


def _mean(found: Sequence[Measured]) -> Measured:
    launched = [each.launched for each in found if each.launched is not None]
    return replace(
        found[0],
        seconds=fmean(each.seconds for each in found),
        spread=fmean(each.spread for each in found),
        launched=Launched(
            fmean(each.kernels_s for each in launched), fmean(each.launching_s for each in launched)
        )
        if launched
        else None,
    )


def _ordered(times: Iterable[Measured]) -> tuple[Measured, ...]:
    """Times by shape; of several of one shape the last."""
    found = {measured.shape: measured for measured in times}
    return tuple(found[shape] for shape in sorted(found))


def _by_size(updated: Updated) -> int:
    return updated.size_bytes


def flat_shape(operands: Sequence[Shape | None], outputs: Sequence[Shape]) -> tuple[int, ...]:
    """Shapes as one row of numbers: the rank and the lengths of each, -1 for an operand not read."""
    row: list[int] = []
    for shape in (*operands, *outputs):
        row.extend([-1] if shape is None else [len(shape), *shape])
    return tuple(row)


def key_of(work: Work) -> OpKey:
    """The operator of a work."""
    return op_key(work.op_name, work.attrs, work.dtype, work.gradients)


def op_key(op_name: str, attrs: tuple[tuple[str, Attr], ...], dtype: str, gradients: int) -> OpKey:
    """The key of an operator; attributes are sorted pairs."""
    # 1, 1.0 and True are equal and hash alike, but are not the same attribute.
    return _op_key(op_name, repr(attrs), _Attrs(attrs), dtype, gradients)


class _Attrs:
    """Attributes that the cache of keys does not look at: their text beside them tells them apart."""

    def __init__(self, pairs: tuple[tuple[str, Attr], ...]) -> None:
        self.pairs = pairs

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attrs)


@cache
def _op_key(op_name: str, text: str, attrs: _Attrs, dtype: str, gradients: int) -> OpKey:
    del text
    return OpKey(op_name, attrs_text({k: _plain(v) for k, v in attrs.pairs}), dtype, gradients)


def attrs_text(attrs: Mapping[str, Any]) -> str:
    """Attributes as JSON text, the same for the same attributes."""
    return json.dumps(attrs, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """An attribute as JSON holds it: tuples as lists, numbers that JSON lacks by name."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value


# -- files ----------------------------------------------------------------------------------------


def document_of(profile: Profile) -> dict[str, Any]:
    """The profile as nested mappings and lists."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": profile.kind,
        "software": dict(profile.software),
        "operators": [
            {
                "op": key.op_name,
                "attrs": json.loads(key.attrs),
                "dtype": key.dtype,
                "gradients": key.gradients,
                "times": [
                    [
                        [None if shape is None else list(shape) for shape in m.operands],
                        list(map(list, m.outputs)),
                        m.seconds,
                        m.spread,
                        m.flops,
                        m.size_bytes,
                        *(() if m.launched is None else (m.launched.kernels_s, m.launched.launching_s)),
                    ]
                    for m in times
                ],
            }
            for key, times in profile.times.items()
        ],
        "updates": [[u.size_bytes, u.seconds, u.spread] for u in profile.updates],
    }


def profile_from(document: object, source: str) -> Profile:
    """The profile that `document` describes; `source` is what errors call it."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CostError(f"{source}: this is no Soapstone profile; `soapstone profile --export` writes one.")
    if document.get("version") != VERSION:
        raise CostError(
            f"{source}: the profile has version {document.get('version')!r}; this Soapstone reads {VERSION}."
        )
    try:
        times: dict[OpKey, tuple[Measured, ...]] = {}
        for entry in document["operators"]:
            key = OpKey(
                _text(entry["op"]), attrs_text(entry["attrs"]), _text(entry["dtype"]), int(entry["gradients"])
            )
            times[key] = tuple(_measured(row) for row in entry["times"])
        software = {_text(k): _text(v) for k, v in document["software"].items()}
        updates = tuple(
            Updated(_count(size), _seconds(s), _seconds(spread)) for size, s, spread in document["updates"]
        )
        return Profile(_text(document["kind"]), software, times, updates)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostError(f"{source}: the profile is damaged ({type(error).__name__}: {error}).") from None


def _measured(row: Sequence[Any]) -> Measured:
    operands, outputs, seconds, spread, flops, size_bytes, *launched = row
    return Measured(
        tuple(None if shape is None else tuple(map(_count, shape)) for shape in operands),
        tuple(tuple(map(_count, shape)) for shape in outputs),
        _seconds(seconds),
        _seconds(spread),
        _number(flops),
        _count(size_bytes),
        Launched(*map(_seconds, launched)) if launched else None,
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} should be text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} should be a whole number")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} should be a finite number that is not negative")
    return float(value)


def _seconds(value: object) -> float:
    number = _number(value)
    if number > LONGEST_S:
        raise ValueError(f"{value!r} is more than {LONGEST_S:g}")
    return number


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile whole, a line for each time."""
    document = document_of(profile)
    head = {name: part for name, part in document.items() if name not in ("operators", "updates")}
    lines = [json.dumps(head, ensure_ascii=False, allow_nan=False)[:-1] + ', "operators": [']
    for number, entry in enumerate(document["operators"]):
        rows = entry.pop("times")
        lines.append(("," if number else "") + json.dumps(entry, ensure_ascii=False)[:-1] + ', "times": [')
        lines.append(",\n".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows))
        lines.append("]}")
    lines.append(f'], "updates": {json.dumps(document["updates"], allow_nan=False)}}}')
    try:
        replace_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise CostError(
            f"{path}: the file cannot be written ({error.strerror}); choose another place."
        ) from None


def read_profile(path: Path) -> Profile:
    """The profile that a file holds."""
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CostError(f"{path}: there is no such profile; check the path.") from None
    except OSError as error:
        raise CostError(f"{path}: the profile cannot be read ({error.strerror}); check it.") from None
    except (ValueError, RecursionError) as error:
        raise CostError(f"{path}: this is not JSON of a profile ({error}).") from None
    return profile_from(document, str(path))
