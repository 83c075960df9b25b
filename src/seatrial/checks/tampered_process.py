"""A kernel that changes the process it runs in: patched functions, stray threads, work left on other streams.

What it shows      after each call the process is as it was: timing and comparison functions are the originals, no new
                   thread lives on, global numeric flags are as before, nothing runs on a stream nobody waits for; nor
                   was the precision of matrix products lowered in between (setting it to the exact side is no fault)
Why it matters     these are the published ways to a false time or a false pass, and side effects on the caller
How                the child notes identities, threads and flags before the candidate is imported and around each call,
                   and every write through torch to a precision setting;
                   on a GPU outputs are copied on the judged stream and the rest of the device is then waited for
What it misses     other changes that are undone before the call returns, and native code that hides its threads
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
from seatrial.model import CallRecord, Finding, Outcome, Ran
from seatrial.study import Case, Study

# Environment variables that decide about precision, kernels, threads or what is loaded.
TELLING = ("CUDA_", "CUBLAS", "NVIDIA_", "CUDNN", "LD_", "PYTHON", "OMP_NUM", "MKL_NUM", "MALLOC")
FLOAT32 = ("float32", "TF32")  # in the name of a setting that narrows float32 alone

NAME = "tampered-process"
TITLE = "leaves its process as it was"

CALLS = 3
LAG_S = 5e-4  # waiting for an idle device takes some 20 µs; a kernel left behind takes at least its launch and more


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """A few calls of the smallest workload."""
    return (Job("side effects", tuple(study.case(study.smallest, draw=60 + i) for i in range(CALLS))),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Plain calls; the child's facts are what counts."""
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Each kind of trace is a finding of its own."""
    calls = list(zip(evidence[0].job.cases, evidence[0].records, strict=True))
    seen = [(c, r) for c, r in calls if r.ran is Ran.RETURNED]
    if not seen:
        return Conclusion([not_verified(NAME, unusable(calls[0][1]), where=where(calls[0][0]))])
    own = (_patched(seen), _threads(seen), _flags(seen), _lowered(study, seen), _stream(seen))
    findings = [f for f in own if f is not None]
    variables = sorted(_variables(seen))
    noted = [_notes(seen, variables)] if variables and not _bear_on_results(variables) else []
    return Conclusion([*(findings or [held(NAME, f"no trace in {len(seen)} calls")]), *noted])


Seen = Sequence[tuple[Case, CallRecord]]


def _patched(seen: Seen) -> Finding | None:
    names = sorted({str(n) for _, r in seen for n in r.facts.get("patched", ())})
    reason = f"replaces functions of the process it runs in: {', '.join(names[:6])}"
    advice = "A kernel has no business with these functions; times and comparisons of this candidate mean nothing."
    return _counted(seen, len(names), "functions", "patched", reason, advice)


def _threads(seen: Seen) -> Finding | None:
    names = [str(n) for _, r in seen for n in r.facts.get("threads_started", ())]
    if names:
        return _left_behind(seen, "threads", len(names), ", ".join(sorted(set(names))[:4]))
    processes = max((int(r.facts.get("processes_left", 0)) for _, r in seen), default=0)
    return _left_behind(seen, "processes", processes, str(processes))


def _left_behind(seen: Seen, kind: str, count: int, which: str) -> Finding | None:
    reason = f"leaves {kind} running after the call returned: {which}"
    return _counted(seen, count, kind, kind, reason, "Finish the work inside the call.")


ENVIRONMENT = "environment: "


def _variables(seen: Seen) -> set[str]:
    """Environment variables that are new or other than before the import."""
    told = (str(n) for _, r in seen for n in r.facts.get("flags_changed", ()))
    return {name for n in told if n.startswith(ENVIRONMENT) for name in n.removeprefix(ENVIRONMENT).split(", ")}


def _bear_on_results(variables: Sequence[str]) -> bool:
    """Libraries leave notes in the environment when they are imported; these change what is computed, or how fast."""
    return any(name.startswith(TELLING) or "TF32" in name for name in variables)


def _notes(seen: Seen, variables: Sequence[str]) -> Finding:
    reason = f"sets environment variables of its process: {', '.join(variables[:6])}"
    return Finding(check=NAME, outcome=Outcome.NOTED, cause="environment", reason=reason, where=where(seen[0][0]))


def _flags(seen: Seen) -> Finding | None:
    told = {str(n) for _, r in seen for n in r.facts.get("flags_changed", ())}
    if not _bear_on_results(sorted(_variables(seen))):
        told = {n for n in told if not n.startswith(ENVIRONMENT)}
    flags = sorted(told)
    reason = f"changes global settings of the process: {', '.join(flags[:4])}"
    advice = "Ask for the precision in the operation itself, and leave the caller's settings alone."
    return _counted(seen, len(flags), "settings", "flags", reason, advice)


def _lowered(study: Study, seen: Seen) -> Finding | None:
    """Written and put back. Values show it on a GPU at the sizes tried; elsewhere nothing but the write does."""
    left = {str(n) for _, r in seen for n in r.facts.get("flags_changed", ())}
    writes = sorted({str(n) for _, r in seen for n in r.facts.get("precision_lowered", ())} - left)
    if "float32" not in {s.dtype for s in study.problem.inputs}:
        writes = [w for w in writes if not any(word in w for word in FLOAT32)]
    reason = f"lowers the precision of the process during the call and puts it back: {', '.join(writes[:4])}"
    advice = "Ask for the precision in the operation itself; where the problem is float32, compute in float32."
    return _counted(seen, len(writes), "settings", "precision", reason, advice)


def _counted(seen: Seen, count: int, unit: str, cause: str, reason: str, advice: str) -> Finding | None:
    """The finding for traces of which there may be none; None when there are none."""
    if not count:
        return None
    place = where(seen[0][0])
    return failed(NAME, reason, cause=cause, measured=float(count), allowed=0.0, unit=unit, where=place, advice=advice)


def _stream(seen: Seen) -> Finding | None:
    lags = sorted(float(r.facts["stream_lag_s"]) for _, r in seen if "stream_lag_s" in r.facts)
    if len(lags) < 2 or lags[1] < LAG_S:  # one slow wait may be the machine's; the second slowest of the fast ones not
        return None
    return failed(
        NAME,
        f"leaves work running on another stream: the device was busy for {lags[1] * 1e3:.1f} ms after the judged "
        "stream had finished",
        cause="stream",
        measured=lags[1],
        allowed=LAG_S,
        unit="s",
        where=where(seen[0][0]),
        advice="Join every side stream before the call returns.",
    )


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """import threading
import time

def run(x):
    t = threading.Thread(target=time.sleep, args=({},), daemon=True)
    t.start()
    t.join(0.05)
    return x * 2
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("0.0"))
REJECTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("20.0"), because="threads running")
