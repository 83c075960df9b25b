"""JUnit XML: one suite per candidate, one case per check, for the test tab of a CI.

- failed → `<failure>`, with reason, place, amounts and reproducer
- not verified → `<error>`, not `<skipped>`: a CI shows skipped as green, and what could not be verified
  is never a pass
- not applicable → `<skipped>`
- held, limited, noted → passed; the limit or note stands in `<system-out>`

A case called "verdict" comes first only where no check's case says why the candidate does not pass, so
that a run without checks cannot look green either. With `--strict` limits count against a candidate in the
exit code; this file stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from seatrial.model import Report
from seatrial.report.data import CheckView, FindingView, ReportView, views

NAME = "junit"
SUMMARY = "JUnit XML, for the test tab of a CI"

_TAG = {
    "failed": "failure",
    "rejected": "failure",
    "not-verified": "error",
    "inconclusive": "error",
    "not-applicable": "skipped",
}


def text(reports: Sequence[Report]) -> str:
    """The file's text."""
    root = Element("testsuites", name="seatrial")
    for report in views(reports):
        root.append(_suite(report))
    if not reports:
        root.append(_suite_of_nothing())
    for tag, attribute in (("testcase", "tests"), ("failure", "failures"), ("error", "errors")):
        root.set(attribute, str(len(root.findall(f".//{tag}"))))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(report: ReportView) -> Element:
    suite = Element("testsuite", name=f"seatrial: {report.candidate}")
    _properties(suite, report)
    cases = [_check_case(report, check) for check in report.checks]
    passes = report.verdict not in _TAG
    if not cases or not (passes or any(_speaks_against(case) for case in cases)):
        suite.append(_verdict_case(report))
    suite.extend(cases)
    return _counted(suite)


def _speaks_against(case: Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def _suite_of_nothing() -> Element:
    suite = Element("testsuite", name="seatrial")
    case = SubElement(suite, "testcase", classname="seatrial", name="verdict", time="0.000")
    SubElement(case, "error", message="no candidate was audited", type="inconclusive")
    return _counted(suite)


def _counted(suite: Element) -> Element:
    for tag, attribute in (("testcase", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in suite.findall('testcase')):.3f}")
    return suite


def _properties(suite: Element, report: ReportView) -> None:
    facts = [
        ("problem", report.problem),
        ("verdict", report.verdict),
        ("grade", report.grade),
        ("replay", report.replay),
    ]
    if report.rule is not None:
        facts.append(("benchmark rule", f"{report.rule.word} {report.rule.tally}".strip()))
    facts += [(f"seed {name}", seed) for name, seed in report.seeds]
    properties = SubElement(suite, "properties")
    for name, value in (*facts, *report.environment):
        if value:
            SubElement(properties, "property", name=name, value=value)


def _verdict_case(report: ReportView) -> Element:
    case = Element("testcase", classname=report.candidate, name="verdict", time="0.000")
    tag = _TAG.get(report.verdict)
    if tag:
        SubElement(case, tag, message=report.headline or report.word, type=report.verdict).text = report.tally
    else:
        SubElement(case, "system-out").text = report.headline
    return case


def _check_case(report: ReportView, check: CheckView) -> Element:
    case = Element("testcase", classname=report.candidate, name=check.check, time=f"{check.duration:.3f}")
    findings = [f for f in _all_findings(report) if f.check == check.check]
    decisive = [finding for finding in findings if finding.outcome == check.outcome]
    tag = _TAG.get(check.outcome)
    if tag:
        message = "; ".join(finding.reason for finding in decisive) or check.summary or check.word
        element = SubElement(case, tag, message=message, type=check.outcome)
        element.text = "\n\n".join(_told(finding) for finding in decisive)
    rest = [finding for finding in findings if not tag or finding not in decisive]
    if rest or check.summary:
        SubElement(case, "system-out").text = "\n\n".join(
            [check.summary, *(_told(finding) for finding in rest)]
        ).strip()
    return case


def _all_findings(report: ReportView) -> tuple[FindingView, ...]:
    return (*report.objections, *report.unverified, *report.prevented, *report.limited, *report.noted)


def _told(finding: FindingView) -> str:
    measured = f"measured {finding.measured}, {finding.limit}" if finding.measured else ""
    where = "; ".join(f"{label} {value}" for label, value in finding.where)
    lines = (f"{finding.word}: {finding.reason}", where, measured, finding.advice, finding.reproducer)
    return "\n".join(line for line in lines if line)
