"""The names of element types in problem files, and what they are in torch.

FP4 comes under two names for one type: torch stores two values in a byte, packed along the last axis.
torch is imported only when a type is asked for, so that a problem can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.errors import ProblemError
from seatrial.model import TensorSpec

if TYPE_CHECKING:
    import torch

FP4 = "float4_e2m1fn_x2"
_SPELLINGS = {"float4_e2m1": FP4}
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1",
    FP4,
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
)

# Spacing of the numbers just above 1: one unit in the last place, relative.
RESOLUTION = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a declared element type; raises ProblemError for a name this format does not have."""
    import torch

    dtype = getattr(torch, _SPELLINGS.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ProblemError(f"element type '{name}' is not one of {', '.join(DTYPES)}; correct the dtype")
    return dtype


def is_packed_fp4(name: str) -> bool:
    """True for both names of FP4: one byte holds two neighbours along the last axis."""
    return _SPELLINGS.get(name, name) == FP4


def declared_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The declared shape at these axis lengths, counted in values; None for a Python scalar."""
    if spec.shape is None:
        return None
    return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in spec.shape)


def stored_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of the torch tensor that holds it: as declared, but FP4 has half as many in the last axis.

    Raises ProblemError when an FP4 tensor has no last axis or an odd one.
    """
    shape = declared_shape(spec, sizes)
    if shape is None or not is_packed_fp4(spec.dtype):
        return shape
    if not shape or shape[-1] % 2:
        raise ProblemError(
            f"FP4 tensor '{spec.name}' has shape {list(shape)}; its last axis must be even, as two share a byte"
        )
    return (*shape[:-1], shape[-1] // 2)
