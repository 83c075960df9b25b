"""Kernels in torch that differ in one thing only: how they add up.

`HONEST` and `FAULTY` are accumulators: (n, columns) fp32 terms -> (columns,) sums before the output
rounding. `PROBLEMS` are references that sum in at least fp32 and round once, each with a kernel that
takes its accumulator as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seatrial.numerics.accumulators import (
    BFLOAT16,
    COMPENSATED,
    EVERY_BLOCK,
    EVERY_CONTRIBUTION,
    FLOAT16,
    FP8_TENSOR_CORE,
    INSIDE_BLOCKS,
    PARTIAL_SUMS,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Accumulator = Callable[[Tensor], Tensor]  # (n, columns) fp32 terms -> (columns,) sums before the output rounding


# ---------------------------------------------------------------------------------------------------
# Simulated accumulators


def in_sequence(dtype: torch.dtype, terms: Tensor) -> Tensor:
    carry = torch.zeros(terms.shape[1], dtype=dtype)
    for term in terms.to(dtype):
        carry += term
    return carry.float()


def pairwise(terms: Tensor) -> Tensor:
    level = terms
    while level.shape[0] > 1:
        half = level.shape[0] // 2
        level = torch.cat([level[0 : 2 * half : 2] + level[1 : 2 * half : 2], level[2 * half :]])
    return level[0]


def padded_to(terms: Tensor, multiple: int) -> Tensor:
    missing = -terms.shape[0] % multiple
    return torch.cat([terms, torch.zeros(missing, terms.shape[1], dtype=terms.dtype)])


def in_lanes(terms: Tensor, lanes: int = 128) -> Tensor:
    strided = padded_to(terms, lanes).reshape(-1, lanes, terms.shape[1])
    total = strided[0].clone()
    for more in strided[1:]:
        total += more
    return pairwise(total)


def in_random_order(terms: Tensor) -> Tensor:
    return in_sequence(F32, terms[torch.randperm(terms.shape[0])])


def split_in(parts: int, partial: torch.dtype, terms: Tensor) -> Tensor:
    chunks = torch.split(terms, -(-terms.shape[0] // parts))
    return torch.stack([in_lanes(c, 32).to(partial).float() for c in chunks]).sum(0)


def inside_blocks(dtype: torch.dtype, terms: Tensor, block: int = 32) -> Tensor:
    blocks = padded_to(terms, block).to(dtype).reshape(-1, block, terms.shape[1])
    while blocks.shape[1] > 1:
        blocks = blocks[:, 0::2] + blocks[:, 1::2]
    return blocks[:, 0].float().sum(0)


def between_tiles(dtype: torch.dtype, terms: Tensor, tile: int = 32) -> Tensor:
    carry = torch.zeros(terms.shape[1], dtype=dtype)
    for chunk in torch.split(terms, tile):
        carry = (carry.float() + pairwise(chunk)).to(dtype)
    return carry.float()


def truncated(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)


def tensor_core(block: int, aligned_bits: int, kept_bits: int, terms: Tensor, promote_every: int = 0) -> Tensor:
    """Aligns a block of products to the largest, truncates, adds, truncates the carry (toward zero)."""
    carry = torch.zeros(terms.shape[1], dtype=F64)
    outside, inside = torch.zeros(terms.shape[1]), 0
    for chunk in torch.split(terms.double(), block):
        largest = torch.maximum(chunk.abs().amax(0), carry.abs())
        grain = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - aligned_bits)
        carry = truncated((torch.trunc(carry / grain) + torch.trunc(chunk / grain).sum(0)) * grain, kept_bits)
        inside += chunk.shape[0]
        if promote_every and inside >= promote_every:
            outside, carry, inside = outside + carry.float(), torch.zeros_like(carry), 0
    return outside + carry.float()


def compensated(dtype: torch.dtype, terms: Tensor) -> Tensor:
    """Kahan summation: a good mean error out of a narrow datapath."""
    total, lost = (torch.zeros(terms.shape[1], dtype=dtype) for _ in range(2))
    for term in terms.to(dtype):
        corrected = term - lost
        grown = total + corrected
        lost, total = (grown - total) - corrected, grown
    return total.float()


HONEST: dict[str, Accumulator] = {
    "float32 in sequence": lambda t: in_sequence(F32, t),
    "float32 pairwise": pairwise,
    "float32 in 128 lanes": in_lanes,
    "float32 atomics": in_random_order,
    "float32 split-K": lambda t: split_in(8, F32, t),
    "tensor core, truncating float32": lambda t: tensor_core(16, 25, 24, t),
}
# name, accumulator, what it is called, where it rounds, terms of a block of 384
FAULTY: dict[str, tuple[Accumulator, str, str, int | None]] = {
    "bfloat16 in sequence": (lambda t: in_sequence(BF16, t), BFLOAT16, EVERY_CONTRIBUTION, 1),
    "float16 in sequence": (lambda t: in_sequence(F16, t), FLOAT16, EVERY_CONTRIBUTION, 1),
    "bfloat16 inside blocks": (lambda t: inside_blocks(BF16, t), BFLOAT16, INSIDE_BLOCKS, 32),
    "bfloat16 split-K partials": (lambda t: split_in(8, BF16, t), BFLOAT16, PARTIAL_SUMS, 48),
    "bfloat16 between tiles": (lambda t: between_tiles(BF16, t), BFLOAT16, EVERY_BLOCK, 32),
    "float16 between tiles": (lambda t: between_tiles(F16, t), FLOAT16, EVERY_BLOCK, 32),
    "14 bits": (lambda t: tensor_core(32, 14, 14, t), FP8_TENSOR_CORE, EVERY_CONTRIBUTION, 1),
    "14 bits, promoted every 128": (lambda t: tensor_core(32, 14, 14, t, 128), FP8_TENSOR_CORE, INSIDE_BLOCKS, 128),
    "compensated bfloat16": (lambda t: compensated(BF16, t), BFLOAT16, COMPENSATED, 1),
}


# ---------------------------------------------------------------------------------------------------
# Problems; each reference sums in at least fp32 and rounds once


@dataclass(frozen=True)
class Problem:
    reference: Callable[..., Any]
    kernel: Callable[..., tuple[Tensor, ...]]  # (accumulator, *inputs)
    inputs: Callable[..., tuple[Any, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    output_dtypes: tuple[torch.dtype, ...]


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, F32))


def row_terms(grad_output: Tensor, ids: Tensor, embed_weight: Tensor, norm_weight: Tensor, eps: float) -> Any:
    """Terms of the gradients of y = RMSNorm(embedding(ids)): per token, for the table and for the norm."""
    x = wide(embed_weight)[ids]
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, grad = x * scale, wide(grad_output)
    weighted = grad * wide(norm_weight)
    into_table = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    hidden = grad.shape[-1]
    return into_table.reshape(-1, hidden), (grad * normed).reshape(-1, hidden)


def embedding_gradient(
    grad_output: Tensor, ids: Tensor, embed_weight: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    into_table, into_norm = row_terms(grad_output, ids, embed_weight, norm_weight, eps)
    table = torch.zeros(embed_weight.shape, dtype=into_table.dtype)
    table.index_add_(0, ids.reshape(-1), into_table)
    return table.to(embed_weight.dtype), into_norm.sum(0).to(norm_weight.dtype)


def embedding_kernel(accumulate: Accumulator, *inputs: Any) -> tuple[Tensor, ...]:
    _, ids, embed_weight, _, _ = inputs
    into_table, into_norm = row_terms(*inputs)
    table = torch.zeros(embed_weight.shape)
    for row in ids.unique().tolist():
        table[row] = accumulate(into_table[ids.reshape(-1) == row])
    return table.to(BF16), accumulate(into_norm).to(BF16)


def embedding_inputs(tokens: int = 384, rows: int = 64, hidden: int = 16) -> tuple[Any, ...]:
    return (
        torch.randn(4, tokens // 4, hidden).to(BF16),
        torch.randint(0, rows, (4, tokens // 4)),
        torch.randn(rows, hidden).to(BF16),
        torch.randn(hidden).to(BF16),
        1e-6,
    )


def only(output: Tensor) -> tuple[Tensor, ...]:
    return (output,)


EMBEDDING = Problem(
    embedding_gradient,
    embedding_kernel,
    embedding_inputs,
    ("grad_output", "token_ids", "embed_weight", "norm_weight", "eps"),
    ("grad_embed_weight", "grad_norm_weight"),
    (BF16, BF16),
)
ROW_SUM = Problem(
    lambda x: wide(x).sum(-1).to(x.dtype),
    lambda accumulate, x: only(accumulate(x.float().T).to(BF16)),
    lambda: (torch.randn(16, 384).to(BF16),),
    ("x",),
    ("y",),
    (BF16,),
)
MATMUL = Problem(
    lambda a, b: (wide(a) @ wide(b)).to(a.dtype),
    lambda accumulate, a, b: only(torch.stack([accumulate(b.float() * row[:, None]) for row in a.float()]).to(BF16)),
    lambda: (torch.randn(4, 384).to(BF16), torch.randn(384, 12).to(BF16)),
    ("a", "b"),
    ("c",),
    (BF16,),
)
NORM_WEIGHT = Problem(
    lambda dy, x: (wide(dy) * wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6)).sum(0),
    lambda accumulate, dy, x: only(
        accumulate(dy.float() * x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6))
    ),
    lambda: (torch.randn(384, 16).to(BF16), torch.randn(384, 16).to(BF16)),
    ("dy", "x"),
    ("dweight",),
    (F32,),
)
PROBLEMS = {"embedding gradient": EMBEDDING, "row sum": ROW_SUM, "matmul": MATMUL, "norm weight": NORM_WEIGHT}
