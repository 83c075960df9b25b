"""F1: low-precision or biased accumulation, or a rounding in the wrong place."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.quality.case import (
    BF16,
    F32,
    FP8,
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

# A01: the origin case, bare and behind the backward of an RMSNorm
VOCABULARY, TOKENS, WIDTH = 256, 256, 16


def embedding_gradient(grad_output: Tensor, token_ids: Tensor) -> Tensor:
    table = torch.zeros(VOCABULARY, grad_output.shape[1], dtype=F32)
    return table.index_add_(0, token_ids, grad_output.float()).to(BF16)


def uniform_ids(seed: int) -> dict[str, Any]:
    g = generator(seed)
    grad = normal(g, TOKENS, WIDTH)
    return {"grad_output": grad, "token_ids": torch.randint(0, VOCABULARY, (TOKENS,), generator=g)}


def scattered(values: Tensor, ids: Tensor, carry: torch.dtype) -> Tensor:
    rows = list(torch.zeros(VOCABULARY, values.shape[1], dtype=carry))
    for row, value in zip(ids.tolist(), values.to(carry), strict=True):
        rows[row] += value
    return torch.stack(rows).to(BF16)


def embedding_kernel(carry: torch.dtype) -> Kernel:
    return lambda grad_output, token_ids: scattered(grad_output, token_ids, carry)


def norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the weight per row, in fp32."""
    xhat, rstd = unit(x)
    scaled = grad_output.float() * weight.float()
    grad_x = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return grad_x, grad_output.float() * xhat


def fused_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, per_row = norm_backward(grad_output, x, weight)
    table = torch.zeros(VOCABULARY, x.shape[1], dtype=F32)
    return table.index_add_(0, token_ids, grad_x).to(BF16), per_row.sum(0).to(BF16)


def fused_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {
        "grad_output": normal(g, TOKENS, WIDTH),
        "x": normal(g, TOKENS, WIDTH),
        "weight": weights(g, WIDTH),
        "token_ids": torch.randint(0, VOCABULARY, (TOKENS,), generator=g),
    }


def fused_kernel(carry: torch.dtype) -> Kernel:
    def kernel(grad_output: Tensor, x: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, per_row = norm_backward(grad_output, x, weight)
        return scattered(grad_x, token_ids, carry), per_row.sum(0).to(BF16)

    return kernel


# A02: exact inside a tile of tokens, read-modify-write of the table between tiles
TILED_ROWS = 512


def tiled_gradient(grad_output: Tensor, token_ids: Tensor) -> Tensor:
    table = torch.zeros(TILED_ROWS, grad_output.shape[1], dtype=F32)
    return table.index_add_(0, token_ids, grad_output.float()).to(BF16)


def unique_ids(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"grad_output": normal(g, TILED_ROWS, WIDTH), "token_ids": torch.randperm(TILED_ROWS, generator=g)}


def tiled_kernel(carry: torch.dtype) -> Kernel:
    def kernel(grad_output: Tensor, token_ids: Tensor) -> Tensor:
        table = torch.zeros(TILED_ROWS, grad_output.shape[1], dtype=carry)
        for values, ids in zip(grad_output.float().split(32), token_ids.split(32), strict=True):
            tile = torch.zeros(TILED_ROWS, values.shape[1]).index_add_(0, ids, values)
            table = (table.float() + tile).to(carry)
        return table.to(BF16)

    return kernel


# A03: one variant of the backward, chosen by shape, reduces the weight gradient in bf16 inside its blocks


def weight_gradient(grad_output: Tensor, x: Tensor) -> Tensor:
    return (grad_output.float() * unit(x)[0]).sum(0).to(BF16)


def rows_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"grad_output": normal(g, 1024, 64), "x": normal(g, 1024, 64)}


def weight_gradient_kernel(carry: torch.dtype) -> Kernel:
    def kernel(grad_output: Tensor, x: Tensor) -> Tensor:
        terms = grad_output.float() * unit(x)[0]
        if len(terms) < 512:
            return terms.sum(0).to(BF16)
        blocks = [one_by_one(block, carry).float() for block in terms.split(64)]
        return torch.stack(blocks).sum(0).to(BF16)

    return kernel


# A04: an FP8 matrix unit that keeps 14 bits of its running sum


def fp8_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (a.float() @ b.float().T * scale_a[:, None] * scale_b).to(BF16)


def fp8_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    made: dict[str, Any] = {}
    for name, rows in (("a", 16), ("b", 24)):
        x = torch.randn(rows, 1024, generator=g)
        scale = x.abs().amax(1) / 448
        made |= {name: (x / scale[:, None]).to(FP8), f"scale_{name}": scale}
    return {key: made[key] for key in ("a", "b", "scale_a", "scale_b")}


def kept_14_bits(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -1024).view(F32)


