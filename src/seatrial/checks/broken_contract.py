"""Outputs of another count, type, shape, dtype or device than the problem declares.

What it shows      the candidate returns (or fills) exactly the declared outputs as plain tensors
Why it matters     the next operation reads what was promised; a tensor subclass can compute lazily, after the clock
How                the child compares count, exact type, shape, dtype and device before it copies anything out
What it misses     values: see wrong-values; writes beyond the ends of a buffer: see out-of-bounds
Cost               one call per audited workload
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
from seatrial.model import Ran
from seatrial.study import Study

NAME = "broken-contract"
TITLE = "outputs are what the problem declares"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """One fresh case of every audited workload."""
    return (Job("output contract", tuple(study.case(w, draw=1) for w in study.audited)),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Call once per case."""
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Every distinct breach is a finding of its own."""
    calls = [(c, r) for e in evidence for c, r in zip(e.job.cases, e.records, strict=True)]
    findings = []
    seen: set[str] = set()
    for case, record in calls:
        for breach in record.breaches:
            if breach not in seen and len(seen) < 5:
                seen.add(breach)
                findings.append(
                    failed(
                        NAME,
                        breach,
                        cause="contract",
                        where=where(case),
                        advice="Return plain torch.Tensor outputs of the declared shape, dtype and device.",
                    )
                )
    silent = [(c, r) for c, r in calls if r.ran is not Ran.RETURNED]
    if silent:
        findings.append(not_verified(NAME, unusable(silent[0][1]), where=where(silent[0][0])))
    return Conclusion(findings or [held(NAME, "count, type, shape, dtype and device are as declared")])


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """import torch

class Later(torch.Tensor):
    pass

def run(x):
    y = x * 2
    return {}
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("y"))
REJECTS: Example | None = Example(
    _REFERENCE, _INPUTS, _CANDIDATE.format("y.as_subclass(Later)"), because="Later", also=("*",)
)
