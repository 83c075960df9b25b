"""A sum that is carried in too few bits.

What it shows      the accumulator behind each output, by name, and where it rounds: at every contribution, every so many
                   terms, in partial sums, inside blocks, in operands (a float32 contract computed in TF32, say)
Why it matters     beside a sum that has grown, small contributions round to zero: a token that occurs a thousand times
                   loses most of its gradient, and no tolerance on random inputs sees it
How                swamping probes: +M, m and −M in dense noise too small to matter, so that a kernel cannot recognise
                   them; the exact answer m survives only if the accumulator holds M and m together, and from where
                   the three stand follows where it rounds. Equal contributions show where a sum stops growing, and the
                   error against the number of contributions whether it is bounded. docs/numerics.md has the method
                   and how often each accumulator is named right
Policy             fewer bits than float32 are a fault, whether or not the accumulator could be named; excused are a bounded
                   loss that the native reference has as well, and 14 bits for fp8 operands on Hopper (compute
                   capability 9) where at most 128 terms are summed so
What it misses     sums behind a nonlinearity have no exact probe; there the value checks are what speaks
Cost               some tens of small calls per linear input
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable, failed, held, not_verified, where
from seatrial.model import Finding, Growth, Outcome, Value
from seatrial.study import Study

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.numerics.accumulators import Fingerprint

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
    from seatrial.numerics.probes import read_probes, wrong_sums

    case = job.cases[0]
    kernel = bench.kernel(case)
    readings = read_probes(bench.study.probe_plan, kernel)
    bench.progress("error growth", 0.8)
    growth = bench.study.growth(kernel) if any(r.bits is not None for r in readings) else ()
    drawn = bench.study.inputs(case)
    wrong = {w.output: (w.inputs, kernel(w.inputs)) for w in wrong_sums(bench.study.probe_plan, readings, drawn)}
    return Evidence(job, (), {"readings": readings, "growth": growth, "wrong": wrong})


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """A carry narrower than the contract is a fault, unless the native reference is as narrow and the loss bounded."""
    from seatrial.numerics.probes import fingerprints

    case = evidence[0].job.cases[0]
    readings = evidence[0].extra.get("readings", ())
    growth: Sequence[Growth] = evidence[0].extra.get("growth", ())
    prints = fingerprints(readings)
    if not prints:
        return Conclusion([not_verified(NAME, "the candidate answered no probe", where=where(case))])
    wrong = evidence[0].extra.get("wrong", {})
    findings = [_judge_wrong(study, f, *wrong[f.output]) if f.output in wrong else None for f in prints]
    return Conclusion(
        [w or _judge_output(study, f, growth) for w, f in zip(findings, prints, strict=True)], growth=growth
    )


def _judge_wrong(
    study: Study, fingerprint: Fingerprint, inputs: Sequence[Value], outputs: Sequence[Tensor] | None
) -> Finding | None:
    """A fault where the oracle and the honest floor say so on inputs as drawn; else what the bits say counts."""
    if outputs is None:
        return None
    reports = study.judge_inputs(inputs, outputs, f"probes on {fingerprint.slot}")
    report = next(r for r in reports if r.name == fingerprint.output)
    if report.passed is not False:
        return None
    return failed(
        NAME,
        f"`{fingerprint.output}` is wrong where `{fingerprint.slot}` holds a few small numbers that any accumulator "
        f"adds up: {report.got:.6g} where float64 gives {report.expected:.6g}"
        if report.got is not None and report.expected is not None
        else f"`{fingerprint.output}` is wrong where `{fingerprint.slot}` holds a few small numbers",
        output=fingerprint.output,
        cause="wrong-sum",
        where=where(study.probe_case, index=report.worst_index, note=f"probes on `{fingerprint.slot}`"),
        advice="Compare with the reference on inputs that are small but for a few elements.",
        details=_details(fingerprint),
    )


def _details(fingerprint: Fingerprint) -> dict[str, Any]:
    return {
        "accumulator": fingerprint.accumulator,
        "class": fingerprint.form if fingerprint.bits is not None else fingerprint.accumulator,
        "bits": fingerprint.bits,
        "rounds": fingerprint.rounds,
        "every": fingerprint.every,
        "confidence": fingerprint.confidence,
        "contributions": fingerprint.contributions,
        "stops_at": fingerprint.stops_at,
    }


def _judge_output(study: Study, fingerprint: Fingerprint, growth: Sequence[Growth]) -> Finding:
    from seatrial.numerics.accumulators import OPERANDS, too_narrow

    native = study.native_fingerprints.get(fingerprint.output)
    verdict = too_narrow(fingerprint, native=native, capability=study.capability)
    details = _details(fingerprint)
    place = where(study.probe_case, note=f"probes on `{fingerprint.slot}`")
    if not verdict.verified and native is not None and native.bits is None and native.at_least is None:
        reason = (
            f"`{fingerprint.output}`: the native reference answers these probes no better, so its sums are not probed"
        )
        return Finding(check=NAME, outcome=Outcome.NOT_APPLICABLE, output=fingerprint.output, reason=reason)
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
            advice="Keep the operands in the precision that the reference declares."
            if fingerprint.rounds == OPERANDS
            else "Carry the sum in fp32 and round once when it is stored.",
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
