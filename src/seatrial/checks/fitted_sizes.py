"""A kernel that is right only at the sizes the benchmark lists.

What it shows      values hold at sizes beside, between and beyond the listed ones: ±1, one, primes, tile edges
Why it matters     a kernel with seven sequence lengths compiled in is useless on the eighth, and worse if it is silent
How                var axes take values outside the list as far as the reference accepts them; a clean Python error is a
                   limit, a wrong value or a crash a fault
What it misses     sizes beyond what this machine's memory allows
Cost               one call per size
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
    unusable,
    where,
)
from seatrial.model import CallRecord, Finding, Outcome, Ran
from seatrial.study import Case, Study
from seatrial.values import judge_values

NAME = "fitted-sizes"
TITLE = "values at sizes outside the list"

FATAL = (Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Sizes outside the list that the reference itself accepts."""
    if not study.problem.var_axes:
        return NotApplicable("every axis of this problem is constant")
    if not study.problem.resizable:
        return NotApplicable("the inputs are recorded tensors, so no other size can be drawn")
    cases = [study.case(w) for w in study.outside_sizes()]
    accepted = [c for c in cases if study.reference_accepts(c)]
    if not accepted:
        return NotApplicable("the reference accepts no size outside the list")
    largest = max(accepted, key=lambda case: study.elements(case.workload))
    # Counts and sums that a narrow type still holds at the listed sizes overflow where one id repeats at a large one.
    crowded = [study.case(largest.workload, "one-id")] if "one-id" in study.recipes else []
    return tuple(Job(f"size {dict(c.workload.axes)}", (c,)) for c in (*accepted, *crowded))


def observe(bench: Bench, job: Job) -> Evidence:
    """Call once per size."""
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Wrong is a fault, refused is a limit."""
    calls = [(c, r) for e in evidence for c, r in zip(e.job.cases, e.records, strict=True)]
    refused = [(c, r) for c, r in calls if r.ran is Ran.RAISED]
    fatal = [(c, r) for c, r in calls if r.ran in FATAL or r.breaches]
    rest = [(c, r) for c, r in calls if r.ran in (Ran.RETURNED, Ran.LOST) and not r.breaches]
    findings: list[Finding] = [_fatal(fatal)] if fatal else []
    if refused:
        findings.append(_limit(refused, len(calls)))
    if rest:
        findings += judge_values(study, NAME, rest)
    return Conclusion(findings or [held(NAME, "no size outside the list")])


def _fatal(fatal: Sequence[tuple[Case, CallRecord]]) -> Finding:
    case, record = fatal[0]
    return failed(
        NAME,
        f"at {len(fatal)} sizes outside the list, first {_axes(case)}: {unusable(record)}",
        cause=f"size:{record.ran.value}",
        where=where(case),
        advice="Support the size, or refuse it with a Python error.",
        details={"words": record.error[-4000:]},
    )


def _limit(refused: Sequence[tuple[Case, CallRecord]], total: int) -> Finding:
    sizes = "; ".join(_axes(c) for c, _ in refused[:4])
    return Finding(
        check=NAME,
        outcome=Outcome.LIMITED,
        cause="size:refused",
        reason=f"refuses {len(refused)} of {total} sizes outside the list with an error ({sizes}): {unusable(refused[0][1])}",
        where=where(refused[0][0]),
        advice="Guard the kernel with a fallback for these sizes, or support them.",
    )


def _axes(case: Case) -> str:
    return ", ".join(f"{k}={v}" for k, v in case.workload.axes.items()) or "no axes"


_REFERENCE = "def run(x):\n    return x * 2 + 1\n"
_INPUTS = (
    "import torch\n\nAXES = {'rows': [4, 8, 16]}\n\ndef make(seed, rows=8):\n"
    "    return {'x': torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))}\n"
)
_CANDIDATE = """import torch

def run(x):
    y = torch.zeros_like(x)
    n = {}
    y[:n] = x[:n] * 2 + 1
    return y
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("x.shape[0]"))
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    _CANDIDATE.format("max(s for s in (1, 4, 8, 16) if s <= x.shape[0])"),
    because="wrong beyond rounding",
)
