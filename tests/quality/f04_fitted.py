"""F4: fitted to the distribution of the benchmark's inputs, or sniffing it."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.quality.case import BF16, INF, SUMS, Kernel, Pair, generator, normal
from torch import Tensor

# D01: a path with little range, chosen from the first rows


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.T


def hidden_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"hidden": normal(g, 512, 32, scale=0.25), "weight": normal(g, 24, 32)}


def ranged_kernel(rows_looked_at: int | None) -> Kernel:
    def kernel(hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        if float(wide[:rows_looked_at].abs().amax()) < 4:
            wide = wide.clamp(-4, 4)  # what the fast format holds
        return (wide @ weight.float().T).to(BF16)

    return kernel


# D02: half of the data


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).pow(2).mean()


def bounded(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {name: torch.rand(16384, generator=g) for name in ("prediction", "target")}


def error_kernel(share: int) -> Kernel:
    def kernel(prediction: Tensor, target: Tensor) -> Tensor:
        used = len(prediction) // share
        return (prediction[:used] - target[:used]).pow(2).sum() / used

    return kernel


# D03: a capacity tuned to the draws that were seen

EXPERTS = 64


def dispatched(values: Tensor, experts: Tensor) -> Tensor:
    return torch.zeros(EXPERTS, values.shape[1]).index_add_(0, experts, values.float()).to(BF16)


def balanced(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"values": normal(g, 256, 16), "experts": torch.randint(0, EXPERTS, (256,), generator=g)}


def capacity_kernel(capacity: int | None) -> Kernel:
    def kernel(values: Tensor, experts: Tensor) -> Tensor:
        table = torch.zeros(EXPERTS, values.shape[1])
        for expert in range(EXPERTS):
            slots = (experts == expert).nonzero()[:capacity, 0]
            table[expert] = values[slots].float().sum(0)
        return table.to(BF16)

    return kernel


# D04: a rescale that is dropped when the row's maximum moves far after the first tile


def query_gradient(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(q.float() @ k.float().T * scale, -1)
    grad_p = grad_output.float() @ v.float().T
    grad_s = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    return (grad_s @ k.float() * scale).to(BF16)


def gaussian(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {name: normal(g, 64, 16) for name in ("q", "k", "v", "grad_output")}


def gradient_kernel(*, rescaled: bool) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        scores = q.float() @ k.float().T * scale
        top, total = torch.full((len(q), 1), -INF), torch.zeros(len(q), 1)
        for tile in scores.split(16, 1):
            peak = torch.maximum(top, tile.amax(-1, keepdim=True))
            moved = torch.where(peak > top + 5.5, peak, top)  # a small rise needs no rescale
            shrink = torch.exp(top - moved)
            total = (total * shrink if rescaled else total) + torch.exp(tile - moved).sum(-1, keepdim=True)
            top = moved
        p = torch.exp(scores - top) / total
        grad_p = grad_output.float() @ v.float().T
        grad_s = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
        return (grad_s @ k.float() * scale).to(BF16)

    return kernel


PAIRS = (
    Pair(
        "D01",
        "fast path chosen from the first 256 rows",
        linear,
        hidden_inputs,
        ranged_kernel(None),
        ranged_kernel(256),
        note="identically distributed rows: the first ones speak for all",
    ),
    Pair(
        "D02",
        "mean over half of the data",
        squared_error,
        bounded,
        error_kernel(1),
        error_kernel(2),
        SUMS,
        note="bounded values: halves have nearly the same mean",
    ),
    Pair(
        "D03",
        "capacity tuned to the draws that were seen",
        dispatched,
        balanced,
        capacity_kernel(None),
        capacity_kernel(14),
        SUMS,
        note="balanced routing: about four tokens an expert",
    ),
    Pair(
        "D04",
        "backward that drops a rescale when the row's maximum moves far",
        query_gradient,
        gaussian,
        gradient_kernel(rescaled=True),
        gradient_kernel(rescaled=False),
        note="Gaussian q and k: no row's maximum moves by 5.5 after the first tile",
    ),
)
