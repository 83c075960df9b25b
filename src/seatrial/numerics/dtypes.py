"""Facts about floating-point formats, and exact rounding to them.

All functions take and return float64 tensors; a format is named by its `torch.dtype`. Rounding is done
in float64 with power-of-two scaling, so it is exact (torch's own float64 -> bfloat16 goes through
float32 and rounds twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7FF0000000000000


@dataclass(frozen=True)
class FloatFormat:
    """Significant bits (with the hidden one), exponents of the smallest normal and of the largest value."""

    bits: int
    min_exponent: int
    largest: float
    has_infinity: bool = True

    @property
    def unit_roundoff(self) -> float:
        """Half an ulp of 1.0: the largest relative error of one rounding to nearest."""
        return 2.0**-self.bits


FORMATS: dict[torch.dtype, FloatFormat] = {
    torch.float64: FloatFormat(53, -1022, torch.finfo(torch.float64).max),
    torch.float32: FloatFormat(24, -126, torch.finfo(torch.float32).max),
    torch.float16: FloatFormat(11, -14, 65504.0),
    torch.bfloat16: FloatFormat(8, -126, torch.finfo(torch.bfloat16).max),
    torch.float8_e4m3fn: FloatFormat(4, -6, 448.0, has_infinity=False),
    torch.float8_e5m2: FloatFormat(3, -14, 57344.0),
    torch.float8_e4m3fnuz: FloatFormat(4, -7, 240.0, has_infinity=False),
    torch.float8_e5m2fnuz: FloatFormat(3, -15, 57344.0, has_infinity=False),
    torch.float8_e8m0fnu: FloatFormat(1, -127, 2.0**127, has_infinity=False),
}
E8M0 = torch.float8_e8m0fnu  # block scales: powers of two, no sign, no zero
FP4 = torch.float4_e2m1fn_x2  # two values in a byte: a container, decoded where it is used (numerics/scaled.py)
FP8 = frozenset(d for d in FORMATS if d.itemsize == 1)
HALF = frozenset({torch.float16, torch.bfloat16})
NARROW = frozenset({torch.float32}) | HALF | FP8  # what the oracle replaces by float64
NARROW_COMPLEX = frozenset({torch.complex32, torch.complex64})


def is_float(dtype: torch.dtype) -> bool:
    """A real floating-point format that this module knows."""
    return dtype in FORMATS


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff u = 2^-p of a format with p significant bits."""
    return FORMATS[dtype].unit_roundoff


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one with fewer significant bits (`first` on a tie)."""
    return second if FORMATS[second].bits < FORMATS[first].bits else first


def finer(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one with more significant bits (`first` on a tie)."""
    return second if FORMATS[second].bits > FORMATS[first].bits else first


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of `dtype` at each value; float64, infinite at non-finite values."""
    form = FORMATS[dtype]
    binade = (values.detach().contiguous().view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    return binade.clamp_(min=2.0**form.min_exponent).mul_(form.unit_roundoff)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Each float64 value rounded to nearest-even in `dtype`, as float64; overflow gives inf or NaN as the format has
    it, or for fp8 the largest value where this torch does so too."""
    if dtype == torch.float64:
        return values.clone()
    if dtype == E8M0:  # ties go to the even exponent, which the mantissa rounding below does not see
        return to_float64(values.to(torch.float32).to(E8M0))
    form = FORMATS[dtype]
    spacing = half_ulp(values, dtype).mul_(2.0)
    rounded = torch.where(torch.isfinite(values), torch.round(values / spacing).mul_(spacing), values)
    too_large = rounded.abs() > form.largest
    if bool(too_large.any()):
        limit = form.largest if dtype in FP8 and _saturates(dtype, values.device.type) else torch.inf
        beyond = torch.copysign(torch.full_like(rounded, limit), rounded)
        rounded = torch.where(too_large, beyond if form.has_infinity or limit != torch.inf else torch.nan, rounded)
        if limit != torch.inf:
            rounded = torch.where(torch.isinf(values), _infinity_in(dtype, values.device.type) * values.sign(), rounded)
    return rounded


@lru_cache(maxsize=16)
def _saturates(dtype: torch.dtype, device: str) -> bool:
    """Whether this torch stores the largest value where fp8 overflows (2.13 does on the CPU; earlier gave NaN)."""
    beyond = torch.tensor([4 * FORMATS[dtype].largest], dtype=torch.float32, device=device)
    return bool(torch.isfinite(beyond.to(dtype).to(torch.float32)).all())


@lru_cache(maxsize=16)
def _infinity_in(dtype: torch.dtype, device: str) -> float:
    return float(torch.tensor([torch.inf], device=device).to(dtype).to(torch.float32))


def to_float64(values: Tensor) -> Tensor:
    """Lossless float64 copy of a real floating-point tensor, fp8 included."""
    if values.dtype in FP8:
        return values.to(torch.float32).to(torch.float64)
    return values.to(torch.float64)
