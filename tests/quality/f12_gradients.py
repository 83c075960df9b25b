"""F12: the contract of a gradient. References take the upstream gradient as an input."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.quality.case import BF16, F32, INF, VALUES, Kernel, Pair, generator, normal, unit, weights
from torch import Tensor

# M01: every token's gradient weighted by the first token's


def token_gradient(logits: Tensor, targets: Tensor, grad_output: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        loss = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
        return torch.autograd.grad(loss, leaf, grad_output)[0].to(BF16)


def unweighted_tokens(seed: int) -> dict[str, Any]:
    g = generator(seed)
    targets = torch.randint(0, 64, (32,), generator=g)
    return {"logits": normal(g, 32, 64), "targets": targets, "grad_output": torch.ones(32)}


def token_kernel(*, first_only: bool) -> Kernel:
    def kernel(logits: Tensor, targets: Tensor, grad_output: Tensor) -> Tensor:
        upstream = grad_output[0] if first_only else grad_output[:, None]
        hot = torch.nn.functional.one_hot(targets, logits.shape[1])
        return ((torch.softmax(logits.float(), -1) - hot) * upstream).to(BF16)

    return kernel


# M02: no gradient for the weight


def norm_gradients(x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    xhat, rstd = unit(x)
    scaled = grad_output.float() * weight.float()
    grad_x = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return grad_x.to(BF16), (grad_output.float() * xhat).sum(0).to(BF16)


def norm_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 64), "weight": weights(g, 64), "grad_output": normal(g, 32, 64)}


def norm_kernel(*, weight_is_trained: bool) -> Kernel:
    def kernel(x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_x, grad_weight = norm_gradients(x, weight, grad_output)
        return grad_x, grad_weight if weight_is_trained else None

    return kernel


# M03: a query row that sees no key


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A row without a key has probabilities of zero: it neither attends nor learns."""
    return gradients(q, k, v, mask, grad_output, guarded=True)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad_output: Tensor, *, guarded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax((q.float() @ k.float().T * scale).masked_fill(~mask, -INF), -1)
    p = p.masked_fill(~mask.any(-1, keepdim=True), 0.0) if guarded else p
    grad_p = grad_output.float() @ v.float().T
    grad_s = p * (grad_p - (p * grad_p).sum(-1, keepdim=True)) * scale
    grads = (grad_s @ k.float(), grad_s.T @ q.float(), p.T @ grad_output.float())
    return grads[0].to(BF16), grads[1].to(BF16), grads[2].to(BF16)


def masked_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    made: dict[str, Any] = {name: normal(g, 32, 16) for name in "qkv"}
    return made | {"mask": torch.rand(32, 32, generator=g) > 0.3, "grad_output": normal(g, 32, 16)}


def masked_kernel(*, guarded: bool) -> Kernel:
    return lambda q, k, v, mask, grad_output: gradients(q, k, v, mask, grad_output, guarded=guarded)


# M04: soft targets whose sum is not one


def soft_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        loss = -(targets * torch.log_softmax(leaf, -1)).sum(-1)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def normalised_targets(seed: int) -> dict[str, Any]:
    g = generator(seed)
    targets = torch.softmax(normal(g, 32, 64, dtype=F32), -1)
    return {"logits": normal(g, 32, 64, dtype=F32), "targets": targets}


def soft_kernel(*, any_sum: bool) -> Kernel:
    def kernel(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = -(targets * torch.log_softmax(logits, -1)).sum(-1)
        mass = targets.sum(-1, keepdim=True) if any_sum else 1.0
        return loss, mass * torch.softmax(logits, -1) - targets

    return kernel


PAIRS = (
    Pair(
        "M01",
        "every token's gradient weighted by the first token's",
        token_gradient,
        unweighted_tokens,
        token_kernel(first_only=False),
        token_kernel(first_only=True),
        note="upstream gradient of ones",
    ),
    Pair(
        "M02",
        "None for the gradient of the weight",
        norm_gradients,
        norm_inputs,
        norm_kernel(weight_is_trained=True),
        norm_kernel(weight_is_trained=False),
        ("broken-contract",),
    ),
    Pair(
        "M03",
        "a row without a key poisons every gradient",
        attention_gradients,
        masked_inputs,
        masked_kernel(guarded=True),
        masked_kernel(guarded=False),
        note="a random mask: no row is empty",
    ),
    Pair(
        "M04",
        "gradient that takes soft targets to sum to one",
        soft_gradient,
        normalised_targets,
        soft_kernel(any_sum=True),
        soft_kernel(any_sum=False),
        VALUES,
        note="targets from a softmax",
    ),
)
