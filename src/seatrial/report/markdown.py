"""Markdown: a comment on a pull request.

The verdict and the objections stand open; everything else folds away. Text from a candidate is escaped
so that it can neither become markup, nor close a table, nor mention anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from seatrial.model import Report
from seatrial.report import words
from seatrial.report.data import FindingView, ReportView, RuleView, TrialView, overview, views, worst

NAME = "markdown"
SUMMARY = "a comment for a pull request"

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+.!|~$^=-])")
_TABLE_CELL = 400  # characters: a table stays readable
_COMMENT = 60_000  # characters; GitHub refuses a comment above 65,536
_NAME_OF = {"failed": "objection", "limited": "limit", "not-verified": "what was not verified,"}
_SIGN = {
    "accepted": "✅",
    "accepted-with-limits": "🟡",
    "rejected": "❌",
    "inconclusive": "❔",
}


def text(reports: Sequence[Report]) -> str:
    """The comment's text."""
    parts: list[str] = []
    if len(reports) != 1:
        verdict = worst(reports)
        parts.append(f"## {_SIGN[verdict.value]} seatrial: {overview(reports)}")
        parts.append(_table(("candidate", "verdict", "in one sentence"), (_summary_row(v) for v in views(reports))))
    parts.extend(block for report in views(reports) for block in _one(report))
    return "\n\n".join(_as_many_as_fit([part for part in parts if part])) + "\n"


def _as_many_as_fit(blocks: Sequence[str]) -> list[str]:
    kept: list[str] = []
    room = _COMMENT
    for block in blocks:
        room -= len(block) + 2
        if room < 0:
            return [*kept, "*The rest does not fit into a comment; see the HTML or JSON report.*"]
        kept.append(block)
    return kept


def _summary_row(report: ReportView) -> tuple[str, ...]:
    return (_code(report.candidate), f"{_SIGN[report.verdict]} {report.word}", _prose(report.headline))


def _one(report: ReportView) -> list[str]:
    return [
        f"## {_SIGN[report.verdict]} {report.word}: {_code(report.candidate)}",
        _prose(report.headline),
        f"Problem {_code(report.problem)} · {_inline(report.tally)}",
        _rule_line(report.rule),
        f"Strength of the inputs: {_prose(report.strength)}" if report.strength else "",
        _findings_table("Objections", report.objections),
        _findings_table("Limits found", report.limited),
        _findings_table("Not verified", report.unverified),
        _prose(report.prevented_words),
        *(_reproducer(finding) for finding in (*report.objections, *report.limited, *report.unverified)),
        _trial(report.trial),
        _fold("Error growth", "\n\n".join(_growth_blocks(report))),
        _fold("Every check", _checks_table(report)),
        _fold("Limits of this verdict", _bullets((*report.limits, *report.oddities))),
        _fold("What the policy leaves out", _bullets(report.policy_limits)),
        _fold("Noted", _bullets(finding.reason for finding in report.noted)),
        _fold("Run it again", "\n\n".join(_replay_blocks(report))),
    ]


def _rule_line(rule: RuleView | None) -> str:
    if rule is None:
        return ""
    tally = f" {rule.tally}" if rule.tally else ""
    summary = f" ({_prose(rule.summary)})" if rule.summary else ""
    return f"Benchmark's own rule: **{rule.word}**{tally}{summary}"


def _findings_table(heading: str, findings: Sequence[FindingView]) -> str:
    if not findings:
        return ""
    rows = (_finding_row(finding) for finding in findings)
    return f"### {heading}\n\n" + _table(("", "what", "where", "measured", "bound", "what to do"), rows)


def _finding_row(finding: FindingView) -> tuple[str, ...]:
    where = "; ".join(f"{label} {value}" for label, value in finding.where)
    what = f"{_prose(finding.reason)} ({_code(finding.check)})"
    return (
        str(finding.number),
        what,
        _inline(where),
        _inline(finding.measured),
        _allowed(finding),
        _prose(finding.advice),
    )


def _allowed(finding: FindingView) -> str:
    return _inline(finding.limit) if finding.allowed else ""


def _reproducer(finding: FindingView) -> str:
    if not finding.reproducer:
        return ""
    return _fold(f"Reproduce {_NAME_OF[finding.outcome]} {finding.number}", _fence(finding.reproducer))


def _trial(trial: TrialView | None) -> str:
    if trial is None:
        return ""
    rows = ((_inline(c.data), _inline(c.optimizer), _inline(c.verdict), _prose(c.reason)) for c in trial.cells)
    return _fold(
        "Training trials", f"{_inline(trial.model)}\n\n" + _table(("data", "optimizer", "verdict", "why"), rows)
    )


def _growth_blocks(report: ReportView) -> Iterable[str]:
    for growth in report.growth:
        rows = ((row.contributions, row.error, row.floor, row.factor) for row in growth.rows)
        yield f"{_code(growth.output)}: {_prose(growth.sentence)}"
        yield _table(("contributions", "error", "honest floor", "times the floor"), rows)


def _checks_table(report: ReportView) -> str:
    rows = ((_code(c.check), c.word, c.calls, c.seconds, _prose(c.summary)) for c in report.checks)
    return _table(("check", "outcome", "calls", "time", "summary"), rows) if report.checks else ""


def _replay_blocks(report: ReportView) -> Iterable[str]:
    if report.replay:
        yield _fence(report.replay)
    seeds = ", ".join(f"{name} {seed}" for name, seed in report.seeds)
    if seeds:
        yield f"Seeds: {_inline(seeds)}"
    facts = (
        ("seatrial", report.seatrial),
        ("device", report.device),
        ("policy", report.policy),
        ("time", report.took),
        *report.environment,
    )
    yield _bullets(f"{name}: {value}" for name, value in facts if value)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_prose(line)}" for line in lines if line)


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if body else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines.extend(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(lines)


def _inline(text: str) -> str:
    """Words that stay words: no markup, no HTML, no link, no mention."""
    text = words.shortened(text, _TABLE_CELL)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _SPECIAL.sub(r"\\\1", text)
    # A zero-width space after @ keeps a name from being called; an entity keeps a URL from being linked.
    return text.replace("@", "@\u200b").replace("://", "&#58;//")


def _prose(text: str) -> str:
    """A sentence in which `names in backticks` stay code spans; the rest is `_inline`."""
    pieces = re.split(r"`([^`]+)`", words.shortened(text, _TABLE_CELL))
    return "".join(_code(piece) if place % 2 else _inline(piece) for place, piece in enumerate(pieces) if piece)


def _code(text: str) -> str:
    """Words in a code span, whatever backticks they hold; a pipe would still end a table cell."""
    text = words.shortened(text, _TABLE_CELL).replace("|", "¦")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{padding}{text}{padding}{ticks}"


def _fence(text: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text}\n{ticks}"
