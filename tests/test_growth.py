"""The curve of a narrow carry climbs with the number of contributions; an honest kernel's stays flat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from probing import oracle_of, outputs_of, traced
from seatrial.model import Growth, GrowthPoint
from seatrial.numerics.growth import GrowthCase, length_cases, measure_growth, repeat_cases, slope
from seatrial.numerics.oracle import Oracle
from seatrial.numerics.trace import linear_slots
from simulated_kernels import BF16, EMBEDDING, F32, MATMUL, between_tiles, in_lanes, in_random_order, in_sequence

SEEDS = range(5)


pytestmark = pytest.mark.usefixtures("one_thread")


def embedding_cases(seed: int, points: int = 5) -> tuple[Oracle, tuple[GrowthCase, ...]]:
    torch.manual_seed(seed)
    inputs = EMBEDDING.inputs(tokens=1024, rows=96)
    oracle = oracle_of(EMBEDDING)
    cases = repeat_cases(
        inputs,
        **traced(EMBEDDING, inputs),
        output_shapes=[(96, 16), (16,)],
        slots=linear_slots(oracle, inputs),
        points=points,
        seed=seed,
    )
    return oracle, cases


def embedding_growth(seed: int, accumulate: Any) -> Growth:
    oracle, cases = embedding_cases(seed)
    (growth,) = measure_growth(
        oracle,
        cases,
        lambda inputs: EMBEDDING.kernel(accumulate, *inputs),
        **outputs_of(EMBEDDING),
    )
    return growth


def test_two_calls_hold_every_count_from_one_to_all() -> None:
    _, cases = embedding_cases(0)
    assert len(cases) == 2
    seen = set()
    for case in cases:
        ids, counts = case.inputs[1], case.counts[0]
        assert isinstance(ids, Tensor) and isinstance(counts, Tensor)
        assert ids.shape == (4, 256) and int(ids.max()) < 96
        present = torch.bincount(ids.reshape(-1), minlength=96)
        looked_at = counts.reshape(-1) > 0
        assert torch.equal(counts.reshape(-1)[looked_at], present[looked_at])
        seen |= set(counts.reshape(-1)[looked_at].tolist())
    assert seen == {1, 6, 32, 181, 1024}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("accumulate", [partial(in_sequence, F32), in_lanes, in_random_order])
def test_honest_accumulation_stays_on_the_floor(seed: int, accumulate: Any) -> None:
    growth = embedding_growth(seed, accumulate)
    assert growth.output == "grad_embed_weight"
    assert [p.contributions for p in growth.points] == [1, 6, 32, 181, 1024]
    for point in growth.points:
        assert point.error <= 1.02 * point.floor
    assert growth.exponent is not None and abs(growth.exponent) < 0.15


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bfloat16_carry_grows_with_the_repeats(seed: int) -> None:
    growth = embedding_growth(seed, partial(in_sequence, BF16))
    first, last = growth.points[0], growth.points[-1]
    assert first.error <= 1.02 * first.floor  # one contribution: nothing to add up, nothing to lose
    assert last.error > 20 * last.floor
    assert growth.exponent is not None and growth.exponent > 0.4


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reduction_length_is_a_lever_where_no_index_is(seed: int) -> None:
    oracle = oracle_of(MATMUL)

    def draw_at(length: int) -> Sequence[Any] | None:
        torch.manual_seed(seed + length)
        return None if length == 64 else (torch.randn(4, length).to(BF16), torch.randn(length, 12).to(BF16))

    cases = length_cases(
        MATMUL.reference,
        draw_at,
        [32, 64, 128, 512, 2048],
        input_names=MATMUL.input_names,
        output_names=MATMUL.output_names,
        axis="K",
    )
    assert [c.counts for c in cases] == [{0: 32}, {0: 128}, {0: 512}, {0: 2048}]  # 64 cannot be drawn
    curves = {
        kind: measure_growth(
            oracle,
            cases,
            lambda inputs, add=add: MATMUL.kernel(add, *inputs),  # type: ignore[misc]
            **outputs_of(MATMUL),
        )[0]
        for kind, add in {"honest": in_lanes, "carry": partial(between_tiles, BF16)}.items()
    }
    assert all(p.error <= 1.02 * p.floor for p in curves["honest"].points)
    assert curves["carry"].points[-1].error > 2 * curves["carry"].points[-1].floor
    assert curves["honest"].lever == "reduction length, through K"


def test_honest_noise_raises_the_floor() -> None:
    oracle, cases = embedding_cases(0)

    def floors(sigma: float) -> list[float]:
        (growth,) = measure_growth(
            oracle,
            cases,
            lambda inputs: EMBEDDING.kernel(in_lanes, *inputs),
            **outputs_of(EMBEDDING),
            sigma=lambda inputs: [torch.full((96, 16), sigma), torch.zeros(16)],
        )
        return [p.floor for p in growth.points]

    assert all(noisy > bare for noisy, bare in zip(floors(1.0), floors(0.0), strict=True))


def test_a_kernel_that_refuses_gives_no_curve() -> None:
    oracle, cases = embedding_cases(0)
    curves = measure_growth(
        oracle,
        cases,
        lambda inputs: None,
        **outputs_of(EMBEDDING),
    )
    assert curves == ()


def test_a_kernel_that_gives_nan_has_an_infinite_error_and_no_slope() -> None:
    oracle, cases = embedding_cases(0)
    (growth,) = measure_growth(
        oracle,
        cases,
        lambda inputs: tuple(o * float("nan") for o in EMBEDDING.kernel(in_lanes, *inputs)),
        **outputs_of(EMBEDDING),
    )
    assert all(p.error == float("inf") for p in growth.points)
    assert growth.exponent is None


def test_the_slope_is_that_of_a_power_law() -> None:
    points = [GrowthPoint(contributions=n, error=3e-4 * n**0.75, floor=1e-3) for n in (1, 8, 64, 512)]
    assert slope(points) == pytest.approx(0.75)
    assert slope(points[:2]) is None
