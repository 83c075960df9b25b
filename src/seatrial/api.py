"""The Python door: `seatrial.check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from seatrial.errors import UsageError
from seatrial.model import Candidate, Problem, Report
from seatrial.policy import POLICIES, Policy

Place = str | PathLike[str]


def check(
    problem: Place | Callable[..., Any],
    candidate: Place | Callable[..., Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    entry_point: str | None = None,
    device: str = "auto",
    policy: str | Policy = "standard",
    seed: int | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    fail_fast: bool = False,
    any_layout: bool = False,
    reproducers: Place | None = None,
) -> Report:
    """Judge one candidate; the same as `seatrial check`.

    With files: check(problem_folder, solution_json_or_py). With plain callables: check(kernel, reference=f,
    inputs=make), where make(seed) returns the inputs as a dict, a tuple or one tensor, and kernel and reference
    take them positionally: a dict is put into the order of the reference's parameters when its keys are their names,
    and a kernel that names the inputs in another order is refused. `device` is "auto", "cpu", "cuda" or "cuda:N"; `seed` is fresh when None and stands in
    the report. `any_layout` demands right values for inputs of any layout, where else a kernel for dense inputs passes with
    a limit. With `reproducers`, a folder, every objection that a call or two can show is written there as a
    standalone Python file of its smallest case, named in the finding. Raises UsageError when the problem, the
    candidate or an option cannot be understood.
    """
    from seatrial.devices import pick
    from seatrial.verify import Options, fresh_seed, verify

    chosen = policy_named(policy)
    loaded, kernel = _load(problem, candidate, reference, inputs, entry_point)
    options = Options(
        policy=replace(chosen, any_layout=any_layout or chosen.any_layout),
        device=pick(device),
        seed=fresh_seed() if seed is None else seed,
        only=tuple(only),
        skip=tuple(skip),
        fail_fast=fail_fast,
        reproducers=None if reproducers is None else Path(reproducers),
    )
    return verify(loaded, [kernel], options)[0]


def policy_named(policy: str | Policy) -> Policy:
    """A policy by name. Raises UsageError naming the known ones."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise UsageError(f"there is no policy named {policy!r}; known are {', '.join(POLICIES)}")
    return POLICIES[policy]


def _load(
    problem: Place | Callable[..., Any],
    candidate: Place | Callable[..., Any] | None,
    reference: Callable[..., Any] | None,
    inputs: Callable[..., Any] | None,
    entry_point: str | None,
) -> tuple[Problem, Candidate]:
    from seatrial.formats import load_candidates, load_problem
    from seatrial.formats.plain import candidate_from_callable, problem_from_callables, refuse_other_order

    if callable(problem):
        if candidate is not None or reference is None or inputs is None:
            raise UsageError("a plain kernel needs reference= and inputs=: check(kernel, reference=f, inputs=make)")
        plain = problem_from_callables(reference, inputs)
        refuse_other_order(problem, plain)
        return plain, candidate_from_callable(problem)
    if candidate is None:
        raise UsageError("a problem folder needs a candidate: check(problem, candidate)")
    loaded = load_problem(Path(problem))
    if callable(candidate):
        refuse_other_order(candidate, loaded)
        return loaded, candidate_from_callable(candidate)
    return loaded, load_candidates([Path(candidate)], entry_point=entry_point, problem=loaded)[0]
