"""The data step: a Report becomes finished strings, already rounded, in reading order.

Reporters and templates lay out what they find here and decide nothing. The one judgement made is to
fail closed: a check whose row says "held" while a finding of it failed is shown as failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seatrial.model import (
    BenchmarkRow,
    BenchmarkRule,
    CheckRow,
    Finding,
    Growth,
    GrowthPoint,
    Outcome,
    Report,
    Trial,
    TrialCell,
    Verdict,
    Where,
)
from seatrial.report import words

Pairs = tuple[tuple[str, str], ...]

_SEVEREST_FIRST = (Outcome.FAILED, Outcome.NOT_VERIFIED, Outcome.LIMITED)
_HONEST_GRADES = ("F32", "TC")
_ENDED = {
    "raised": "raised an error",
    "crashed": "crashed",
    "exited": "ended its process",
    "timed-out": "hung",
    "out-of-memory": "ran out of memory",
}
_WORST_FIRST = (Verdict.REJECTED, Verdict.INCONCLUSIVE, Verdict.ACCEPTED_WITH_LIMITS, Verdict.ACCEPTED)


@dataclass(frozen=True)
class Scale:
    """Measured and allowed on one linear scale from 0, in percent of its length."""

    measured: float
    allowed: float


@dataclass(frozen=True)
class FindingView:
    """One finding in a person's words.

    `number` counts from 1 within its group; `bound` says which side of `allowed` is right ("at most"); `limit` is
    both in words ("at least 24 bits required").
    """

    number: int
    check: str
    title: str
    output: str
    outcome: str
    word: str
    reason: str
    cause: str
    where: Pairs
    measured: str
    allowed: str
    bound: str
    factor: str
    scale: Scale | None
    advice: str
    reproducer: str
    details: Pairs

    @property
    def asked(self) -> str:
        """ "required" for a minimum, "allowed" for a maximum."""
        return "required" if self.bound == "at least" else "allowed"

    @property
    def limit(self) -> str:
        """ "at least 24 bits required", "at most 0.01 allowed"."""
        return f"{self.bound} {self.allowed or 'unstated'} {self.asked}"


@dataclass(frozen=True)
class RuleRowView:
    """The benchmark's rule on one workload."""

    workload: str
    axes: str
    status: str
    passed: bool
    matched: str
    required: str
    absolute_error: str
    relative_error: str
    tolerance: str
    message: str


@dataclass(frozen=True)
class RuleView:
    """What the benchmark itself says. `word` is PASSED, FAILED or NOT RUN, `tally` "4 of 4 workloads"."""

    name: str
    passed: bool
    word: str
    tally: str
    summary: str
    rows: tuple[RuleRowView, ...]


@dataclass(frozen=True)
class CheckView:
    """One line of the per-check table."""

    check: str
    title: str
    outcome: str
    word: str
    calls: str
    seconds: str
    duration: float
    summary: str


@dataclass(frozen=True)
class GrowthRow:
    """Error at one number of contributions, beside the honest floor."""

    contributions: str
    error: str
    floor: str
    factor: str


@dataclass(frozen=True)
class GrowthView:
    """Error growth of one output; `source` is what the plot is drawn from."""

    output: str
    lever: str
    sentence: str
    rows: tuple[GrowthRow, ...]
    source: Growth


@dataclass(frozen=True)
class CellView:
    """One cell of the training matrix; `source` is what the plot is drawn from."""

    data: str
    optimizer: str
    verdict: str
    reason: str
    facts: Pairs
    source: TrialCell


@dataclass(frozen=True)
class TrialView:
    """The training matrix, one row per optimizer."""

    adapter: str
    model: str
    seconds: str
    rows: tuple[tuple[str, tuple[CellView, ...]], ...]
    tally: str
    source: Trial

    @property
    def cells(self) -> tuple[CellView, ...]:
        """All cells, row by row."""
        return tuple(cell for _, row in self.rows for cell in row)


