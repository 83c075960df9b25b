"""How well the envelope separates honest kernels from faulty ones: counts, over seeds and distributions.

Every honest kernel must pass every workload, every faulty one must be rejected on every workload of its
family. Honest and faulty kernels differ in one thing; the counts are printed (`pytest -s`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.numerics.dtypes import to_float64
from seatrial.numerics.envelope import TC, Envelope
from seatrial.numerics.oracle import Oracle

BF16, FP16, FP8, F32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
Kernel = Callable[..., Any]
SEEDS = 3


@dataclass(frozen=True)
class Family:
    """A reference, its workloads, and kernels that differ from each other in one thing."""

    name: str
    reference: Kernel
    workloads: dict[str, Callable[[torch.Generator], tuple[Any, ...]]]
    honest: dict[str, Kernel]
    faulty: dict[str, Kernel]
    outputs: tuple[str, ...] = ("y",)


def bf(x: Tensor) -> Tensor:
    return x.to(BF16)


def truncated(x: Tensor) -> Tensor:
    """To bfloat16 by dropping the low bits."""
    return (x.float().view(torch.int32) & -65536).view(torch.float32).to(BF16)


def parts(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Consecutive pieces of `size` along `dim`; the last may be shorter."""
    length = x.shape[dim]
    return [x.narrow(dim, start, min(size, length - start)) for start in range(0, length, size)]


def total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g)


def positive(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g)


def with_outliers(g: torch.Generator, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=g)
    x[..., ::37] *= 50
    return x


def drawn_by(
    values: Kernel, *shapes: tuple[int, ...], weights: tuple[int, ...] | None = None
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """A bfloat16 workload: one tensor per shape, then norm weights around one."""

    def draw(g: torch.Generator) -> tuple[Any, ...]:
        scaled = weights and bf(1 + 0.1 * torch.randn(weights, generator=g))
        return (*(bf(values(g, *shape)) for shape in shapes), *(() if scaled is None else (scaled,)))

    return draw


# ---------------------------------------------------------------------------------------------------
# Gradient of an embedding: rows that are added to many times

ROWS, TOKENS, WIDTH = 64, 1024, 16


def embedding_gradient(dy: Tensor, ids: Tensor) -> Tensor:
    table = torch.zeros(ROWS, dy.shape[1], dtype=F32, device=dy.device)
    table.index_add_(0, ids, dy.to(F32))
    return table.to(BF16)


def ids_of(kind: str, g: torch.Generator) -> Tensor:
    if kind == "uniform":
        return torch.randint(0, ROWS, (TOKENS,), generator=g)
    if kind == "zipf":
        weights = 1 / torch.arange(1, ROWS + 1).double() ** 1.2
        return torch.multinomial(weights, TOKENS, replacement=True, generator=g)
    return torch.full((TOKENS,), 7)


def embedding_workload(kind: str, values: Kernel) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda g: (bf(values(g, TOKENS, WIDTH)), ids_of(kind, g))


def summed(dy: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH).index_add_(0, ids, dy.float())


def in_random_order(dy: Tensor, ids: Tensor) -> Tensor:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))
    return bf(summed(dy[order], ids[order]))


def one_by_one(carry: torch.dtype) -> Kernel:
    def kernel(dy: Tensor, ids: Tensor) -> Tensor:
        rows = list(torch.zeros(ROWS, WIDTH, dtype=carry))
        for row, value in zip(ids.tolist(), dy.to(carry), strict=True):
            rows[row] += value
        return bf(torch.stack(rows))

    return kernel


def by_tiles(tile: int, partial: torch.dtype, carry: torch.dtype) -> Kernel:
    """Exact inside a tile; what a tile hands over is `partial`, what collects it is `carry`."""

    def kernel(dy: Tensor, ids: Tensor) -> Tensor:
        table = torch.zeros(ROWS, WIDTH, dtype=carry)
        for d, i in zip(parts(dy, tile), parts(ids, tile), strict=True):
            table += summed(d, i).to(partial).to(carry)
        return bf(table)

    return kernel


EMBEDDING = Family(
    "embedding gradient",
    embedding_gradient,
    {
        f"{kind} {values.__name__}": embedding_workload(kind, values)
        for kind in ("uniform", "zipf", "one id")
        for values in (normal, positive)
    },
    {
        "one after the other": lambda dy, ids: bf(summed(dy, ids)),
        "random order": in_random_order,
        "tiles": by_tiles(128, F32, F32),
    },
    {
        "bf16 carry": one_by_one(BF16),
        "fp16 carry": one_by_one(FP16),
        "bf16 partials": by_tiles(128, BF16, F32),
        "bf16 atomics between tiles": by_tiles(128, F32, BF16),
        "truncating store": lambda dy, ids: truncated(summed(dy, ids)),
    },
)

