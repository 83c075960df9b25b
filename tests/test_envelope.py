"""The honest envelope: what it measures, what it refuses to judge, how it grades."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.numerics.compare import Yardstick
from seatrial.numerics.dtypes import half_ulp, round_to
from seatrial.numerics.envelope import (
    F32,
    IO,
    TC,
    Contract,
    Envelope,
    OutputReport,
    contribution_deciles,
    grade,
    grade_outputs,
    native_report,
    no_worse_than,
)
from seatrial.numerics.noise import io_dtype
from seatrial.numerics.oracle import Oracle

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, shift: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + shift).to(dtype)


def built(
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    names: Sequence[str] = ("y",),
    contract: Contract = TC,
    **more: Any,
) -> Envelope:
    return Envelope.build(
        Oracle(reference, names),
        inputs,
        contract=contract,
        samples=more.pop("samples", 4),
        seed=more.pop("seed", 1),
        **more,
    )


def only(reports: tuple[OutputReport, ...]) -> OutputReport:
    (report,) = reports
    return report


def failing(report: OutputReport) -> set[str]:
    return {test.name for test in report.failures}


def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(-1).to(x.dtype)


# ---------------------------------------------------------------------------------------------------
# One output


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64, FP8, torch.float8_e5m2])
def test_the_correctly_rounded_answer_has_no_excess_and_the_next_neighbour_has(dtype: torch.dtype) -> None:
    source = torch.float64 if dtype == torch.float64 else torch.float32
    x = drawn(96, 32, dtype=source)
    envelope = built(lambda x: (x * 0.37).to(dtype), [x])
    exact = x.double() * 0.37
    right = round_to(exact, dtype).to(dtype)
    report = only(envelope.judge([right]))
    assert report.passed is True and report.dtype == dtype and report.slope == pytest.approx(1.0)
    step = 2 * half_ulp(exact, dtype) * (64 if dtype.itemsize > 2 else 1)
    wrong = round_to(exact + torch.where(torch.arange(32) == 5, 1.01, 0.0) * step * 2, dtype).to(dtype)
    report = only(envelope.judge([wrong]))
    assert report.passed is False and "tail" in failing(report)
    assert report.worst_index is not None and report.worst_index[1] == 5


def test_a_wrong_element_is_located_with_both_values() -> None:
    x = drawn(64, 256)
    envelope = built(row_sums, [x])
    out = row_sums(x)
    out[17] += 3
    report = only(envelope.judge([out]))
    assert report.worst_index == (17,)
    assert report.got == float(out[17]) and report.expected == float(x[17].double().sum())


def test_a_kernel_more_accurate_than_the_reference_passes() -> None:
    def reference(x: Tensor, r: Tensor) -> Tensor:
        return torch.tanh((x + r) * 0.5) * r

    x, r = drawn(64, 64), drawn(64, 64, seed=1)
    envelope = built(reference, [x, r])
    better = (torch.tanh((x.double() + r.double()) * 0.5) * r.double()).to(BF16)
    assert only(envelope.judge([better])).passed is True
    assert only(envelope.judge([reference(x, r)])).passed is True
    assert only(envelope.judge([(better.float() * 1.02).to(BF16)])).passed is False


def test_truncation_is_seen_by_its_lean_alone() -> None:
    def reference(x: Tensor) -> Tensor:
        return x * 1.1 * 0.9  # rounds to bfloat16 twice, which hides single elements

    x = drawn(128, 256)
    envelope = built(reference, [x])
    wide = x.float() * 1.1 * 0.9
    cut = (wide.view(torch.int32) & -65536).view(torch.float32).to(BF16)
    assert only(envelope.judge([wide.to(BF16)])).passed is True
    report = only(envelope.judge([cut]))
    assert report.passed is False and "bias" in failing(report) and "tail" not in failing(report)


def few_rows(kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention whose unnormalised probabilities go through `kernel` before the second product."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exact = torch.exp((s := q.float() @ k.float().T / 6) - s.amax(-1, keepdim=True))
        return (kernel(exact) @ v.float() / exact.sum(-1, keepdim=True)).bfloat16()

    return run


@pytest.mark.parametrize("seed", range(12))
def test_operands_of_rows_that_repeat_are_rounded_alike(seed: int) -> None:
    """Few distinct numbers are off together in an honest kernel, so its mean error is no sign of a bias."""
    g = torch.Generator().manual_seed(seed)
    four = {n: torch.randn(4, 32, generator=g).abs().bfloat16() for n in "qkv"}
    q, k, v = (four[n][torch.randint(4, (64,), generator=g)] for n in "qkv")

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(q.float() @ k.float().T / 6, -1) @ v.float()).bfloat16()

    envelope = built(reference, [q, k, v], seed=seed)
    nearest = few_rows(lambda p: p.bfloat16().float())(q, k, v)
    cut_off = few_rows(lambda p: (p.view(torch.int32) & -65536).view(torch.float32) * (1 - 2**-6))(q, k, v)
    assert only(envelope.judge([nearest])).passed
    assert only(envelope.judge([cut_off])).passed is False


def test_repeated_values_do_not_make_rounding_to_nearest_look_biased() -> None:
    x = torch.full((64, 64), 1 + 2.0**-7).to(BF16)
    reference: Callable[..., Any] = lambda x: (x.float() * 1.5).to(BF16)  # noqa: E731 - every element is the same tie
    assert only(built(reference, [x]).judge([reference(x)])).passed is True


def test_slope_reports_a_lost_factor() -> None:
    x = drawn(64, 512, shift=1.0)
    envelope = built(row_sums, [x])
    report = only(envelope.judge([(x.float().sum(-1) * 0.75).to(BF16)]))
    assert report.slope == pytest.approx(0.75, abs=0.01) and report.slope_allowed is not None
    assert "slope" in failing(report) and report.slope_allowed < 0.05
    assert only(envelope.judge([row_sums(x)])).slope == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("carry", "low", "high"), [(BF16, 5, 12), (FP16, 8, 15)])
def test_implied_bits_tell_the_accumulator(carry: torch.dtype, low: float, high: float) -> None:
    x = drawn(256, 1024, shift=0.5)
    total = torch.zeros(256, dtype=carry)
    for column in x.to(carry).unbind(1):
        total += column
    report = only(built(lambda x: x.float().sum(-1), [x]).judge([total.float()]))
    assert report.passed is False and report.implied_bits is not None and low < report.implied_bits < high
    honest = only(built(lambda x: x.float().sum(-1), [x]).judge([x.float().sum(-1)]))
    assert honest.implied_bits is None or honest.implied_bits > 22


def test_a_wrong_shape_and_a_wrong_number_are_told_apart() -> None:
    envelope = built(row_sums, [drawn(8, 8)])
    report = only(envelope.judge([torch.zeros(9)]))
    assert report.passed is False and failing(report) == {"shape"}
    with pytest.raises(ValueError, match="2 outputs given, 1 expected"):
        envelope.judge([torch.zeros(8), torch.zeros(8)])


def test_one_sample_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        built(row_sums, [drawn(8, 8)], samples=1)


def test_the_same_seed_gives_the_same_envelope() -> None:
    x = drawn(32, 64)
    first, second, other = (built(row_sums, [x], seed=s).yardsticks[0] for s in (3, 3, 4))
    assert first is not None and second is not None and other is not None
    assert torch.equal(first.sigma, second.sigma) and not torch.equal(first.sigma, other.sigma)


# ---------------------------------------------------------------------------------------------------
# Not finite, not in range, not well-conditioned


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_element_fails(bad: float) -> None:
    x = drawn(64, 64)
    out = row_sums(x)
    out[3] = bad
    report = only(built(row_sums, [x]).judge([out]))
    assert report.passed is False and failing(report) >= {"nonfinite"} and report.worst_index == (3,)


def test_infinite_masks_are_compared_by_class_and_place() -> None:
    def reference(x: Tensor) -> Tensor:
        return x.float().masked_fill(torch.ones(x.shape).triu(1).bool(), -math.inf) * 0.1

    x = drawn(64, 64)
    envelope, right = built(reference, [x]), reference(x)
    assert only(envelope.judge([right])).passed is True
    assert only(envelope.judge([-right])).passed is False
    moved = right.clone()
    moved[0, 1] = 0.0
    assert only(envelope.judge([moved])).worst_index == (0, 1)


def test_overflow_of_the_output_dtype_is_expected_where_the_reference_has_it() -> None:
    x = torch.tensor([1e4, 5e4, 7e4, -9e4] * 32)
    reference: Callable[..., Any] = lambda x: x.to(FP16)  # noqa: E731
    envelope = built(reference, [x])
    assert only(envelope.judge([reference(x)])).passed is True
    assert only(envelope.judge([x.clamp(-65504, 65504).to(FP16)])).passed is False


def test_where_the_reference_leaves_its_range_nothing_is_judged() -> None:
    def reference(x: Tensor) -> Tensor:
        return (x.float() / x.float().pow(2).mean(-1, keepdim=True).sqrt()).to(BF16)

    x = (drawn(16, 64).float() * 2.0**70).to(BF16)
    native = Oracle(reference, ["y"]).native([x])
    assert only(built(reference, [x]).judge(native)).passed is False
    report = only(built(reference, [x], native=native).judge(native))
    assert report.passed is None and "leaves its range" in report.why


def test_an_ill_conditioned_output_is_not_judged_but_nan_still_fails() -> None:
    def reference(x: Tensor) -> Tensor:
        return ((x * 3 + 1000) - 1000).float() + x.float()  # bfloat16 loses everything but the last term

    x = drawn(64, 64)
    envelope, right = built(reference, [x]), reference(x)
    report = only(envelope.judge([right]))
    assert report.passed is None and "ill-conditioned" in report.why
    right[0, 0] = math.nan
    assert only(envelope.judge([right])).passed is False


def test_a_mathematically_zero_output_is_judged_by_its_absolute_scale() -> None:
    def reference(s: Tensor) -> Tensor:
        p = torch.softmax(s.float(), -1)
        return (p - p / p.sum(-1, keepdim=True)).sum(0)

    s = drawn(64, 128)
    envelope = built(reference, [s])
    assert only(envelope.judge([reference(s)])).passed is True
    assert only(envelope.judge([reference(s) + 1e-3])).passed is False


def test_subnormals_may_be_flushed_but_small_normals_may_not() -> None:
    x = torch.full((64, 64), 2.0**-130)
    assert only(built(lambda x: x * 1.5, [x]).judge([torch.zeros_like(x)])).passed is True
    x = torch.full((64, 64), 2.0**-110)
    assert only(built(lambda x: x * 1.5, [x]).judge([torch.zeros_like(x)])).passed is False


def test_where_float64_cannot_follow_a_weaker_oracle_judges_roughly_and_says_so() -> None:
    def reference(x: Tensor) -> Tensor:
        if x.untyped_storage().nbytes() != x.numel() * 2:
            raise RuntimeError("only bfloat16 storage")
        return x * 2

    x = drawn(8, 8)
    envelope = built(reference, [x])
    assert envelope.oracle.weaker and "only bfloat16 storage" in envelope.oracle.kind
    assert only(envelope.judge([x * 2])).passed is True
    assert only(envelope.judge([(x.float() * 2.2).to(BF16)])).passed is False
    assert grade(Oracle(reference, ["y"]), [x], [x * 2]) == "IO"


# ---------------------------------------------------------------------------------------------------
# Integers


def test_integers_are_exact_and_located() -> None:
    x = drawn(32, 64)
    reference: Callable[..., Any] = lambda x: x.float().argmax(-1)  # noqa: E731
    envelope, out = built(reference, [x]), reference(x)
    assert only(envelope.judge([out])).passed is True
    out[9] += 1
    report = only(envelope.judge([out]))
    assert report.passed is False and report.worst_index == (9,) and failing(report) == {"exact"}


def test_codes_that_rounding_decides_may_flip_as_often_as_in_honest_runs() -> None:
    def reference(x: Tensor) -> Tensor:
        return ((x * 1.1) * 40).round().clamp(-127, 127).to(torch.int8)

    x = drawn(64, 256)
    envelope = built(reference, [x])
    assert only(envelope.judge([reference(x)])).passed is True
    fused = ((x.float() * 1.1) * 40).round().clamp(-127, 127).to(torch.int8)
    assert only(envelope.judge([fused])).passed is True
    off_by_one = fused + (torch.arange(256) % 2).to(torch.int8)
    assert only(envelope.judge([off_by_one])).passed is False


def test_empty_outputs_and_scalars() -> None:
    envelope = built(lambda x: (x[:0], x.float().sum()), [drawn(8, 64)], names=["none", "total"])
    none, total = envelope.judge([torch.empty(0, 64, dtype=BF16), drawn(8, 64).double().sum().float()])
    assert none.passed is True and none.elements == 0 and total.passed is True
    none, total = envelope.judge([torch.empty(0, 64, dtype=BF16), drawn(8, 64).double().sum().float() + 0.01])
    assert total.passed is False and failing(total) == {"tail"}


# ---------------------------------------------------------------------------------------------------
# Problems of their own


def test_the_declared_dtype_of_the_problem_decides_half_an_ulp() -> None:
    x = drawn(64, 64, dtype=torch.float32)
    reference: Callable[..., Any] = lambda x: x * 0.7  # noqa: E731 - float32, but the problem wants bfloat16
    out = (x * 0.7).to(BF16)
    assert only(built(reference, [x]).judge([out])).passed is False
    assert only(built(reference, [x], dtypes=[BF16]).judge([out])).passed is True


def test_the_reference_own_rounding_is_permitted_when_the_problem_declares_more_bits() -> None:
    x = drawn(64, 64)
    report = only(built(lambda x: x * 0.7, [x], dtypes=[torch.float32]).judge([(x * 0.7).float()]))
    assert report.passed is True


@pytest.mark.parametrize("how", ["copy", "index", "cat", "transpose"])
def test_the_final_rounding_is_counted_once_however_the_output_is_assembled(how: str) -> None:
    def reference(x: Tensor) -> Tensor:
        y = x.float().cumsum(-1)
        if how == "copy":
            out = torch.empty(x.shape, dtype=BF16)
            out[:32], out[32:] = y[:32], y[32:]
            return out
        if how == "index":
            out = torch.zeros(x.shape, dtype=BF16)
            out[torch.arange(64)] = y.to(BF16)
            return out
        return torch.cat([y[:32].to(BF16), y[32:].to(BF16)]) if how == "cat" else y.to(BF16).t().contiguous().t()

    yardstick = built(reference, [drawn(64, 64)]).yardsticks[0]
    assert yardstick is not None
    assert float((yardstick.sigma / yardstick.half).median()) < 1e-2


def test_float64_problems_are_held_to_float64() -> None:
    x = drawn(64, 512, dtype=torch.float64)
    envelope = built(lambda x: x.sum(-1), [x])
    assert only(envelope.judge([x.flip(-1).sum(-1)])).passed is True
    assert only(envelope.judge([x.float().sum(-1).double()])).passed is False


def test_a_float64_step_inside_a_narrow_problem_may_be_done_in_float32() -> None:
    x = drawn(64, 512, dtype=torch.float32)
    envelope = built(lambda x: x.double().sum(-1).float(), [x])
    assert only(envelope.judge([x.sum(-1)])).passed is True
    assert only(envelope.judge([x.to(BF16).float().sum(-1)])).passed is False


def test_fourier_transforms_have_an_error_of_their_own() -> None:
    x = drawn(16, 256, dtype=torch.float32)
    reference: Callable[..., Any] = lambda x: torch.fft.rfft(x, dim=-1)  # noqa: E731
    envelope = built(reference, [x])
    assert only(envelope.judge([reference(x)])).passed is True
    assert only(envelope.judge([reference(x.to(BF16).float())])).passed is False


def test_long_softmax_and_mean_of_squares_allow_for_their_sums() -> None:
    x = drawn(4, 8192, dtype=torch.float32)

    def reference(x: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x, -1), torch.log_softmax(x, -1), x.var(-1), torch.logsumexp(x, -1)

    names = ["softmax", "log", "var", "lse"]
    envelope = built(reference, [x], names=names)
    total = torch.zeros(4)
    for part in x.exp().unbind(1):
        total += part
    lse = total.log()
    sequential = (
        (x - lse[:, None]).exp(),
        x - lse[:, None],
        ((x - x.mean(-1, keepdim=True)).square().cumsum(-1)[:, -1] / 8191),
        lse,
    )
    assert [r.passed for r in envelope.judge(sequential)] == [True] * 4
    assert [r.passed for r in envelope.judge(reference(x))] == [True] * 4
    half = reference(x.to(FP16).float())
    assert all(r.passed is False for r in envelope.judge(half)[:2])


# ---------------------------------------------------------------------------------------------------
# Groups


def test_a_fault_in_one_row_is_found_by_rows() -> None:
    def reference(x: Tensor) -> Tensor:
        return x * 1.1 * 0.9

    x = drawn(256, 256)
    envelope = built(reference, [x])
    wide = x.float() * 1.1 * 0.9
    out = wide.to(BF16)
    out[100] = (wide.view(torch.int32) & -65536).view(torch.float32).to(BF16)[100]
    report = only(envelope.judge([out]))
    assert report.passed is False and "bias by rows" in failing(report) and "bias" not in failing(report)
    assert {t.name: t.index for t in report.tests}["bias by rows"] == (100,)


def test_groups_of_the_caller_are_judged_by_themselves() -> None:
    g = torch.Generator().manual_seed(2)
    ids = torch.cat([torch.zeros(2000, dtype=torch.int64), torch.randint(1, 40, (400,), generator=g)])
    dy = (torch.rand(2400, 128, generator=g)).to(BF16)

    def reference(dy: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(40, 128).index_add_(0, ids, dy.float()).to(BF16)

    counts = torch.bincount(ids, minlength=40)
    groups = {"dw": {"contributions": contribution_deciles(counts)}}
    envelope = built(reference, [dy, ids], names=["dw"])
    right = reference(dy, ids)
    honest = only(envelope.judge([right], groups=groups))
    assert honest.passed is True and abs(honest.groups["contributions"]) < 0.1
    stalled = right.clone()
    stalled[0] = (right[0].float() * 0.97).to(BF16)
    report = only(envelope.judge([stalled], groups=groups))
    assert "bias by contributions" in failing(report) and report.groups["contributions"] < -1


def test_deciles_separate_the_hot_from_the_rare() -> None:
    labels = contribution_deciles(torch.arange(100))
    assert labels.min() == 0 and labels.max() == 9 and torch.equal(labels, labels.sort().values)


# ---------------------------------------------------------------------------------------------------
# Contracts and grades


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(q.float() @ k.float().transpose(-1, -2) / 8, -1) @ v.float()).to(q.dtype)


def attention_with_rounded_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / 8
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return ((p.to(q.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)


def test_flash_attention_with_narrow_weights_needs_the_tensor_core_contract() -> None:
    inputs = [drawn(2, 128, 64, seed=s) for s in range(3)]
    oracle = Oracle(attention, ["o"])
    assert grade(oracle, inputs, [attention(*inputs)]) == "F32"
    assert grade(oracle, inputs, [attention_with_rounded_weights(*inputs)]) == "TC"
    fp8 = attention_with_rounded_weights(*[t.to(FP8).to(BF16) for t in inputs])
    assert grade(oracle, inputs, [fp8]) == "REJECT"


def test_products_rounded_before_the_sum_are_an_io_rounding() -> None:
    def reference(dy: Tensor, x: Tensor) -> Tensor:
        return (dy.float() * x.float()).sum(0).to(dy.dtype)

    dy, x = drawn(1024, 128), drawn(1024, 128, seed=1)
    graded = grade_outputs(Oracle(reference, ["dw"]), [dy, x], [(dy * x).float().sum(0).to(BF16)], samples=4, seed=0)
    assert graded.grades == ("IO",) and graded.worst == "IO"


def test_a_float32_problem_does_not_allow_narrow_operands() -> None:
    x, w = drawn(32, 512, dtype=torch.float32), drawn(512, 64, dtype=torch.float32, seed=1)
    oracle = Oracle(torch.matmul, ["y"])
    tf32: Callable[..., Any] = lambda t: ((t.view(torch.int32) + 0x1000) & -8192).view(torch.float32)  # noqa: E731
    assert grade(oracle, [x, w], [x @ w]) == "F32"
    assert grade(oracle, [x, w], [tf32(x) @ tf32(w)]) == "IO"
    assert grade(oracle, [x, w], [x.to(BF16).float() @ w.to(BF16).float()]) == "REJECT"


def test_a_float32_input_of_a_narrow_problem_stays_float32() -> None:
    hidden, router = drawn(64, 512), drawn(512, 64, dtype=torch.float32, seed=1)
    reference: Callable[..., Any] = lambda h, r: h.float() @ r  # noqa: E731
    envelope = built(reference, [hidden, router])
    assert only(envelope.judge([hidden.float() @ router])).passed is True
    assert only(envelope.judge([hidden.float() @ router.to(BF16).float()])).passed is False


def test_the_io_dtype_is_the_narrowest_half_of_the_inputs() -> None:
    assert io_dtype((torch.float32, FP16)) == FP16
    assert io_dtype((BF16, FP16, torch.float32)) == BF16
    assert io_dtype((torch.float32,)) is None and io_dtype((FP8,)) == BF16


def embedding_backward(ids: Tensor, dy: Tensor) -> Tensor:
    weight = torch.zeros(16, dy.shape[1], dtype=dy.dtype, requires_grad=True)
    torch.nn.functional.embedding(ids, weight).backward(dy)  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad


def test_a_deficient_reference_is_reported_and_is_no_excuse() -> None:
    """torch's CPU kernel carries bfloat16 gradients of an embedding in bfloat16."""
    ids, dy = torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 8, dtype=BF16)
    oracle = Oracle(embedding_backward, ["dw"])
    native = native_report(oracle, [ids, dy], samples=4, seed=0)
    right = torch.zeros(16, 8).index_add_(0, ids, dy.float()).to(BF16)
    candidate = grade_outputs(oracle, [ids, dy], [right], samples=4, seed=0)
    stalled = grade_outputs(oracle, [ids, dy], list(oracle.native([ids, dy])), samples=4, seed=0)
    if float(oracle.native([ids, dy])[0][0, 0]) == 1000:
        pytest.skip("this torch sums embedding gradients in float32")
    assert native.worst == "REJECT" and candidate.worst == "F32"
    assert no_worse_than(native, candidate) and not no_worse_than(native, stalled)


