"""The weaker oracle: the reference in its own precision, where float64 cannot follow it.

It stands in when a reference leaves torch (numpy, a kernel of its own, an op of another library) or does not run
in float64. The right answer is then the native result on float32 inputs, or on the declared ones when the reference
takes no others; the honest floor is how far native results move when every input moves by a little. That sees only
errors that are large against one rounding of the inputs (2^-16 for float32 inputs), and it inherits what the
reference itself does wrong in both runs; whoever reports a value judged like this says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seatrial.model import Value
from seatrial.numerics.dtypes import HALF, NARROW, is_float, to_float64, unit_roundoff

WIDE = torch.float64
_OF_FLOAT32 = 2.0**-16  # covers an honest float32 sum over tens of thousands of terms
_OF_FLOAT64 = 2.0**-45
_LIKE = 0.05  # relative norm within which a float32 run is the same computation


def in_float32(inputs: Sequence[Value]) -> list[Value]:
    """The inputs with every half-precision tensor as float32: the same values, and no rounding of results."""
    return [v.to(torch.float32) if isinstance(v, Tensor) and v.dtype in HALF else v for v in inputs]


def moved(inputs: Sequence[Value], seed: int, *, as_float32: bool) -> list[Value]:
    """The inputs, each float element moved by up to one rounding (two, where it must survive being stored again)."""
    generator = torch.Generator().manual_seed(seed)
    return [_moved(v, generator, as_float32=as_float32) for v in inputs]


def _moved(value: Value, generator: torch.Generator, *, as_float32: bool) -> Value:
    if not isinstance(value, Tensor) or value.dtype not in HALF | {torch.float32, WIDE}:
        return value  # codes and integers are what they are
    if value.dtype in HALF:
        size = unit_roundoff(value.dtype) * (0.75 if as_float32 else 2.0)
    else:
        size = _OF_FLOAT32 if value.dtype == torch.float32 else _OF_FLOAT64
    target = torch.float32 if as_float32 and value.dtype in HALF else value.dtype
    return (to_float64(value) * (1 + size * _uniform(value, generator))).to(target)


def with_store_noise(outputs: Sequence[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Native outputs in float64, moved by a rounding of the dtype that they were stored in; integers as they are."""
    generator = torch.Generator().manual_seed(seed ^ 0x5EA)
    return tuple(_stored(out, generator) for out in outputs)


def _stored(out: Tensor, generator: torch.Generator) -> Tensor:
    if not is_float(out.dtype):
        return out.to(torch.complex128) if out.is_complex() else out
    wide = to_float64(out)
    size = unit_roundoff(out.dtype) if out.dtype in HALF else _OF_FLOAT64 if out.dtype == WIDE else _OF_FLOAT32 / 4
    overall = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().mean().sqrt() if wide.numel() else 0.0
    return wide + size * (wide + overall / 64) * _uniform(wide, generator)


def same_computation(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two native runs give the same outputs but for roundings."""
    return len(first) == len(second) and all(_alike(a, b) for a, b in zip(first, second, strict=True))


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.is_complex() != b.is_complex() or a.is_floating_point() != b.is_floating_point():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return a.dtype == b.dtype
    a, b = (to_float64(t) if t.dtype in NARROW else t for t in (a, b))
    return bool((a - b).nan_to_num().norm() <= _LIKE * a.nan_to_num().norm())


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=WIDE).mul_(2).sub_(1).to(like.device)
