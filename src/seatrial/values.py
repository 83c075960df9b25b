"""From compared outputs to findings: the words and the consolidation that every value check shares.

One finding per output, however many cases it fails: the worst case speaks, the others are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.checks.base import failed, held, not_verified, unusable, where
from seatrial.errors import InfrastructureError
from seatrial.model import CallRecord, Finding, Outcome

if TYPE_CHECKING:
    from seatrial.numerics.compare import OutputReport, TestResult
    from seatrial.study import Case, Study


@dataclass(frozen=True)
class Judged:
    """One output of one call, compared."""

    case: Case
    report: OutputReport
    excused: bool = False  # no worse than the native reference, which falls short here too

    @property
    def severity(self) -> float:
        """How far beyond what is allowed, as a ratio; 0 when everything held."""
        return max((_excess(t) for t in self.report.tests if t.failed), default=0.0)


def judge_values(study: Study, check: str, calls: Sequence[tuple[Case, CallRecord]]) -> list[Finding]:
    """Compare every usable call with the oracle; conclude per output.

    A case that the oracle cannot judge is dropped, never turned into a pass: an output that no case
    could judge is not verified.
    """
    judged: list[Judged] = []
    silent: list[tuple[Case, str]] = []
    for case, record in calls:
        if not record.usable:
            silent.append((case, unusable(record)))
            continue
        try:
            judged += _judge_call(study, case, record)
        except InfrastructureError as error:
            silent.append((case, str(error)))
    findings = [_conclude(study, check, slot.name, judged) for slot in study.problem.outputs]
    if silent:
        case, why = silent[0]
        findings.append(
            not_verified(check, f"{len(silent)} of {len(calls)} calls gave nothing to judge: {why}", where=where(case))
        )
    return findings


GRADES = ("F32", "TC", "IO", "REJECT")


def grade_values(study: Study, calls: Sequence[tuple[Case, CallRecord]]) -> str:
    """The tightest rounding contract under which every usable case passes; empty when none could be judged.

    F32: declared dtypes and fp32 accumulation. TC: also tensor-core operands. IO: also every intermediate
    rounded once to the I/O dtype. REJECT: none of them.
    """
    worst = -1
    for case, record in calls:
        if record.usable:
            try:
                worst = max(worst, _grade_of(study, case, record))
            except InfrastructureError:
                continue  # judge_values has reported this case as not verified
    return GRADES[worst] if worst >= 0 else ""


def _grade_of(study: Study, case: Case, record: CallRecord) -> int:
    floats = [t.is_floating_point() for t in record.outputs]
    if not any(floats):
        return -1
    if study.oracle.kind.startswith("native"):  # the weaker oracle knows the storage type's roundings and no finer ones
        return GRADES.index("IO" if _passes(study, case, record, "IO") else "REJECT")
    if _passes(study, case, record, "TC"):
        return GRADES.index("F32" if _passes(study, case, record, "F32") else "TC")
    return GRADES.index("IO" if _passes(study, case, record, "IO") else "REJECT")


def _passes(study: Study, case: Case, record: CallRecord, contract: str) -> bool:
    return all(r.passed is not False for r in study.judge(case, record.outputs, contract))


def wrong_outputs(study: Study, case: Case, record: CallRecord) -> dict[str, str]:
    """What is wrong beyond rounding in each output of a usable call, in words; empty when nothing is."""
    bad = [j.report for j in _judge_call(study, case, record) if j.report.passed is False and not j.excused]
    return {r.name: next(t for t in r.tests if t.failed).words for r in bad}


def _judge_call(study: Study, case: Case, record: CallRecord) -> list[Judged]:
    reports = study.judge(case, record.outputs)
    excused = [False] * len(reports)
    if any(r.passed is False for r in reports) and study.native_falls_short(case):
        excused = study.excuses(case, record.outputs)
    return [Judged(case, r, excused=e and r.passed is False) for r, e in zip(reports, excused, strict=True)]


def _conclude(study: Study, check: str, output: str, judged: Sequence[Judged]) -> Finding:
    mine = [j for j in judged if j.report.name == output]
    bad = [j for j in mine if j.report.passed is False and not j.excused]
    if bad:
        return _objection(study, check, output, max(bad, key=lambda j: j.severity), len(bad), len(mine))
    excused = [j for j in mine if j.excused]
    if excused:
        return _deficient(check, output, excused[0], len(excused), len(mine))
    able = [j for j in mine if j.report.passed is not None]
    if not able:
        why = mine[0].report.why if mine else "no call returned this output"
        return not_verified(check, f"`{output}` could not be judged: {why}", output=output)
    worst = max((_share(t) for j in able for t in j.report.tests), default=0.0)
    left_out = max(j.report.unjudged / max(1, j.report.elements) for j in able)
    return held(
        check,
        f"`{output}` stays within the honest floor in {len(able)} of {len(mine)} cases"
        + (
            f"; up to {left_out:.2%} of its elements cannot be judged (ill-conditioned or out of range)"
            if left_out
            else ""
        ),
        output=output,
        measured=worst,
        allowed=1.0,
        unit="of what is allowed",
    )


def _objection(study: Study, check: str, output: str, worst: Judged, bad: int, total: int) -> Finding:
    test = max((t for t in worst.report.tests if t.failed), key=_excess)
    report = worst.report
    inputs = study.told_inputs(worst.case)
    reason = f"`{output}` is wrong beyond rounding in {bad} of {total} cases"
    reason += f", worst with {inputs}: {test.words}" if inputs else f": {test.words}"
    if report.got is not None and report.expected is not None:
        reason += (
            f"; worst element {list(report.worst_index or ())}: got {report.got:.6g}, expected {report.expected:.6g}"
        )
    return failed(
        check,
        reason,
        output=output,
        cause=f"values:{test.name}",
        measured=test.measured,
        allowed=test.allowed,
        unit=_unit(test.name),
        where=where(worst.case, index=report.worst_index),
        advice="Compare the kernel with the reference at this element; the replay below draws the same inputs.",
        details={
            "implied_bits": report.implied_bits,
            "slope": report.slope,
            "failed_tests": sorted({t.name for t in report.tests if t.failed}),
        },
    )


UNITS = {
    "tail": "honest deviations",
    "bulk": "times the honest rms error",
    "bias": "mean signed error over the rounding scale",
    "slope": "deviation of the slope from 1",
    "nonfinite": "elements",
    "exact": "elements",
}


def _unit(test: str) -> str:
    return UNITS.get(test.split(" by ")[0], test)


def _deficient(check: str, output: str, one: Judged, count: int, total: int) -> Finding:
    return Finding(
        check=check,
        outcome=Outcome.NOTED,
        output=output,
        cause="reference-deficient",
        reason=(
            f"reference deficient: in {count} of {total} cases the native reference itself falls short of its "
            f"declared precision in `{output}`, and the candidate is no worse"
        ),
        where=where(one.case),
    )


def _excess(test: TestResult) -> float:
    if test.measured != test.measured:  # NaN: nothing is further off
        return float("inf")
    return abs(test.measured) / test.allowed if test.allowed else float("inf")


def _share(test: TestResult) -> float:
    return abs(test.measured) / test.allowed if test.allowed else 0.0