@dataclass(frozen=True)
class ReportView:
    """Everything a page says about one candidate. `anchor` is unique among the reports shown together.

    `prevented` is what could not be verified because of a crash that an objection carries: `prevented_words` sum it
    up for a person, and only what lists checks one by one lists it too.
    """

    anchor: str
    candidate: str
    candidate_path: str
    problem: str
    problem_path: str
    verdict: str
    word: str
    headline: str
    tally: str
    grade: str
    grade_words: str
    objections: tuple[FindingView, ...]
    limited: tuple[FindingView, ...]
    unverified: tuple[FindingView, ...]
    prevented: tuple[FindingView, ...]
    prevented_words: str
    noted: tuple[FindingView, ...]
    checks: tuple[CheckView, ...]
    strength: str
    limits: tuple[str, ...]
    policy_limits: tuple[str, ...]
    oddities: tuple[str, ...]
    rule: RuleView | None
    contrast: str
    growth: tuple[GrowthView, ...]
    trial: TrialView | None
    environment: Pairs
    seeds: Pairs
    policy: str
    device: str
    seconds: str
    audit_seconds: str
    took: str
    replay: str
    seatrial: str


def views(reports: Sequence[Report]) -> tuple[ReportView, ...]:
    """One view per report, with anchors that differ."""
    return tuple(view(report, anchor=f"candidate-{number}") for number, report in enumerate(reports, 1))


def worst(reports: Sequence[Report]) -> Verdict:
    """The verdict over several candidates; inconclusive when there is none, for nothing was verified."""
    verdicts = {report.verdict for report in reports}
    return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), Verdict.INCONCLUSIVE)


def overview(reports: Sequence[Report]) -> str:
    """ "1 rejected, 2 accepted": how many candidates got which verdict, the worst first."""
    verdicts = [report.verdict for report in reports]
    present = [verdict for verdict in _WORST_FIRST if verdict in verdicts]
    tally = ", ".join(f"{verdicts.count(verdict)} {words.VERDICT_WORDS[verdict].lower()}" for verdict in present)
    return tally or "No candidate was audited"


def view(report: Report, *, anchor: str = "candidate-1") -> ReportView:
    """The finished strings of one report."""
    titles = {row.check: words.name(row.title) for row in report.checks}
    prevented = _prevented(report)
    unverified = [f for f in report.findings if f.outcome is Outcome.NOT_VERIFIED and f not in prevented]
    return ReportView(
        anchor=anchor,
        candidate=words.name(report.candidate) or "(no name)",
        candidate_path=words.one_line(report.candidate_path),
        problem=words.name(report.problem) or "(no name)",
        problem_path=words.one_line(report.problem_path),
        verdict=report.verdict.value,
        word=words.VERDICT_WORDS[report.verdict],
        headline=words.one_line(report.headline),
        tally=_tally(report),
        grade=_grade(report),
        grade_words=words.GRADE_WORDS.get(report.grade, "") if _grade(report) else "",
        objections=_findings(report, Outcome.FAILED, titles),
        limited=_findings(report, Outcome.LIMITED, titles),
        unverified=_numbered(unverified, titles),
        prevented=_numbered(prevented, titles),
        prevented_words=_prevented_words(prevented),
        noted=_findings(report, Outcome.NOTED, titles),
        checks=tuple(_check(row, _told_above(report)) for row in rows_with_findings(report)),
        strength=words.one_line(report.adequacy.sentence) if report.adequacy else "",
        limits=_sentences(report.limits),
        policy_limits=_sentences(report.policy_limits),
        oddities=_sentences(report.oddities),
        rule=_rule(report.benchmark_rule),
        contrast=_contrast(report),
        growth=tuple(_growth(growth) for growth in report.growth if growth.points),
        trial=_trial(report.trial),
        environment=_pairs(report.environment),
        seeds=tuple((words.name(name), str(seed)) for name, seed in report.seeds.items()),
        policy=words.name(report.policy),
        device=words.name(report.device),
        seconds=words.seconds(report.seconds),
        audit_seconds=words.seconds(report.audit_seconds) if report.audit_seconds else "",
        took=_took(report),
        replay=words.plain(report.replay).strip(),
        seatrial=words.name(report.seatrial),
    )


def rows_with_findings(report: Report) -> tuple[CheckRow, ...]:
    """The check rows, none milder than its findings, with a row for each finding whose check has none."""
    known = {row.check: row for row in report.checks}
    loose = {finding.check: finding for finding in reversed(report.findings) if finding.check not in known}
    for check, first in sorted(loose.items()):
        known[check] = CheckRow(
            check=check, title=check, outcome=Outcome.HELD, calls=0, seconds=0.0, summary=first.reason
        )
    return tuple(_no_milder(row, report.findings) for row in known.values())


def _no_milder(row: CheckRow, findings: Sequence[Finding]) -> CheckRow:
    outcomes = {row.outcome, *(finding.outcome for finding in findings if finding.check == row.check)}
    severest = next((outcome for outcome in _SEVEREST_FIRST if outcome in outcomes), row.outcome)
    return row if severest is row.outcome else row.model_copy(update={"outcome": severest})


