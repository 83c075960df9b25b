"""A result that belongs to an earlier call.

What it shows      new values in tensors of the same shapes give new results
Why it matters     a cache keyed by shape, pointer or object passes every benchmark that repeats its inputs, and serves
                   the first request's answer for ever
How                several draws of one workload follow each other in one process, every one in fresh tensors; each
                   result is compared with its own oracle and with the earlier results; the child keeps the last result
                   alive and sees whether the next one lies in its memory
What it misses     caches keyed by the values themselves, and in-place changes behind a tensor's version counter
Cost               three calls
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.bench import Bench
from seatrial.checks.base import (
    Conclusion,
    Evidence,
    Example,
    Job,
    NotApplicable,
    failed,
    held,
    not_verified,
    unusable,
    where,
)
from seatrial.errors import InfrastructureError
from seatrial.model import CallRecord, Finding
from seatrial.study import Case, Study

NAME = "replayed-result"
TITLE = "each call's result is its own"

DRAWS = 3


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Draws of one workload, one after the other in one fresh process."""
    if all(not spec.shape for spec in study.problem.inputs):
        return NotApplicable("no tensor inputs whose values could change")
    cases = tuple(study.case(study.smallest, draw=40 + i) for i in range(DRAWS))
    return (Job("new values, same shapes", cases),)


def observe(bench: Bench, job: Job) -> Evidence:
    """All draws in one process that has made no call before."""
    bench.fresh()
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """A later result that is bit for bit the first, where the exact results differ, is a replay."""
    from seatrial.numerics.moved import share_changed

    cases, records = evidence[0].job.cases, evidence[0].records
    for case, record in zip(cases, records, strict=True):
        if not record.usable:
            return Conclusion([not_verified(NAME, unusable(record), where=where(case))])
    findings = [f for i in range(1, len(cases)) for f in _compare(study, cases, records, i)]
    reused = [
        i
        for i in range(1, len(records))
        if records[i].facts.get("reuses_output")
        and any(share_changed(a, b) for a, b in zip(records[i - 1].outputs, records[i].outputs, strict=True))
    ]
    if reused:
        findings.append(_overwritten(cases[reused[0]], reused[0]))
    return Conclusion(findings[:1] or [held(NAME, f"{len(cases)} draws in one process gave results of their own")])


def _compare(study: Study, cases: Sequence[Case], records: Sequence[CallRecord], later: int) -> list[Finding]:
    from seatrial.numerics.moved import share_changed, share_moved

    try:
        exact = [study.exact(c) for c in (cases[0], cases[later])]
    except InfrastructureError as error:
        return [not_verified(NAME, str(error), where=where(cases[later]))]
    for i, spec in enumerate(study.problem.outputs):
        should_change = share_moved(exact[0][i], exact[1][i], study.stored_dtypes[i])
        changed = share_changed(records[0].outputs[i], records[later].outputs[i])
        if should_change > 0.5 and changed == 0.0:
            return [
                failed(
                    NAME,
                    f"call {later + 1} returned `{spec.name}` of call 1 again, bit for bit, "
                    f"although {should_change:.0%} of its exact values changed",
                    output=spec.name,
                    cause="replayed",
                    measured=changed,
                    allowed=should_change,
                    unit="share of elements that changed",
                    where=where(cases[later]),
                    advice="Do not cache by shape, pointer or object; compute from the values of this call.",
                )
            ]
    return []


def _overwritten(case: Case, call: int) -> Finding:
    return failed(
        NAME,
        f"call {call + 1} returned its result in the memory of call {call}'s, which is overwritten while it is still in use",
        cause="overwritten",
        measured=1.0,
        allowed=0.0,
        unit="results overwritten",
        where=where(case),
        advice="Allocate the output of every call, or take it as an argument.",
    )


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """CACHE = {{}}

def run(x):
    key = {}
    if key not in CACHE:
        CACHE[key] = x * 2
    return CACHE[key].clone()
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("x.numpy().tobytes()"))
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    _CANDIDATE.format("tuple(x.shape)"),
    because="of call 1 again",
    also=("wrong-values", "fitted-inputs"),
)