def test_a_bounded_rounding_is_excused_only_by_a_reference_that_makes_it_too() -> None:
    def reference(dy: Tensor, x: Tensor) -> Tensor:
        return (dy.float() * x.float()).sum(0).to(dy.dtype)

    dy, x = drawn(1024, 128), drawn(1024, 128, seed=1)
    oracle = Oracle(reference, ["dw"])
    rounded = grade_outputs(oracle, [dy, x], [(dy * x).float().sum(0).to(BF16)], samples=4, seed=0)
    honest = native_report(oracle, [dy, x], samples=4, seed=0)
    assert rounded.worst == "IO" and honest.worst == "F32"
    assert no_worse_than(rounded, rounded) and not no_worse_than(honest, rounded)
    assert not no_worse_than(rounded, rounded, carry_bits=8)


def test_contracts_widen_in_order() -> None:
    inputs = [drawn(2, 64, 64, seed=s) for s in range(3)]
    sizes = []
    for contract in (F32, TC, IO):
        yardstick = built(attention, inputs, contract=contract).yardsticks[0]
        assert yardstick is not None
        sizes.append(float(yardstick.sigma.square().mean()))
    assert sizes[0] * 4 < sizes[1] and sizes[1] < sizes[2]


def _capped(scores: Tensor, tanh: Callable[[Tensor], Tensor], cap: float = 50.0) -> Tensor:
    return torch.softmax(cap * tanh(scores.float() / cap), -1).to(scores.dtype)


