"""How much of one tensor differs from another: bit for bit, or by more than any honest rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from seatrial.numerics.dtypes import half_ulp, is_float

SURELY_OTHER = 8.0  # half spacings of the stored type


def share_changed(before: Tensor, now: Tensor) -> float:
    """Share of elements that differ; NaN equals NaN. 0 for tensors of different shapes or without elements."""
    if before.numel() == 0 or before.shape != now.shape:
        return 0.0
    x, y = (t.double() if t.is_floating_point() else t for t in (before, now))
    return float((~((x == y) | ((x != x) & (y != y)))).double().mean())


def share_moved(before: Tensor, now: Tensor, stored: torch.dtype) -> float:
    """Share of elements of two exact results that no honest kernel rounds to one number of the stored type."""
    if before.numel() == 0 or before.shape != now.shape or not before.is_floating_point() or not is_float(stored):
        return share_changed(before, now)
    spacing = torch.maximum(half_ulp(before, stored), half_ulp(now, stored))
    return float(((before - now).abs() > SURELY_OTHER * spacing).double().mean())