# ---------------------------------------------------------------------------------------------------
# RMSNorm, forward and backward


def rmsnorm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(F32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def rmsnorm_fp32(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w.float()


def rmsnorm_bf16_squares(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=BF16)
    for column in x.unbind(1):
        total += column * column
    return bf(x.float() * torch.rsqrt(total.float()[:, None] / x.shape[1] + 1e-6) * w.float())


def norm_workload(values: Kernel, scale: float = 1.0) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda g: (bf(values(g, 32, 1024) * scale), bf(1 + 0.1 * torch.randn(1024, generator=g)))


RMSNORM = Family(
    "rmsnorm",
    rmsnorm,
    {v.__name__: norm_workload(v) for v in (normal, positive, with_outliers)},
    {"as written": rmsnorm, "fp32 throughout": lambda x, w: bf(rmsnorm_fp32(x, w))},
    {"bf16 sum of squares": rmsnorm_bf16_squares, "truncating store": lambda x, w: truncated(rmsnorm_fp32(x, w))},
)
TINY_RMSNORM = Family(
    "rmsnorm of tiny values",
    rmsnorm,
    {"normal": norm_workload(normal, 2.0**-10)},
    {"as written": rmsnorm, "fp32 throughout": lambda x, w: bf(rmsnorm_fp32(x, w))},
    {"eps dropped": lambda x, w: bf(rmsnorm_fp32(x, w, 0.0)), "eps 1e-5": lambda x, w: bf(rmsnorm_fp32(x, w, 1e-5))},
)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    wide = x.to(F32)
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (dy.to(F32) * unit).sum(0).to(BF16)


def gradient_terms(dy: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    return dy.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))


def carried(terms: Tensor, carry: torch.dtype) -> Tensor:
    total = torch.zeros(terms.shape[1], dtype=carry)
    for row in terms.to(carry):
        total += row
    return bf(total)


WEIGHT_GRADIENT = Family(
    "rmsnorm weight gradient",
    weight_gradient,
    {v.__name__: drawn_by(v, (2048, 256), (2048, 256)) for v in (normal, positive)},
    {"as written": weight_gradient, "one after the other": lambda dy, x: carried(gradient_terms(dy, x), F32)},
    {
        "bf16 carry": lambda dy, x: carried(gradient_terms(dy, x), BF16),
        "bf16 partials": lambda dy, x: bf(total([bf(t.sum(0)).float() for t in parts(gradient_terms(dy, x), 128)])),
        "bf16 inside blocks": lambda dy, x: bf(
            total([carried(t, BF16).float() for t in parts(gradient_terms(dy, x), 32)])
        ),
    },
)


def add_and_norm(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return rmsnorm(x + residual, w)  # the sum is rounded to bfloat16 first


def add_and_norm_fp32(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return bf(rmsnorm_fp32(x.float() + residual.float(), w))


ADD_AND_NORM = Family(
    "fused add + rmsnorm",
    add_and_norm,
    {v.__name__: drawn_by(v, (32, 1024), (32, 1024), weights=(1024,)) for v in (normal, positive)},
    {"as written": add_and_norm, "more accurate than the reference": add_and_norm_fp32},
    {
        "bf16 sum of squares": lambda x, r, w: rmsnorm_bf16_squares(bf(x.float() + r.float()), w),
        "residual added twice in one column": lambda x, r, w: add_and_norm_fp32(
            x, torch.cat([2 * r[:, :1], r[:, 1:]], 1), w
        ),
    },
)

# ---------------------------------------------------------------------------------------------------
# Matmul, quantised matmul


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def chunked(chunk: int, partial: torch.dtype, carry: torch.dtype) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], w.shape[0], dtype=carry)
        for a, b in zip(parts(x.float(), chunk, 1), parts(w.float(), chunk, 1), strict=True):
            total = total + (a @ b.T).to(partial).to(carry)
        return total.to(x.dtype)

    return kernel


MATMUL = Family(
    "bf16 matmul",
    matmul,
    {v.__name__: drawn_by(v, (24, 2048), (32, 2048)) for v in (normal, positive, with_outliers)},
    {
        "fp32": lambda x, w: bf(x.float() @ w.float().T),
        "chunks of 32": chunked(32, F32, F32),
        "chunks of 256": chunked(256, F32, F32),
    },
    {
        "bf16 accumulator": chunked(32, F32, BF16),
        "bf16 split-K partials": chunked(256, BF16, F32),
        "fp16 accumulator": chunked(32, F32, FP16),
        "operands rounded to fp8": lambda x, w: bf(x.to(FP8).float() @ w.to(FP8).float().T),
    },
)


def to_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & -8192).view(torch.float32)