@pytest.mark.parametrize("seed", range(5))
def test_tanh_made_of_exp_is_honest_and_a_coarse_one_is_not(seed: int) -> None:
    scores = (32 * torch.randn(4, 32, 128, generator=torch.Generator().manual_seed(seed))).bfloat16()
    oracle = Oracle(lambda x: _capped(x, torch.tanh), ["probs"])
    envelope = Envelope.build(oracle, [scores], contract=F32, samples=4, seed=seed)
    from_exp = _capped(scores, lambda z: 1 - 2 / (1 + torch.exp2(2 * z * 1.4426950408889634)))
    coarse = _capped(scores, lambda z: torch.tanh(z) * (1 + 2.0**-11 * torch.randn_like(z)))
    assert envelope.judge([from_exp])[0].passed is True
    assert envelope.judge([coarse])[0].passed is False


@pytest.mark.parametrize("seed", range(4))
def test_a_constants_reciprocal_is_honest_and_a_narrow_scale_is_not(seed: int) -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    oracle = Oracle(lambda v: v.float().abs().amax(-1) / 448.0, ["scale"])
    envelope = Envelope.build(oracle, [x], contract=TC, samples=4, seed=seed, native=oracle.native([x]))
    by_reciprocal = x.float().abs().amax(-1) * (1 / 448.0)
    narrow = (x.float().abs().amax(-1) / 448.0).bfloat16().float()
    assert envelope.judge([by_reciprocal])[0].passed is True
    assert envelope.judge([narrow])[0].passed is False


