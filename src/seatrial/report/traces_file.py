"""SOL-ExecBench traces: one JSON line per declared workload, as the benchmark's own evaluator writes them.

`status` is what the benchmark's rule says, row by row, so that the line can stand beside others of its
kind; when seatrial disagrees, `log` begins with seatrial's verdict. Times are 0: nothing was timed, and
the format has no other word for it. The input specs of the workload are not part of a report and stay
empty. A problem without a benchmark rule gives an empty file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from seatrial.model import BenchmarkRow, Report, Verdict
from seatrial.report import words

NAME = "traces"
SUMMARY = "SOL-ExecBench trace lines, one per workload"

_NOT_TIMED = {"latency_ms": 0.0, "reference_latency_ms": 0.0, "speedup_factor": 0.0}


def text(reports: Sequence[Report]) -> str:
    """The file's text; every line ends in a newline."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return "".join(json.dumps(trace, ensure_ascii=False) + "\n" for trace in _traces(reports, now))


def _traces(reports: Sequence[Report], now: str) -> Iterator[dict[str, Any]]:
    for report in reports:
        for row in report.benchmark_rule.rows if report.benchmark_rule else ():
            yield {
                "definition": words.one_line(report.problem) or "(no name)",
                "workload": _workload(row),
                "solution": words.one_line(report.candidate) or "(no name)",
                "evaluation": _evaluation(report, row, now),
            }


def _workload(row: BenchmarkRow) -> dict[str, Any]:
    known = {"max_atol": row.atol, "max_rtol": row.rtol, "required_matched_ratio": row.required_matched_ratio}
    tolerance = {name: value for name, value in known.items() if value is not None and math.isfinite(value)}
    axes = {words.one_line(name): size for name, size in row.axes.items()}
    return {"uuid": words.one_line(row.workload), "axes": axes, "inputs": {}, "tolerance": tolerance}


def _evaluation(report: Report, row: BenchmarkRow, now: str) -> dict[str, Any]:
    status = words.one_line(row.status)
    measured = status in ("PASSED", "INCORRECT_NUMERICAL")
    return {
        "status": status,
        "environment": {"hardware": words.one_line(report.device) or "unknown", "libs": _libraries(report)},
        "timestamp": now,
        "log": _log(report, row),
        "correctness": _correctness(row) if measured else None,
        "performance": dict(_NOT_TIMED) if status == "PASSED" else None,
    }


def _libraries(report: Report) -> dict[str, str]:
    return {words.one_line(name): words.one_line(version) for name, version in report.environment.items()}


def _correctness(row: BenchmarkRow) -> dict[str, Any]:
    errors = [row.max_absolute_error, row.max_relative_error]
    # The format's own convention: an error that is no number is 0.0 with a flag beside it.
    has_nan = any(error is not None and math.isnan(error) for error in errors)
    return {
        "max_relative_error": _finite(row.max_relative_error),
        "max_absolute_error": _finite(row.max_absolute_error),
        "has_nan": has_nan,
        "has_inf": not has_nan and any(error is not None and math.isinf(error) for error in errors),
        "extra": None if row.matched_ratio is None else {"matched_ratio": _finite(row.matched_ratio)},
    }


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _log(report: Report, row: BenchmarkRow) -> str:
    verdict = words.VERDICT_WORDS[report.verdict].lower()
    disagrees = report.verdict in (Verdict.REJECTED, Verdict.INCONCLUSIVE) or row.status != "PASSED"
    said = f"seatrial: {verdict}: {words.one_line(report.headline)}" if disagrees else f"seatrial: {verdict}"
    return "\n".join(part for part in (said, words.plain(row.message).strip(), "nothing was timed") if part)
