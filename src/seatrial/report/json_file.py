"""JSON: the report itself, for programs.

One candidate gives the report as it is, with `verdict`, `findings`, `benchmark_rule`, `limits`,
`environment` and `seeds` at the top. Several give `{"verdict": the worst, "reports": [...]}`. NaN and
the infinities are the strings "NaN", "Infinity" and "-Infinity", and come back as numbers. The schema is
`docs/report-schema.json`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from seatrial.errors import UsageError
from seatrial.model import Report, Verdict
from seatrial.report.data import worst

NAME = "json"
SUMMARY = "the whole report, for programs"


class SeveralReports(BaseModel):
    """The file for several candidates: the worst verdict, then one report per candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    verdict: Verdict
    reports: list[Report]


def text(reports: Sequence[Report]) -> str:
    """The file's text."""
    if len(reports) == 1:
        return reports[0].to_json() + "\n"
    return SeveralReports(verdict=worst(reports), reports=list(reports)).model_dump_json(indent=2) + "\n"


def read(content: str) -> list[Report]:
    """The reports that `text` wrote, non-finite numbers included. UsageError when it is no such file."""
    try:
        return [Report.from_json(content)]
    except ValidationError as not_one:
        try:
            return SeveralReports.model_validate_json(content).reports
        except ValidationError:
            first = not_one.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the start"
            raise UsageError(f"this is no seatrial report: {first['msg']} at {place}; write one with --json") from None
