"""One loop over the table of checks: pages, names, examples. A new check is tested by being in the table."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sources import candidate_of, problem_of

from seatrial.checks import CHECKS
from seatrial.checks.base import Check, Evidence, Job
from seatrial.devices import pick
from seatrial.model import CallRecord, Outcome, Ran, Report, Verdict
from seatrial.policy import QUICK
from seatrial.study import Study
from seatrial.verify import Options, verify

HEADINGS = ("What it shows", "Why it matters", "How", "What it misses", "Cost")
DEMANDING = replace(QUICK, layouts=4, any_layout=True)
WITH_EXAMPLES = [name for name, check in CHECKS.items() if check.REJECTS is not None]


def audit(check: Check, example_name: str, seed: int | None = None) -> Report:
    example = getattr(check, example_name)
    more = {} if seed is None else {"seed": seed}
    options = Options(policy=DEMANDING, device=pick("cpu"), **more)
    return verify(problem_of(example), [candidate_of(example)], options)[0]


def failing(report: Report) -> set[str]:
    return {f.check for f in report.findings if f.outcome is Outcome.FAILED}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_has_a_page_and_names_a_fault(name: str) -> None:
    module = CHECKS[name]
    assert Path(str(module.__file__)).stem == name.replace("-", "_")  # type: ignore[attr-defined]
    page = module.__doc__ or ""
    assert [h for h in HEADINGS if f"\n{h}" not in page] == []
    assert not name.endswith(("-check", "-test", "-ok", "-validation"))
    assert len(module.TITLE) <= 48


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_differ_by_one_line(name: str) -> None:
    good, bad = CHECKS[name].ACCEPTS, CHECKS[name].REJECTS
    assert good is not None and bad is not None
    changed = [
        line
        for line in difflib.ndiff(good.candidate.splitlines(), bad.candidate.splitlines())
        if line.startswith(("- ", "+ "))
    ]
    assert 1 <= len(changed) <= 2, changed


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_honest_example_passes_everything(name: str) -> None:
    report = audit(CHECKS[name], "ACCEPTS")
    assert report.verdict is Verdict.ACCEPTED, [f.reason for f in report.findings if f.outcome.value != "held"]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_faulty_example_fails_here_with_the_stated_reason(name: str) -> None:
    check = CHECKS[name]
    report = audit(check, "REJECTS")
    assert report.verdict is Verdict.REJECTED
    mine = [f for f in report.findings if f.check == name and f.outcome is Outcome.FAILED]
    assert any(check.REJECTS.because in f.reason for f in mine), [f.reason for f in report.findings]  # type: ignore[union-attr]
    assert all(f.reproducer for f in mine)
    also = set(check.REJECTS.also)  # type: ignore[union-attr]
    if "*" not in also:
        assert failing(report) - {name} <= also


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "training-divergence"])
def test_a_lost_process_is_never_a_pass(name: str) -> None:
    check = CHECKS[name]
    example = CHECKS["wrong-values"].ACCEPTS
    assert example is not None
    study = Study(problem_of(example), QUICK, pick("cpu"), seed=1)
    jobs = check.plan(study)
    if not isinstance(jobs, (list, tuple)):
        return  # not applicable to this problem, which claims nothing
    lost = CallRecord(Ran.LOST, error="the machine burnt down")
    evidence = [Evidence(job, tuple(lost for _ in range(max(1, _records_of(name, job))))) for job in jobs]
    findings = check.judge(study, evidence).findings
    assert findings
    assert {f.outcome for f in findings} <= {Outcome.NOT_VERIFIED}


def _records_of(name: str, job: Job) -> int:
    return 2 if name == "stale-output" else len(job.cases)


def test_planning_is_deterministic() -> None:
    example = CHECKS["wrong-values"].ACCEPTS
    assert example is not None
    plans = [
        [c.plan(Study(problem_of(example), QUICK, pick("cpu"), seed=7)) for c in CHECKS.values()] for _ in range(2)
    ]
    assert [str(p) for p in plans[0]] == [str(p) for p in plans[1]]