def _prevented(report: Report) -> list[Finding]:
    """What could not be verified because the candidate's calls end as an objection says that they do."""
    told = any(f.outcome is Outcome.FAILED and f.cause.startswith("call:") for f in report.findings)
    return [f for f in report.findings if told and f.outcome is Outcome.NOT_VERIFIED and f.cause.startswith("call:")]


def _prevented_words(prevented: Sequence[Finding]) -> str:
    """ "7 checks could not run: the candidate crashed in every call (wrong-values, …)"; empty for nothing."""
    if not prevented:
        return ""
    checks = {finding.check: finding for finding in prevented}
    ends = {finding.cause.partition(":")[2] for finding in prevented}
    how = _ENDED.get(ends.pop(), "did not return") if len(ends) == 1 else "did not return"
    calls, silent = (
        sum(int(f.details.get(name, 0)) for f in checks.values()) for name in ("calls", "calls without a result")
    )
    some = silent < calls
    where = f"in {silent} of their {calls} calls" if some else "in every call"
    could = "could not be finished" if some else "could not run"
    names = ", ".join(words.name(check) for check in checks)
    return f"{words.count(len(checks), 'check')} {could}: the candidate {how} {where} ({names})"


def _took(report: Report) -> str:
    """ "the audit took 21.4 s, 9.1 s of them this candidate"; without the first where it was not measured."""
    own = words.seconds(report.seconds) if report.seconds else ""
    if not report.audit_seconds:
        return f"took {own}" if own else ""
    whole = f"the whole audit took {words.seconds(report.audit_seconds)}"
    return f"{whole}, this candidate {own} of it" if own else whole


def _tally(report: Report) -> str:
    prevented = _prevented(report)
    found = [finding.outcome for finding in report.findings if finding not in prevented]
    parts = [
        words.count(found.count(outcome), singular, plural)
        for outcome, singular, plural in (
            (Outcome.FAILED, "objection", "objections"),
            (Outcome.LIMITED, "limit", "limits"),
            (Outcome.NOT_VERIFIED, "thing not verified", "things not verified"),
        )
        if outcome in found
    ]
    if prevented:
        parts.append(f"{words.count(len({f.check for f in prevented}), 'check')} that it prevents")
    if parts:
        return ", ".join(parts)
    held = sum(row.outcome is Outcome.HELD for row in report.checks)
    return f"{words.count(held, 'check')} held" if held else "no check came to a conclusion"


def _grade(report: Report) -> str:
    """The grade with what it speaks of; nothing where a proven wrong value on the same inputs contradicts it."""
    wrong = any(f.outcome is Outcome.FAILED and f.check == "wrong-values" for f in report.findings)
    if not report.grade or (wrong and report.grade in _HONEST_GRADES):
        return ""
    return f"{words.name(report.grade)} on the declared inputs"


def _sentences(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for line in lines if (text := words.one_line(line)))


def _pairs(values: Mapping[str, object]) -> Pairs:
    return tuple((words.name(str(key)), words.one_line(_said(value))) for key, value in values.items())


def _said(value: object) -> str:
    if isinstance(value, float):
        return words.number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_said(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(item) for item in value)
    return str(value)


def _findings(report: Report, outcome: Outcome, titles: Mapping[str, str]) -> tuple[FindingView, ...]:
    return _numbered([finding for finding in report.findings if finding.outcome is outcome], titles)


def _numbered(findings: Sequence[Finding], titles: Mapping[str, str]) -> tuple[FindingView, ...]:
    return tuple(_finding(number, finding, titles) for number, finding in enumerate(findings, 1))


def _finding(number: int, finding: Finding, titles: Mapping[str, str]) -> FindingView:
    return FindingView(
        number=number,
        check=words.name(finding.check),
        title=titles.get(finding.check) or words.name(finding.check),
        output=words.name(finding.output or ""),
        outcome=finding.outcome.value,
        word=words.OUTCOME_WORDS[finding.outcome],
        reason=words.one_line(finding.reason),
        cause=words.name(finding.cause),
        where=_where(finding.where),
        measured=words.amount(finding.measured, finding.unit),
        allowed=words.amount(finding.allowed, finding.unit),
        bound=bound(finding),
        factor=_times(finding.measured, finding.allowed),
        scale=_scale(finding.measured, finding.allowed),
        advice=words.one_line(finding.advice),
        reproducer=words.plain(finding.reproducer).strip(),
        details=_pairs(finding.details),
    )