def test_powers_with_a_tensor_as_exponent_are_judged() -> None:
    x = torch.rand(64, 64) + 0.5
    oracle = Oracle(lambda v: torch.pow(v, torch.arange(64.0) / 64), ["y"])
    envelope = Envelope.build(oracle, [x], contract=TC, samples=4, seed=0)
    assert envelope.judge([x ** (torch.arange(64.0) / 64)])[0].passed is True
    assert envelope.judge([x ** ((torch.arange(64.0) + 1) / 64)])[0].passed is False


@pytest.mark.parametrize("seed", range(4))
def test_a_layernorm_of_rows_far_from_zero_is_judged_as_real_roundings_fall(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(96, 256, generator=g) + 12 * torch.randn(96, 1, generator=g)).bfloat16()
    w, b = (torch.randn(256, generator=g).bfloat16() for _ in range(2))
    norm = torch.nn.functional.layer_norm
    oracle = Oracle(lambda x, w, b: norm(x.float(), (256,), w.float(), b.float()).to(x.dtype), ["y"])
    envelope = Envelope.build(oracle, [x, w, b], contract=TC, samples=4, seed=seed, native=oracle.native([x, w, b]))
    mean, variance = x.float().mean(-1, keepdim=True), x.float().var(-1, keepdim=True, unbiased=False)
    two_pass = ((x.float() - mean) * torch.rsqrt(variance + 1e-5) * w.float() + b.float()).bfloat16()
    narrow_mean = ((x.float() - mean.bfloat16()) * torch.rsqrt(variance + 1e-5) * w.float() + b.float()).bfloat16()
    assert envelope.judge([two_pass])[0].passed is True
    assert envelope.judge([narrow_mean])[0].passed is False