MATMUL_FP32 = Family(
    "fp32 matmul",
    matmul,
    {
        "normal": lambda g: (normal(g, 24, 1024), normal(g, 32, 1024)),
        "positive": lambda g: (positive(g, 24, 1024), positive(g, 32, 1024)),
    },
    {"fp32": matmul, "chunks of 32": chunked(32, F32, F32)},
    {
        "tf32 operands": lambda x, w: to_tf32(x) @ to_tf32(w).T,
        "fp16 operands": lambda x, w: x.half().float() @ w.half().float().T,
    },
)


def quantised_matmul(x: Tensor, w: Tensor) -> Tensor:
    scale = x.to(F32).abs().amax(-1, keepdim=True) / 448
    codes = (x.to(F32) / scale).to(FP8)
    return ((codes.to(F32) @ w.to(F32).T) * scale).to(BF16)


def quantised_with(codes: Kernel) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        return bf((codes(x.float() * (1 / scale)) @ w.float().T) * scale)

    return kernel


def truncated_to_fp8(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -(1 << 20)).view(torch.float32)


QUANTISED = Family(
    "fp8-quantising matmul",
    quantised_matmul,
    {"normal": lambda g: (bf(normal(g, 24, 1024)), bf(normal(g, 32, 1024) / 32))},
    {"as written": quantised_matmul, "multiplies by the inverse": quantised_with(lambda x: x.to(FP8).float())},
    {
        "not quantised": quantised_with(lambda x: x),
        "truncating codes": quantised_with(truncated_to_fp8),
        "two mantissa bits": quantised_with(lambda x: x.to(torch.float8_e5m2).float()),
    },
)

# ---------------------------------------------------------------------------------------------------
# Softmax with a soft cap, attention, cross-entropy


def capped_softmax(x: Tensor) -> Tensor:
    wide = x.to(F32)
    return torch.softmax(30 * torch.tanh(wide / 30), -1).to(x.dtype)


def online_capped_softmax(x: Tensor) -> Tensor:
    capped = 30 * torch.tanh(x.float() / 30)
    peak, total = torch.full((x.shape[0], 1), -1e30), torch.zeros(x.shape[0], 1)
    for part in parts(capped, 64, -1):
        higher = torch.maximum(peak, part.amax(-1, keepdim=True))
        total = total * torch.exp(peak - higher) + torch.exp(part - higher).sum(-1, keepdim=True)
        peak = higher
    return bf(torch.exp(capped - peak) / total)


CAPPED = Family(
    "softmax with soft cap",
    capped_softmax,
    {"wide logits": lambda g: (bf(8 * normal(g, 32, 512)),), "outliers": lambda g: (bf(with_outliers(g, 32, 512)),)},
    {"as written": capped_softmax, "online": online_capped_softmax},
    {
        "no cap": lambda x: bf(torch.softmax(x.float(), -1)),
        "cap of 25": lambda x: bf(torch.softmax(25 * torch.tanh(x.float() / 25), -1)),
    },
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.to(F32) @ k.to(F32).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1) @ v.to(F32)).to(q.dtype)


def flash(weights: Kernel = bf, carry: Kernel = lambda x: x) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        peak, total = torch.full((*q.shape[:-1], 1), -1e30), torch.zeros(*q.shape[:-1], 1)
        out = torch.zeros(q.shape)
        for kk, vv in zip(parts(k.float(), 64, -2), parts(v.float(), 64, -2), strict=True):
            scores = q.float() @ kk.transpose(-1, -2) / math.sqrt(q.shape[-1])
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            p, fade = torch.exp(scores - higher), torch.exp(peak - higher)
            total, peak = total * fade + p.sum(-1, keepdim=True), higher
            out = carry(out * fade + weights(p).float() @ vv)
        return bf(out / total)

    return kernel


ATTENTION = Family(
    "attention",
    attention,
    {
        "normal": lambda g: tuple(bf(normal(g, 2, 256, 64)) for _ in range(3)),
        # the rounding of one row of weights is then common to the whole row of the output
        "values of one sign": lambda g: (
            *(bf(normal(g, 2, 256, 64)) for _ in range(2)),
            bf(1 + positive(g, 2, 256, 64)),
        ),
    },
    {"as written": attention, "flash, fp32 weights": flash(lambda p: p), "flash, bf16 weights": flash()},
    {
        "fp8 weights": flash(lambda p: (p * 448).to(FP8).float() / 448),
        "bf16 output carry": flash(carry=lambda x: bf(x).float()),
        "last key dropped": lambda q, k, v: flash()(q, k[:, :-1], v[:, :-1]),
    },
)


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(F32)
    loss = torch.nn.functional.cross_entropy(wide, target)
    gradient = torch.softmax(wide, -1) - torch.nn.functional.one_hot(target, wide.shape[1]).to(F32)
    return loss, (gradient / wide.shape[0]).to(logits.dtype)


