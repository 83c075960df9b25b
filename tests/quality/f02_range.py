"""F2: algorithms that lose range or cancel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tests.quality.case import BF16, F32, Kernel, Pair, generator, normal, weights
from torch import Tensor

# B01: variance in one pass


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def norm_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 128, dtype=F32), "weight": weights(g, 128, F32)}


def layer_norm_kernel(*, one_pass: bool) -> Kernel:
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        squares = (x * x).mean(-1, keepdim=True) - mean * mean if one_pass else (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(squares + 1e-5) * weight

    return kernel


# B02: the phase of a rotary embedding


def frequencies(half: int) -> Tensor:
    return 10000.0 ** (-torch.arange(half, dtype=F32) / half)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    phase = positions.float()[:, None] * frequencies(x.shape[-1] // 2)
    return rotated(x, torch.cos(phase), torch.sin(phase))


def short_positions(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 16, 32), "positions": torch.arange(16)}


def rope_kernel(carry: torch.dtype) -> Kernel:
    def kernel(x: Tensor, positions: Tensor) -> Tensor:
        phase = (positions.to(carry)[:, None] * frequencies(x.shape[-1] // 2).to(carry)).float()
        return rotated(x, torch.cos(phase), torch.sin(phase))

    return kernel


def reduced_by_turns(phase: Tensor) -> Tensor:
    """How a GPU's fast sine reduces its argument: whole turns are dropped after one fp32 multiplication."""
    turns = phase * (1 / (2 * math.pi))
    return (turns - turns.floor()) * (2 * math.pi)


def rope_of_phases(x: Tensor, freqs: Tensor) -> Tensor:
    return rotated(x, torch.cos(freqs), torch.sin(freqs))


def short_phases(seed: int) -> dict[str, Any]:
    drawn = short_positions(seed)
    return {"x": drawn["x"], "freqs": drawn["positions"].float()[:, None] * frequencies(16)}


def fast_sine_kernel(reduced: Kernel) -> Kernel:
    def kernel(x: Tensor, freqs: Tensor) -> Tensor:
        return rope_of_phases(x, reduced(freqs))

    return kernel


# B03: exp before the mask


def decayed(log_decay: Tensor, *, mask_first: bool) -> Tensor:
    total = log_decay.cumsum(0)
    difference = total[:, None] - total[None, :]
    lower = torch.ones_like(difference).tril()
    return difference.masked_fill(lower == 0, -math.inf).exp() if mask_first else difference.exp() * lower


def chunk_kernel(*, mask_first: bool) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return (q @ k.T * decayed(log_decay, mask_first=mask_first)) @ v

    return kernel


def gated_chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return (q @ k.T * decayed(log_decay, mask_first=True)) @ v


def overflowing_chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return (q @ k.T * decayed(log_decay, mask_first=False)) @ v


def decay_inputs(strength: float, steps: int = 64) -> Any:
    def make(seed: int) -> dict[str, Any]:
        g = generator(seed)
        made: dict[str, Any] = {name: normal(g, steps, 16, dtype=F32) for name in "qkv"}
        return made | {"log_decay": -strength * torch.rand(steps, generator=g)}

    return make


# B03/chunked: a recurrence by chunks, whose decays are differences of prefix sums


def step_by_step(decays: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), []
    for i in range(len(q)):
        state = state * decays(i) + k[i, :, None] * v[i, None, :]
        out.append(q[i] @ state)
    return torch.stack(out)


