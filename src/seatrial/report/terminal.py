"""The terminal: the verdict in words first, then every objection with a line to copy.

On a terminal there is colour and wrapping; in a pipe or a log there is neither, and the text is stable
from run to run. A reproducer is never wrapped. No box is drawn anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from seatrial.model import Curve, Report, TrialCell
from seatrial.report import words
from seatrial.report.data import CheckView, FindingView, GrowthView, Pairs, ReportView, TrialView, loss_window, views

_STYLE = {
    "accepted": "bold green",
    "accepted-with-limits": "bold yellow",
    "rejected": "bold red",
    "inconclusive": "bold magenta",
    "held": "green",
    "failed": "bold red",
    "limited": "yellow",
    "not-verified": "magenta",
    "not-applicable": "dim",
    "noted": "cyan",
    "agrees": "green",
    "drifts": "bold red",
    "diverges": "bold red",
    "masked": "yellow",
    "not verified": "magenta",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = "_.-=+*#@"
_SPARKS = 20  # characters of a sparkline
_IN_ASCII = str.maketrans({"×": "x", "–": "-", "—": "-", "…": "...", "·": "-", "±": "+/-", "¦": "|"})

Cell = str | tuple[str, str]  # text, or text with a style


def render(reports: Sequence[Report], console: Console) -> None:
    """Print every report, then a summary when there are several candidates."""
    paper = Paper(console)
    shown = views(reports)
    if not shown:
        paper.say("No candidate was audited.", style=_STYLE["inconclusive"])
    for report in shown:
        _one(paper, report)
    if len(shown) > 1:
        _summary(paper, shown)


def render_compact(reports: Sequence[Report], console: Console) -> None:
    """Print a short table per candidate and the summary; everything else is for the page."""
    paper = Paper(console)
    shown = views(reports)
    for report in shown:
        _head(paper, report)
        _verdicts_of_checks(paper, report)
    _summary(paper, shown)
    for heading, lines in (
        ("Limits of these verdicts", [line for report in shown for line in report.limits]),
        ("What the policy leaves out", [line for report in shown for line in report.policy_limits]),
    ):
        _lines(paper, heading, tuple(dict.fromkeys(lines)))


def _verdicts_of_checks(paper: Paper, report: ReportView) -> None:
    """A row per check that did not hold, with what it measured; the others are counted."""
    rows: list[tuple[Cell, ...]] = [
        (check.check, (check.word, _STYLE[check.outcome]), _in_short(report, check))
        for check in report.checks
        if check.outcome != "held"
    ]
    held = [check.check for check in report.checks if check.outcome == "held"]
    if held:
        rows.append(
            (f"{words.count(len(held), 'check')}{' more' if rows else ''}", ("held", _STYLE["held"]), ", ".join(held))
        )
    paper.table(("check", "outcome", "measured"), rows)
    if report.trial is not None:
        paper.say(f"training: the candidate {report.trial.tally}", indent=2)


def _in_short(report: ReportView, check: CheckView) -> str:
    findings = (*report.objections, *report.unverified, *report.limited)
    first = next((f for f in findings if f.check == check.check), None)
    if first is None:
        return check.summary
    return dict(_evidence(first)).get("measured") or first.reason


def _summary(paper: Paper, shown: Sequence[ReportView]) -> None:
    paper.head("Summary")
    rows = [((r.word.upper(), _STYLE[r.verdict]), r.candidate, _found(r), r.seconds) for r in shown]
    paper.table(("verdict", "candidate", "found", "time"), rows)
    whole = next((r.audit_seconds for r in shown if r.audit_seconds), "")
    if whole:
        paper.say(f"The whole audit took {whole}: start, control, planted faults and every candidate.", indent=2)


def _found(report: ReportView) -> str:
    """The tally; with the reason where one thing alone stands in the way."""
    alone = report.unverified if not report.objections and len(report.unverified) == 1 else ()
    return f"{report.tally}: {alone[0].reason}" if alone else report.tally


@dataclass(frozen=True)
class Paper:
    """A console that writes the same words on a terminal, in a pipe and in a narrow encoding."""

    console: Console

    @property
    def speaks_unicode(self) -> bool:
        """False where a sparkline would print as question marks or raise."""
        return self.console.encoding.lower().replace("-", "").startswith("utf")

    def say(self, text: str, *, style: str = "", indent: int = 0) -> None:
        """Prose: wrapped on a terminal, one line elsewhere; nothing for an empty text."""
        if not text:
            return
        if self.console.is_terminal:
            self.console.print(
                Padding(Text(self._spelled(text), style=style), (0, 0, 0, indent), expand=False), highlight=False
            )
        else:
            self.copyable(text, indent=indent)

    def copyable(self, text: str, *, indent: int = 0) -> None:
        """Lines to copy: never wrapped, never coloured."""
        for line in text.splitlines():
            self.console.print(Text(" " * indent + self._spelled(line)), soft_wrap=True, highlight=False)

    def head(self, text: str) -> None:
        """A heading with an empty line before it."""
        self.console.print()
        self.say(text, style="bold")

    def pairs(self, pairs: Pairs, *, indent: int) -> None:
        """Label and value, one pair a line, values aligned."""
        width = max((len(label) for label, _ in pairs), default=0)
        if not self.console.is_terminal:
            for label, value in pairs:
                self.copyable(f"{label:<{width}}  {value}", indent=indent)
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        for label, value in pairs:
            grid.add_row(Text(self._spelled(label), style="dim"), Text(self._spelled(value), overflow="fold"))
        self.console.print(Padding(grid, (0, 0, 0, indent), expand=False))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Columns without lines; the last column takes what is left."""
        if self.console.is_terminal:
            self._live_table(heads, rows)
        else:
            self._plain_table(heads, rows)

    def _live_table(self, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(*(Text(self._spelled(_words(cell)), style=_style(cell)) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def _plain_table(self, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        lines = [[self._spelled(_words(cell)) for cell in row] for row in (heads, *rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
        for line in lines:
            cells = (f"{cell:<{min(width, 60)}}" for cell, width in zip(line, widths, strict=True))
            self.copyable(("  " + "  ".join(cells)).rstrip())

    def _spelled(self, text: str) -> str:
        if self.speaks_unicode:
            return text
        encoding = self.console.encoding
        return text.translate(_IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)


def _words(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def _head(paper: Paper, report: ReportView) -> None:
    paper.console.print()
    paper.say(f"{report.word.upper()}: {report.candidate}", style=_STYLE[report.verdict])
    paper.say(report.headline, indent=2)
    paper.say(f"problem {report.problem}", indent=2)
    if report.rule is not None:
        tally = f" {report.rule.tally}" if report.rule.tally else ""
        paper.say(f"benchmark's own rule: {report.rule.word}{tally}", indent=2)
        paper.say(report.rule.summary, indent=4)
    if report.grade:
        paper.say(f"grade {report.grade}" + (f": {report.grade_words}" if report.grade_words else ""), indent=2)
    if report.strength:
        paper.say(f"strength of the inputs: {report.strength}", indent=2)


def _one(paper: Paper, report: ReportView) -> None:
    _head(paper, report)
    _findings(paper, "Objections", report.objections)
    _findings(paper, "Limits found", report.limited)
    _findings(paper, "Not verified", report.unverified)
    _lines(paper, "What this prevented", (report.prevented_words,) if report.prevented_words else ())
    _growth(paper, report.growth)
    _trial(paper, report.trial)
    _checks(paper, report)
    _lines(paper, "Noted", tuple(finding.reason for finding in report.noted))
    _lines(paper, "Limits of this verdict", report.limits)
    _lines(paper, f"What policy {report.policy} leaves out", report.policy_limits)
    _lines(paper, "Oddities of the problem", report.oddities)
    _footer(paper, report)


def _findings(paper: Paper, heading: str, findings: Sequence[FindingView]) -> None:
    if findings:
        paper.head(heading)
    for finding in findings:
        label = f"{finding.check}, output {finding.output}" if finding.output else finding.check
        paper.say(f"{finding.number}. {finding.reason}", style="bold", indent=2)
        paper.say(label, indent=5)
        paper.pairs(_evidence(finding), indent=5)
        if finding.reproducer:
            paper.say("reproduce", indent=5)
            # At the margin, so that what is copied is the command and nothing else.
            paper.copyable(finding.reproducer)


def _evidence(finding: FindingView) -> Pairs:
    where = "; ".join(f"{label} {value}" for label, value in finding.where)
    factor = f" ({finding.factor} what is allowed)" if finding.factor else ""
    amounts = f"{finding.measured}, {finding.limit}{factor}" if finding.measured else ""
    known = (("where", where), ("measured", amounts), ("cause", finding.cause), ("do", finding.advice))
    return tuple((label, value) for label, value in known if value)


def _growth(paper: Paper, growths: Sequence[GrowthView]) -> None:
    for growth in growths:
        paper.head(
            f"Error growth of {growth.output}, {growth.lever}" if growth.lever else f"Error growth of {growth.output}"
        )
        rows = [(row.contributions, row.error, row.floor, row.factor) for row in growth.rows]
        paper.table(("contributions", "error", "honest floor", "times the floor"), rows)
        paper.say(growth.sentence, indent=2)


def _trial(paper: Paper, trial: TrialView | None) -> None:
    if trial is None:
        return
    paper.head("Training trials")
    paper.say(f"{trial.adapter}; {trial.model}; {trial.seconds}", indent=2)
    rows: list[tuple[Cell, ...]] = []
    for cell in trial.cells:
        reference, candidate = _two_sparklines(cell.source, unicode=paper.speaks_unicode)
        verdict = (cell.verdict, _STYLE.get(cell.verdict, ""))
        rows.append((cell.data, cell.optimizer, verdict, reference, candidate, cell.reason))
    paper.table(("data", "optimizer", "verdict", "reference loss", "candidate loss", "why"), rows)


def _checks(paper: Paper, report: ReportView) -> None:
    if not report.checks:
        return
    paper.head("Checks")
    rows = [(c.check, (c.word, _STYLE[c.outcome]), c.calls, c.seconds, c.summary) for c in report.checks]
    paper.table(("check", "outcome", "calls", "time", "summary"), rows)


def _lines(paper: Paper, heading: str, lines: Sequence[str]) -> None:
    if lines:
        paper.head(heading)
    for line in lines:
        paper.say(f"- {line}", indent=2)


def _footer(paper: Paper, report: ReportView) -> None:
    paper.head("Run it again")
    seeds = ", ".join(f"{name} {seed}" for name, seed in report.seeds)
    facts = (f"seeds {seeds}" if seeds else "", f"policy {report.policy}" if report.policy else "", report.device)
    paper.say(", ".join(fact for fact in facts if fact), indent=2)
    paper.say(report.took, indent=2)
    if report.replay:
        paper.copyable(report.replay)


def _two_sparklines(cell: TrialCell, *, unicode: bool) -> tuple[str, str]:
    """Reference and candidate on one scale, the first seed of each."""
    first: dict[str, Curve] = {}
    for curve in cell.curves:
        first.setdefault(curve.run, curve)
    losses = [first[run].losses if run in first else [] for run in ("reference", "candidate")]
    low, high = loss_window([cell])
    reference, candidate = (sparkline(run, low, high, unicode=unicode) for run in losses)
    return reference, candidate


def sparkline(values: Sequence[float], low: float, high: float, *, unicode: bool = True) -> str:
    """At most 20 characters for any number of values; what is not finite is an x."""
    marks, broken = (_BLOCKS, "×") if unicode else (_LETTERS, "x")
    chosen = (
        values if len(values) <= _SPARKS else [values[i * (len(values) - 1) // (_SPARKS - 1)] for i in range(_SPARKS)]
    )
    span = (high - low) or 1.0
    return "".join(_mark(marks, (value - low) / span) if math.isfinite(value) else broken for value in chosen)


def _mark(marks: str, height: float) -> str:
    return marks[min(len(marks) - 1, max(0, int(height * len(marks))))]