def cross_entropy_with(log_sum: Kernel) -> Kernel:
    def kernel(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        lse = log_sum(wide)
        loss = (lse - wide.gather(1, target[:, None])[:, 0]).mean()
        p = torch.exp(wide - lse[:, None]) - torch.nn.functional.one_hot(target, wide.shape[1]).float()
        return loss, bf(p / wide.shape[0])

    return kernel


def log_sum_in_bf16(wide: Tensor) -> Tensor:
    peak = wide.amax(1)
    total = torch.zeros(wide.shape[0], dtype=BF16)
    for part in parts(torch.exp(wide - peak[:, None]), 64, 1):
        total += part.sum(1).to(BF16)
    return peak + total.float().log()


CROSS_ENTROPY = Family(
    "cross-entropy",
    cross_entropy,
    {"normal": lambda g: (bf(2 * normal(g, 64, 1024)), torch.randint(0, 1024, (64,), generator=g))},
    {"as written": cross_entropy, "from the log-sum": cross_entropy_with(lambda x: torch.logsumexp(x, 1))},
    {
        "bf16 sum of exponentials": cross_entropy_with(log_sum_in_bf16),
        "bf16 log-sum": cross_entropy_with(lambda x: bf(torch.logsumexp(x, 1)).float()),
    },
    outputs=("loss", "dlogits"),
)

FAMILIES = (
    EMBEDDING,
    RMSNORM,
    TINY_RMSNORM,
    WEIGHT_GRADIENT,
    ADD_AND_NORM,
    MATMUL,
    MATMUL_FP32,
    QUANTISED,
    CAPPED,
    ATTENTION,
    CROSS_ENTROPY,
)


# ---------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_thread")


def workloads_of(family: Family) -> Iterator[tuple[str, tuple[Any, ...], Envelope]]:
    oracle = Oracle(family.reference, family.outputs)
    for name, draw in family.workloads.items():
        for seed in range(SEEDS):
            inputs = draw(torch.Generator().manual_seed(1000 + seed))
            yield f"{name}, seed {seed}", inputs, Envelope.build(oracle, inputs, contract=TC, samples=4, seed=seed)


def outcome(envelope: Envelope, kernel: Kernel, inputs: tuple[Any, ...]) -> bool | None:
    returned = kernel(*inputs)
    reports = envelope.judge(returned if isinstance(returned, tuple) else (returned,))
    if any(report.passed is False for report in reports):
        return False
    return None if any(report.passed is None for report in reports) else True


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_honest_kernels_pass_and_faulty_ones_do_not(family: Family) -> None:
    alarms: list[str] = []
    missed: list[str] = []
    caught = passed = 0
    for workload, inputs, envelope in workloads_of(family):
        for name, kernel in family.honest.items():
            ok = outcome(envelope, kernel, inputs) is True
            passed += ok
            alarms += [] if ok else [f"{name} on {workload}"]
        for name, kernel in family.faulty.items():
            ok = outcome(envelope, kernel, inputs) is False
            caught += ok
            missed += [] if ok else [f"{name} on {workload}"]
    counts = f"{passed} honest passed, {len(alarms)} false alarms; {caught} faults caught, {len(missed)} missed"
    sys.stdout.write(f"{family.name}: {counts}\n")
    assert not alarms and not missed


def test_the_usual_tolerance_passes_what_the_envelope_rejects() -> None:
    """Why no fixed tolerance: 99 % within 1e-2 says nothing about the one row that everything was added to."""
    g = torch.Generator().manual_seed(3)
    table, tokens = 4096, 8192
    weights = 1 / torch.arange(1, table + 1).double() ** 1.1
    ids = torch.multinomial(weights, tokens, replacement=True, generator=g)
    dy = bf(torch.randn(tokens, 8, generator=g) + 0.2)

    def reference(dy: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(table, 8).index_add_(0, ids, dy.float()).to(BF16)

    rows = list(torch.zeros(table, 8, dtype=BF16))
    for row, value in zip(ids.tolist(), dy, strict=True):
        rows[row] += value
    faulty, honest = torch.stack(rows), reference(dy, ids)
    within = ((faulty.double() - honest.double()).abs() <= 1e-2 + 1e-2 * honest.double().abs()).double().mean()
    envelope = Envelope.build(Oracle(reference, ["dw"]), (dy, ids), contract=TC, samples=4, seed=0)
    assert float(within) >= 0.98
    assert envelope.judge([honest])[0].passed is True
    report = envelope.judge([faulty])[0]
    assert report.passed is False and report.worst_index is not None
    assert int(torch.bincount(ids, minlength=table)[report.worst_index[0]]) > 8
    assert to_float64(faulty).shape == envelope.oracle.values[0].shape
