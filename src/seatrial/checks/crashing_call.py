"""A call on a declared workload that raises, crashes, hangs, exits or runs out of memory.

What it shows      every audited declared workload is computed to the end by a fresh process
Why it matters     in production the whole run dies with the kernel, or waits for it
How                one call per audited workload under a time and a memory limit; a dead process is replaced
What it misses     faults that need many calls, other devices or other streams
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

NAME = "crashing-call"
TITLE = "every declared workload returns"

FATAL = (Ran.RAISED, Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """One fresh case of every audited workload."""
    return (Job("declared workloads", tuple(study.case(w) for w in study.audited)),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Call once per case; the first call happens in a fresh process."""
    bench.fresh()
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """One finding for the first fatal call; the others are counted."""
    calls = [(c, r) for e in evidence for c, r in zip(e.job.cases, e.records, strict=True)]
    fatal = [(c, r) for c, r in calls if r.ran in FATAL]
    if fatal:
        case, record = fatal[0]
        return Conclusion(
            [
                failed(
                    NAME,
                    f"{len(fatal)} of {len(calls)} audited workloads did not return: {unusable(record)}",
                    cause=f"call:{record.ran.value}",
                    where=where(case),
                    advice="Run the replay below and read the candidate's own words in the details.",
                    details={"words": record.error[-4000:], "printed": record.printed[-4000:]},
                )
            ]
        )
    lost = [(c, r) for c, r in calls if r.ran is Ran.LOST]
    if lost:
        return Conclusion([not_verified(NAME, unusable(lost[0][1]), where=where(lost[0][0]))])
    return Conclusion([held(NAME, f"all {len(calls)} audited workloads returned")])


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}\n"

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, "import os\n\ndef run(x):\n    y = x * 2\n    return y\n")
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    "import os\n\ndef run(x):\n    os.abort()\n    return y\n",
    because="did not return",
    also=("*",),
)