def _where(where: Where) -> Pairs:
    known = (
        ("workload", words.one_line(where.workload)),
        ("sizes", words.axes(where.axes)),
        ("inputs", words.one_line(where.inputs)),
        ("case seed", "" if where.seed is None else str(where.seed)),  # the run's own seed is in the reproducer
        ("element", "" if where.index is None else words.listing(where.index)),
        ("note", words.one_line(where.note)),
    )
    return tuple((label, text) for label, text in known if text)


def bound(finding: Finding) -> str:
    """Which side of `allowed` is right: "at least" or "at most"."""
    if finding.measured is None or finding.allowed is None:
        return "at most"
    # A failed finding below its bound missed a minimum: bits kept, rows written.
    return "at least" if finding.outcome is Outcome.FAILED and finding.measured < finding.allowed else "at most"


def _both_positive(first: float | None, second: float | None) -> tuple[float, float] | None:
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return None
    return (first, second) if first > 0 and second > 0 else None


def _times(measured: float | None, allowed: float | None) -> str:
    pair = _both_positive(measured, allowed)
    if pair is None or pair[0] <= pair[1] or not math.isfinite(pair[0] / pair[1]):
        return ""
    return f"{pair[0] / pair[1]:,.0f} ×" if pair[0] >= 10 * pair[1] else f"{pair[0] / pair[1]:.1f} ×"


def _scale(measured: float | None, allowed: float | None) -> Scale | None:
    pair = _both_positive(measured, allowed)
    if pair is None:
        return None
    longest = max(pair)
    return Scale(*(round(max(100 * value / longest, 0.6), 2) for value in pair))


def _rule(rule: BenchmarkRule | None) -> RuleView | None:
    if rule is None:
        return None
    rows = tuple(_rule_row(row) for row in rule.rows)
    tally = f"{sum(row.passed for row in rows)} of {words.count(len(rows), 'workload')}" if rows else ""
    summary = words.one_line(rule.summary)
    return RuleView(
        name=words.name(rule.name),
        passed=rule.passed,
        word="PASSED" if rule.passed else "FAILED" if rows else "NOT RUN",
        tally=tally,
        summary="" if tally and summary.startswith(tally) else summary,  # said once is enough
        rows=rows,
    )


def _contrast(report: Report) -> str:
    if report.benchmark_rule is None or not (report.benchmark_rule.passed or report.benchmark_rule.rows):
        return ""
    passes = report.verdict in (Verdict.ACCEPTED, Verdict.ACCEPTED_WITH_LIMITS)
    return {
        (True, True): "Both let it pass.",
        (True, False): "The benchmark lets it pass. seatrial does not.",
        (False, True): "The benchmark does not let it pass. seatrial does.",
        (False, False): "Neither lets it pass.",
    }[report.benchmark_rule.passed, passes]


def _rule_row(row: BenchmarkRow) -> RuleRowView:
    return RuleRowView(
        workload=words.one_line(row.workload),
        axes=words.axes(row.axes),
        status=words.name(row.status),
        passed=row.status == "PASSED",
        matched=_ratio(row.matched_ratio),
        required=_ratio(row.required_matched_ratio),
        absolute_error=words.number(row.max_absolute_error),
        relative_error=words.number(row.max_relative_error),
        tolerance=_tolerance(row),
        message=words.one_line(row.message),
    )


def _ratio(ratio: float | None) -> str:
    if ratio is None or not math.isfinite(ratio):
        return words.number(ratio)
    # Rounded down: 99.999 % must never read as "100 %".
    return f"{math.floor(ratio * 1e4) / 1e2:g} %"


def _tolerance(row: BenchmarkRow) -> str:
    parts = (("atol", row.atol), ("rtol", row.rtol))
    return ", ".join(f"{name} {words.number(value)}" for name, value in parts if value is not None)


def _told_above(report: Report) -> dict[str, str]:
    """Reasons that stand in full above the table, and the words that point to them."""
    names = {Outcome.FAILED: "objection", Outcome.LIMITED: "limit", Outcome.NOT_VERIFIED: "not verified"}
    shown = [finding for finding in report.findings if finding not in _prevented(report)]
    return {
        words.one_line(finding.reason): f"see {name} {number}"
        for outcome, name in names.items()
        for number, finding in enumerate([f for f in shown if f.outcome is outcome], 1)
    }


