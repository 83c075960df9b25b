"""An input that the kernel changed although the problem does not say so.

What it shows      every input tensor holds after the call, byte for byte, what it held before
Why it matters     the caller reads its activations again in the backward pass
How                the child sends the inputs back as they stand after the call; the parent compares bytes
What it misses     a change that is undone before the call returns
Cost               up to four calls
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from seatrial.model import CallRecord, Finding, Outcome, Ran
from seatrial.study import Case, Study

if TYPE_CHECKING:
    from torch import Tensor

NAME = "mutated-input"
TITLE = "inputs are left as they were"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Up to two audited workloads, and inputs of unusual size: a clamp in place changes nothing else."""
    if all(spec.shape is None for spec in study.problem.inputs):
        return NotApplicable("no tensor inputs")
    cases = [study.case(w) for w in study.audited[:2]]
    cases += [study.case(study.smallest, name) for name in ("scaled-up-32", "hot-id") if name in study.recipes]
    return tuple(Job(f"inputs after the call, {c.workload.uuid} {c.recipe}", (c,)) for c in cases)


def observe(bench: Bench, job: Job) -> Evidence:
    """One call whose inputs come back."""
    return Evidence(job, (bench.call(job.cases[0], echo=True),))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Any changed byte is a fault, but in an input that the reference itself works in."""
    findings: list[Finding] = []
    for e in evidence:
        findings += _judge_call(study, e.job.cases[0], e.records[0])
    bad = [f for f in findings if f.outcome is Outcome.FAILED]
    noted = [f for f in findings if f.outcome is Outcome.NOTED]
    words = "no byte of any other input changed" if noted else "no byte of any input changed"
    missing = [f for f in findings if f.outcome is Outcome.NOT_VERIFIED]
    return Conclusion(bad[:3] or missing or [held(NAME, words), *noted[:1]])


def _judge_call(study: Study, case: Case, record: CallRecord) -> list[Finding]:
    from torch import Tensor

    before, allowed = study.inputs(case), study.written_by_reference(case)
    if record.ran is not Ran.RETURNED or len(record.echoed) != len(before):
        return [not_verified(NAME, unusable(record), where=where(case))]
    findings = []
    for spec, was, now in zip(study.problem.inputs, before, record.echoed, strict=True):
        count = changed_elements(was, now) if now is not None and isinstance(was, Tensor) else 0
        if count and spec.name in allowed:
            findings.append(_as_the_reference(case, spec.name))
        elif count and isinstance(was, Tensor):
            findings.append(_mutated(case, spec.name, count, was.numel()))
    return findings


def _mutated(case: Case, name: str, count: int, elements: int) -> Finding:
    return failed(
        NAME,
        f"input `{name}` changed during the call in {count} of {elements} elements",
        cause="mutated",
        measured=float(count),
        allowed=0.0,
        unit="elements",
        where=where(case),
        advice="Work on a copy, or have the problem declare the input as updated in place.",
    )


def _as_the_reference(case: Case, name: str) -> Finding:
    return Finding(
        check=NAME,
        outcome=Outcome.NOTED,
        reason=f"input `{name}` changes during the call, as it does in the reference; what is left there is not judged",
        where=where(case),
    )


def changed_elements(was: Tensor, now: Tensor) -> int:
    """Elements with at least one other byte; NaN payloads and signed zeros count."""
    import torch

    if was.shape != now.shape or was.dtype != now.dtype:
        return max(was.numel(), 1)
    if was.numel() == 0:
        return 0
    size = was.element_size()
    a, b = (t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for t in (was, now))
    return int((a != b).any(-1).sum())


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}\n"

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, "def run(x):\n    return x.mul(2)\n")
REJECTS: Example | None = Example(
    _REFERENCE, _INPUTS, "def run(x):\n    return x.mul_(2).clone()\n", because="changed during the call"
)
