"""Accumulators by name: every class on every operation, orders that change, operands, clamps, and wrong sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import accumulators as bench
from benchmarks.accumulators import BF16, CLASSES, F16, F32, OPERATIONS, Accumulator, Operation
from torch import Tensor

import seatrial
from seatrial import Outcome
from seatrial.devices import pick
from seatrial.numerics import accumulators as names
from seatrial.numerics.accumulators import CERTAIN, LIKELY, NOT_DETERMINED, Fingerprint, too_narrow
from seatrial.numerics.probes import fingerprints, read_probes

CPU = pick("cpu")
MATMUL, ROW_SUM, SCATTER, _ = OPERATIONS
FP32 = CLASSES[0]


pytestmark = pytest.mark.usefixtures("one_thread")


def read(
    operation: Operation, how: Accumulator, terms: int = 500, inputs: torch.dtype = F32, output: torch.dtype = BF16
) -> Fingerprint:
    plan = bench.planned(operation, terms, inputs, output, terms, CPU)
    return bench.read(plan, lambda given: bench.run(operation, how, output, given))


def added_up(accumulate: Callable[[Tensor], Tensor]) -> Accumulator:
    return replace(FP32, accumulate=accumulate)


def after(operand: Callable[[Tensor], Tensor]) -> Accumulator:
    return replace(FP32, operand=operand)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operation", OPERATIONS, ids=[o.name for o in OPERATIONS])
def test_every_class_is_told_apart_from_the_others(operation: Operation, seed: int) -> None:
    rows = list(bench.simulated([seed], CPU, [operation]))
    assert len(rows) == 3 * len(CLASSES) - 1
    for row in rows:
        assert row.right, row.sentence
        assert row.fault is not row.honest


def test_the_one_line_names_the_axis_the_carry_and_the_block() -> None:
    carried = read(MATMUL, CLASSES[4])
    assert carried.sentence == "`out` sums over `K` with a bfloat16 carry every 64 terms"
    assert carried.confidence == CERTAIN
    assert read(MATMUL, FP32).sentence == "`out` sums over `K` in float32"
    assert read(SCATTER, CLASSES[7], 384).sentence == "`out` sums over `tokens` with bfloat16 partial sums of 48 terms"


# -- other places and orders ------------------------------------------------------------------------


def in_any_order(accumulate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda terms: accumulate(terms[torch.randperm(terms.shape[0])])


def tiles_in_any_order(terms: Tensor) -> Tensor:
    """A program per 32 terms that adds its float32 sum to the result with a bfloat16 atomic."""
    carry = torch.zeros(terms.shape[1:], dtype=BF16)
    tiles = torch.split(terms, 32)
    for tile in torch.randperm(len(tiles)).tolist():
        carry += tiles[tile].sum(0).to(BF16)
    return carry.float()


def in_bfloat16_lanes(terms: Tensor, lanes: int = 32) -> Tensor:
    """Threads that each add up every 32nd term in bfloat16, and add that up in float32."""
    missing = torch.zeros(-terms.shape[0] % lanes, *terms.shape[1:])
    strided = torch.cat([terms, missing]).reshape(-1, lanes, *terms.shape[1:])
    return bench.step_by_step(BF16)(strided).float().sum(0)


def in_a_bfloat16_tree(terms: Tensor) -> Tensor:
    level = terms.to(BF16)
    while level.shape[0] > 1:
        half = -(-level.shape[0] // 2)
        other = torch.cat([level[half:], torch.zeros(2 * half - level.shape[0], *level.shape[1:], dtype=BF16)])
        level = level[:half] + other
    return level[0].float()


@pytest.mark.parametrize(
    ("accumulate", "rounds", "every", "confidence"),
    [
        (in_any_order(bench.step_by_step(BF16)), names.EVERY_CONTRIBUTION, 1, CERTAIN),
        (lambda t: bench.step_by_step(BF16)(t.flip(0)), names.EVERY_CONTRIBUTION, 1, CERTAIN),
        (tiles_in_any_order, names.EVERY_BLOCK, 32, LIKELY),
        (lambda t: bench.carried_per_block(t.flip(0)), names.EVERY_BLOCK, 64, LIKELY),
        (in_bfloat16_lanes, names.IN_LANES, None, CERTAIN),
    ],
    ids=["atomics", "from the end", "atomics between tiles", "blocks from the end", "lanes"],
)
@pytest.mark.parametrize("terms", [331, 500, 700])
def test_other_orders_are_named_too(
    accumulate: Callable[[Tensor], Tensor], rounds: str, every: int | None, confidence: str, terms: int
) -> None:
    seen = read(SCATTER, added_up(accumulate), terms)
    assert (seen.accumulator, seen.rounds, seen.every) == (names.BFLOAT16, rounds, every)
    assert seen.confidence == confidence or rounds == names.EVERY_BLOCK
    assert seen.unbounded and too_narrow(seen).fault
    honest = read(SCATTER, added_up(in_any_order(lambda t: t.sum(0))), terms)
    assert honest.accumulator == names.FLOAT32 and not too_narrow(honest).fault


def test_a_tree_is_no_compensated_carry() -> None:
    tree = read(ROW_SUM, added_up(in_a_bfloat16_tree), 512)
    assert (tree.accumulator, tree.rounds) == (names.BFLOAT16, names.IN_A_TREE)
    assert too_narrow(tree).fault and not tree.unbounded


def test_a_name_that_is_not_determined_is_still_a_fault() -> None:
    """17 bits are no accumulator that anyone builds."""

    def odd(terms: Tensor) -> Tensor:
        carry = torch.zeros(terms.shape[1:])
        for term in terms.unbind():
            carry = bench.cut(carry + term, 17)
        return carry

    seen = read(ROW_SUM, added_up(odd))
    assert (seen.accumulator, seen.confidence) == (NOT_DETERMINED, NOT_DETERMINED)
    assert "about 17 significant bits; which accumulator that is was not determined" in seen.sentence
    assert too_narrow(seen).fault


# -- operands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS, ids=[o.name for o in OPERATIONS])
@pytest.mark.parametrize(
    ("operand", "accumulator"),
    [
        (bench.to_tf32, names.TF32_OPERANDS),
        (lambda t: t.half().float(), names.FLOAT16_OPERANDS),
        (lambda t: t.bfloat16().float(), names.BFLOAT16_OPERANDS),
    ],
    ids=["tf32", "float16", "bfloat16"],
)
def test_a_float32_contract_computed_in_less_is_named_and_rejected(
    operation: Operation, operand: Callable[[Tensor], Tensor], accumulator: str
) -> None:
    seen = read(operation, after(operand), output=F32)
    assert (seen.accumulator, seen.rounds, seen.confidence) == (accumulator, names.OPERANDS, CERTAIN)
    assert too_narrow(seen).fault
    assert not too_narrow(seen, native=seen).fault  # what the reference does by the hardware's default is excused
    assert not too_narrow(read(operation, FP32, output=F32)).fault


def test_fp8_operands_behind_a_bfloat16_contract_are_named() -> None:
    seen = read(MATMUL, after(lambda t: t.to(torch.float8_e4m3fn).float()), inputs=BF16)
    assert seen.accumulator == names.FP8_OPERANDS or seen.wrong  # fp8's range does not hold every probe
    rounded_terms = read(MATMUL, added_up(lambda t: t.to(BF16).float().sum(0)), inputs=BF16)
    assert not too_narrow(rounded_terms).fault


def test_float16_is_known_by_its_range() -> None:
    wide = added_up(lambda t: _steps_of_11_bits(t))
    narrow = added_up(bench.step_by_step(F16))
    assert read(ROW_SUM, narrow).accumulator == names.FLOAT16
    seen = read(ROW_SUM, wide)
    assert seen.accumulator == NOT_DETERMINED and seen.bits == 11 and too_narrow(seen).fault


def _steps_of_11_bits(terms: Tensor) -> Tensor:
    carry = torch.zeros(terms.shape[1:])
    for term in terms.unbind():
        carry = bench.to_tf32(carry + term)
    return carry


# -- clamps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [260.0, 4000.0])
def test_a_sum_that_the_reference_clamps_does_not_stand_still(most: float) -> None:
    """Clamped below what equal terms come to, it is not probed at all; above, the clamp does not show."""
    clamped = replace(ROW_SUM, reference=lambda x: bench.wide(x).sum(-1).clamp(-most, most))
    plan = bench.planned(clamped, 500, F32, BF16, 0, CPU)
    honest = fingerprints(read_probes(plan, lambda given: (given[0].sum(-1).clamp(-most, most).to(BF16),)))
    assert len(honest) == (most > 500)
    for seen in honest:
        assert seen.stops_at is None and not seen.unbounded and not too_narrow(seen).fault


def test_a_clamp_of_the_kernel_is_no_carry_that_stands_still() -> None:
    seen = read(ROW_SUM, added_up(lambda t: t.sum(0).clamp(-260, 260)))
    assert seen.stops_at is None and not seen.unbounded
    stalled = read(ROW_SUM, CLASSES[3])
    assert stalled.stops_at == 256


# -- wrong without swamping -------------------------------------------------------------------------


def make(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(384, 16, generator=generator)
    return {"dy": torch.randn(384, 16, generator=generator), "x": x, "mean": x.mean(-1, keepdim=True)}


def centred(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (dy * (x - mean)).sum(0)


def centred_again(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (dy * (x - x.mean(-1, keepdim=True))).sum(0)


def doubled(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return 2 * (dy * (x - mean)).sum(0)


def judged(kernel: Callable[..., Tensor]) -> Sequence[Any]:
    report = seatrial.check(
        kernel, reference=centred, inputs=make, policy="quick", device="cpu", only=["narrow-accumulator"]
    )
    return [f for f in report.findings if f.check == "narrow-accumulator"]


def test_a_sum_that_is_wrong_without_swamping_is_rejected() -> None:
    (wrong,) = judged(doubled)
    assert (wrong.outcome, wrong.cause) == (Outcome.FAILED, "wrong-sum")
    assert wrong.details["accumulator"] == NOT_DETERMINED
    (right,) = judged(centred)
    assert right.outcome is Outcome.HELD


def test_a_kernel_that_relies_on_what_ties_its_inputs_is_not_blamed_for_the_fill() -> None:
    """The probes put a mean beside an x that has another one; on inputs as drawn the kernel is right."""
    (finding,) = judged(centred_again)
    assert finding.outcome is not Outcome.FAILED
