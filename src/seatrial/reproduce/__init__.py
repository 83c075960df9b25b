"""Reproducers: every objection of a report as the smallest case that still shows it, in a file of its own.

situations   from a finding back to the calls behind it
nouns        the calls and the fault as they show it
symptoms     do these calls still show it?
wrong_values the same for values, by the honest floor
shrink       the smallest calls that do
standalone   the file: torch and the candidate, nothing of seatrial
replay       `seatrial replay FILE`
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.bench import Bench
from seatrial.errors import InfrastructureError, SeatrialError, UsageError
from seatrial.model import Candidate, Finding, Outcome, Report
from seatrial.reproduce.shrink import Budget, numel, shrink, weight
from seatrial.reproduce.situations import situation_of
from seatrial.reproduce.standalone import Reproducer, file_name, write
from seatrial.study import Clock, Study

if TYPE_CHECKING:
    from seatrial.workers.process import ForkServer

__all__ = ["write_reproducers"]

LATER = 3  # a finding of a cause and output already shrunk gets this part of the budget
SPARE_SECONDS = 120.0  # beyond the search, for the calls that find the case again


def write_reproducers(report: Report, study: Study, candidate: Candidate, server: ForkServer, folder: Path) -> Report:
    """Write a file for every objection that a call or two can show; the report with the files named.

    A reproducer gets a second line, the command that replays its file. Raises UsageError when the folder cannot
    be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UsageError(f"{folder} cannot be made ({fault.strerror}); give another folder to --reproducers") from fault
    seen: set[tuple[str, str | None]] = set()
    taken = {p.name for p in folder.glob("*.py")}
    failing = {(f.check, f.output) for f in report.findings if f.outcome is Outcome.FAILED}
    findings = []
    for finding in report.findings:
        if finding.outcome is Outcome.FAILED:
            part = LATER if (finding.cause, finding.output) in seen else 1
            seen.add((finding.cause, finding.output))
            only_listed = _has_another_fault_outside(finding, failing)
            path = _write_one(finding, study, candidate, server, folder, taken, part=part, only_listed=only_listed)
            if path is not None:
                line = shlex.join(["seatrial", "replay", str(path)])
                text = f"{finding.reproducer}\n{line}" if finding.reproducer else line
                finding = finding.model_copy(update={"reproducer": text})
        findings.append(finding)
    return report.model_copy(update={"findings": findings})


def _has_another_fault_outside(finding: Finding, failing: set[tuple[str, str | None]]) -> bool:
    """True when this output is wrong at sizes outside the list and right at listed ones, which is a fault of its own."""
    outside, listed = ("fitted-sizes", finding.output) in failing, ("wrong-values", finding.output) in failing
    return finding.check != "fitted-sizes" and outside and not listed


def _write_one(
    finding: Finding,
    study: Study,
    candidate: Candidate,
    server: ForkServer,
    folder: Path,
    taken: set[str],
    *,
    part: int,
    only_listed: bool,
) -> Path | None:
    seconds = study.policy.shrink_s / part
    bench = Bench(study, candidate, server, Clock(seconds + SPARE_SECONDS))
    try:
        found = situation_of(study, bench, finding)
        if found is None:
            return None
        original, symptom = found
        budget = Budget(study.policy.shrink_calls, seconds)
        situation, symptom = shrink(study, bench, original, symptom, budget, listed_sizes_only=only_listed)
    except InfrastructureError:
        return None  # the command of the finding still stands
    finally:
        bench.close()
    reproducer = Reproducer(
        finding=finding,
        situation=situation,
        symptom=symptom,
        problem=study.problem,
        slots=situation.slots(study) if situation.kind != "load" else study.slots(study.smallest),
        candidate=candidate,
        device=study.device.name,
        policy=study.policy.name,
        seed=study.seed,
        timeout_s=study.policy.call_timeout_s + study.policy.load_timeout_s,
        original_elements=numel(original),
        original_weight=weight(original),
    )
    path = folder / file_name(finding, candidate.name, taken)
    try:
        write(reproducer, path)
    except SeatrialError:
        return None
    return path
