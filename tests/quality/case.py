"""What a pair is, and the few helpers that the tables share. Knows torch alone: kernels travel to another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16, FP16, FP8, F32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
INF = float("inf")

Kernel = Callable[..., Any]
Inputs = Callable[[int], dict[str, Any]]

VALUES = ("wrong-values", "fitted-inputs")
SUMS = ("narrow-accumulator", *VALUES)


@dataclass(frozen=True)
class Pair:
    """A faulty kernel and its honest twin, one line apart, over one small problem.

    case        "A01", or "A01/variant"; unique over all tables
    inputs      draws as a naive benchmark would: where the real fault was hidden by its inputs, so it is here
    honest      must be accepted; None when the case has no honest side of its own
    faulty      must be rejected; None for a property or a trap, where there is nothing to object to
    causes      checks or causes of findings, one of which must have rejected the faulty kernel
    lenient     the problem cannot be judged fully: the honest kernel must not be rejected, the faulty not accepted
    known_miss  why the faulty kernel is not rejected yet, or "sometimes: …" when it depends on the seed
    any_layout  audited with the policy that demands right values for inputs of any layout
    known_alarm why the honest kernel is not accepted yet, likewise
    """

    case: str
    title: str
    reference: Kernel
    inputs: Inputs
    honest: Kernel | None
    faulty: Kernel | None
    causes: tuple[str, ...] = VALUES
    note: str = ""
    lenient: bool = False
    known_miss: str = ""
    known_alarm: str = ""
    any_layout: bool = False


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unseeded() -> torch.Generator:
    """Another order at every call, as atomics have, without touching the global stream."""
    g = torch.Generator()
    g.seed()
    return g


def normal(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (scale * torch.randn(shape, generator=g)).to(dtype)


def weights(g: torch.Generator, width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Norm weights around one."""
    return (1 + 0.1 * torch.randn(width, generator=g)).to(dtype)


def one_by_one(terms: Tensor, carry: torch.dtype) -> Tensor:
    """The sum over dim 0, one term after the other, held in `carry`."""
    total = torch.zeros(terms.shape[1:], dtype=carry)
    for term in terms.to(carry).unbind(0):
        total += term
    return total


def unit(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x over its row's rms, and one over that rms, in fp32."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd
