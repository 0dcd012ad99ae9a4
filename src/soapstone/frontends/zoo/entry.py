"""What the zoo promises of each of its models, and how a model's sizes become its options.

A model file describes its model three times over: a frozen dataclass of sizes, a module that takes
such sizes, and a function that makes example inputs for them. `entry` ties these together. Every
field of the sizes is an option of the model, so `build(steps=2)` and `inputs(8, steps=2)` mean the
sizes with `steps` replaced, and there is one place where options are checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from soapstone.errors import CaptureError
from soapstone.frontends.zoo.synthetic import Synthetic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor, nn

Sizes = TypeVar("Sizes", bound="DataclassInstance")


@dataclass(frozen=True)
class ZooModel:
    """A built-in model: a module whose `forward(*inputs)` returns the scalar training loss.

    `build(tiny=False, **options)` makes the module, in training mode, on the current default device
    (`with torch.device("meta"):` makes it without memory). `inputs(batch, tiny=False, seed=0,
    **options)` makes synthetic inputs, targets included, on the same device; axis 0 of every input
    is the sample. Give both the same options.
    """

    name: str
    description: str
    batch_per_device: int
    build: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]
    options: Mapping[str, object]
    """The options of `build` and `inputs`, with the values they have in the full model."""


def entry(
    name: str,
    description: str,
    batch_per_device: int,
    *,
    module: Callable[[Sizes], nn.Module],
    inputs: Callable[[Sizes, int, Synthetic], tuple[Tensor, ...]],
    full: Sizes,
    tiny: Sizes,
) -> ZooModel:
    """The zoo's entry for `module`, with `full` for the published sizes and `tiny` for tests."""
    variants = {False: full, True: tiny}

    def sizes(tiny: bool, options: Mapping[str, object]) -> Sizes:
        return _with_options(name, variants[tiny], options)

    def build(tiny: bool = False, **options: object) -> nn.Module:
        chosen = sizes(tiny, options)
        try:
            return module(chosen)
        except ValueError as error:
            raise CaptureError(f"{name} cannot have these sizes: {error}") from error

    def example_inputs(
        batch: int, tiny: bool = False, seed: int = 0, **options: object
    ) -> tuple[Tensor, ...]:
        if batch < 1:
            raise CaptureError(f"{name} needs a batch of at least one sample, not {batch}")
        return inputs(sizes(tiny, options), batch, Synthetic(seed))

    return ZooModel(name, description, batch_per_device, build, example_inputs, _values(full))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not among `known`: the nearest ones, or all of them."""
    near = difflib.get_close_matches(word, known)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"choose from {', '.join(known)}"


def _values(sizes: DataclassInstance) -> dict[str, object]:
    return {field.name: getattr(sizes, field.name) for field in fields(sizes)}


def _with_options(name: str, sizes: Sizes, options: Mapping[str, object]) -> Sizes:
    defaults = _values(sizes)
    checked: dict[str, object] = {}
    for option, value in options.items():
        if option not in defaults:
            raise CaptureError(f"{name} has no option {option!r}; {did_you_mean(option, defaults)}")
        checked[option] = tuple(value) if isinstance(value, list) else value
        if not _fits(checked[option], defaults[option]):
            raise CaptureError(
                f"option {option} of {name} cannot be {value!r}; it is {defaults[option]!r} by default"
            )
    try:
        return replace(sizes, **checked)
    except ValueError as error:
        raise CaptureError(f"{name} cannot have these sizes: {error}") from error


def _fits(value: object, default: object) -> bool:
    """Whether `value` is of the default's kind: sizes are positive, rates are not negative."""
    match default:
        case bool():
            return isinstance(value, bool)
        case int():
            return isinstance(value, int) and not isinstance(value, bool) and value > 0
        case float():
            return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        case tuple():
            return isinstance(value, tuple) and value != () and all(_fits(item, default[0]) for item in value)
        case _:
            return isinstance(value, type(default))
