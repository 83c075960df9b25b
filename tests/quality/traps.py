"""T1–T16: correct kernels that a naive verifier rejects, where natural with a faulty neighbour.

T12 (a clone loses attributes of Python objects) has no form here: plain inputs travel by value.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from tests.quality.case import (
    BF16,
    F32,
    FP8,
    INF,
    SUMS,
    VALUES,
    Kernel,
    Pair,
    generator,
    normal,
    one_by_one,
    unit,
    unseeded,
    weights,
)
from torch import Tensor

# T1: keeps fp32 where the reference rounds


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return weight * unit(total)[0].to(BF16), total


def add_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 128), "residual": normal(g, 32, 128), "weight": weights(g, 128)}


def fused_add_kernel(eps: float) -> Kernel:
    def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual.float()
        return (unit(total, eps)[0] * weight.float()).to(BF16), total.to(BF16)

    return kernel


# T2: another order of a long sum


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def long_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": torch.randn(8, 4096, generator=g), "w": torch.randn(16, 4096, generator=g)}


def backwards_kernel(lost: int) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        x, w = x.flip(1)[:, lost:], w.flip(1)[:, lost:]
        parts = [a @ b.T for a, b in zip(x.split(16, 1), w.split(16, 1), strict=True)]
        return one_by_one(torch.stack(parts), F32)

    return kernel


# T3: atomics in another order at every call


def scatter(values: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(32, values.shape[1]).index_add_(0, ids, values)


def scatter_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"values": torch.randn(512, 16, generator=g), "ids": torch.randint(0, 32, (512,), generator=g)}


def atomic_kernel(lost: int) -> Kernel:
    def kernel(values: Tensor, ids: Tensor) -> Tensor:
        order = torch.randperm(len(ids), generator=unseeded())[lost:]
        return torch.zeros(32, values.shape[1]).index_add_(0, ids[order], values[order])

    return kernel


# T4: equal values in any order


def top_k(x: Tensor) -> tuple[Tensor, Tensor]:
    values, at = torch.topk(x, 4)
    return values, at


def sorting(x: Tensor) -> tuple[Tensor, Tensor]:
    values, at = torch.sort(x, dim=-1)
    return values, at


def first_largest(x: Tensor) -> Tensor:
    return x.argmax(-1)


def ties(seed: int) -> dict[str, Any]:
    return {"x": torch.randint(-5, 6, (16, 32), generator=generator(seed)).float()}


def from_the_end(reference: Kernel, shift: int) -> Kernel:
    """The same on the reversed row: other positions among equals; `shift` names a neighbour's position instead."""

    def kernel(x: Tensor) -> Any:
        found = reference(x.flip(-1))
        last = x.shape[-1] - 1
        if isinstance(found, Tensor):
            return (last - found + shift) % (last + 1)
        return found[0], (last - found[1] + shift) % (last + 1)

    return kernel


def gating(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, experts = torch.topk(torch.softmax(logits.float(), -1), 2)
    return chosen / chosen.sum(-1, keepdim=True), experts


def coarse_logits(seed: int) -> dict[str, Any]:
    return {"logits": (normal(generator(seed), 64, 8) * 4).round() / 4}


def gating_from_the_end(shift: int) -> Kernel:
    def kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
        top, found = torch.topk(logits.float().flip(-1), 2)
        return torch.softmax(top, -1), (7 - found + shift) % 8

    return kernel


# T5: infinities and NaN where the reference has them


def log_sum_exp(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.logsumexp(scores.masked_fill(~mask, -INF), -1)


def with_empty_rows(seed: int) -> dict[str, Any]:
    g = generator(seed)
    mask = torch.rand(32, 48, generator=g) > 0.3
    mask[::5] = False
    return {"scores": normal(g, 32, 48, dtype=F32), "mask": mask}


def log_sum_kernel(empty: float) -> Kernel:
    def kernel(scores: Tensor, mask: Tensor) -> Tensor:
        x = scores.masked_fill(~mask, -INF)
        top = x.amax(-1, keepdim=True).clamp(min=-1e30)
        total = torch.exp(x - top).sum(-1)
        return torch.where(total > 0, top[:, 0] + torch.log(total), empty)

    return kernel


def ignoring_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)


def all_ignored(seed: int) -> dict[str, Any]:
    return {"logits": normal(generator(seed), 16, 32, dtype=F32), "targets": torch.full((16,), -100)}


def negative_nan(logits: Tensor, targets: Tensor) -> Tensor:
    loss = ignoring_loss(logits, targets)
    return torch.where(loss.isnan(), torch.tensor(-4194303, dtype=torch.int32).view(F32), loss)


# T6: a row that attends to nothing


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q.float() @ k.float().T / math.sqrt(q.shape[-1])).masked_fill(~mask, -INF)
    return (torch.softmax(scores, -1) @ v.float()).to(BF16)