def _check(row: CheckRow, told_above: Mapping[str, str]) -> CheckView:
    summary = words.one_line(row.summary)
    return CheckView(
        check=words.name(row.check),
        title=words.name(row.title) or words.name(row.check),
        outcome=row.outcome.value,
        word=words.OUTCOME_WORDS[row.outcome],
        calls=str(row.calls),
        seconds=words.seconds(row.seconds),
        duration=row.seconds if math.isfinite(row.seconds) else 0.0,
        summary=told_above.get(summary, summary),
    )


def _growth(growth: Growth) -> GrowthView:
    points = sorted(growth.points, key=lambda point: point.contributions)
    return GrowthView(
        output=words.name(growth.output),
        lever=words.one_line(growth.lever),
        sentence=_growth_sentence(growth.exponent, points[-1]),
        rows=tuple(_growth_row(point) for point in points),
        source=growth,
    )


def _growth_row(point: GrowthPoint) -> GrowthRow:
    return GrowthRow(
        contributions=str(point.contributions),
        error=words.number(point.error),
        floor=words.number(point.floor),
        factor=_times(point.error, point.floor) or _beside_the_floor(point),
    )


def _beside_the_floor(point: GrowthPoint) -> str:
    if not (math.isfinite(point.error) and math.isfinite(point.floor)):
        return "unknown"
    return "within" if point.error <= point.floor else "beyond"


def _growth_sentence(exponent: float | None, last: GrowthPoint) -> str:
    factor = _times(last.error, last.floor)
    beside = f", {factor} the honest floor of {words.number(last.floor)}" if factor else ""
    end = f"At {words.count(last.contributions, 'contribution')} the error is {words.number(last.error)}{beside}."
    if exponent is None or not math.isfinite(exponent):
        return end
    return f"{end} On log-log axes that is a slope of {exponent:.2f}, where 0 is flat and 1 is in proportion."


def _drawable(loss: float) -> bool:
    # Beyond that the window's own arithmetic would overflow; no loss of a run that trains is near it.
    return math.isfinite(loss) and abs(loss) < 1e30


def loss_window(cells: Sequence[TrialCell]) -> tuple[float, float]:
    """The losses worth seeing: those of the honest runs, and half as much again for a candidate above them."""
    honest = [loss for cell in cells for curve in cell.curves if curve.run != "candidate" for loss in curve.losses]
    everything = [loss for cell in cells for curve in cell.curves for loss in curve.losses]
    known = [loss for loss in honest if _drawable(loss)] or [loss for loss in everything if _drawable(loss)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    low -= (high - low) / 20  # a curve does not lie on the axis
    headroom = max((high - low) / 2, 1e-6 * abs(high), 1e-12)
    highest = max(loss for loss in everything if _drawable(loss))
    return low, min(max(high, highest), high + headroom) if highest > low else low + headroom


def _trial(trial: Trial | None) -> TrialView | None:
    if trial is None:
        return None
    optimizers = dict.fromkeys(cell.optimizer for cell in trial.cells)
    rows = tuple(
        (words.name(name), tuple(_cell(cell) for cell in trial.cells if cell.optimizer == name)) for name in optimizers
    )
    return TrialView(
        adapter=words.one_line(trial.adapter),
        model=words.one_line(trial.model),
        seconds=words.seconds(trial.seconds),
        rows=rows,
        tally=_cells_tally([words.name(cell.verdict) for cell in trial.cells]),
        source=trial,
    )


def _cells_tally(verdicts: Sequence[str]) -> str:
    """ "diverges in 1, masked in 5 of 6 cells"."""
    told = {"masked": "is masked", "not verified": "is not verified"}
    parts = [f"{told.get(verdict, verdict)} in {verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts)]
    return f"{', '.join(parts)} of {words.count(len(verdicts), 'cell')}" if parts else ""


def _cell(cell: TrialCell) -> CellView:
    facts = (
        ("learning rate", words.number(cell.learning_rate)),
        ("first step outside", "" if cell.first_step is None else str(cell.first_step)),
        ("final loss, candidate minus reference", words.number(cell.gap)),
        ("honest controls stay within ±", words.number(cell.band)),
        ("most contributions to one row in a step", "" if cell.most_repeats is None else str(cell.most_repeats)),
    )
    return CellView(
        data=words.name(cell.data),
        optimizer=words.name(cell.optimizer),
        verdict=words.name(cell.verdict),
        reason=words.one_line(cell.reason),
        facts=tuple((label, text) for label, text in facts if text),
        source=cell,
    )
