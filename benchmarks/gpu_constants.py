"""Measures on a GPU the constants that the honest floor was simulated with.

    python benchmarks/gpu_constants.py --json results/h200/gpu_constants.json

Tensor cores: how far and which way a sum of like-signed products strays from the exact one, in units of the last
place of fp32, against its length; what the largest honest accumulator is said to do is u·n/4 toward zero. Widths: at
which exponent a small term vanishes beside a large one. Atomics: what a thousand ones add up to. Cost: float64 against
the native product.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

U = 2.0**-24
LENGTHS = (128, 512, 2048, 8192, 32768)
SIDES = (128, 4096)  # of the square result: a small one is split over its terms, a large one is not


def main() -> int:
    """Four short tables; JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("a CUDA device is needed")
        return 2
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "u": U}
    found = {**facts, "drift": drift(), "widths": widths(), "atomics": atomics(), "cost": cost()}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


# -- products ---------------------------------------------------------------------------------------


def products() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """(m, k) and (k, n) operands to fp32 results, by the units that compute them."""

    def bf16(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)

    def fp16(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.half(), b.half(), out_dtype=torch.float32)

    def tf32(a: Tensor, b: Tensor) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def fp32(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def fp8(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
        one = torch.ones((), device=a.device)
        e4m3 = torch.float8_e4m3fn
        right = b.t().contiguous().to(e4m3).t()
        return torch._scaled_mm(a.to(e4m3), right, one, one, out_dtype=torch.float32, use_fast_accum=fast)

    return {
        "fp32": fp32,
        "tf32": tf32,
        "bf16": bf16,
        "fp16": fp16,
        "fp8": lambda a, b: fp8(a, b, fast=False),
        "fp8 fast": lambda a, b: fp8(a, b, fast=True),
    }


OPERANDS = {
    "fp32": torch.float32,
    "tf32": torch.float16,  # as many significant bits
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8 fast": torch.float8_e4m3fn,
}


def _held(values: Tensor, unit: str) -> Tensor:
    """The values as the operands of this unit hold them, in fp32."""
    return values.to(OPERANDS[unit]).float()


def _exactly(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def drift() -> dict[str, dict[int, dict[str, float]]]:
    """Mean and rms of (got - exact) / exact in units of u, of like-signed products that every unit holds exactly."""
    print(f"{'unit, side':14}" + "".join(f"{n:>22}" for n in LENGTHS) + "   mean / rms of the relative error, in u")
    found: dict[str, dict[int, dict[str, float]]] = {}
    for side, (unit, product) in ((side, item) for side in SIDES for item in products().items()):
        name = f"{unit} {side}"
        found[name] = {}
        for n in LENGTHS:
            g = torch.Generator(device="cuda").manual_seed(n)
            # As many significant bits as the operands hold, so that no product or sum is exact by luck.
            a = _held(1 + torch.rand(side, n, generator=g, device="cuda"), unit)
            b = _held(1 + torch.rand(n, side, generator=g, device="cuda"), unit)
            relative = attempt(lambda a=a, b=b, product=product: (product(a, b).double() / _exactly(a, b) - 1) / U)
            if isinstance(relative, Tensor):
                found[name][n] = {"mean": float(relative.mean()), "rms": float(relative.square().mean().sqrt())}
        cells = (f"{c['mean']:10.2f} /{c['rms']:9.2f} " for c in found[name].values())
        print(f"{name:14}" + "".join(f"{c:>22}" for c in cells))
    print(f"{'u·n/4':14}" + "".join(f"{-n / 4:>22.0f}" for n in LENGTHS))
    return found


def widths() -> dict[str, int]:
    """Significant bits of each accumulator: the largest k for which 1, then 2^-k, then -1 leaves 2^-k."""
    found = {}
    for name, product in products().items():
        kept = [k for k in range(1, 30) if _keeps(product, k)]
        found[name] = (max(kept) + 1) if kept else 0
    print("bits kept beside a large term: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    return found


def _keeps(product: Callable[[Tensor, Tensor], Tensor], k: int, n: int = 512) -> bool:
    a = torch.zeros(128, n, device="cuda")
    b = torch.ones(n, 128, device="cuda")
    # 2^-k as a product of two powers, so that an e4m3 operand holds it.
    first, second = -(k // 2), -(k - k // 2)
    places = (0, n // 2, n - 1)
    a[:, places[0]], a[:, places[1]], a[:, places[2]] = 1.0, 2.0**first, -1.0
    b[places[1]] = 2.0**second
    got = attempt(lambda: product(a, b))
    return isinstance(got, Tensor) and abs(float(got[0, 0]) * 2.0**k - 1) < 0.3


# -- atomics ----------------------------------------------------------------------------------------


def atomics() -> dict[str, float]:
    """What n ones added to one place become."""
    found: dict[str, float] = {}
    for n in (1000, 100_000):
        ones = torch.ones(n, 8, device="cuda", dtype=torch.bfloat16)
        where = torch.zeros(n, device="cuda", dtype=torch.int64)
        found[f"index_add_ bf16, {n} ones"] = _first(lambda o=ones, w=where: _zeros(o).index_add_(0, w, o))
        found[f"index_put_ accumulate bf16, {n} ones"] = _first(
            lambda o=ones, w=where: _zeros(o).index_put_((w,), o, accumulate=True)
        )
        found[f"scatter_add_ bf16, {n} ones"] = _first(
            lambda o=ones, w=where: _zeros(o).scatter_add_(0, w[:, None].expand_as(o), o)
        )
        found[f"embedding backward bf16, {n} ones"] = _first(
            lambda o=ones, w=where: torch.ops.aten.embedding_dense_backward(o, w, 2, -1, False)
        )
        found[f"sum bf16, {n} ones"] = _first(lambda o=ones: o.sum(0, keepdim=True))
    for words, value in found.items():
        print(f"{words:42} {value:g}")
    return found


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(2, like.shape[1], device="cuda", dtype=like.dtype)


def _first(work: Callable[[], Tensor]) -> float:
    got = attempt(work)
    return float(got[0, 0]) if isinstance(got, Tensor) else float("nan")


# -- cost -------------------------------------------------------------------------------------------


def cost(size: int = 4096) -> dict[str, float]:
    """Milliseconds of one product of squares of this size, by dtype."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a = torch.randn(size, size, device="cuda").to(dtype)
        found[str(dtype).removeprefix("torch.")] = _milliseconds(lambda a=a: a @ a)
    x = torch.randn(8192, 8192, device="cuda")
    found["sum float32"], found["sum float64"] = (
        _milliseconds(lambda: x.sum(-1)),
        _milliseconds(lambda: x.double().sum(-1)),
    )
    print(f"{size}^3 product and 8192^2 row sum, ms: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()))
    return found


def _milliseconds(work: Callable[[], Any], times: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times * 1e3


def attempt(work: Callable[[], Tensor]) -> Tensor | None:
    """The result, or None where this GPU or this version has no such operation; the words are printed."""
    try:
        return work()
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"    not available: {str(error).splitlines()[0][:120]}")
        return None


if __name__ == "__main__":
    sys.exit(main())