def with_an_empty_row(seed: int) -> dict[str, Any]:
    g = generator(seed)
    mask = torch.rand(32, 32, generator=g) > 0.3
    mask[5] = False
    return {**{name: normal(g, 32, 16) for name in "qkv"}, "mask": mask}


def zero_row_kernel(others: float) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = others * attention(q, k, v, mask)
        return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)

    return kernel


# T7: slots beyond the length


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    """Rows beyond a sequence's length are nobody's: NaN stands there."""
    valid = torch.arange(x.shape[1]) < lengths[:, None]
    return (2 * x.float()).masked_fill(~valid[..., None], float("nan")).to(BF16)


def lengths_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 4, 16, 8), "lengths": torch.randint(4, 13, (4,), generator=g)}


def padded_kernel(factor: float) -> Kernel:
    return lambda x, lengths: (factor * x.float()).to(BF16)


# T8: another random stream (its faulty neighbour is P02/own)


def dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.float(), 0.25).to(BF16)


def x_alone(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 64, 64)}


def own_stream(x: Tensor) -> Tensor:
    keep = torch.rand(x.shape, generator=unseeded()) < 0.75
    return torch.where(keep, x.float() / 0.75, 0.0).to(BF16)


# T9: buffers that are reused by contract, and one that is not


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def add_out_of_place(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def two_tensors(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 32, dtype=F32), "y": normal(g, 32, 32, dtype=F32)}


# T10: one step of another rounding in a quantiser


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(FP8), scale


def rows(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 32, 64, dtype=F32)}


def reciprocal_kernel(shrink: float) -> Kernel:
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * (shrink * 448 / amax)).clamp(-448, 448).to(FP8), amax * (1 / 448)

    return kernel


# T11: overflows only beyond any activation


def safe_norm(x: Tensor) -> Tensor:
    top = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled = x / top
    return scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True))


def squares_kernel(lost: int) -> Kernel:
    def kernel(x: Tensor) -> Tensor:
        used = x[:, lost:]
        return x * torch.rsqrt(used.pow(2).sum(-1, keepdim=True) / x.shape[1])

    return kernel


# T13: sets flags to the exact side, caches what it made for a shape and runs it on live data


