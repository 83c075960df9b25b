"""Every simulated accumulator is named right, and no honest one is ever called narrow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from probing import oracle_of, outputs_of, planned, traced
from seatrial.numerics.accumulators import (
    BFLOAT16,
    CERTAIN,
    EVERY_CONTRIBUTION,
    FLOAT32,
    FLOAT64,
    FP8_TENSOR_CORE,
    INSIDE_BLOCKS,
    NOT_DETERMINED,
    OPERANDS,
    TF32_OPERANDS,
    WHEN_DISGUISED,
    Fingerprint,
    too_narrow,
)
from seatrial.numerics.probes import fingerprints, probe_accumulators, read_probes
from simulated_kernels import (
    BF16,
    EMBEDDING,
    F16,
    F32,
    FAULTY,
    HONEST,
    MATMUL,
    PROBLEMS,
    ROW_SUM,
    Accumulator,
    Problem,
    pairwise,
    tensor_core,
    wide,
)


def seen(plan: Any, problem: Problem, accumulate: Accumulator) -> tuple[Fingerprint, ...]:
    return fingerprints(read_probes(plan, lambda inputs: problem.kernel(accumulate, *inputs)))


SEEDS = range(5)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_honest_accumulators_are_never_narrow(name: str, seed: int) -> None:
    problem = PROBLEMS[name]
    plan = planned(problem, seed)
    for kind, accumulate in HONEST.items():
        prints = seen(plan, problem, accumulate)
        assert len(prints) == len(problem.output_names)
        for fingerprint in prints:
            assert fingerprint.accumulator == FLOAT32, (kind, fingerprint)
            assert fingerprint.contributions == 384
            assert not fingerprint.unbounded
            assert not too_narrow(fingerprint).fault


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_narrow_accumulators_are_named(name: str, seed: int) -> None:
    problem = PROBLEMS[name]
    plan = planned(problem, seed)
    for kind, (accumulate, accumulator, rounds, every) in FAULTY.items():
        for fingerprint in seen(plan, problem, accumulate):
            read = (fingerprint.accumulator, fingerprint.rounds, fingerprint.every)
            assert read == (accumulator, rounds, every), (kind, fingerprint)
            assert too_narrow(fingerprint).fault


# ---------------------------------------------------------------------------------------------------
# The traps, each beside its twin


def problem_of(
    reference: Callable[..., Any],
    kernel: Callable[..., Tensor],
    inputs: Callable[[], tuple[Any, ...]],
    dtype: torch.dtype = BF16,
) -> Problem:
    """A problem with inputs a, b, c, … and one output y."""
    names = tuple("abcdef"[: len(inputs())])
    return Problem(reference, lambda *given: (kernel(*given),), inputs, names, ("y",), (dtype,))


def read_one(problem: Problem, accumulate: Accumulator, seed: int = 0) -> Fingerprint:
    (fingerprint,) = seen(planned(problem, seed), problem, accumulate)
    return fingerprint


@pytest.mark.parametrize("seed", SEEDS)
def test_the_count_at_which_a_sum_stands_still_is_named(seed: int) -> None:
    stalled = read_one(ROW_SUM, FAULTY["bfloat16 in sequence"][0], seed)
    assert stalled.stops_at == 256
    assert stalled.sentence == (
        "`y` sums over `x` with a bfloat16 carry every contribution, which stops growing after 256 equal contributions"
    )
    assert read_one(ROW_SUM, HONEST["float32 in sequence"], seed).stops_at is None


def test_the_main_example_is_told_in_one_sentence() -> None:
    table, norm = seen(planned(EMBEDDING, 0), EMBEDDING, FAULTY["bfloat16 in sequence"][0])
    assert table.output == "grad_embed_weight" and table.stops_at is not None and 200 <= table.stops_at <= 300
    assert table.sentence.startswith(
        "`grad_embed_weight` sums over `grad_output` with a bfloat16 carry every contribution"
    )
    assert norm.output == "grad_norm_weight" and norm.confidence == CERTAIN


def test_few_calls_are_made() -> None:
    for problem in PROBLEMS.values():
        plan = planned(problem, 0)
        for accumulate, most in ((HONEST["float32 in sequence"], 40), (FAULTY["bfloat16 split-K partials"][0], 100)):
            readings = read_probes(plan, lambda inputs, add=accumulate, p=problem: p.kernel(add, *inputs))  # type: ignore[misc]
            assert max(r.calls for r in readings) <= most


def where_sparse(otherwise: Accumulator, least: float = 0.0) -> Accumulator:
    """Float32 where fewer than 8 terms are not zero (or not small beside the largest), something else elsewhere."""

    def accumulate(terms: Tensor) -> Tensor:
        bare = (terms.abs() > least * terms.abs().amax(0)).sum(0) < 8
        return torch.where(bare, terms.sum(0), otherwise(terms))

    return accumulate


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_that_recognises_sparse_inputs_sees_none(name: str, seed: int) -> None:
    problem = PROBLEMS[name]
    plan = planned(problem, seed)
    for evader in seen(plan, problem, where_sparse(FAULTY["bfloat16 in sequence"][0])):
        assert (evader.accumulator, evader.rounds) == (BFLOAT16, EVERY_CONTRIBUTION)
        assert too_narrow(evader).fault
    for twin in seen(plan, problem, where_sparse(HONEST["float32 in sequence"])):
        assert twin.accumulator == FLOAT32
        assert not too_narrow(twin).fault


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_that_counts_only_large_terms_is_seen_through(seed: int) -> None:
    evader = read_one(ROW_SUM, where_sparse(FAULTY["bfloat16 in sequence"][0], 2.0**-20), seed)
    assert evader.bits is not None and evader.bits < 14
    assert evader.rounds == WHEN_DISGUISED and evader.unbounded
    assert too_narrow(evader).fault
    twin = read_one(ROW_SUM, where_sparse(HONEST["float32 in sequence"], 2.0**-20), seed)
    assert not too_narrow(twin).fault


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_rounded_once_are_no_narrow_sum(seed: int) -> None:
    """Rounding each term to the I/O dtype before an fp32 sum is another grade, not another accumulator."""
    for fingerprint in seen(planned(EMBEDDING, seed), EMBEDDING, lambda t: pairwise(t.to(BF16).float())):
        assert fingerprint.accumulator == FLOAT32
        assert not too_narrow(fingerprint).fault


FLOAT32_MATMUL = problem_of(
    lambda a, b: a @ b,
    lambda add, a, b: torch.stack([add(b * row[:, None]) for row in a]),
    lambda: (torch.randn(4, 384), torch.randn(384, 12)),
    F32,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_tf32_operands_are_told_from_a_narrow_sum(seed: int) -> None:
    def tf32(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 2.0**11) / 2.0**11, exponent)

    downgraded = Problem(
        FLOAT32_MATMUL.reference,
        lambda add, a, b: FLOAT32_MATMUL.kernel(add, tf32(a), tf32(b)),
        FLOAT32_MATMUL.inputs,
        FLOAT32_MATMUL.input_names,
        FLOAT32_MATMUL.output_names,
        FLOAT32_MATMUL.output_dtypes,
    )
    narrow = read_one(downgraded, HONEST["float32 pairwise"], seed)
    assert (narrow.accumulator, narrow.rounds, narrow.unbounded) == (TF32_OPERANDS, OPERANDS, False)
    full = read_one(FLOAT32_MATMUL, HONEST["float32 pairwise"], seed)
    assert full.accumulator == FLOAT32
    assert too_narrow(narrow).fault and not too_narrow(full).fault
    # The hardware default of a reference that does the same is a bounded loss: a grade, not a fault.
    excused = too_narrow(narrow, native=narrow)
    assert (excused.fault, excused.reference_deficient) == (False, True)


def test_a_float64_sum_is_no_fault() -> None:
    exact = read_one(FLOAT32_MATMUL, lambda t: t.double().sum(0).float())
    assert exact.accumulator == FLOAT64
    assert not too_narrow(exact).fault


LAYER_NORM_WEIGHT = problem_of(
    lambda dy, x: (wide(dy) * torch.nn.functional.layer_norm(wide(x), (16,))).sum(0).to(dy.dtype),
    lambda add, dy, x: add(dy.float() * torch.nn.functional.layer_norm(x.float(), (16,))).to(BF16),
    lambda: (torch.randn(384, 16).to(BF16), torch.randn(384, 16).to(BF16)),
)
CAUSAL_ATTENTION = problem_of(
    lambda q, k, v: (causal_weights(wide(q), wide(k)) @ wide(v)).to(v.dtype),
    lambda add, q, k, v: torch.stack([add(v.float() * p[:, None]) for p in causal_weights(q.float(), k.float())]).to(
        BF16
    ),
    lambda: (torch.randn(192, 8).to(BF16), torch.randn(192, 8).to(BF16), torch.randn(192, 8).to(BF16)),
)
BINS = problem_of(
    lambda ids, x: torch.zeros(7, dtype=wide(x).dtype, device=x.device).scatter_add(0, ids, wide(x)).to(x.dtype),
    lambda add, ids, x: torch.cat(
        [add(torch.cat([x.float()[ids == row], torch.zeros(1)])[:, None]) for row in range(7)]
    ).to(BF16),
    lambda: (torch.randint(0, 7, (384,)), torch.randn(384).to(BF16)),
)
HALF_ROW_SUM = problem_of(
    lambda x: wide(x).sum(-1).to(x.dtype),
    lambda add, x: add(x.float().T).to(F16),
    lambda: (torch.randn(16, 384).to(F16),),
    F16,
)


def causal_weights(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.T / 8**0.5
    hidden = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@pytest.mark.parametrize(
    ("problem", "contributions"),
    [(LAYER_NORM_WEIGHT, 384), (CAUSAL_ATTENTION, 192), (BINS, 384), (HALF_ROW_SUM, 384)],
    ids=["layer norm weight", "causal attention", "bins", "float16 row sum"],
)
def test_sums_are_found_behind_other_structures(problem: Problem, contributions: int) -> None:
    honest = read_one(problem, HONEST["float32 in 128 lanes"])
    faulty = read_one(problem, FAULTY["bfloat16 in sequence"][0])
    assert (honest.accumulator, honest.contributions) == (FLOAT32, contributions)
    assert (faulty.accumulator, faulty.rounds) == (BFLOAT16, EVERY_CONTRIBUTION)


def test_fp8_operands_show_a_14_bit_accumulator_and_no_more() -> None:
    fp8 = torch.float8_e4m3fn
    problem = problem_of(
        lambda a, b: (a.to(F32) @ b.to(F32)).to(BF16),
        lambda add, a, b: torch.stack([add(b.float() * row[:, None]) for row in a.float()]).to(BF16),
        lambda: (torch.randn(4, 384).to(fp8), torch.randn(384, 12).to(fp8)),
    )
    promoted = read_one(problem, FAULTY["14 bits, promoted every 128"][0])
    assert (promoted.accumulator, promoted.rounds, promoted.every) == (FP8_TENSOR_CORE, INSIDE_BLOCKS, 128)
    assert not too_narrow(promoted, capability=(9, 0)).fault  # as wide as fp8 tensor cores of Hopper go
    for elsewhere in (None, (8, 9), (10, 0)):
        assert too_narrow(promoted, capability=elsewhere).fault
    longer = replace(problem, inputs=lambda: (torch.randn(4, 1000).to(fp8), torch.randn(1000, 12).to(fp8)))
    late = read_one(longer, lambda t: tensor_core(32, 14, 14, t, 256))
    assert (late.rounds, late.every) == (INSIDE_BLOCKS, 256)
    assert too_narrow(late, capability=(9, 0)).fault
    narrow = read_one(problem, FAULTY["14 bits"][0])
    honest = read_one(problem, HONEST["tensor core, truncating float32"])
    assert narrow.accumulator == FP8_TENSOR_CORE and too_narrow(narrow, capability=(9, 0)).fault
    assert honest.bits is None and honest.at_least == 17  # the reach of float8_e4m3fn
    assert too_narrow(honest).verified and not too_narrow(honest).fault


def test_an_output_behind_a_nonlinearity_is_not_probed() -> None:
    problem = problem_of(
        lambda x: torch.nn.functional.rms_norm(wide(x), (64,)).to(x.dtype),
        lambda add, x: x,
        lambda: (torch.randn(4, 64).to(BF16),),
    )
    plan = planned(problem, 0)
    assert plan.sums == () and plan.unprobed == {"y": "no input acts linearly on it"}
    assert read_probes(plan, lambda inputs: None) == ()


def test_a_kernel_that_refuses_the_probes_is_not_verified() -> None:
    (refused,) = fingerprints(read_probes(planned(ROW_SUM, 0), lambda inputs: None))
    assert (refused.accumulator, refused.bits) == (NOT_DETERMINED, None)
    assert "no answer" in refused.sentence
    verdict = too_narrow(refused)
    assert not verdict.verified and not verdict.fault


def test_a_wrong_factor_is_not_called_an_accumulator() -> None:
    doubled = read_one(ROW_SUM, lambda t: 2 * pairwise(t))
    assert (doubled.accumulator, doubled.bits) == (NOT_DETERMINED, None)
    assert "wrong even without swamping" in doubled.sentence
    assert doubled.wrong and not too_narrow(doubled).verified
    assert not read_one(ROW_SUM, pairwise).wrong


def test_a_deficient_reference_excuses_a_bounded_loss_only() -> None:
    """PyTorch's own CPU embedding gradient carries bfloat16 sums: no reason to accept another such carry."""

    @torch.no_grad()
    def autograd_reference(grad: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(torch.nn.functional.embedding(ids, leaf), leaf, grad)
        return gradient

    def kernel(add: Accumulator, grad: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        table = torch.zeros(weight.shape)
        for row in ids.unique().tolist():  # type: ignore[no-untyped-call]
            table[row] = add(grad.float()[ids == row])
        return table.to(BF16)

    problem = problem_of(
        autograd_reference,
        kernel,
        lambda: (torch.randn(384, 16).to(BF16), torch.randint(0, 9, (384,)), torch.randn(9, 16).to(BF16)),
    )
    plan = planned(problem, 0)
    (native,) = fingerprints(read_probes(plan, lambda inputs: (problem.reference(*inputs),)))
    assert (native.accumulator, native.rounds) == (BFLOAT16, EVERY_CONTRIBUTION)
    verdicts = {
        kind: too_narrow(seen(plan, problem, accumulate)[0], native=native)
        for kind, accumulate in {
            "honest": HONEST["float32 pairwise"],
            "bounded": FAULTY["bfloat16 split-K partials"][0],
            "unbounded": FAULTY["bfloat16 in sequence"][0],
        }.items()
    }
    assert all(v.reference_deficient for v in verdicts.values())
    assert {kind: v.fault for kind, v in verdicts.items()} == {"honest": False, "bounded": False, "unbounded": True}


def test_probes_leave_the_callers_inputs_alone_and_repeat_with_the_seed() -> None:
    torch.manual_seed(0)
    inputs = MATMUL.inputs()
    kept = [i.clone() for i in inputs]
    calls: list[Tensor] = []

    def scribbling(given: Any) -> tuple[Tensor, ...]:
        calls.append(given[0].clone())
        outputs = MATMUL.kernel(pairwise, *given)
        for tensor in given:
            tensor.fill_(7.0)
        return outputs

    def readings() -> Any:
        return probe_accumulators(
            oracle_of(MATMUL),
            inputs,
            scribbling,
            **traced(MATMUL, inputs),
            **outputs_of(MATMUL),
            seed=3,
        )

    first = readings()
    halfway = len(calls)
    assert first == readings()
    assert all(torch.equal(a, b) for a, b in zip(calls[:halfway], calls[halfway:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
    assert {r.slot for r in first} == {"a"}  # "b" feeds the same reduction
