"""Every simulated accumulator is named right, and no honest one is ever called narrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from seatrial.numerics.oracle import Oracle
from seatrial.numerics.probes import (
    FLOAT32,
    Fingerprint,
    fingerprints,
    plan_probes,
    read_probes,
    too_narrow,
)
from seatrial.numerics.trace import trace
from simulated_kernels import FAULTY, HONEST, PROBLEMS, Accumulator, Problem


def planned(problem: Problem, seed: int, placements: int = 3) -> Any:
    torch.manual_seed(seed)
    inputs = problem.inputs()
    return plan_probes(
        Oracle(problem.reference, problem.output_names),
        inputs,
        trace=trace(problem.reference, inputs, problem.input_names),
        output_names=problem.output_names,
        input_names=problem.input_names,
        output_dtypes=problem.output_dtypes,
        placements=placements,
        seed=seed,
    )


def seen(plan: Any, problem: Problem, accumulate: Accumulator) -> tuple[Fingerprint, ...]:
    return fingerprints(read_probes(plan, lambda inputs: problem.kernel(accumulate, *inputs)))


SEEDS = range(5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    for kind, (accumulate, accumulator, rounds) in FAULTY.items():
        for fingerprint in seen(plan, problem, accumulate):
            assert (fingerprint.accumulator, fingerprint.rounds) == (accumulator, rounds), (kind, fingerprint)
            assert too_narrow(fingerprint).fault