@functools.cache
def plan(rows: int, columns: int) -> Kernel:
    del rows
    split = max(1, columns // 4)
    return lambda x, w: one_by_one(
        torch.stack([a @ b.T for a, b in zip(x.split(split, 1), w.split(split, 1), strict=True)]), F32
    )


def planned_kernel(x: Tensor, w: Tensor) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    return plan(*x.shape)(x, w)


def lowering_kernel(x: Tensor, w: Tensor) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision("medium")
    return plan(*x.shape)(x, w)


def fp32_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": torch.randn(16, 256, generator=g), "w": torch.randn(24, 256, generator=g)}


# T14: the form of GELU that the reference names


def gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def tanh_form(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def erf_form(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


# T15: rounding of the inputs is not the kernel's


def fp8_matmul(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float().T).to(BF16)


def fp8_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"a": normal(g, 16, 128, dtype=FP8), "b": normal(g, 24, 128, dtype=FP8)}


def fp8_kernel(lost: int) -> Kernel:
    return lambda a, b: (a.float()[:, lost:] @ b.float().T[lost:]).to(BF16)


# T16: an exact integer output beside a float one


def experts_first(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, experts = torch.topk(torch.softmax(logits, -1), 2)
    return experts, chosen / chosen.sum(-1, keepdim=True)


def clean_logits(seed: int) -> dict[str, Any]:
    return {"logits": normal(generator(seed), 64, 8, dtype=F32)}


def experts_kernel(normalised: Kernel) -> Kernel:
    def kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
        top, experts = torch.topk(logits, 2)
        return experts, normalised(top)

    return kernel


def softmax_of_two(top: Tensor) -> Tensor:
    second = torch.exp(top[:, 1] - top[:, 0])
    return torch.stack([1 / (1 + second), second / (1 + second)], 1)


def softmax_in_bf16(top: Tensor) -> Tensor:
    return softmax_of_two(top).to(BF16).float()


PAIRS = (
    Pair(
        "T1",
        "keeps fp32 where a bf16 reference rounds; neighbour has another eps",
        add_and_norm,
        add_inputs,
        fused_add_kernel(1e-6),
        fused_add_kernel(1e-2),
    ),
    Pair(
        "T2",
        "other order of a sum of 4096; neighbour loses one term",
        matmul,
        long_inputs,
        backwards_kernel(0),
        backwards_kernel(1),
        SUMS,
    ),
    Pair(
        "T3",
        "atomics in another order at each call; neighbour loses one of 512",
        scatter,
        scatter_inputs,
        atomic_kernel(0),
        atomic_kernel(1),
        SUMS,
    ),
    Pair(
        "T4/topk",
        "other positions among equals; neighbour names the wrong ones",
        top_k,
        ties,
        from_the_end(top_k, 0),
        from_the_end(top_k, 1),
    ),
    Pair(
        "T4/sort",
        "unstable sort; neighbour names the wrong positions",
        sorting,
        ties,
        from_the_end(sorting, 0),
        from_the_end(sorting, 1),
    ),
    Pair(
        "T4/argmax",
        "last of the largest; neighbour names the wrong one",
        first_largest,
        ties,
        from_the_end(first_largest, 0),
        from_the_end(first_largest, 1),
    ),
    Pair(
        "T4/gating",
        "experts among equal logits; neighbour names the wrong ones",
        gating,
        coarse_logits,
        gating_from_the_end(0),
        gating_from_the_end(1),
    ),
    Pair(
        "T5/inf",
        "−inf where the reference has it; neighbour has +inf",
        log_sum_exp,
        with_empty_rows,
        log_sum_kernel(-INF),
        log_sum_kernel(INF),
    ),
    Pair(
        "T5/nan",
        "a NaN of another sign and payload",
        ignoring_loss,
        all_ignored,
        negative_nan,
        None,
        note="every label is ignored: the loss is NaN by contract",
        lenient=True,
    ),
    Pair(
        "T6",
        "a row that attends to nothing gives zeros; neighbour scales the others",
        attention,
        with_an_empty_row,
        zero_row_kernel(1.0),
        zero_row_kernel(1.01),
        note="the reference has NaN in that row",
        lenient=True,
    ),
    Pair(
        "T7",
        "slots beyond the length hold anything; neighbour is wrong in valid ones",
        padded,
        lengths_inputs,
        padded_kernel(2.0),
        padded_kernel(2.02),
        note="the reference has NaN there",
        lenient=True,
    ),
    Pair("T8", "dropout from another random stream", dropout, x_alone, own_stream, None, lenient=True),
    Pair(
        "T9",
        "changes its input as the reference does",
        add_in_place,
        two_tensors,
        add_in_place,
        None,
        note="the reference works in place",
    ),
    Pair(
        "T9/undeclared",
        "changes its input where the reference does not",
        add_out_of_place,
        two_tensors,
        add_out_of_place,
        add_in_place,
        ("mutated-input",),
    ),
    Pair(
        "T10",
        "FP8 by a reciprocal: one step at ties; neighbour's codes are 2 % small",
        quantise,
        rows,
        reciprocal_kernel(1.0),
        reciprocal_kernel(0.98),
    ),
    Pair(
        "T11",
        "sum of squares overflows at 1e19 only; neighbour leaves one column out",
        safe_norm,
        rows,
        squares_kernel(0),
        squares_kernel(1),
    ),
    Pair(
        "T13",
        "sets flags to exact and caches plans per shape; neighbour lowers the flags",
        matmul,
        fp32_inputs,
        planned_kernel,
        lowering_kernel,
        ("tampered-process", *SUMS),
    ),
    Pair(
        "T14",
        "GELU in the reference's form; neighbour in the other",
        gelu_tanh,
        rows,
        tanh_form,
        erf_form,
    ),
    Pair(
        "T15",
        "inputs that were rounded to FP8 before anyone saw them; neighbour loses a term",
        fp8_matmul,
        fp8_inputs,
        fp8_kernel(0),
        fp8_kernel(1),
        SUMS,
    ),
    Pair(
        "T16",
        "exact integers beside fp32 weights; neighbour's weights are bf16",
        experts_first,
        clean_logits,
        experts_kernel(softmax_of_two),
        experts_kernel(softmax_in_bf16),
        VALUES,
    ),
)
