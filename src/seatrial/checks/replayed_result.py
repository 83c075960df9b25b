"""A result that belongs to an earlier call.

What it shows      new values in tensors of the same shapes give new results
Why it matters     a cache keyed by shape, pointer or object passes every benchmark that repeats its inputs, and serves
                   the first request's answer for ever
How                several draws of one workload follow each other in one process, every one in fresh tensors; each
                   result is compared with its own oracle and with the earlier results; the child keeps the last result
                   alive and sees whether the next one lies in its memory. Then new values are written into the same
                   tensors (address, object and version stay), as when weights are loaded anew: what is right in fresh
                   tensors and wrong there is a cache's
What it misses     caches keyed by the values themselves, and by single elements
Cost               seven calls
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
from seatrial.values import wrong_outputs

NAME = "replayed-result"
TITLE = "each call's result is its own"

DRAWS = 3
FRESH, SAME = "new values in new tensors", "new values in the same tensors"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Draws of one workload, one after the other in one fresh process."""
    if all(not spec.shape for spec in study.problem.inputs):
        return NotApplicable("no tensor inputs whose values could change")
    cases = tuple(study.case(study.smallest, draw=40 + i) for i in range(DRAWS))
    return (Job(FRESH, cases), Job(SAME, cases))


def observe(bench: Bench, job: Job) -> Evidence:
    """All draws in one process that has made no call before; of the same tensors, the last draw once more in new ones."""
    bench.fresh()
    if job.words == FRESH:
        return Evidence(job, tuple(bench.call(case) for case in job.cases))
    records = tuple(bench.call(case, same_tensors=True) for case in job.cases)
    bench.fresh()
    return Evidence(job, records, {"alone": bench.call(job.cases[-1])})


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
    findings += [f for e in evidence[1:] for f in _judge_same_tensors(study, e)]
    words = f"{len(cases)} draws in one process gave results of their own, in new tensors and in the same ones"
    return Conclusion(findings[:1] or [held(NAME, words)])


def _judge_same_tensors(study: Study, e: Evidence) -> list[Finding]:
    case, last, alone = e.job.cases[-1], e.records[-1], e.extra["alone"]
    if not last.usable:
        return [not_verified(NAME, unusable(last), where=where(case))]
    try:
        objections = wrong_outputs(study, case, last)
        if not objections or not alone.usable or wrong_outputs(study, case, alone):
            return []  # right; or wrong in new tensors as well, which is no cache's doing
    except InfrastructureError as error:
        return [not_verified(NAME, str(error), where=where(case))]
    output, words = next(iter(objections.items()))
    return [
        failed(
            NAME,
            f"`{output}` is wrong when new values lie in the tensors of an earlier call, and right in new tensors: {words}",
            output=output,
            cause="in-place",
            where=where(case),
            advice="Do not cache by address, object or version: weights are updated where they lie.",
        )
    ]


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
