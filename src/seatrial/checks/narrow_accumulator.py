"""A sum that is carried in too few bits.

What it shows      how many significant bits the running sum behind each output has, and where it rounds: everywhere,
                   inside blocks, between tiles, in split-K partials
Why it matters     beside a sum that has grown, small contributions round to zero: a token that occurs a thousand times
                   loses most of its gradient, and no tolerance on random inputs sees it
How                swamping probes: +M, m and −M among zeros (and in small dense noise, so that a kernel cannot recognise
                   them), whose exact answer m survives only if the accumulator holds M and m together; far, near and
                   paired placements tell where it rounds. Equal contributions show where a sum stops growing, and the
                   error against the number of contributions whether it is bounded
What it misses     sums behind a nonlinearity have no exact probe; there the value checks are what speaks
Cost               some tens of small calls per linear input
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable, failed, held, not_verified, where
from seatrial.model import Finding, Growth, Outcome
from seatrial.study import Study

if TYPE_CHECKING:
    from seatrial.numerics.probes import Fingerprint

NAME = "narrow-accumulator"
TITLE = "sums are carried in enough bits"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """One job with all probes, when the reference has a sum that can be probed."""
    if study.too_large_to_probe:
        return NotApplicable(
            f"the smallest declared workload has {study.elements(study.smallest):,} elements, too many to send a "
            "hundred times; the sums of this problem were not probed"
        )
    if not study.probe_plan.sums:
        reasons = "; ".join(f"{o}: {why}" for o, why in study.probe_plan.unprobed.items())
        return NotApplicable(f"no output is a plain sum over an input ({reasons})")
    return (Job("swamping probes", (study.probe_case,)),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Put every probe to the candidate, then let the number of contributions grow."""
    from seatrial.numerics.probes import read_probes

    case = job.cases[0]
    kernel = bench.kernel(case)
    readings = read_probes(bench.study.probe_plan, kernel)
    bench.progress("error growth", 0.8)
    growth = bench.study.growth(kernel) if any(r.bits is not None for r in readings) else ()
    return Evidence(job, (), {"readings": readings, "growth": growth})


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """A carry narrower than the contract is a fault, unless the native reference is as narrow and the loss bounded."""
    from seatrial.numerics.probes import fingerprints

    case = evidence[0].job.cases[0]
    readings = evidence[0].extra.get("readings", ())
    growth: Sequence[Growth] = evidence[0].extra.get("growth", ())
    prints = fingerprints(readings)
    if not prints:
        return Conclusion([not_verified(NAME, "the candidate answered no probe", where=where(case))])
    return Conclusion([_judge_output(study, f, growth) for f in prints], growth=growth)


def _judge_output(study: Study, fingerprint: Fingerprint, growth: Sequence[Growth]) -> Finding:
    from seatrial.numerics.probes import too_narrow

    verdict = too_narrow(fingerprint, native=study.native_fingerprints.get(fingerprint.output))
    details = {
        "accumulator": fingerprint.accumulator,
        "bits": fingerprint.bits,
        "rounds": fingerprint.rounds,
        "confidence": fingerprint.confidence,
        "contributions": fingerprint.contributions,
        "stops_at": fingerprint.stops_at,
    }
    place = where(study.probe_case, note=f"probes on `{fingerprint.slot}`")
    if not verdict.verified:
        return not_verified(NAME, verdict.reason, output=fingerprint.output, where=place, details=details)
    if verdict.fault:
        return failed(
            NAME,
            verdict.reason + _growth_words(fingerprint.output, growth),
            output=fingerprint.output,
            cause=f"accumulator:{fingerprint.accumulator}",
            measured=None if fingerprint.bits is None else float(fingerprint.bits),
            allowed=24.0,
            unit="significant bits",
            where=place,
            advice="Carry the sum in fp32 and round once when it is stored.",
            details=details,
        )
    if verdict.reference_deficient:
        return Finding(
            check=NAME,
            outcome=Outcome.NOTED,
            output=fingerprint.output,
            cause="reference-deficient",
            reason=f"reference deficient: {verdict.reason}",
            where=place,
            details=details,
        )
    return held(NAME, verdict.reason, output=fingerprint.output, details=details)


def _growth_words(output: str, growth: Sequence[Growth]) -> str:
    curve = next((g for g in growth if g.output == output and len(g.points) >= 2), None)
    if curve is None:
        return ""
    first, last = curve.points[0], curve.points[-1]
    return (
        f"; its relative error grows from {first.error:.2g} at {first.contributions} to {last.error:.2g} at "
        f"{last.contributions} contributions, where an honest kernel has {last.floor:.2g}"
    )


_REFERENCE = "def run(x):\n    return x.float().sum(0).bfloat16()\n"
_INPUTS = (
    "import torch\n\ndef make(seed):\n"
    "    return {'x': torch.randn(1024, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()}\n"
)
_CANDIDATE = """import torch

def run(x):
    total = torch.zeros(x.shape[1], dtype={})
    for row in x:
        total += row
    return total.bfloat16()
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("torch.float32"))
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    _CANDIDATE.format("torch.bfloat16"),
    because="bfloat16",
    also=("wrong-values", "fitted-inputs"),
)
