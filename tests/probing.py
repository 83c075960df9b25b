"""What the tests of probes and of error growth ask of a simulated problem: its oracle, its trace and its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seatrial.numerics.oracle import Oracle
from seatrial.numerics.probes import plan_probes
from seatrial.numerics.trace import trace
from simulated_kernels import Problem


def oracle_of(problem: Problem) -> Oracle:
    """The problem's reference in float64."""
    return Oracle(problem.reference, problem.output_names)


def traced(problem: Problem, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The trace of the reference on these inputs, with the names that it goes by: keyword arguments of what uses it."""
    return {"trace": trace(problem.reference, inputs, problem.input_names), "input_names": problem.input_names}


def outputs_of(problem: Problem) -> dict[str, Any]:
    """Names and dtypes of the outputs, as keyword arguments."""
    return {"output_names": problem.output_names, "output_dtypes": problem.output_dtypes}


def planned(problem: Problem, seed: int, placements: int = 3) -> Any:
    """The probes of a fresh draw of the problem's inputs."""
    torch.manual_seed(seed)
    inputs = problem.inputs()
    return plan_probes(
        oracle_of(problem),
        inputs,
        **traced(problem, inputs),
        **outputs_of(problem),
        placements=placements,
        seed=seed,
    )