@pytest.mark.parametrize("seed", range(4))
def test_equal_values_may_come_in_any_order_and_unequal_ones_may_not(seed: int) -> None:
    logits = (torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) * 2).bfloat16()
    logits[:, 40] = logits[:, 7]  # a tie in every row, often among the largest
    oracle = Oracle(lambda x: torch.topk(x, 6, dim=-1), ["values", "ids"])
    envelope = Envelope.build(oracle, [logits], contract=TC, samples=4, seed=seed)
    values, first = logits.sort(dim=-1, descending=True, stable=True)
    _, last = logits.flip(-1).sort(dim=-1, descending=True, stable=True)
    for ids in (first, 63 - last):
        assert [r.passed for r in envelope.judge([values[:, :6], ids[:, :6]])] == [True, True]
    shifted = [r.passed for r in envelope.judge([values[:, :6], first[:, 1:7]])]
    assert shifted == [True, False]


# ---------------------------------------------------------------------------------------------------
# What the oracle's open ends mean for a verdict: an honest kernel passes, its twin one line off does not


@pytest.mark.parametrize("seed", range(3))
def test_constants_may_be_kept_exact_or_rounded_as_declared(seed: int) -> None:
    def reference(x: Tensor) -> Tensor:
        return x.float() * torch.full((1,), 0.1, dtype=x.dtype)

    x = drawn(64, 64, seed=seed)
    envelope = built(reference, [x], seed=seed)
    rounded = float(torch.tensor(0.1, dtype=BF16))
    for factor in (0.1, rounded):
        assert only(envelope.judge([x.float() * factor])).passed is True
    assert only(envelope.judge([x.float() * (0.1 + 4 * (rounded - 0.1))])).passed is False


