"""F3: a term, clamp, scale, flag or denominator is left out or altered."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.quality.case import BF16, F32, INF, Kernel, Pair, generator, normal, unit, weights
from torch import Tensor
from torch.nn.functional import cross_entropy

# C01: soft cap


def capped_scores(q: Tensor, k: Tensor, cap: float) -> Tensor:
    scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    return cap * torch.tanh(scores / cap) if cap else scores


def capped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(capped_scores(q, k, 50.0), -1) @ v.float()).to(BF16)


def cap_as_argument(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    return (torch.softmax(capped_scores(q, k, softcap), -1) @ v.float()).to(BF16)


def small_logits(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"q": normal(g, 32, 32, scale=0.1), "k": normal(g, 32, 32, scale=0.1), "v": normal(g, 32, 32)}


def small_logits_and_cap(seed: int) -> dict[str, Any]:
    return small_logits(seed) | {"softcap": 50.0}


def cap_kernel(cap: float) -> Kernel:
    return lambda q, k, v: (torch.softmax(capped_scores(q, k, cap), -1) @ v.float()).to(BF16)


def uncapped(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    return (torch.softmax(capped_scores(q, k, 0.0), -1) @ v.float()).to(BF16)


# C02: sliding window


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, *, off: int = 0) -> Tensor:
    scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    age = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (age < 0) | (age >= window + off)
    return (torch.softmax(scores.masked_fill(hidden, -INF), -1) @ v.float()).to(BF16)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return windowed(q, k, v, window)


def window_inputs(length: int) -> Any:
    def make(seed: int) -> dict[str, Any]:
        g = generator(seed)
        return {**{name: normal(g, length, 16) for name in "qkv"}, "window": 16}

    return make


def window_kernel(off: int) -> Kernel:
    return lambda q, k, v, window: windowed(q, k, v, window, off=off)


# C03: conventions of a norm


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (unit(x)[0] * (1 + weight.float())).to(BF16)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (unit(x)[0] * weight.float()).to(BF16)


def without_one(x: Tensor, weight: Tensor) -> Tensor:
    return (unit(x)[0] * weight.float()).to(BF16)


def without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return unit(x)[0].to(BF16)


def eps_kernel(eps: float) -> Kernel:
    return lambda x, weight: (unit(x, eps)[0] * weight.float()).to(BF16)


def near_zero_weights(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 64), "weight": normal(g, 64, scale=0.1)}


def fresh_weights(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 32, 64), "weight": torch.ones(64, dtype=BF16)}


def trained_weights(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 64), "weight": weights(g, 64)}


# C04: ignored labels

CLASSES = 64


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float(), targets, ignore_index=-100)


def token_loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    valid = targets != -100
    gradient = torch.softmax(logits.float(), -1)
    gradient = gradient - torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[1])
    gradient = gradient * valid[:, None] / valid.sum()
    return cross_entropy(logits.float(), targets, ignore_index=-100), gradient.to(logits.dtype)


def labels(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"logits": normal(g, 64, CLASSES), "targets": torch.randint(0, CLASSES, (64,), generator=g)}


def loss_kernel(*, padding_counts: bool, gradient: bool = False) -> Kernel:
    def kernel(logits: Tensor, targets: Tensor) -> Any:
        valid = targets != -100
        wide = logits.float()
        chosen = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        count = len(targets) if padding_counts else valid.sum()
        loss = ((torch.logsumexp(wide, -1) - chosen) * valid).sum() / count
        if not gradient:
            return loss
        hot = torch.nn.functional.one_hot(targets.clamp(min=0), wide.shape[1])
        return loss, ((torch.softmax(wide, -1) - hot) * valid[:, None] / count).to(logits.dtype)

    return kernel


# C05: the denominator of gradient accumulation


def batch_loss(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def mean_of_means(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def sum_of_sums(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum(1).sum() / mask.sum(1).sum()


def packed(seed: int) -> dict[str, Any]:
    return {"losses": 3 * torch.rand(8, 64, generator=generator(seed)), "mask": torch.ones(8, 64, dtype=torch.bool)}


# C06: the scale of logits, in both passes


def scaled_loss(logits: Tensor, targets: Tensor, logits_scale: float) -> tuple[Tensor, Tensor]:
    wide = logits.float() * logits_scale
    loss = cross_entropy(wide, targets, reduction="none")
    hot = torch.nn.functional.one_hot(targets, logits.shape[1])
    return loss, ((torch.softmax(wide, -1) - hot) * logits_scale).to(logits.dtype)


def default_scale(seed: int) -> dict[str, Any]:
    return labels(seed) | {"logits_scale": 1.0}


def scale_tensor(seed: int) -> dict[str, Any]:
    return labels(seed) | {"logits_scale": torch.ones(())}


def scaled_kernel(*, on_second_read: bool) -> Kernel:
    def kernel(logits: Tensor, targets: Tensor, logits_scale: Any) -> tuple[Tensor, Tensor]:
        first = logits.float() * logits_scale
        total = torch.logsumexp(first, -1, keepdim=True)
        loss = total - first.gather(1, targets[:, None])
        second = logits.float() * logits_scale if on_second_read else logits.float()
        hot = torch.nn.functional.one_hot(targets, logits.shape[1])
        return loss[:, 0], ((torch.exp(second - total) - hot) * logits_scale).to(logits.dtype)

    return kernel


# C07: routing weights that are not renormalised


def router(logits: Tensor, renormalize: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001 -- the contract is positional
    chosen, experts = torch.topk(torch.softmax(logits.float(), -1), 2)
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen, experts


def router_kernel(*, softmax_always: bool) -> Kernel:
    def kernel(logits: Tensor, renormalize: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        chosen, experts = torch.topk(logits.float(), 2)
        if renormalize:
            return torch.softmax(chosen, -1), experts
        return torch.exp(
            chosen - torch.logsumexp(logits.float(), -1, keepdim=True)
        ) if softmax_always else chosen, experts

    return kernel


def always_renormalized(seed: int) -> dict[str, Any]:
    return {"logits": normal(generator(seed), 32, 8, dtype=F32), "renormalize": True}


PAIRS = (
    Pair(
        "C01",
        "soft cap left out",
        capped_attention,
        small_logits,
        cap_kernel(50.0),
        cap_kernel(0.0),
        note="logits far below the cap",
    ),
    Pair(
        "C01/argument",
        "soft cap accepted as an argument and never applied",
        cap_as_argument,
        small_logits_and_cap,
        cap_as_argument,
        uncapped,
        note="logits far below the cap",
    ),
    Pair(
        "C02",
        "sliding window one key too wide, sequence no longer than the window",
        windowed_attention,
        window_inputs(16),
        window_kernel(0),
        window_kernel(1),
        note="16 tokens, window 16",
    ),
    Pair(
        "C02/long",
        "sliding window one key too wide",
        windowed_attention,
        window_inputs(48),
        window_kernel(0),
        window_kernel(1),
    ),
    Pair("C03", "x·w where x·(1 + w) is meant", gemma_norm, near_zero_weights, gemma_norm, without_one),
    Pair(
        "C03/weight",
        "norm weight not applied",
        plain_norm,
        fresh_weights,
        plain_norm,
        without_weight,
        note="weights as initialised: all one",
    ),
    Pair(
        "C03/eps",
        "eps 1e-5 where 1e-6 is meant",
        plain_norm,
        trained_weights,
        eps_kernel(1e-6),
        eps_kernel(1e-5),
        note="rows of rms 1, where eps is below the output's rounding",
    ),
    Pair(
        "C04",
        "padding counts in the loss's denominator",
        token_loss,
        labels,
        loss_kernel(padding_counts=False),
        loss_kernel(padding_counts=True),
        note="no label is ignored",
    ),
    Pair(
        "C04/gradient",
        "padding counts in the denominator of loss and gradient",
        token_loss_and_gradient,
        labels,
        loss_kernel(padding_counts=False, gradient=True),
        loss_kernel(padding_counts=True, gradient=True),
        note="no label is ignored",
    ),
    Pair(
        "C05",
        "mean of the micro-batches' means",
        batch_loss,
        packed,
        sum_of_sums,
        mean_of_means,
        note="packed data: equal counts, the mask is all true",
    ),
    Pair(
        "C06",
        "scale of logits forgotten on the second read",
        scaled_loss,
        default_scale,
        scaled_kernel(on_second_read=True),
        scaled_kernel(on_second_read=False),
        note="the scale is a number, 1.0",
    ),
    Pair(
        "C06/tensor",
        "scale of logits forgotten on the second read",
        scaled_loss,
        scale_tensor,
        scaled_kernel(on_second_read=True),
        scaled_kernel(on_second_read=False),
        note="the scale is a 0-D tensor, 1.0",
    ),
    Pair(
        "C07",
        "raw logits as routing weights without renormalize",
        router,
        always_renormalized,
        router_kernel(softmax_always=True),
        router_kernel(softmax_always=False),
        note="the flag is always true",
    ),
)
