"""The norms a problem may mean by "norm", and how to tell which: by trying them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Norm: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]  # activations (…, H), weight (H,), eps -> (…, H)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the last axis, kept as an axis of length 1."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _one_plus_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * inverse_rms(x, eps) * (1 + weight)


NORMS: dict[str, Norm] = {
    "RMSNorm": lambda x, weight, eps: x * inverse_rms(x, eps) * weight,
    "RMSNorm with 1 + weight": _one_plus_weight,
    "LayerNorm": lambda x, weight, eps: torch.nn.functional.layer_norm(x, weight.shape, weight, None, eps),
}


def starts_at_zero(norm: Norm) -> float:
    """What to take off the decoder's norm weights, which start at one: 1.0 for a norm that adds one itself."""
    return 1.0 if norm is _one_plus_weight else 0.0