def assembled(x: Tensor, how: str) -> Tensor:
    y = x.float().cumsum(-1)
    out = torch.zeros(x.shape, dtype=x.dtype)
    if how == "columns":
        for i in range(x.shape[1]):
            out[:, i] = y[:, i]
    elif how == "narrow rows":
        for i in range(x.shape[0]):
            out[i] = y[i].to(x.dtype)
    elif how == "mask":
        out[x > 0], out[x <= 0] = y[x > 0].to(x.dtype), y[x <= 0].to(x.dtype)
    elif how == "scatter":
        out.scatter_(1, torch.arange(x.shape[1]).expand(x.shape), y.to(x.dtype))
    elif how == "flat view":
        out.view(-1).copy_(y.to(x.dtype).view(-1))
    elif how == "foreach":
        torch._foreach_copy_(list(out.unbind(0)), list(y.unbind(0)))
    elif how == "out":
        torch.add(y, 0.0, out=out)
    else:
        out += y
    return out


HOWS = ["columns", "narrow rows", "mask", "scatter", "flat view", "foreach", "out", "add in place"]


@pytest.mark.parametrize("how", HOWS)
def test_an_output_written_in_place_is_judged_without_its_last_rounding(how: str) -> None:
    x = drawn(64, 64)
    reference: Callable[..., Any] = lambda x: assembled(x, how)  # noqa: E731
    envelope = built(reference, [x])
    yardstick = envelope.yardsticks[0]
    assert yardstick is not None and float((yardstick.sigma / yardstick.half).median()) < 1e-2
    assert only(envelope.judge([reference(x)])).passed is True
    carried = torch.zeros(64, dtype=BF16)
    narrow = torch.empty(x.shape, dtype=BF16)
    for i in range(64):
        carried = carried + x[:, i]
        narrow[:, i] = carried
    assert only(envelope.judge([narrow])).passed is False


