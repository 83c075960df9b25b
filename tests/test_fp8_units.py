"""Hopper's float8 units keep 14 bits: allowed by the contract of that architecture for 128 terms at a time, and no further.

Source of the hardware's behaviour: DeepSeek-V3 report (arXiv 2412.19437) §3.3.2; deepseek-ai/DeepGEMM #37.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from seatrial.model import Verdict
from seatrial.numerics.envelope import Envelope
from seatrial.numerics.noise import contract_on
from seatrial.numerics.oracle import Oracle

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9  # noqa: TID251
TERMS = 2048


def scaled_after(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (a.float() @ b.float().T * scale_a[:, None] * scale_b).to(BF16)


def scaled_before(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return ((a.float() * scale_a[:, None]) @ (b.float() * scale_b[:, None]).T).to(BF16)


def operands(seed: int, *, one_sign: bool) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for rows in (16, 24):
        x = torch.randn(rows, TERMS, generator=g)
        x = x.abs() if one_sign else x
        scale = x.abs().amax(1) / 448
        made.append(((x / scale[:, None]).to(FP8), scale))
    (a, scale_a), (b, scale_b) = made
    return a, b, scale_a, scale_b


def cut(x: Tensor, largest: Tensor) -> Tensor:
    """What is left of x when 13 bits below the largest term's leading one are kept."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 14)
    return torch.trunc(x / unit) * unit


def in_units(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, promoted_every: int) -> Tensor:
    """A float8 matrix unit, 32 products at a time aligned to the largest, added to float32 every so many terms."""
    left, right = a.float(), b.float()
    total = torch.zeros(len(a), len(b))
    for start in range(0, TERMS, promoted_every):
        unit_sum = torch.zeros_like(total)
        for at in range(start, start + promoted_every, 32):
            products = left[:, None, at : at + 32] * right[None, :, at : at + 32]
            largest = torch.maximum(products.abs().amax(-1), unit_sum.abs())
            unit_sum = cut(unit_sum, largest) + cut(products, largest[..., None].expand_as(products)).sum(-1)
        total += unit_sum
    return (total * scale_a[:, None] * scale_b).to(BF16)


@pytest.mark.parametrize("reference", [scaled_after, scaled_before])
def test_promoted_sums_pass_on_hopper_alone_and_endless_ones_nowhere(reference: object) -> None:
    assert callable(reference)
    oracle = Oracle(reference, ["y"])
    for seed in range(3):
        inputs = operands(seed, one_sign=True)

        def passes(output: Tensor, capability: tuple[int, int] | None, inputs: tuple[Tensor, ...] = inputs) -> object:
            contract = contract_on("TC", capability, inputs)
            envelope = Envelope.build(oracle, inputs, contract=contract, samples=4, seed=1, dtypes=[BF16])
            return envelope.judge([output])[0].passed

        promoted, endless = (in_units(*inputs, promoted_every=n) for n in (128, TERMS))
        assert passes(reference(*inputs), (9, 0)) is True and passes(reference(*inputs), None) is True
        assert passes(promoted, (9, 0)) is True
        if reference is scaled_after:  # scaled operands may be rounded to bfloat16 anywhere, which covers as much
            assert passes(promoted, None) is False and passes(promoted, (10, 0)) is False
        assert passes(endless, (9, 0)) is False and passes(endless, None) is False


def test_sums_of_other_operands_get_no_allowance() -> None:
    inputs = operands(0, one_sign=True)
    assert contract_on("TC", (9, 0), inputs).fp8_units and not contract_on("F32", (9, 0), inputs).fp8_units
    assert not contract_on("TC", (9, 0), [t.float() for t in inputs]).fp8_units
    assert not contract_on("TC", (9, 0), [inputs[0], inputs[1].float()]).fp8_units


KERNEL = """
import torch, triton
import triton.language as tl


@triton.jit
def matmul(a, b, scale_a, scale_b, y, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, KEPT: tl.constexpr):
    m = tl.program_id(0) * TM + tl.arange(0, TM)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    k = tl.arange(0, TK)
    total = tl.zeros((TM, TN), dtype=tl.float32)
    for start in range(0, K, TK):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None] & (start + k < K)[None, :], other=0.0)
        right = tl.load(b + n[None, :] * K + (start + k)[:, None], mask=(n < N)[None, :] & (start + k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=KEPT)
    total = total * tl.load(scale_a + m, mask=m < M, other=0.0)[:, None] * tl.load(scale_b + n, mask=n < N, other=0.0)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], total.to(tl.bfloat16), mask=(m < M)[:, None] & (n < N)[None, :])


def run(a, b, scale_a, scale_b):
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[0]
    y = torch.empty(M, N, dtype=torch.bfloat16, device=a.device)
    grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
    matmul[grid](a, b, scale_a.contiguous(), scale_b.contiguous(), y, M, N, K, TM=64, TN=64, TK=128, KEPT=PROMOTED)
    return y
"""
PROBLEM = {
    "reference.py": (
        "import torch\n\ndef run(a, b, scale_a, scale_b):\n"
        "    return (a.float() @ b.float().T * scale_a[:, None] * scale_b).to(torch.bfloat16)\n"
    ),
    "inputs.py": (
        "import torch\n\ndef make(seed):\n    g = torch.Generator().manual_seed(seed)\n    made = {}\n"
        "    for name, rows in (('a', 128), ('b', 192)):\n        x = torch.randn(rows, 4096, generator=g)\n"
        "        scale = x.abs().amax(1) / 448\n        made[name] = (x / scale[:, None]).to(torch.float8_e4m3fn)\n"
        "        made['scale_' + name] = scale\n"
        "    return {name: made[name] for name in ('a', 'b', 'scale_a', 'scale_b')}\n"
    ),
}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("promoted", "verdict"), [("128", Verdict.ACCEPTED), ("1 << 30", Verdict.REJECTED)])
def test_on_the_gpu_itself(promoted: str, verdict: Verdict, tmp_path: Path) -> None:
    for name, text in {**PROBLEM, "kernel.py": KERNEL.replace("PROMOTED", promoted)}.items():
        (tmp_path / name).write_text(text)
    space: dict[str, object] = {}
    for name in PROBLEM:
        exec(compile(PROBLEM[name], name, "exec"), space)
    from seatrial.api import policy_named
    from seatrial.devices import pick
    from seatrial.formats import load_candidates
    from seatrial.formats.plain import problem_from_callables
    from seatrial.verify import Options, verify

    problem = problem_from_callables(space["run"], space["make"])  # type: ignore[arg-type]
    (kernel,) = load_candidates([tmp_path / "kernel.py"], entry_point="run", problem=problem)
    options = Options(policy=policy_named("quick"), device=pick("cuda"), seed=3, skip=("training-divergence",))
    report = verify(problem, [kernel], options)[0]
    assert report.verdict is verdict, [f"{f.check}: {f.reason}" for f in report.findings if f.outcome.value != "held"]
