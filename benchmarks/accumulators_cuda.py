"""The GPU side of accumulators.py: accumulators as Triton kernels, and those of CUDA's libraries.

Not run by itself: `python benchmarks/accumulators.py --device cuda`. Needs Triton and a GPU with bfloat16
atomics (compute capability 9.0 or newer); what fp8 tensor cores keep is what the device has, so their rows
expect a name only on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from accumulators import BF16, F16, F32, LENGTHS, OPERATIONS, Operation, Row, planned, read, row_of
from torch import Tensor

from seatrial.devices import Device

FP8 = torch.float8_e4m3fn
BLOCK = 64
PARTS = 4
TILE = 32
ROWS = 9

MATMUL, ROW_SUM, SCATTER, NORM_WEIGHT = OPERATIONS
FP8_MATMUL = Operation(
    "fp8 matmul",
    lambda a, b: a.to(F32) @ b.to(F32),
    MATMUL.kernel,
    lambda n, d: (torch.randn(6, n).to(FP8), torch.randn(n, 10).to(FP8)),
    ("a", "b"),
    (("M", "K"), ("K", "N")),
)


# ---------------------------------------------------------------------------------------------------
# Triton kernels. FORM chooses the accumulator; everything else is the same.


@triton.jit
def _matmul(
    a, b, c, M, N, K, per_part,
    stride_am, stride_ak, stride_bk, stride_bn,
    FORM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per part of K; c is (parts, M, N) and takes what each part comes to."""
    part = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    start = part * per_part
    stop = tl.minimum(start + per_part, K)
    if FORM == "bf16 carry":
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.bfloat16)
    elif FORM == "fp16":
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, stop, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(
            a + m[:, None] * stride_am + k[None, :] * stride_ak, mask=(m[:, None] < M) & (k[None, :] < stop), other=0.0
        )
        y = tl.load(
            b + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=(k[:, None] < stop) & (n[None, :] < N), other=0.0
        )
        if FORM == "bf16 carry":
            total = (total.to(tl.float32) + tl.dot(x, y, input_precision=PRECISION)).to(tl.bfloat16)
        elif FORM == "fp16":
            total = tl.dot(x, y, total, out_dtype=tl.float16)
        elif FORM == "fp8 promoted":
            total = tl.dot(x, y, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(x, y, total, input_precision=PRECISION)
    place = c + part * M * N + m[:, None] * N + n[None, :]
    tl.store(place, total.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _row_sum(x, out, K, FORM: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    if FORM == "bf16 steps":
        step = tl.zeros((1,), tl.bfloat16)
        for k in range(K):
            step += tl.load(x + row * K + k + tl.arange(0, 1)).to(tl.bfloat16)
        tl.store(out + row + tl.arange(0, 1), step.to(out.dtype.element_ty))
    elif FORM == "bf16 Kahan":
        kept = tl.zeros((1,), tl.bfloat16)
        lost = tl.zeros((1,), tl.bfloat16)
        for k in range(K):
            term = tl.load(x + row * K + k + tl.arange(0, 1)).to(tl.bfloat16) - lost
            grown = kept + term
            lost = (grown - kept) - term
            kept = grown
        tl.store(out + row + tl.arange(0, 1), kept.to(out.dtype.element_ty))
    elif FORM == "bf16 lanes":
        lanes = tl.zeros((BLOCK_K,), tl.bfloat16)
        for first in range(0, K, BLOCK_K):
            lanes += tl.load(x + row * K + first + lane, mask=first + lane < K, other=0.0).to(tl.bfloat16)
        tl.store(out + row, tl.sum(lanes.to(tl.float32), 0).to(out.dtype.element_ty))
    elif FORM == "bf16 carry":
        carry = tl.zeros((1,), tl.bfloat16)
        for first in range(0, K, BLOCK_K):
            block = tl.load(x + row * K + first + lane, mask=first + lane < K, other=0.0).to(tl.float32)
            carry = (carry.to(tl.float32) + tl.sum(block, 0)).to(tl.bfloat16)
        tl.store(out + row + tl.arange(0, 1), carry.to(out.dtype.element_ty))
    else:
        total = tl.zeros((BLOCK_K,), tl.float32)
        for first in range(0, K, BLOCK_K):
            total += tl.load(x + row * K + first + lane, mask=first + lane < K, other=0.0).to(tl.float32)
        tl.store(out + row, tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit
def _scatter(ids, source, out, H, BLOCK_H: tl.constexpr):
    """One program per token: an atomic per element, in the dtype of `out`."""
    token = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    row = tl.load(ids + token)
    value = tl.load(source + token * H + h, mask=h < H, other=0.0)
    tl.atomic_add(out + row * H + h, value.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _scatter_tiles(ids, source, out, n, H, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """One program per tile of tokens, which it adds up in fp32 before the atomic."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    row = tl.load(ids + token, mask=token < n, other=-1)
    value = tl.load(
        source + token[:, None] * H + h[None, :], mask=(token[:, None] < n) & (h[None, :] < H), other=0.0
    ).to(tl.float32)
    for r in range(ROWS):
        mine = tl.sum(tl.where(row[:, None] == r, value, 0.0), 0)
        tl.atomic_add(out + r * H + h, mine.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _norm_weight(dy, x, out, n, H, per_part, FORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """One program per part of the rows; out is (parts, H)."""
    part = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    start = part * per_part
    stop = tl.minimum(start + per_part, n)
    if FORM == "bf16 carry":  # noqa: SIM108 - a choice at compile time
        total = tl.zeros((BLOCK_H,), tl.bfloat16)
    else:
        total = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(start, stop, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        inside = (r[:, None] < stop) & (h[None, :] < H)
        xs = tl.load(x + r[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(dy + r[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(xs * xs, 1) / H + 1e-6)
        block = tl.sum(ds * (xs * scale[:, None]), 0)
        if FORM == "bf16 carry":
            total = (total.to(tl.float32) + block).to(tl.bfloat16)
        else:
            total += block
    tl.store(out + part * H + h, total.to(out.dtype.element_ty), mask=h < H)


# -- how they are called ----------------------------------------------------------------------------


def matmul(
    a: Tensor, b: Tensor, *, form: str = "fp32", precision: str = "ieee", parts: int = 1, partial_dtype: torch.dtype = F32,
    block_m: int = 16, block_k: int = BLOCK,
) -> Tensor:  # fmt: skip
    """a @ b in float32 out of one or more parts of K, each stored as `partial_dtype`."""
    if a.dtype == FP8:
        b = b.T.contiguous().T  # fp8 tensor cores want both operands contiguous along K
    (m, k), n = a.shape, b.shape[1]
    per_part = -(-k // (parts * block_k)) * block_k
    out = torch.zeros(parts, m, n, dtype=partial_dtype, device=a.device)
    _matmul[(parts,)](
        a, b, out, m, n, k, per_part, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        FORM=form, PRECISION=precision, BLOCK_M=block_m, BLOCK_N=16, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out.float().sum(0)


def row_sum(x: Tensor, *, form: str, block_k: int = BLOCK) -> Tensor:
    out = torch.zeros(x.shape[0], dtype=F32, device=x.device)
    _row_sum[(x.shape[0],)](x, out, x.shape[1], FORM=form, BLOCK_K=block_k)
    return out


def scatter(ids: Tensor, source: Tensor, *, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(ROWS, source.shape[1], dtype=dtype, device=source.device)
    width = triton.next_power_of_2(source.shape[1])
    _scatter[(ids.numel(),)](ids, source, out, source.shape[1], BLOCK_H=width, num_warps=1)
    return out


def scatter_tiles(ids: Tensor, source: Tensor, *, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(ROWS, source.shape[1], dtype=dtype, device=source.device)
    width = triton.next_power_of_2(source.shape[1])
    _scatter_tiles[(triton.cdiv(ids.numel(), TILE),)](
        ids, source, out, ids.numel(), source.shape[1], ROWS=ROWS, BLOCK_T=TILE, BLOCK_H=width
    )
    return out


def norm_weight(
    dy: Tensor, x: Tensor, *, form: str = "fp32", parts: int = 1, partial_dtype: torch.dtype = F32
) -> Tensor:
    n, width = dy.shape
    per_part = -(-n // (parts * BLOCK)) * BLOCK
    out = torch.zeros(parts, width, dtype=partial_dtype, device=dy.device)
    _norm_weight[(parts,)](
        dy, x, out, n, width, per_part, FORM=form, BLOCK_R=BLOCK, BLOCK_H=triton.next_power_of_2(width)
    )
    return out.float().sum(0)


@contextmanager
def matmul_settings(*, tf32: bool = False, fp16_accumulation: bool = False) -> Iterator[None]:
    """The library's switches for one call; reduced-precision reductions are off in every case."""
    settings = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), settings.allow_fp16_accumulation
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    settings.allow_fp16_accumulation = fp16_accumulation
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        settings.allow_fp16_accumulation = before[1]


def library_matmul(a: Tensor, b: Tensor, *, tf32: bool = False, fp16_accumulation: bool = False) -> Tensor:
    with matmul_settings(tf32=tf32, fp16_accumulation=fp16_accumulation):
        return a @ b


def library_index_add(ids: Tensor, source: Tensor, *, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(ROWS, source.shape[1], dtype=dtype, device=source.device)
    return out.index_add_(0, ids, source.to(dtype))


# ---------------------------------------------------------------------------------------------------
# What is run, and what is true of it


@dataclass(frozen=True)
class Case:
    """A kernel with the name that its accumulator must get; "*" in it stands for anything."""

    operation: Operation
    name: str
    kernel: Callable[..., Tensor]
    expected: Callable[[int], str]
    honest: bool = False
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ((F32, F32), (F32, BF16))


IN_BF16 = ((BF16, BF16), (BF16, F32))
IN_F16 = ((F16, F16), (F16, F32))


def fixed(form: str) -> Callable[[int], str]:
    return lambda terms: form


def in_parts(terms: int) -> str:
    return f"bfloat16 partial sums of {-(-terms // (PARTS * BLOCK)) * BLOCK} terms"


FLOAT32 = fixed("float32 accumulator")
EVERY_64 = fixed("bfloat16 carry every 64 terms")
EVERY_ONE = fixed("bfloat16 carry every contribution")

CASES = (
    Case(MATMUL, "Triton fp32", partial(matmul), FLOAT32, True),
    Case(MATMUL, "Triton bf16 operands, fp32 sum", partial(matmul), FLOAT32, True, IN_BF16),
    Case(MATMUL, "Triton fp16 operands, fp32 sum", partial(matmul), FLOAT32, True, IN_F16),
    Case(MATMUL, "Triton TF32", partial(matmul, precision="tf32"), fixed("TF32 operands")),
    Case(MATMUL, "Triton TF32 × 3", partial(matmul, precision="tf32x3"), FLOAT32, True),
    Case(MATMUL, "Triton bf16 per 64", partial(matmul, form="bf16 carry"), EVERY_64, dtypes=IN_BF16),
    Case(MATMUL, "Triton bf16 per 64, fp32 operands", partial(matmul, form="bf16 carry"), EVERY_64),
    Case(MATMUL, "Triton fp16 accumulator", partial(matmul, form="fp16"), fixed("float16*"), dtypes=IN_F16),
    Case(
        MATMUL, "Triton bf16 split-K partials", partial(matmul, parts=PARTS, partial_dtype=BF16), in_parts, dtypes=IN_BF16
    ),
    Case(MATMUL, "Triton fp32 split-K partials", partial(matmul, parts=PARTS), FLOAT32, True, IN_BF16),
    Case(
        FP8_MATMUL, "Triton fp8, 14 bits", partial(matmul, block_m=64, block_k=128),
        fixed("14-bit carry every contribution"), dtypes=((FP8, BF16),),
    ),
    Case(
        FP8_MATMUL, "Triton fp8, promoted every 128",
        partial(matmul, form="fp8 promoted", block_m=64, block_k=128),
        fixed("14-bit carry inside blocks of 128 terms*"), True, ((FP8, BF16),),
    ),
    Case(MATMUL, "cuBLAS bf16", library_matmul, FLOAT32, True, ((BF16, BF16),)),
    Case(MATMUL, "cuBLAS fp16", library_matmul, FLOAT32, True, ((F16, F16),)),
    Case(MATMUL, "cuBLAS fp32", library_matmul, FLOAT32, True, ((F32, F32),)),
    Case(MATMUL, "cuBLAS TF32", partial(library_matmul, tf32=True), fixed("TF32 operands"), dtypes=((F32, F32),)),
    Case(
        MATMUL, "cuBLAS fp16 accumulation", partial(library_matmul, fp16_accumulation=True), fixed("float16*"),
        dtypes=((F16, F16),),
    ),
    Case(ROW_SUM, "Triton fp32", partial(row_sum, form="fp32"), FLOAT32, True),
    Case(ROW_SUM, "Triton bf16 step by step", partial(row_sum, form="bf16 steps"), EVERY_ONE),
    Case(ROW_SUM, "Triton bf16 per 64", partial(row_sum, form="bf16 carry"), EVERY_64),
    Case(ROW_SUM, "Triton bf16 Kahan", partial(row_sum, form="bf16 Kahan"), fixed("compensated bfloat16 carry")),
    Case(ROW_SUM, "Triton bf16 lanes", partial(row_sum, form="bf16 lanes", block_k=32), fixed("bfloat16 carry in each lane*")),
    Case(ROW_SUM, "torch.sum bf16", lambda x: x.sum(-1), FLOAT32, True, ((BF16, BF16),)),
    Case(SCATTER, "Triton fp32 atomics", partial(scatter, dtype=F32), FLOAT32, True),
    Case(SCATTER, "Triton bf16 atomics", partial(scatter, dtype=BF16), EVERY_ONE),
    Case(SCATTER, "Triton bf16 atomics between tiles", partial(scatter_tiles, dtype=BF16), fixed("bfloat16 carry every 32 terms")),
    Case(SCATTER, "Triton fp32 atomics between tiles", partial(scatter_tiles, dtype=F32), FLOAT32, True),
    Case(SCATTER, "index_add_ fp32", partial(library_index_add, dtype=F32), FLOAT32, True),
    Case(SCATTER, "index_add_ bf16", partial(library_index_add, dtype=BF16), EVERY_ONE, dtypes=((BF16, BF16),)),
    Case(NORM_WEIGHT, "Triton fp32", partial(norm_weight), FLOAT32, True),
    Case(NORM_WEIGHT, "Triton bf16 per 64", partial(norm_weight, form="bf16 carry"), EVERY_64),
    Case(NORM_WEIGHT, "Triton bf16 partials", partial(norm_weight, parts=PARTS, partial_dtype=BF16), in_parts),
)  # fmt: skip


def measured(seeds: Sequence[int], device: Device) -> Iterator[Row]:
    """Every case on every seed. Raises what a kernel raises: a benchmark has nothing to hide."""
    capability = tuple(int(part) for part in device.facts()["capability"].split("."))
    plans: dict[Any, Any] = {}
    for case in CASES:
        if case.operation is FP8_MATMUL and capability[0] != 9:
            continue
        for inputs, output in case.dtypes:
            for seed in seeds:
                terms = LENGTHS[seed % len(LENGTHS)]
                key = case.operation.name, terms, inputs, output, seed
                if key not in plans:
                    plans[key] = planned(case.operation, terms, inputs, output, seed, device)
                seen = read(plans[key], partial(call, case, output, device))
                yield row_of(
                    case.operation, case.name, (inputs, output), terms, seed, case.expected(terms), seen,
                    honest=case.honest, capability=(capability[0], capability[1]),
                )  # fmt: skip


def call(case: Case, output: torch.dtype, device: Device, inputs: Sequence[Any]) -> Tensor:
    """One call on the device, with CPU tensors in and out."""
    return case.kernel(*(device.to_device(t) for t in inputs)).to(output).cpu()