@pytest.mark.parametrize("how", ["seeded dropout", "noise"])
def test_a_reference_that_draws_is_judged_on_the_same_draws(how: str) -> None:
    def reference(x: Tensor, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        if how == "noise":
            return x.float() @ torch.randn(64, 64)
        return (torch.nn.functional.dropout(x.float() * 1.1, 0.3, training=True)).to(x.dtype)

    x = drawn(64, 64)
    oracle = Oracle(reference, ["y"])
    envelope = Envelope.build(oracle, [x], contract=TC, samples=4, seed=0)
    with torch.random.fork_rng():
        right, other = reference(x), reference(x, seed=4)
    assert oracle.draws_randomness
    assert only(envelope.judge([right])).passed is True
    assert only(envelope.judge([other])).passed is False


@pytest.mark.parametrize("seed", range(2))
def test_a_block_scaled_matmul_is_judged_though_this_machine_cannot_run_it(seed: int) -> None:
    a, b = drawn(128, 256, seed=seed).to(FP8), drawn(128, 256, seed=seed + 9).to(FP8)
    sa, sb = torch.rand(128, 2) + 0.5, torch.rand(2, 128) + 0.5
    reference: Callable[..., Any] = lambda a, b, sa, sb: torch._scaled_mm(a, b.t(), sa, sb, out_dtype=BF16)  # noqa: E731
    envelope = built(reference, [a, b, sa, sb], seed=seed)
    blocks = [
        (a.float()[:, k * 128 :][:, :128] @ b.float()[:, k * 128 :][:, :128].t()) * sa[:, k : k + 1] * sb[k]
        for k in range(2)
    ]
    assert only(envelope.judge([(blocks[0] + blocks[1]).to(BF16)])).passed is True
    assert only(envelope.judge([blocks[0].to(BF16) + blocks[1].to(BF16)])).passed is False
    swapped = blocks[0] / sa[:, :1] * sa[:, 1:] + blocks[1]
    assert only(envelope.judge([swapped.to(BF16)])).passed is False


@pytest.mark.parametrize("seed", range(3))
def test_ill_conditioned_elements_are_left_out_and_the_others_judged(seed: int) -> None:
    def reference(x: Tensor, big: Tensor) -> Tensor:
        return (((x + big) - big).float() * 1.5).to(x.dtype)  # a large `big` leaves next to nothing of x

    x, big = drawn(64, 64, seed=seed), torch.zeros(64, 64, dtype=BF16)
    big[5], big[:, 7] = 3e4, 3e4
    envelope, right = built(reference, [x, big], seed=seed), reference(x, big)
    report = only(envelope.judge([right]))
    assert report.passed is True and report.unjudged == 127
    assert only(envelope.judge([torch.where(big > 0, right + 300, right)])).passed is True
    wrong = right.clone()
    wrong[40, 40] += 1
    assert only(envelope.judge([wrong])).passed is False
    wrong = right.clone()
    wrong[5, 3] = math.nan
    assert only(envelope.judge([wrong])).passed is False


def test_how_far_terms_cancel_is_measured_and_said() -> None:
    def reference(x: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([x * 1.1, rest - x * 1.1], -1).float().sum(-1)  # all but `rest` cancels

    x, rest = drawn(256, 64, shift=3.0), (drawn(256, 64, seed=1).float() * 0.01).to(BF16)
    envelope = built(reference, [x, rest])
    terms = torch.cat([x.double() * 1.1, rest.double() - x.double() * 1.1], -1)
    condition = float(terms.abs().sum(-1).square().mean().sqrt() / terms.sum(-1).square().mean().sqrt())
    assert envelope.conditions["sum"] == pytest.approx(condition, rel=0.3) and condition > 1000
    report = only(envelope.judge([reference(x, rest)]))
    assert report.passed is None and "terms of `sum` cancel to 1/" in report.why
    sound = built(reference, [x, (rest.float() * 1000).to(BF16)])
    assert only(sound.judge([reference(x, (rest.float() * 1000).to(BF16))])).passed is True


def test_where_the_reference_leaves_its_range_in_few_rows_the_others_are_judged() -> None:
    def reference(x: Tensor) -> Tensor:
        return (x.float() / x.float().pow(2).mean(-1, keepdim=True).sqrt()).to(BF16)

    x = drawn(16, 64)
    x[3] = (x[3].float() * 2.0**70).to(BF16)
    native = Oracle(reference, ["y"]).native([x])
    envelope = built(reference, [x], native=native)
    report = only(envelope.judge(native))
    assert report.passed is True and report.unjudged == 64
    wrong = native[0].clone()
    wrong[9] *= 1.1
    assert only(envelope.judge([wrong])).passed is False


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.1, 1.0, 1.5])
def test_attention_with_a_scaled_query_in_bf16_is_honest_and_a_narrow_output_carry_is_not(
    size: float, seed: int
) -> None:
    q, k, v = (drawn(2, 256, 64, seed=10 * seed + s).float() for s in range(3))
    q, k, v = (q * size).to(BF16), (k * size).to(BF16), (v + 0.5).to(BF16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    oracle = Oracle(sdpa, ["o"])
    envelope = Envelope.build(oracle, [q, k, v], contract=TC, samples=4, seed=seed, native=oracle.native([q, k, v]))

    def flash(q: Tensor, k: Tensor, carry: torch.dtype = torch.float32) -> Tensor:
        s = q.float() @ k.float().transpose(-1, -2)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        out = torch.zeros(v.shape, dtype=carry)
        for at in range(0, 256, 16):
            out = (out.float() + p[..., at : at + 16].to(BF16).float() @ v[:, at : at + 16].float()).to(carry)
        return (out.float() / p.sum(-1, keepdim=True)).to(BF16)

    root = math.sqrt(1 / 8)
    both = (q.float() * root).to(BF16), (k.float() * root).to(BF16)
    assert only(envelope.judge([sdpa(q, k, v)])).passed is True
    assert only(envelope.judge([flash(q.float() / 8, k)])).passed is True
    assert only(envelope.judge([flash((q.float() / 8 * 1.1).to(BF16).float() / 1.1, k)])).passed is True
    assert only(envelope.judge([flash(*both)])).passed is True
    assert only(envelope.judge([flash(q.float() / 8, k, carry=BF16)])).passed is False


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_a_table_of_sines_may_take_its_frequencies_from_any_honest_power(width: int, seed: int) -> None:
    at = torch.arange(0, width, 2).float()

    def reference(position: Tensor, one: Tensor) -> Tensor:
        return torch.outer(position.float(), 1.0 / 10000.0 ** (at / width)).sin().repeat(1, 2) * one

    position, one = torch.arange(128), torch.ones(1)
    oracle = Oracle(reference, ["table"])
    native = oracle.native([position, one])
    envelope = Envelope.build(oracle, [position, one], contract=TC, samples=4, seed=seed, native=native)

    def table(frequencies: Tensor) -> Tensor:
        return torch.outer(position.float(), frequencies).sin().repeat(1, 2)

    exact = 10000.0 ** (-at.double() / width)
    honest = [
        torch.exp2(at / width * -13.287712379549449),
        torch.exp(at * (-math.log(10000.0) / width)),
        (exact * (1 - 2 * 2.0**-24)).float(),  # a library's power that leans by one unit in the last place
    ]
    assert only(envelope.judge(native)).passed is True
    assert [only(envelope.judge([table(f)])).passed for f in honest] == [True] * 3
    assert only(envelope.judge([table(exact.to(FP16).float())])).passed is False
    assert only(envelope.judge([table(exact.float()) * (1 - 2.0**-21)])).passed is False


def test_the_tail_bound_grows_with_very_many_elements() -> None:
    few, many = torch.full((4096,), 1.0).double(), torch.full((1 << 22,), 1.0).double()
    bounds = []
    for y in (few, many):
        samples = [y + 1e-3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(s)) for s in range(3)]
        yardstick = Yardstick(y, samples, torch.float32)
        tests, _ = yardstick.tests(y.float(), {})
        bounds.append(next(t.allowed for t in tests if t.name == "tail"))
    assert bounds[0] >= 6 and bounds[1] > 6 * math.sqrt(22 / 20)


def test_the_weaker_oracle_accepts_other_roundings_and_rejects_a_narrow_carry() -> None:
    def reference(x: Tensor) -> Tensor:
        return torch.from_numpy(x.float().numpy().sum(-1))

    x = drawn(64, 2048, shift=0.5)
    envelope = built(reference, [x])
    assert envelope.oracle.weaker
    assert only(envelope.judge([x.float().flip(-1).sum(-1)])).passed is True
    carried = torch.zeros(64, dtype=BF16)
    for column in x.unbind(1):
        carried = carried + column
    assert only(envelope.judge([carried.float()])).passed is False
