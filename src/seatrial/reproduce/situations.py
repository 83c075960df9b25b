"""From a finding back to calls that show it.

A finding names its check and its seed; the check's plan, which no candidate can change, holds the case. A narrow
accumulator was read from many probes: of the calls that were made, the first that shows a wrong value is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from seatrial.checks import CHECKS
from seatrial.checks.base import NotApplicable
from seatrial.model import Finding, Value
from seatrial.reproduce.nouns import Situation, Symptom
from seatrial.reproduce.symptoms import examine

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.bench import Bench
    from seatrial.study import Case, Study

VALUE_CHECKS = ("wrong-values", "fitted-inputs", "fitted-sizes")
NEED_AN_OUTPUT = ("values", "replayed", "unwritten")
MANY_ROUNDINGS = 4.0  # times what is allowed
MOST_SECONDS = 30.0  # for finding the case again, beside the seconds that the search may take
PROBE_CALLS = 6  # of the recorded probe calls, spread over all of them


def situation_of(study: Study, bench: Bench, finding: Finding) -> tuple[Situation, Symptom] | None:
    """The calls behind a finding, as the audit made them, with what they show now.

    None where no single call or pair of calls shows it: a training run, a tampered process, a fault that does not
    repeat. Raises InfrastructureError where the study cannot make its inputs.
    """
    started = time.monotonic()
    for situation in _candidates(study, bench, finding):
        if time.monotonic() - started > MOST_SECONDS + study.policy.shrink_s:
            return None
        found = examine(study, bench, situation).symptom
        if found is not None and found.quality > 0:
            return replace(situation, family=found.family), found
    return None


def _candidates(study: Study, bench: Bench, finding: Finding) -> Iterator[Situation]:
    if finding.check == "does-not-load":
        yield Situation("load", {}, (), family=finding.cause.partition(":")[2])
        return
    output = _position(study, finding)
    if finding.check == "narrow-accumulator":
        yield from _accumulator(study, bench, output)
        return
    kind, case = _kind(finding), _case(study, finding)
    if kind is None or case is None or (kind in NEED_AN_OUTPUT and output is None):
        return
    calls = [tuple(study.inputs(c)) for c in (*_earlier(study, finding, case), case)]
    situation = Situation(kind, dict(case.workload.axes), tuple(calls), output, _family(finding))
    if finding.check == "assumed-layout":
        told = finding.details
        situation = replace(situation, layout=str(told["layout"]), relaid=tuple(told["inputs"]))
    yield situation


def _kind(finding: Finding) -> str | None:
    if finding.check in VALUE_CHECKS and finding.cause.startswith("values:"):
        return "values"
    if finding.cause == "layout:wrong":
        return "values"
    if finding.check == "crashing-call" or finding.cause.startswith(("size:", "layout:")):
        return "dies"
    known = {
        ("replayed-result", "replayed"): "replayed",
        ("replayed-result", "overwritten"): "overwritten",
        ("stale-output", "unwritten"): "unwritten",
        ("mutated-input", "mutated"): "mutated",
        ("broken-contract", "contract"): "contract",
        ("out-of-bounds", "out-of-bounds:write"): "writes-beyond",
        ("out-of-bounds", "out-of-bounds:read"): "reads-beyond",
    }
    return known.get((finding.check, finding.cause))


def _family(finding: Finding) -> str:
    if finding.cause == "layout:wrong":
        return ""
    return finding.cause.partition(":")[2] if finding.cause.startswith(("call:", "size:", "layout:")) else ""


def _position(study: Study, finding: Finding) -> int | None:
    names = [s.name for s in study.problem.outputs]
    return names.index(finding.output) if finding.output in names else None


def _plan(study: Study, check: str) -> list[Case]:
    jobs = CHECKS[check].plan(study)
    return [] if isinstance(jobs, NotApplicable) else [case for job in jobs for case in job.cases]


def _case(study: Study, finding: Finding) -> Case | None:
    where = finding.where
    plans = [finding.check, *CHECKS] if finding.check == "out-of-bounds" else [finding.check]  # any call may overrun
    for case in (case for check in plans for case in _plan(study, check)):
        if (case.seed, case.recipe, dict(case.workload.axes)) == (where.seed, where.inputs, where.axes):
            return case
    return None


def _earlier(study: Study, finding: Finding, case: Case) -> Sequence[Case]:
    """The call before: the first one for a replay, the one just before for an overwritten result."""
    if finding.check != "replayed-result":
        return ()
    cases = _plan(study, finding.check)
    return [cases[0] if finding.cause == "replayed" else cases[max(0, cases.index(case) - 1)]]


# -- narrow accumulators ------------------------------------------------------------------------------


def _accumulator(study: Study, bench: Bench, output: int | None) -> Iterator[Situation]:
    """Many contributions to one element first, then the probes."""
    if output is None:
        return
    growing = [g.inputs for g in reversed(study.growth_cases) if output in g.counts]
    for inputs in growing:
        yield _values(study, inputs, output, MANY_ROUNDINGS)
    probes = _probe_calls(study, bench, output)
    for inputs in probes:
        yield _values(study, inputs, output, MANY_ROUNDINGS)
    for inputs in (*growing, *probes):
        yield _values(study, inputs, output, 1.0)


def _values(study: Study, inputs: Sequence[Value], output: int, least: float) -> Situation:
    on_cpu = tuple(v.cpu() if hasattr(v, "cpu") else v for v in inputs)
    return Situation("values", _axes(study, on_cpu), (on_cpu,), output, "finite", least)


def _axes(study: Study, inputs: Sequence[Value]) -> dict[str, int]:
    axes = dict(study.probe_case.workload.axes)
    for spec, value in zip(study.problem.inputs, inputs, strict=True):
        for axis, length in zip(spec.shape or (), getattr(value, "shape", ()), strict=True):
            if axis in study.problem.var_axes:
                axes[axis] = int(length)
    return axes


def _probe_calls(study: Study, bench: Bench, output: int) -> list[tuple[Value, ...]]:
    from seatrial.numerics.probes import ProbePlan, read_probes

    kernel = bench.kernel(study.probe_case)
    seen: list[tuple[Value, ...]] = []

    def recorded(inputs: Sequence[Value]) -> tuple[Tensor, ...] | None:
        seen.append(tuple(v.clone() if hasattr(v, "clone") else v for v in inputs))
        return kernel(inputs)

    name = study.problem.outputs[output].name
    read_probes(ProbePlan(tuple(s for s in study.probe_plan.sums if s.output == name), {}), recorded)
    step = max(1, len(seen) // PROBE_CALLS)
    return seen[::step]
