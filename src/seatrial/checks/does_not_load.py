"""A candidate that cannot be built or imported, or that lacks its entry point.

What it shows      the source builds and the entry point is there, in a fresh process with nothing of ours on its path
Why it matters     nothing else can be observed of a kernel that does not load
How                the sources are laid out in an empty folder and imported once; the child's own words are kept
What it misses     a kernel that loads here and not on another machine: see the environment in the report
Cost               one process
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable, failed, held, not_verified
from seatrial.model import Ran
from seatrial.study import Study

NAME = "does-not-load"
TITLE = "builds and imports"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """One load, no call."""
    return (Job("loading", ()),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Open the first process."""
    return Evidence(job, (bench.load(),))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Anything but a clean load rejects; our own machinery failing is not the candidate's fault."""
    record = evidence[0].records[0]
    words = record.error.strip() or record.printed.strip()
    if record.ran is Ran.RETURNED:
        return Conclusion([held(NAME, "the sources build and the entry point is there")])
    if record.ran is Ran.LOST:
        return Conclusion([not_verified(NAME, f"the candidate's process could not be run: {words}")])
    last = words.splitlines()[-1] if words else "it said nothing"
    reason = f"loading the candidate {_how(record.ran)}: {last}"
    return Conclusion(
        [
            failed(
                NAME,
                reason,
                cause=f"load:{record.ran.value}",
                advice="Make the sources import in an empty folder with the environment shown in this report.",
                details={"words": words[-4000:], "printed": record.printed[-4000:]},
            )
        ]
    )


def _how(ran: Ran) -> str:
    return {
        Ran.RAISED: "raised",
        Ran.CRASHED: "crashed its process",
        Ran.EXITED: "ended its process",
        Ran.TIMED_OUT: "did not finish in time",
        Ran.OUT_OF_MEMORY: "ran out of memory",
    }.get(ran, ran.value)


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}\n"

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, "def run(x):\n    return x * 2\n")
REJECTS: Example | None = Example(_REFERENCE, _INPUTS, "def run(x)\n    return x * 2\n", because="SyntaxError")
