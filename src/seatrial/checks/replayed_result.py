"""A result that belongs to an earlier call.

What it shows      new values in tensors of the same shapes give new results
Why it matters     a cache keyed by shape, pointer or object passes every benchmark that repeats its inputs, and serves
                   the first request's answer for ever
How                several draws of one workload follow each other in one process, every one in fresh tensors; each
                   result is compared with the earlier ones, and the first call of the process with the same inputs
                   at its end; the child keeps the last result alive and sees whether the next one lies in its memory.
                   Then new values are written into the same tensors (address, object and version stay), as when
                   weights are loaded anew, and one new element into each: what is right in fresh tensors and wrong
                   there is a cache's
What it misses     caches keyed by all the values, and such as are dropped when calls come a little later
Cost               eleven calls
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
from seatrial.model import CallRecord, Finding, Value
from seatrial.study import Case, Study
from seatrial.values import wrong_outputs

NAME = "replayed-result"
TITLE = "each call's result is its own"

DRAWS = 3
FRESH, SAME = "new values in new tensors", "new values in the same tensors"
ONE = "one new element in the same tensors"
FAR_OUT = 8.0  # sigma: where the one element goes


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Draws of one workload, one after the other in one fresh process."""
    if all(not spec.shape for spec in study.problem.inputs):
        return NotApplicable("no tensor inputs whose values could change")
    cases = tuple(study.case(study.smallest, draw=40 + i) for i in range(DRAWS))
    return (Job(FRESH, cases), Job(SAME, cases), Job(ONE, cases[:1]))


def observe(bench: Bench, job: Job) -> Evidence:
    """All draws in one process that has made no call before; of the same tensors, the last draw once more in new ones."""
    bench.fresh()
    if job.words == FRESH:
        return Evidence(job, tuple(map(bench.call, job.cases)), {"again": bench.call(job.cases[0])})
    if job.words == ONE:
        case, changed = job.cases[0], one_changed(bench.study, job.cases[0])
        pair = (bench.call(case, same_tensors=True), bench.call(case, inputs=changed, same_tensors=True))
        bench.fresh()
        return Evidence(job, pair, {"alone": bench.call(case, inputs=changed)})
    records = tuple(bench.call(case, same_tensors=True) for case in job.cases)
    bench.fresh()
    return Evidence(job, records, {"alone": bench.call(job.cases[-1])})


def one_changed(study: Study, case: Case) -> list[Value]:
    """The inputs of the case with one element of every float tensor far out, neither near its start nor near its end."""
    import torch

    generator = torch.Generator().manual_seed(study.seed_for("one element", *case.key))
    made: list[Value] = []
    for value in study.inputs(case):
        if isinstance(value, torch.Tensor) and value.dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float64,
        ):
            value = value.clone(memory_format=torch.contiguous_format)
            if value.numel():
                middle = max(1, value.numel() // 2)
                at = value.numel() // 4 + int(torch.randint(0, middle, (), generator=generator))
                value.view(-1)[at] = FAR_OUT * float(value.double().square().mean().sqrt())
        made.append(value)
    return made


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """A later result that is bit for bit the first, where the exact results differ, is a replay."""
    from seatrial.numerics.moved import share_changed

    cases, records = evidence[0].job.cases, evidence[0].records
    for case, record in zip(cases, records, strict=True):
        if not record.usable:
            return Conclusion([not_verified(NAME, unusable(record), where=where(case))])
    findings = [f for i in range(1, len(cases)) for f in _compare(study, cases, records, i)]
    findings += _judge_order(study, evidence[0])
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


def _judge_order(study: Study, e: Evidence) -> list[Finding]:
    """The same inputs in the first call of a process and in its last: where one is right, the order is to blame."""
    case, first, last = e.job.cases[0], e.records[0], e.extra["again"]
    if not last.usable:
        return [not_verified(NAME, unusable(last), where=where(case))]
    try:
        early, late = wrong_outputs(study, case, first), wrong_outputs(study, case, last)
    except InfrastructureError as error:
        return [not_verified(NAME, str(error), where=where(case))]
    if bool(early) == bool(late):
        return []  # right; or wrong whatever went before, which other checks tell
    output, words = next(iter((early or late).items()))
    wrong, right = ("the first call", f"call {DRAWS + 1}") if early else (f"call {DRAWS + 1}", "the first call")
    return [
        failed(
            NAME,
            f"`{output}` is wrong in {wrong} of a fresh process, and right in {right}, on the same inputs: {words}",
            output=output,
            cause="first-call" if early else "order-of-calls",
            where=where(case),
            advice="Clear what an autotuner's trial runs leave in the output; compute every call from its inputs alone.",
        )
    ]


def _judge_same_tensors(study: Study, e: Evidence) -> list[Finding]:
    case, last, alone = e.job.cases[-1], e.records[-1], e.extra.get("alone")
    if not last.usable or alone is None:
        return [not_verified(NAME, unusable(last), where=where(case))]

    def wrong(record: CallRecord) -> dict[str, str]:
        if e.job.words == SAME:
            return wrong_outputs(study, case, record)
        reports = study.judge_inputs(one_changed(study, case), record.outputs, f"{NAME} {ONE}")
        return {r.name: next(t for t in r.tests if t.failed).words for r in reports if r.passed is False}

    try:
        objections = wrong(last)
        if not objections or not alone.usable or wrong(alone):
            return []  # right; or wrong in new tensors as well, which is no cache's doing
    except InfrastructureError as error:
        return [not_verified(NAME, str(error), where=where(case))]
    output, words = next(iter(objections.items()))
    return [
        failed(
            NAME,
            f"`{output}` is wrong where {e.job.words} follow{'s' if e.job.words == ONE else ''} an earlier call, and right "
            f"in new tensors: {words}",
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