def fp8_kernel(promoted_every: int, keep: Kernel = kept_14_bits) -> Kernel:
    def kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        total = torch.zeros(len(a), len(b))
        for start in range(0, a.shape[1], promoted_every):
            unit_sum = torch.zeros_like(total)
            for at in range(start, start + promoted_every, 32):
                unit_sum = keep(unit_sum + a[:, at : at + 32].float() @ b[:, at : at + 32].float().T)
            total += unit_sum
        return (total * scale_a[:, None] * scale_b).to(BF16)

    return kernel


# A05: a bias in the mean of the error. Rounding the numerator's probabilities to nearest over a sum of exact ones, as every
# fused attention does, has none that shows beside the output's own rounding: that form is the honest twin here


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1) @ v.float()).to(BF16)


def attention_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {name: normal(g, 64, 32) for name in "qkv"}


def attention_kernel(rounded_by: Kernel) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
        exact = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (rounded_by(exact) @ v.float() / exact.sum(-1, keepdim=True)).to(BF16)

    return kernel


def to_nearest(x: Tensor) -> Tensor:
    return x.to(BF16).float()


def towards_nought(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(F32)


# A06: split-K, its parts added by atomics in any order


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def matmul_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 16, 1024), "w": normal(g, 24, 1024)}


def split_kernel(workspace: torch.dtype) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        parts = [a.float() @ b.float().T for a, b in zip(x.split(128, 1), w.split(128, 1), strict=True)]
        order = torch.randperm(len(parts), generator=unseeded())
        return one_by_one(torch.stack(parts)[order], workspace).to(BF16)

    return kernel


# A07: TF32 where fp32 was promised


def fp32_inputs(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": torch.randn(16, 256, generator=g), "w": torch.randn(24, 256, generator=g)}


def small_integers(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {name: torch.randint(-8, 9, (n, 256), generator=g).float() for name, n in (("x", 16), ("w", 24))}


def to_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & -8192).view(F32)


def tf32_kernel(x: Tensor, w: Tensor) -> Tensor:
    return to_tf32(x) @ to_tf32(w).T


def flag_kernel(precision: str) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return x @ w.T
        finally:
            torch.set_float32_matmul_precision(before)

    return kernel


PAIRS = (
    Pair(
        "A01",
        "embedding gradient carried in bf16",
        embedding_gradient,
        uniform_ids,
        embedding_kernel(F32),
        embedding_kernel(BF16),
        SUMS,
        "uniform ids: a row gets at most about six tokens",
    ),
    Pair(
        "A01/fused",
        "RMSNorm backward, then an embedding gradient carried in bf16",
        fused_gradient,
        fused_inputs,
        fused_kernel(F32),
        fused_kernel(BF16),
        SUMS,
        "uniform ids; the sum stands behind a normalisation",
    ),
    Pair(
        "A02",
        "embedding table held in bf16 between tiles of tokens",
        tiled_gradient,
        unique_ids,
        tiled_kernel(F32),
        tiled_kernel(BF16),
        SUMS,
        "every id occurs once, so nothing is ever added",
    ),
    Pair(
        "A03",
        "norm weight gradient reduced in bf16 inside blocks",
        weight_gradient,
        rows_inputs,
        weight_gradient_kernel(F32),
        weight_gradient_kernel(BF16),
        SUMS,
    ),
    Pair(
        "A04",
        "FP8 matmul with a 14-bit running sum that is never promoted",
        fp8_matmul,
        fp8_inputs,
        fp8_kernel(1024, keep=torch.clone),
        fp8_kernel(1024),
        SUMS,
        "random signs",
    ),
    Pair(
        "A04/promoted",
        "FP8 matmul with a 14-bit sum promoted every 128 terms: Hopper's contract (tests/test_fp8_units.py), no CPU's",
        fp8_matmul,
        fp8_inputs,
        fp8_kernel(128, keep=torch.clone),
        fp8_kernel(128),
        SUMS,
    ),
    Pair(
        "A05",
        "attention: bf16 probabilities cut off, not rounded, over the sum of fp32 ones",
        attention,
        attention_inputs,
        attention_kernel(to_nearest),
        attention_kernel(towards_nought),
        VALUES,
        "Gaussian q, k, v: the error has no common sign",
    ),
    Pair(
        "A06",
        "split-K parts added by bf16 atomics",
        matmul,
        matmul_inputs,
        split_kernel(F32),
        split_kernel(BF16),
        SUMS,
    ),
    Pair("A07", "TF32 for fp32", matmul, fp32_inputs, matmul, tf32_kernel, SUMS),
    Pair(
        "A07/integers",
        "TF32 for fp32, on small integers",
        matmul,
        small_integers,
        matmul,
        tf32_kernel,
        SUMS,
        "integers up to 8 are exact in TF32",
    ),
    Pair(
        "A07/flag",
        "lowers the matmul precision for its own call and restores it",
        matmul,
        fp32_inputs,
        flag_kernel("highest"),
        flag_kernel("high"),
        ("tampered-process", *SUMS),
        "on a CPU the flag changes no value: only the write shows",
    ),
)
