"""SARIF 2.1.0: objections as annotations beside the candidate's code.

One run; a rule for each check; a result for each finding that failed (error), limits (warning) or could
not be verified (kind "open": not enough is known to decide). The place is the candidate's file, line 1
unless the finding's details hold a `line`. A plain callable has no file and is named as a logical
location.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from seatrial.model import CheckRow, Finding, Outcome, Report, Verdict
from seatrial.report import words
from seatrial.report.data import bound, rows_with_findings, view, worst

NAME = "sarif"
SUMMARY = "SARIF 2.1.0, for code scanning"

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {Outcome.FAILED: "error", Outcome.LIMITED: "warning", Outcome.NOT_VERIFIED: "none"}


def text(reports: Sequence[Report]) -> str:
    """The file's text."""
    rules = _rules(reports)
    places = {rule["id"]: index for index, rule in enumerate(rules)}
    driver = {"name": "seatrial", "version": _version(reports), "rules": rules}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(reports)],
        "properties": {"candidates": [_candidate(report) for report in reports]},
        "results": [result for report in reports for result in _results(report, places)],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _version(reports: Sequence[Report]) -> str:
    return words.one_line(reports[0].seatrial) if reports else ""


def _invocation(reports: Sequence[Report]) -> dict[str, Any]:
    verdict = worst(reports)
    return {
        "executionSuccessful": verdict is not Verdict.INCONCLUSIVE,
        "exitCode": verdict.exit_code(),
        "exitCodeDescription": words.VERDICT_WORDS[verdict],
    }


def _candidate(report: Report) -> dict[str, str]:
    return {
        "name": words.one_line(report.candidate),
        "verdict": report.verdict.value,
        "headline": words.one_line(report.headline),
    }


def _rules(reports: Sequence[Report]) -> list[dict[str, Any]]:
    rows = {row.check: row for report in reports for row in rows_with_findings(report)}
    return [_rule(row) for row in rows.values()]


def _rule(row: CheckRow) -> dict[str, Any]:
    check, title = words.one_line(row.check), words.one_line(row.title)
    return {"id": check, "shortDescription": {"text": title or check}, "defaultConfiguration": {"level": "error"}}


def _results(report: Report, places: dict[str, int]) -> list[dict[str, Any]]:
    return [_result(report, finding, places) for finding in report.findings if finding.outcome in _LEVEL]


def _result(report: Report, finding: Finding, places: dict[str, int]) -> dict[str, Any]:
    check = words.one_line(finding.check)
    return {
        "ruleId": check,
        "ruleIndex": places[check],
        "kind": "open" if finding.outcome is Outcome.NOT_VERIFIED else "fail",
        "level": _LEVEL[finding.outcome],
        "message": {"text": _message(report, finding)},
        "locations": [_location(report, finding)],
        "partialFingerprints": {"seatrial/v1": _fingerprint(report, finding)},
        "properties": {"candidate": words.one_line(report.candidate), "cause": words.one_line(finding.cause)},
    }


def _message(report: Report, finding: Finding) -> str:
    amounts = f"Measured {words.amount(finding.measured, finding.unit)}" if finding.measured is not None else ""
    if amounts and finding.allowed is not None:
        asked = "at least {} required" if bound(finding) == "at least" else "at most {} allowed"
        amounts += ", " + asked.format(words.amount(finding.allowed, finding.unit))
    again = words.plain(finding.reproducer).strip() or words.plain(report.replay).strip()
    sentences = (words.one_line(finding.reason), amounts and f"{amounts}.", words.one_line(finding.advice))
    return "\n".join(part for part in (*sentences, again and f"Reproduce: {again}") if part)


def _location(report: Report, finding: Finding) -> dict[str, Any]:
    if not report.candidate_path:
        return {"logicalLocations": [{"name": view(report).candidate, "kind": "function"}]}
    line = finding.details.get("line")
    start = line if isinstance(line, int) and not isinstance(line, bool) and line > 0 else 1
    artifact = {"uri": _uri(report.candidate_path)}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": start}}}


def _uri(path: str) -> str:
    path = words.one_line(path)
    if path.startswith("/"):
        return "file://" + quote(path)
    return quote(PurePath(path).as_posix())


def _fingerprint(report: Report, finding: Finding) -> str:
    # What the finding is, without seeds and amounts: the same fault keeps its alert from run to run.
    identity = json.dumps([report.problem, report.candidate, finding.check, finding.output, finding.cause])
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()[:32]
