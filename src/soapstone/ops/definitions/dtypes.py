"""The short names of dtypes that attributes hold, and torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from soapstone.errors import OpError
from soapstone.ops.lazy import torch as lazy_torch

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
_SHORT_NAMES = {f"torch.{long}": short for short, long in _TORCH_NAMES.items()}


def torch_dtype(name: str | None) -> torch.dtype | None:
    """torch's dtype of a short name; None stays None, which lets torch choose."""
    if name is None:
        return None
    found = _TORCH_NAMES.get(name)
    if found is None:
        raise OpError(f"there is no dtype '{name}' (dtypes: {', '.join(_TORCH_NAMES)})")
    dtype: torch.dtype = getattr(lazy_torch, found)
    return dtype


def short_name(dtype: Any) -> str | None:
    """The short name of torch's dtype, or of a short name; None stays None."""
    if dtype is None or dtype in _TORCH_NAMES:
        return dtype  # type: ignore[no-any-return]
    found = _SHORT_NAMES.get(str(dtype))
    if found is None:
        raise OpError(f"{dtype} has no short name")
    return found


def name_for(number: float) -> str:
    """The dtype that torch gives a tensor made of this number."""
    return "bool" if isinstance(number, bool) else "i64" if isinstance(number, int) else "f32"
