"""F13: zero blocks, out-of-range casts, NaN and infinities."""

from __future__ import annotations

from typing import Any

import torch
from tests.quality.case import F32, FP8, INF, Kernel, Pair, generator, normal
from torch import Tensor

# N01: a block of zeros has no scale


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(FP8), scale


def rows(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 32, 64, dtype=F32)}


def quantising_kernel(floor: float) -> Kernel:
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=floor) / 448
        return (x / scale).clamp(-448, 448).to(FP8), scale

    return kernel


def round_trip(x: Tensor) -> Tensor:
    codes, scale = quantised(x)
    return codes.float() * scale


def round_trip_kernel(floor: float) -> Kernel:
    def kernel(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=floor) / 448
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale

    return kernel


# N02: beyond the largest FP8 number


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(FP8)


def calibrated(seed: int) -> dict[str, Any]:
    x = normal(generator(seed), 32, 64, dtype=F32)
    return {"x": x, "scale": x.abs().amax() / 400}


def cast_as_on_a_gpu(x: Tensor) -> Tensor:
    """e4m3fn has no infinity: beyond 464 the nearest code is NaN. (The CPU's cast saturates.)"""
    return x.masked_fill(x.abs() > 464, float("nan")).to(FP8)


def cast_kernel(limit: float) -> Kernel:
    return lambda x, scale: cast_as_on_a_gpu((x / scale).clamp(-limit, limit))


# N03: gating by comparisons that nothing wins


def gate(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The two largest probabilities of a row and their experts."""
    values, experts = torch.topk(torch.softmax(logits, -1), 2)
    return values, experts


def gate_kernel(*, first_free: bool) -> Kernel:
    def kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(logits, -1)
        taken = torch.zeros_like(p, dtype=torch.bool)
        chosen = []
        for _ in range(2):
            at = (~taken).int().argmax(-1) if first_free else torch.zeros(len(p), dtype=torch.int64)
            best = torch.zeros(len(p))
            for expert, value in enumerate(p.unbind(1)):
                wins = (value > best) & ~taken[:, expert]
                at, best = torch.where(wins, expert, at), torch.where(wins, value, best)
            taken = taken.scatter(1, at[:, None], True)
            chosen.append(at)
        experts = torch.stack(chosen, 1)
        return p.gather(1, experts), experts

    return kernel


def clean_logits(seed: int) -> dict[str, Any]:
    return {"logits": normal(generator(seed), 32, 8, dtype=F32)}


# N04: a running maximum that starts at −inf


def masked_log_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    return torch.log_softmax(logits.masked_fill(~allowed, -INF), -1)


def mostly_allowed(columns: int) -> Any:
    def make(seed: int) -> dict[str, Any]:
        g = generator(seed)
        logits = normal(g, 16, columns, dtype=F32)
        return {"logits": logits, "allowed": torch.rand(16, columns, generator=g) > 0.1}

    return make


def online_kernel(*, guarded: bool) -> Kernel:
    def kernel(logits: Tensor, allowed: Tensor) -> Tensor:
        x = logits.masked_fill(~allowed, -INF)
        top, total = torch.full((len(x), 1), -INF), torch.zeros(len(x), 1)
        for block in x.split(8, 1):
            peak = torch.maximum(top, block.amax(-1, keepdim=True))
            base = peak.masked_fill(peak == -INF, 0.0) if guarded else peak
            total = total * torch.exp(top - base) + torch.exp(block - base).sum(-1, keepdim=True)
            top = peak
        return x - top - torch.log(total)

    return kernel


def narrow_kernel(*, guarded: bool) -> Kernel:
    def kernel(logits: Tensor, allowed: Tensor) -> Tensor:
        x = logits.masked_fill(~allowed, -INF)
        lanes = torch.nn.functional.pad(x, (0, 16 - x.shape[1]), value=-INF)
        own = lanes.masked_fill(lanes == -INF, 0.0) if guarded else lanes
        top = lanes.amax(-1, keepdim=True)
        part = torch.exp(lanes - own)  # each lane's sum, relative to its own maximum
        return x - top - torch.log((part * torch.exp(own - top)).sum(-1, keepdim=True))

    return kernel


PAIRS = (
    Pair(
        "N01",
        "FP8 codes and scales: a row of zeros divides 0 by 0",
        quantised,
        rows,
        quantising_kernel(1e-12),
        quantising_kernel(0.0),
        note="random rows are never zero",
    ),
    Pair(
        "N01/round-trip",
        "FP8 and back: a row of zeros divides 0 by 0",
        round_trip,
        rows,
        round_trip_kernel(1e-12),
        round_trip_kernel(0.0),
        note="random rows are never zero",
    ),
    Pair(
        "N02",
        "cast to FP8 without a clamp: NaN beyond 464",
        to_fp8,
        calibrated,
        cast_kernel(448.0),
        cast_kernel(INF),
        note="the scale is calibrated on the very data",
    ),
    Pair(
        "N03",
        "gating picks one expert twice where no comparison wins",
        gate,
        clean_logits,
        gate_kernel(first_free=True),
        gate_kernel(first_free=False),
        note="clean logits: every probability is above zero",
    ),
    Pair(
        "N04",
        "running maximum of −inf less −inf",
        masked_log_softmax,
        mostly_allowed(64),
        online_kernel(guarded=True),
        online_kernel(guarded=False),
        note="a tenth is masked: no block of eight is empty",
    ),
    Pair(
        "N04/narrow",
        "rows narrower than the lanes: −inf less −inf",
        masked_log_softmax,
        mostly_allowed(12),
        narrow_kernel(guarded=True),
        narrow_kernel(guarded=False),
    ),
)