def decay_by_decay(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return step_by_step(lambda i: torch.exp(log_decay[i]), q, k, v)


def decays_at_once(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    decays = torch.exp(log_decay)[:, None]
    return step_by_step(lambda i: decays[i], q, k, v)


CHUNK = 8


def by_chunks(within: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor] = lambda x: x) -> Kernel:
    """`within` gives exp(a_i - a_j) of a chunk's prefix sums, `total` rounds these."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        state, out = q.new_zeros(k.shape[1], v.shape[1]), []
        for at in range(0, len(q), CHUNK):
            here = slice(at, at + CHUNK)
            a = total(log_decay[here].cumsum(0))
            out.append((q[here] @ k[here].T * within(a)) @ v[here] + a.exp()[:, None] * (q[here] @ state))
            state = a[-1].exp() * state + (k[here] * (a[-1] - a).exp()[:, None]).T @ v[here]
        return torch.cat(out)

    return kernel


def of_differences(a: Tensor) -> Tensor:
    kept = torch.ones(len(a), len(a), dtype=torch.bool).tril()
    return (a[:, None] - a[None, :]).masked_fill(~kept, -math.inf).exp()


def of_quotients(a: Tensor) -> Tensor:
    return (a.exp()[:, None] * (-a).exp()[None, :]).tril()


# B04: the inverse of a triangular matrix by a truncated series


def delta_rule(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    lower = torch.tril(beta[:, None] * (k @ k.T), -1)
    return torch.linalg.solve_triangular(torch.eye(len(k)) + lower, v, upper=False, unitriangular=True)


def small_keys(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {
        "k": normal(g, 32, 32, scale=0.02, dtype=F32),
        "v": normal(g, 32, 16, dtype=F32),
        "beta": torch.rand(32, generator=g),
    }


def delta_kernel(series_below: float) -> Kernel:
    def kernel(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        lower = torch.tril(beta[:, None] * (k @ k.T), -1)
        if float(k.abs().amax()) < series_below:
            once = lower @ v
            twice = lower @ once
            return v - once + twice - lower @ twice
        return torch.linalg.solve_triangular(torch.eye(len(k)) + lower, v, upper=False, unitriangular=True)

    return kernel


PAIRS = (
    Pair(
        "B01",
        "variance as E[x²] − E[x]²",
        layer_norm,
        norm_inputs,
        layer_norm_kernel(one_pass=False),
        layer_norm_kernel(one_pass=True),
        note="rows of mean 0",
    ),
    Pair(
        "B02",
        "rotary phase in bf16",
        rope,
        short_positions,
        rope_kernel(F32),
        rope_kernel(BF16),
        note="positions below 16",
    ),
    Pair(
        "B02/fast-sine",
        "fast sine of a large phase",
        rope_of_phases,
        short_phases,
        fast_sine_kernel(torch.clone),
        fast_sine_kernel(reduced_by_turns),
        note="positions below 16, where the fast sine is good; the phases are given, so their own rounding hides nothing",
    ),
    Pair(
        "B03",
        "exp before the mask: inf times 0",
        gated_chunk,
        decay_inputs(0.1),
        chunk_kernel(mask_first=True),
        chunk_kernel(mask_first=False),
        note="mild decay",
    ),
    Pair(
        "B03/reference",
        "the reference itself overflows before its mask",
        overflowing_chunk,
        decay_inputs(4.0),
        chunk_kernel(mask_first=True),
        None,
        note="NaN in the reference is nobody's fault but its own",
        lenient=True,
    ),
    Pair(
        "B03/chunked",
        "decays within a chunk as quotients of exponentials: overflow",
        decay_by_decay,
        decay_inputs(1.0, 24),
        by_chunks(of_differences),
        by_chunks(of_quotients),
        note="differences of prefix sums lose bits where gates are strong, as every chunked kernel does",
    ),
    Pair(
        "B03/prefix",
        "prefix sums of the decays kept in bfloat16",
        decays_at_once,
        decay_inputs(1.0, 24),
        by_chunks(of_differences),
        by_chunks(of_differences, lambda a: a.bfloat16().float()),
        note="the reference makes all decays at once and takes one at a step",
    ),
    Pair(
        "B04",
        "triangular inverse by a series of third order while keys are small",
        delta_rule,
        small_keys,
        delta_kernel(0.0),
        delta_kernel(0.55),
        note="keys so small that the fourth term is below rounding; large scales take the exact path",
    ),
)
