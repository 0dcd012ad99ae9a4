"""torch's dtypes by the short names that graphs use."""

from __future__ import annotations

import torch

from soapstone.errors import CaptureError

SHORT: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def short(dtype: torch.dtype) -> str:
    """The graph's name for a dtype."""
    found = SHORT.get(dtype)
    if found is None:
        raise CaptureError(f"the model computes with {dtype}, which Soapstone does not know")
    return found
